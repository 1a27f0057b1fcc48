package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
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

func TestHangupTriggersACheck(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.swap(exempting("10.1.0.0/16"))
	other := filepath.Join(t.TempDir(), "the same file")
	n.check(os.Link(n.path, other))
	d := n.start("--resync-interval=3600", "--http-address", httpAddress)
	d.began(wants(t, exempting("10.1.0.0/16")))
	d.signal(unix.SIGHUP)
	d.until("a look at the kernel", func() bool { return n.checks("sighup") == "1" })
	// Inotify does not report writes through another directory.
	n.check(os.WriteFile(other, []byte(exempting("10.2.0.0/16")), 0o644))
	d.signal(unix.SIGHUP)
	d.applied("config", wants(t, exempting("10.2.0.0/16")))
	d.silent()
}

func TestNothingIsWrittenOrLoggedWithoutChanges(t *testing.T) {
	nfttest.SkipIfShort(t) // a resync takes a second
	t.Parallel()
	inEachMode(t, func(t *testing.T, _ nft.Mode, flag string) {
		n := newNode(t)
		n.swap("resyncInterval: 1s\nenableIPv6: true\n")
		d := n.start(flag, "--http-address", httpAddress)
		d.began(wants(t, "enableIPv6: true\n", flag))
		before := n.generation()
		d.until("some looks", func() bool {
			looks, _ := strconv.Atoi(n.checks("resync"))
			return looks >= 3
		})
		if after := n.generation(); after != before {
			t.Errorf("generation %d, was %d", after, before)
		}
		d.silent()
		d.stop()
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

func TestCleanupRemovesOlderAgentsRulesOnRequest(t *testing.T) {
	nfttest.SkipIfShort(t)
	t.Parallel()
	n := newTrafficNode(t)
	n.enforce("")
	loadLegacy(n.testNode)
	before := n.kernelText()
	if got := n.run("cleanup", "--legacy", "--dry-run"); got.code != exitDone ||
		!strings.Contains(got.stdout, "would remove table inet nft-masq-agent\n") ||
		!strings.Contains(got.stdout, "would remove another agent's chain MY-MASQ") || n.kernelText() != before {
		t.Errorf("--dry-run: %+v", got)
	}
	for _, step := range []struct{ flag, removes, keeps string }{
		{"--legacy-only", "MY-MASQ", "table inet nft-masq-agent"},
		{"", "table inet nft-masq-agent", "MY-MASQ"},
		{"--legacy", "MY-MASQ", ""},
	} {
		got := n.run(strings.Fields("cleanup " + step.flag)...)
		left := n.kernelText()
		if got.code != exitDone || !strings.Contains(got.stdout, step.removes) || strings.Contains(left, step.removes) ||
			!strings.Contains(left, step.keeps) {
			t.Errorf("%s: %+v, left:\n%s", step.flag, got, left)
		}
		loadLegacy(n.testNode)
	}
}

// A comment like an agent's is no proof that a chain is one.
func TestChainWithARuleOfAnotherProgramIsKeptAndTheRuleNamed(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	n := newNode(t)
	nfttest.Run(t, n.NS, `*nat
:SITE - [0:0]
-A POSTROUTING -j SITE
-A SITE -d 192.0.2.9/32 -m comment --comment "ip-masq: see the wiki" -j ACCEPT
-A SITE -d 192.0.2.7/32 -j ACCEPT
COMMIT
`, "iptables-nft-restore")
	before := nfttest.Save(t, n.NS, "iptables-nft-save", "nat")
	const says = "has no comment of such an agent: ip daddr 192.0.2.7"
	for _, args := range [][]string{{"--legacy-only", "--dry-run"}, {"--legacy-only"}, {"--legacy"}} {
		got := n.run(append([]string{"cleanup"}, args...)...)
		if got.code != exitDone || got.stdout != "nothing to remove\n" || !strings.Contains(unwrap(got.stderr), says) {
			t.Errorf("%v: %+v", args, got)
		}
	}
	d := n.start("--takeover")
	if line := d.await("legacy_rules_active"); !strings.Contains(line.Texts("found"), says) {
		t.Errorf("logged: %v", line)
	}
	if got := n.run("status"); !strings.Contains(unwrap(got.stdout), says) {
		t.Errorf("status: %+v", got)
	}
	if diff := cmp.Diff(before, nfttest.Save(t, n.NS, "iptables-nft-save", "nat")); diff != "" {
		t.Errorf("the chain (-before +after):\n%s", diff)
	}
}
