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
	"slices"
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
	n := nfttest.Must(b.messages())
	b.add(newRow(groupReads, 10, "netlink messages of one CIDR changed, without the poll", "", series{n}).target(25))
}

// messages counts the messages that an agent sends because of one CIDR.
func (b *bench) messages() (n float64, err error) {
	f, err := b.follow(10)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, f.close()) }()
	out := filepath.Join(os.TempDir(), fmt.Sprintf("bench-%d.strace", os.Getpid()))
	defer func() { _ = os.Remove(out) }()
	const observed = 3 * time.Second // and all observers have seen the change
	time.Sleep(observed)
	trace := nfttest.Command("strace", "-f", "-e", "trace=sendmsg", "-o", out, "-p", strconv.Itoa(f.agent.Pid))
	attached, err := trace.StderrPipe()
	if err == nil {
		err = f.node.ns.Do(trace.Start) // where it can name the types of messages
	}
	if err != nil {
		return 0, err
	}
	if _, err := bufio.NewReader(attached).ReadString('\n'); err != nil {
		return 0, errors.Join(fmt.Errorf("strace: %w", err), trace.Wait())
	}
	c := f.contender()
	if err := c.prepare(); err != nil {
		return 0, err
	}
	_, err = c.run()
	time.Sleep(observed)
	if err = errors.Join(err, trace.Process.Signal(unix.SIGINT)); err != nil {
		return 0, err
	}
	_ = trace.Wait() // it ends by the signal
	text, err := os.ReadFile(out)
	return requests(string(text)), err
}

// A sent is a line of strace about a request on a socket.
var sent = regexp.MustCompile(`sendmsg\((\d+), .*nlmsg_type=([^,]+),`)

// requests counts the requests in the output of strace, but those of the sockets that ask for
// nothing but the generation: they poll.
func requests(trace string) (n float64) {
	types := map[string][]string{}
	for line := range strings.Lines(trace) {
		if m := sent.FindStringSubmatch(line); m != nil {
			types[m[1]] = append(types[m[1]], m[2])
		}
	}
	for _, of := range types {
		if slices.ContainsFunc(of, func(typ string) bool { return !strings.HasSuffix(typ, "NFT_MSG_GETGEN") }) {
			n += float64(len(of))
		}
	}
	return n
}
