package main

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfttest"
)

func TestUnreadLogBlocksNothingAndCountsLostLines(t *testing.T) {
	t.Parallel()
	r, w := io.Pipe()
	q := newLineQueue(w)
	const lines = 50_000
	for i := range lines {
		if n, err := fmt.Fprintf(q, "line %08d\n", i); n != 14 || err != nil {
			t.Fatal(n, err)
		}
		for i == 0 && len(q.lines) > 0 { // until the first line is blocked by the reader
			time.Sleep(time.Millisecond)
		}
	}
	q.Close(0) // it does not wait for the reader
	lost := q.lost.Load()
	if most := uint64(lines - maxQueued); lost != most-1 {
		t.Errorf("%d lines are lost, want %d: all but those that the queue holds and the one being written", lost, most-1)
	}
	read := uint64(0)
	for s := bufio.NewScanner(r); read+lost < lines && s.Scan(); read++ {
		if want := fmt.Sprintf("line %08d", read); s.Text() != want {
			t.Fatalf("%q, want %q", s.Text(), want)
		}
	}
	q.Close(timeout)
}

// A failingWriter fails until it is repaired.
type failingWriter struct {
	repaired atomic.Bool
	written  chan string
}

func (w *failingWriter) Write(p []byte) (int, error) {
	if !w.repaired.Load() {
		return 0, unix.EPIPE
	}
	w.written <- string(p)
	return len(p), nil
}

func TestLinesThatCannotBeWrittenAreCounted(t *testing.T) {
	t.Parallel()
	w := &failingWriter{written: make(chan string, 10)}
	q := newLineQueue(w)
	for range 3 {
		_, _ = q.Write([]byte("x\n"))
	}
	for q.lost.Load() < 3 {
		time.Sleep(time.Millisecond)
	}
	w.repaired.Store(true)
	_, _ = q.Write([]byte("y\n"))
	if line := <-w.written; line != "y\n" {
		t.Errorf("written is %q, want the line after those that were lost", line)
	}
	q.Close(timeout)
}

func TestUnreadOrSlowLogDoesNotStopRepairs(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	n := newNode(t)
	r, w, err := os.Pipe()
	n.check(err)
	_, err = unix.FcntlInt(w.Fd(), unix.F_SETPIPE_SZ, 4096)
	n.check(err)
	cmd := n.command(nil, "run", "--config", n.path, "--http-address", httpAddress, "--v=4")
	cmd.Stdout = w
	p, err := n.Start(cmd)
	n.check(err)
	n.check(w.Close())
	t.Cleanup(func() {
		_ = p.Kill()
		<-p.Done()
	})
	want := wants(t, "")
	heals := func(when string, times int) {
		t.Helper()
		for range times {
			tamper(n, nft.ModeNFTables)
			n.comes("the restoration while the log is "+when, want)
		}
	}
	n.comes("the start", want)
	for i := range 20 { // more than pipe and queue can buffer
		unknown := "" // each has a line
		for j := range 100 {
			unknown += fmt.Sprintf("unknown%d-%d: 1\n", i, j)
		}
		n.swap(unknown)
		heals("not read", 1)
		if n.number("nft_masq_agent_log_lines_lost_total") > 0 {
			break
		}
	}
	if n.number("nft_masq_agent_log_lines_lost_total") == 0 {
		t.Error("no line was lost: the test proves nothing")
	}
	heals("not read", 5)
	for range 3 {
		_, err := r.Read(make([]byte, 1))
		n.check(err)
		heals("read byte by byte", 3)
	}
	n.check(r.Close())
	heals("gone", 5)
	nfttest.NoError(t, p.Signal(unix.SIGTERM))
	select {
	case <-p.Done():
	case <-time.After(timeout):
		t.Fatal("does not end")
	}
	if err := p.Wait(); err != nil {
		t.Errorf("ended with %v", err)
	}
}

func TestUnreadWarningsDoNotPreventTheStart(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	for _, gone := range []bool{false, true} {
		for _, line := range []string{"run --resync-interval=0 --config FILE", "--config FILE ignored"} {
			t.Run(fmt.Sprintf("gone %t, %s", gone, line), func(t *testing.T) {
				n := newNode(t)
				r, w, err := os.Pipe()
				n.check(err)
				defer r.Close()
				if gone {
					n.check(r.Close())
				} else {
					size, err := unix.FcntlInt(w.Fd(), unix.F_GETPIPE_SZ, 0)
					n.check(err)
					_, err = w.Write(make([]byte, size))
					n.check(err)
				}
				cmd := n.command(nil, strings.Fields(strings.Replace(line, "FILE", n.path, 1))...)
				cmd.Stderr = w
				p, err := n.Start(cmd)
				n.check(err)
				t.Cleanup(func() {
					_ = p.Kill()
					<-p.Done()
				})
				n.check(w.Close())
				n.comes("the start", wants(t, ""))
				n.check(p.Signal(unix.SIGTERM))
				if err := p.Wait(); err != nil {
					t.Errorf("ended with %v", err)
				}
			})
		}
	}
}
