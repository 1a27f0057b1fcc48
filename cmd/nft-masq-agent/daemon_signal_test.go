package main

import (
	"errors"
	"os/exec"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
)

// The second of two signals kills it at once: both are pending when it continues. Its successor finds the rules.
func TestRulesStayWhenTheAgentExits(t *testing.T) {
	t.Parallel()
	inEachMode(t, func(t *testing.T, _ nft.Mode, flag string) {
		n := newNode(t)
		d := n.start(flag)
		d.began(wants(t, "", flag))
		before := n.kernelText()
		for i, signals := range [][]unix.Signal{
			{unix.SIGTERM},
			{unix.SIGINT},
			{unix.SIGSTOP, unix.SIGTERM, unix.SIGINT, unix.SIGCONT},
			{unix.SIGKILL},
			{unix.SIGTERM},
		} {
			if i > 0 {
				d = n.start(flag)
				d.await("starting")
				d.await("rules_in_place")
			}
			for _, s := range signals {
				d.signal(s)
			}
			<-d.Done()
			err := d.Wait()
			var ended *exec.ExitError
			killed := errors.As(err, &ended) && ended.ExitCode() < 0 && (i == 2 || i == 3)
			if err != nil && !killed || d.Stderr() != "" {
				t.Errorf("%v: ended with %v: %s", signals, err, d.Stderr())
			}
			if diff := cmp.Diff(before, n.kernelText()); diff != "" {
				t.Errorf("%v: the kernel (-before +after):\n%s", signals, diff)
			}
			d.silent()
		}
		n.holds(wants(t, "", flag))
	})
}

func TestSocketOfAnAgentKeepsCleanupFromItsRules(t *testing.T) {
	t.Parallel()
	n, elsewhere := newNode(t), newNode(t)
	n.start()
	if got := elsewhere.run("cleanup", "--probe-socket", n.socket); got.code != exitFailed || got.stdout != "" {
		t.Errorf("%+v", got)
	}
}
