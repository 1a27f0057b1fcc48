package agent

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"nft-masq-agent/nft/nfttest"
)

// A Line is the fields of a log line.
type Line map[string]any

// Event returns the field that identifies what happened, which is stable across
// versions.
func (l Line) Event() string { return l.Text("event") }

// Message returns the text for people.
func (l Line) Message() string { return l.Text("msg") }

// Text returns a field that is a string, "" if it is absent.
func (l Line) Text(key string) string {
	s, _ := l[key].(string)
	return s
}

// Texts returns a field that is a list of strings, joined.
func (l Line) Texts(key string) string {
	list, _ := l[key].([]any)
	return fmt.Sprint(list...)
}

// A Log collects the log of an agent, in either format. Each line can be taken once.
type Log struct {
	mu      sync.Mutex
	more    chan struct{}   // closed by the next line
	ended   <-chan struct{} // closed when the agent has exited
	exit    func() error    // how
	partial []byte
	last    []entry        // the last lines
	counts  map[string]int // of all lines, by event
}

type entry struct {
	Line
	text  string // as written
	taken bool
}

// kept is how many lines are kept: some agents run for hours.
const kept = 10_000

// NewLog returns an empty log.
func NewLog() *Log { return &Log{more: make(chan struct{}), counts: map[string]int{}} }

// Write implements [io.Writer].
func (g *Log) Write(p []byte) (int, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.partial = append(g.partial, p...)
	for {
		line, rest, ended := bytes.Cut(g.partial, []byte("\n"))
		if !ended {
			return len(p), nil
		}
		l := parse(line)
		g.counts[l.Event()]++
		g.last = append(g.last, entry{Line: l, text: string(line)})
		g.last = g.last[max(0, len(g.last)-kept):]
		g.partial = rest
		close(g.more)
		g.more = make(chan struct{})
	}
}

// parse reads a line. In the format for people, time, level and message precede
// the fields.
func parse(text []byte) Line {
	at := max(0, bytes.Index(text, []byte("  {\"")))
	var l Line
	if err := json.Unmarshal(text[at:], &l); err != nil {
		return Line{"msg": "not a line of the log: " + string(text)}
	}
	if words := strings.SplitN(string(text[:at]), "  ", 3); len(words) == 3 {
		l["time"], l["level"], l["msg"] = words[0], strings.ToLower(words[1]), strings.TrimSpace(words[2])
	}
	return l
}

// Take takes the first line with one of the events, or any line if none is given;
// nil if there is none.
func (g *Log) Take(events ...string) Line {
	g.mu.Lock()
	defer g.mu.Unlock()
	for i, l := range g.last {
		if !l.taken && (len(events) == 0 || slices.Contains(events, l.Event())) {
			g.last[i].taken = true
			return l.Line
		}
	}
	return nil
}

// timeout bounds every wait. Only a failure takes that long.
var timeout = nfttest.Patient(15 * time.Second)

// Await waits for a line with one of the events, or any line if none is given,
// and takes it.
func (g *Log) Await(ctx context.Context, events ...string) (Line, error) {
	var line Line
	err := g.Until(ctx, strings.Join(events, " or "), func() bool {
		line = g.Take(events...)
		return line != nil
	})
	return line, err
}

// Until waits for a condition that only a log line can change. It stops waiting when
// the agent has exited, and returns how.
func (g *Log) Until(ctx context.Context, what string, met func() bool) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	for {
		g.mu.Lock()
		more := g.more
		g.mu.Unlock()
		if met() {
			return nil
		}
		select {
		case <-more:
		case <-g.ended:
			if met() {
				return nil
			}
			return errors.Join(fmt.Errorf("wait for %s: the agent has exited\n%s", what, g), g.exit())
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: %w\n%s", what, ctx.Err(), g)
		}
	}
}

// Untaken returns the lines that have not been taken.
func (g *Log) Untaken() (all []Line) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, l := range g.last {
		if !l.taken {
			all = append(all, l.Line)
		}
	}
	return all
}

// Latest returns the last line with one of the events, taken or not; nil if there
// is none.
func (g *Log) Latest(events ...string) Line {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, l := range slices.Backward(g.last) {
		if slices.Contains(events, l.Event()) {
			return l.Line
		}
	}
	return nil
}

// Count returns the number of lines with an event, taken or not.
func (g *Log) Count(event string) int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.counts[event]
}

// Lines returns the number of lines.
func (g *Log) Lines() (n int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, count := range g.counts {
		n += count
	}
	return n
}

// Text returns the log.
func (g *Log) Text() string { return g.tail(kept) }

// String returns the last lines of the log.
func (g *Log) String() string { return g.tail(25) }

func (g *Log) tail(n int) string {
	g.mu.Lock()
	defer g.mu.Unlock()
	var lines []string
	for _, l := range g.last[max(0, len(g.last)-n):] {
		lines = append(lines, l.text)
	}
	return strings.Join(lines, "\n")
}
