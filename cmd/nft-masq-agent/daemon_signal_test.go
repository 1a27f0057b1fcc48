package main

import (
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfttest"
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

func TestCleanupRemovesEverythingButNotNextToARunningAgent(t *testing.T) {
	t.Parallel()
	inEachMode(t, func(t *testing.T, mode nft.Mode, flag string) {
		n := newNode(t)
		d := n.start(flag, "--enable-ipv6")
		want := wants(t, "", flag, "--enable-ipv6")
		d.began(want)
		warning := ""
		if mode == nft.ModeNFTables { // iptables' base chains stay, and so does NAT
			warning = "warning: there are no other NAT rules on this node, so the kernel stops translating: masqueraded " +
				"connections will break\n"
		}
		says := fmt.Sprintf("nft-masq-agent cleanup: an agent runs here (pid %d)", d.Pid)
		for _, flag := range []string{"--wait", "--legacy"} {
			if got := n.run("cleanup", flag); got.code != exitFailed || got.stdout != "" ||
				!strings.HasPrefix(got.stderr, says) {
				t.Errorf("next to a running agent: %+v, want %q", got, says)
			}
		}
		for _, flag := range []string{"--dry-run", "--legacy-only"} {
			if got := n.run("cleanup", flag); got.code != exitDone {
				t.Errorf("next to a running agent, %s: %+v", flag, got)
			}
		}
		// Its flags apply to other commands, and its socket is enough to find it.
		if got := n.run("render", "--probe-socket", n.socket); got.code != exitDone || got.stdout != want.String() ||
			!strings.Contains(got.stderr, "with the flags of the running agent") {
			t.Errorf("render next to a running agent: %+v", got)
		}
		elsewhere := newNode(t)
		if got := elsewhere.run("cleanup", "--probe-socket", n.socket); got.code != exitFailed || got.stdout != "" {
			t.Errorf("next to an agent that is only known by its socket: %+v", got)
		}
		n.holds(want)
		d.silent()
		d.stop()
		if got := n.run("cleanup"); got.code != exitDone || got.stderr != warning || got.stdout == "" {
			t.Errorf("after it: %+v", got)
		}
		// The shared tables and base chains of iptables stay.
		listing := nfttest.ListRuleset(t, n.NS)
		if mode == nft.ModeNFTables && listing != "" || strings.Contains(listing, "IP-MASQ-AGENT") {
			t.Errorf("left:\n%s", listing)
		}
		nothing := result{stdout: "nothing to remove\n"}
		if diff := cmp.Diff(nothing, n.run("cleanup"), cmp.AllowUnexported(result{})); diff != "" {
			t.Errorf("once more (-want +got):\n%s", diff)
		}
	})
}
