package main

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/nft-masq-agent/internal/running"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/xtables"
)

// A stalled agent works next to a program that commits.
type stalled struct {
	*daemon
	signals bool // it is stopped by signals, or else without membarrier(2)
	rate    int  // of the other program's transactions, a second
	cidrs   int
	mode    nft.Mode
}

func (s *stalled) String() string {
	how := map[bool]string{true: "stopped", false: "membarrier rejected"}[s.signals]
	return fmt.Sprintf("%s, %d commits a second, %d CIDRs, %s", how, s.rate, s.cidrs, s.mode)
}

// stall lets the agent run for a sixth of the time, until the test ends it.
func (s *stalled) stall() (end func()) {
	done, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for running := false; ; running = !running {
			signal, pause := unix.SIGSTOP, 100*time.Millisecond
			if running {
				signal, pause = unix.SIGCONT, 20*time.Millisecond
			}
			_ = s.Signal(signal)
			select {
			case <-time.After(pause):
			case <-done:
				_ = s.Signal(unix.SIGCONT)
				return
			}
		}
	}()
	return func() { close(done); <-ended }
}

// text returns one of two configs with so many CIDRs. In mode nftables they have a map, which
// goes a transaction after the rules that refer to it.
func (s *stalled) text(first int) string {
	var b strings.Builder
	if s.mode == nft.ModeNFTables {
		fmt.Fprintf(&b, "snatAddresses: [198.51.100.%d, 198.51.100.%d]\n", first, first+1)
	}
	b.WriteString("nonMasqueradeCIDRs:\n")
	for i := range s.cidrs {
		fmt.Fprintf(&b, "- %d.%d.%d.%d/32\n", first+i>>23, i>>15&0xff, i>>7&0xff, i<<1&0xff)
	}
	return b.String()
}

// comes waits for the wanted rules, which the stall may delay beyond their bound. A fault of what the
// agent does delays them for ever.
func (s *stalled) comes(what string, within time.Duration, want nft.Ruleset) {
	s.t.Helper()
	begun := time.Now()
	for pause := 50 * time.Millisecond; ; pause = min(2*pause, 400*time.Millisecond) { // reading may cost a lot
		k := s.kernel()
		state, err := k.Read(s.t.Context(), want, nft.Contents)
		_ = k.Close()
		if err == nil && len(state.Differences()) == 0 {
			s.t.Logf("%s after %v", what, time.Since(begun).Round(time.Millisecond))
			return
		}
		if time.Since(begun) > nfttest.Patient(within+timeout) {
			s.t.Fatalf("%s: not after %v; differences: %q", what, time.Since(begun), s.differences(want))
		}
		select {
		case <-time.After(pause):
		case <-s.Done():
			s.t.Fatalf("%s: the agent ended", what)
		}
	}
}

// handles identifies the rules of the agent's chain. The program nft would read the elements, too,
// and all again after each transaction of the neighbor: for ever, if it is slower than those.
func (s *stalled) handles() (all []uint64) {
	s.t.Helper()
	family, table, chain := nfnetlink.Inet, nft.TableName, native.BaseChain
	if s.mode == nft.ModeIPTables {
		family, table, chain = nfnetlink.IPv4, "nat", "IP-MASQ-AGENT"
	}
	c := s.connect()
	defer c.Close()
	s.check(c.EachRule(family, table, chain, func(r nfnetlink.Rule) error {
		all = append(all, r.Handle)
		return nil
	}))
	return all
}

// Whatever keeps the agent from its work, next to whichever neighbor: a change of the file takes
// effect, what others change is restored, a bad file changes nothing, and what is late is not
// called rejected.
func TestStalledAgentNextToAProgramThatCommitsDoesWhatItPromises(t *testing.T) {
	nfttest.SkipIfShort(t)
	t.Parallel()
	for i, signals := range []bool{true, false} {
		for m, mode := range modes {
			sizes := []int{10, 10_000, 100_000}
			if mode == nft.ModeIPTables {
				sizes = []int{10, xtables.MaxCIDRs}
			}
			for j, rate := range []int{5, 50, 500} {
				for k, cidrs := range sizes {
					// Usually, each stall is tried once, each in another mode.
					if usual := i == m && j == 1 && k == 1-i; !usual && !nfttest.Long() {
						continue
					}
					s := &stalled{signals: signals, rate: rate, cidrs: cidrs, mode: mode}
					t.Run(s.String(), func(t *testing.T) {
						t.Parallel()
						s.try(t)
					})
				}
			}
		}
	}
}

func (s *stalled) try(t *testing.T) {
	n, flag := newNode(t), "--mode="+string(s.mode)
	has := cases.Addrs("198.51.100.10", "198.51.100.11", "198.51.100.20", "198.51.100.21")
	for _, a := range has {
		n.check(n.AddAddr("lo", netip.PrefixFrom(a, a.BitLen())))
	}
	first, second := s.text(10), s.text(20)
	n.swap(first)
	var env []string
	if !s.signals {
		env = []string{fmt.Sprintf("%s=%d", withoutBarrier, unix.EPERM)}
	}
	s.daemon = n.startIn(env, flag, "--resync-interval=3600", "--http-address="+httpAddress)
	s.began(wants(t, first, flag).WithAddresses(has))
	n.neighbor(time.Second / time.Duration(s.rate))
	end := func() {}
	if s.signals {
		end = s.stall()
	}

	want := wants(t, second, flag).WithAddresses(has)
	n.swap(second)
	s.comes("change of the file", 30*time.Second, want)
	tamper(n, s.mode)
	s.comes("rules", 10*time.Second, want)
	if s.mode == nft.ModeNFTables {
		nfttest.NFT(t, n.NS, "", "flush set inet nft-masq-agent", n.set())
	} else {
		nfttest.Run(t, n.NS, "", "iptables-nft", "-t", "nat", "-D", "IP-MASQ-AGENT", "2")
	}
	s.comes("elements", 30*time.Second, want)

	rules := s.handles()
	n.swap(second + "- 10.0.0.0/33\n")
	s.until("the file is rejected", func() bool {
		reason, err := running.Probe("unix", n.socket, "/readyz")
		return err == nil && strings.Contains(reason, "config rejected")
	})
	s.comes("bad file", 0, want)
	if now := s.handles(); !slices.Equal(now, rules) {
		t.Errorf("the bad file changed the rules from %v to %v", rules, now)
	}
	tamper(n, s.mode)
	s.comes("rules next to a bad file", 10*time.Second, want)

	end()
	_, metrics := n.get("/metrics")
	rejections := regexp.MustCompile(`applies_total\{.*result="rejected"\} (.*)`).FindAllStringSubmatch(metrics, -1)
	if len(rejections) == 0 {
		t.Errorf("no metric counts rejections:\n%s", metrics)
	}
	for _, r := range rejections {
		if r[1] != "0" {
			t.Errorf("what is late is called rejected: %s", r[0])
		}
	}
	s.stop()
	expected := []string{
		"rules_restored", "repairs_slowed", "rules_delayed", "rules_accepted", "config_applied", "config_rejected", "exiting",
		"listening",
	}
	for _, line := range s.Untaken() {
		if !slices.Contains(expected, line.Event()) && !hidden(line) {
			t.Errorf("the agent logs, too: %v", line)
		}
	}
	if n := s.Count("config_rejected"); n != 1 {
		t.Errorf("%d files are rejected", n)
	}
}
