package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfttest"
)

const groupReads = "a change reads nothing that it does not need"

// reads measures what is read for a change: nothing, if all CIDRs are others; and few messages, if
// one is.
func (b *bench) reads(ctx context.Context) {
	const many, few = 50_000, 11
	all := list(2 * many)
	var halves [2][]netip.Prefix
	for i, p := range all {
		halves[i%2] = append(halves[i%2], p)
	}
	var contenders []contender
	for _, lists := range [][2][]netip.Prefix{{halves[0], halves[1]}, {list(few), halves[1]}} {
		f := nfttest.Must(followerOf(many, b.agent, lists))
		defer func() { _ = f.close() }()
		contenders = append(contenders, f.firstChange())
	}
	s := takeTurns(ctx, b.rounds, contenders...)
	b.add(newRow(groupReads, many, "replaced by others, swap to kernel", "ms", s[0]).
		against(fmt.Sprintf("instead of %d", few), s[0], s[1]).targetOfMedian(1.3))
	ofChange, ofObservers, err := b.messages(ctx)
	nfttest.Check(err)
	b.add(newRow(groupReads, 10, "netlink messages of one CIDR changed", "", series{ofChange}).target(25))
	b.add(newRow(groupReads, 10, "netlink messages of observers, in three seconds after it", "", series{ofObservers}))
}

// messages counts the messages that an agent sends because of one CIDR: those of the change, and those of what then
// looks at the connections and the node.
func (b *bench) messages(ctx context.Context) (ofChange, ofObservers float64, err error) {
	f, err := b.follow(10)
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, f.close()) }()
	out := filepath.Join(os.TempDir(), fmt.Sprintf("bench-%d.strace", os.Getpid()))
	defer func() { _ = os.Remove(out) }()
	const observed = 3 * time.Second // and all observers have seen the change
	time.Sleep(observed)
	trace := nfttest.Command("strace", "-f", "-ttt", "-e", "trace=sendmsg", "-o", out, "-p", strconv.Itoa(f.agent.Pid))
	attached, err := trace.StderrPipe()
	if err == nil {
		err = f.node.ns.Do(trace.Start) // where it can name the types of messages
	}
	if err != nil {
		return 0, 0, err
	}
	if _, err := bufio.NewReader(attached).ReadString('\n'); err != nil {
		return 0, 0, errors.Join(fmt.Errorf("strace: %w", err), trace.Wait())
	}
	c := f.contender()
	if err := c.prepare(); err != nil {
		return 0, 0, err
	}
	begun := time.Now()
	_, err = c.run()
	if err == nil {
		_, err = f.agent.Await(ctx, "config_applied")
	}
	ended := time.Now()
	time.Sleep(observed)
	if err = errors.Join(err, trace.Process.Signal(unix.SIGINT)); err != nil {
		return 0, 0, err
	}
	_ = trace.Wait() // it ends by the signal
	text, err := os.ReadFile(out)
	if err != nil {
		return 0, 0, err
	}
	ofChange, ofObservers = count(sentMessages(string(text)), begun, ended)
	return ofChange, ofObservers, nil
}

// A sent is a request that an agent has sent.
type sent struct {
	moment time.Time
	socket string
	kind   string // of its last message
}

// sendmsg is a line of strace -ttt about a request.
var sendmsg = regexp.MustCompile(`^\d+ +(\d+)\.(\d+) sendmsg\((\d+), .*nlmsg_type=([^,]+),`)

// sentMessages returns the requests in the output of strace.
func sentMessages(trace string) (all []sent) {
	for line := range strings.Lines(trace) {
		m := sendmsg.FindStringSubmatch(line)
		if m == nil {
			continue
		}
		seconds, _ := strconv.ParseInt(m[1], 10, 64)
		microseconds, _ := strconv.ParseInt(m[2], 10, 64)
		all = append(all, sent{moment: time.Unix(seconds, microseconds*1000), socket: m[3], kind: m[4]})
	}
	return all
}

// count counts the requests of a change that began and ended at a time, and those of observers from then on. The loop
// commits and polls on a socket of its own.
func count(all []sent, begun, ended time.Time) (ofChange, ofObservers float64) {
	loop := map[string]bool{}
	for _, s := range all {
		if strings.HasPrefix(s.kind, "NFNL_MSG_BATCH") {
			loop[s.socket] = true
		}
	}
	for _, s := range all {
		switch {
		case s.moment.Before(begun):
		case !loop[s.socket]:
			ofObservers++
		case s.moment.Before(ended):
			ofChange++
		}
	}
	return ofChange, ofObservers
}
