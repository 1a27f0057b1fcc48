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
	more    chan struct{} // closed by the next line
	partial []byte
	text    []string // the last lines as written
	untaken []Line
	latest  map[string]numbered // by event
	counts  map[string]int      // by event
	lines   int
}

type numbered struct {
	Line
	number int
}

// kept is how many lines are kept: some agents run for hours.
const kept = 10_000

// NewLog returns an empty log.
func NewLog() *Log {
	return &Log{more: make(chan struct{}), latest: map[string]numbered{}, counts: map[string]int{}}
}

// Write implements [io.Writer].
func (g *Log) Write(p []byte) (int, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.partial = append(g.partial, p...)
	for {
		line, rest, ended := bytes.Cut(g.partial, []byte("\n"))
		if !ended {
			break
		}
		g.add(line)
		g.partial = rest
	}
	return len(p), nil
}

func (g *Log) add(text []byte) {
	l := parse(text)
	event := l.Event()
	g.lines++
	g.counts[event]++
	g.latest[event] = numbered{l, g.lines}
	g.text = last(append(g.text, string(text)), kept)
	g.untaken = last(append(g.untaken, l), kept)
	close(g.more)
	g.more = make(chan struct{})
}

func last[T any](all []T, n int) []T { return all[max(0, len(all)-n):] }

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
	for i, l := range g.untaken {
		if len(events) == 0 || slices.Contains(events, l.Event()) {
			g.untaken = slices.Delete(g.untaken, i, i+1)
			return l
		}
	}
	return nil
}

// timeout bounds every wait. Only a failure takes that long.
var timeout = nfttest.Patient(time.Minute)

// ErrEnded reports that the agent exited during a wait.
var ErrEnded = errors.New("the agent has exited")

// Await waits for a line with one of the events, or any line if none is given,
// and takes it. It stops waiting when the agent has exited.
func (g *Log) Await(ctx context.Context, ended <-chan struct{}, events ...string) (Line, error) {
	var line Line
	err := g.Until(ctx, ended, strings.Join(events, " or "), func() bool {
		line = g.Take(events...)
		return line != nil
	})
	return line, err
}

// Until waits for a condition that only a log line can change.
func (g *Log) Until(ctx context.Context, ended <-chan struct{}, what string, met func() bool) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	for {
		more := g.next()
		if met() {
			return nil
		}
		select {
		case <-more:
		case <-ended:
			if met() {
				return nil
			}
			return fmt.Errorf("wait for %s: %w\n%s", what, ErrEnded, g)
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: %w\n%s", what, ctx.Err(), g)
		}
	}
}

// Untaken returns the lines that have not been taken.
func (g *Log) Untaken() []Line {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Clone(g.untaken)
}

// Latest returns the last line with one of the events, taken or not; nil if there
// is none.
func (g *Log) Latest(events ...string) Line {
	g.mu.Lock()
	defer g.mu.Unlock()
	var latest numbered
	for _, event := range events {
		if l := g.latest[event]; l.number > latest.number {
			latest = l
		}
	}
	return latest.Line
}

// Count returns the number of lines with an event, taken or not.
func (g *Log) Count(event string) int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.counts[event]
}

// Lines returns the number of lines.
func (g *Log) Lines() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.lines
}

// next returns a channel that the next line closes.
func (g *Log) next() <-chan struct{} {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.more
}

// Text returns the log.
func (g *Log) Text() string { return g.tail(kept) }

// String returns the last lines of the log.
func (g *Log) String() string { return g.tail(25) }

func (g *Log) tail(n int) string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return strings.Join(last(g.text, n), "\n")
}
