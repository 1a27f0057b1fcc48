package main

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/nft-masq-agent/internal/running"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/xtables"
)

// A stall keeps an agent from its work.
type stall struct {
	name  string
	env   []string
	begin func(*stalled) (end func())
}

// The stalls.
func stalls() []stall {
	return []stall{
		{"stopped", nil, func(s *stalled) func() { return s.runFor(20*time.Millisecond, 120*time.Millisecond) }},
		{"processor quota", nil, (*stalled).quota},
		{"unread log", nil, (*stalled).unread},
		{"membarrier refused", []string{fmt.Sprintf("%s=%d", withoutBarrier, unix.EPERM)}, (*stalled).barrier},
	}
}

// A stalled agent works next to a program that commits.
type stalled struct {
	*daemon
	stall stall
	rate  int // of the other program's transactions, a second
	cidrs int
	mode  nft.Mode
	log   heldLog
	t     *testing.T
}

func (s *stalled) String() string {
	return fmt.Sprintf("%s, %d commits a second, %d CIDRs, %s", s.stall.name, s.rate, s.cidrs, s.mode)
}

// runFor lets the agent run for a part of each period, by signals.
func (s *stalled) runFor(part, period time.Duration) (end func()) {
	done, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			_ = s.Signal(unix.SIGSTOP)
			select {
			case <-time.After(period - part):
			case <-done:
			}
			_ = s.Signal(unix.SIGCONT)
			select {
			case <-time.After(part):
			case <-done:
				return
			}
		}
	}()
	return func() { close(done); <-ended }
}

// quota lets the agent run for a small part of each second, and for a larger one where its work
// is more than that.
func (s *stalled) quota() (end func()) {
	part := 20 * time.Millisecond
	if s.cidrs > 10_000 {
		part = 200 * time.Millisecond
	}
	us := strconv.FormatInt(part.Microseconds(), 10)
	dir := cgroup(s.t, cgroupLimit{
		"cpu",
		map[string]string{"cpu.cfs_period_us": "1000000", "cpu.cfs_quota_us": us},
		map[string]string{"cpu.max": us + " 1000000"},
	}, "signals stop the agent for the same part of each second")
	if dir == "" {
		return s.runFor(part, time.Second)
	}
	s.t.Cleanup(func() { // before the directory is removed
		_ = s.Kill()
		<-s.Done()
	})
	join := func(dir string) {
		s.check(os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(s.Pid)), 0))
	}
	join(dir)
	return func() { join(filepath.Dir(dir)) }
}

// unread fills the pipe of the log, so that its next line waits for a reader.
func (s *stalled) unread() (end func()) {
	reading := s.log.hold()
	pipe, err := unix.Open(fmt.Sprintf("/proc/%d/fd/1", s.Pid), unix.O_WRONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	s.check(err)
	defer unix.Close(pipe)
	line := []byte(`{"event":"filler"}` + "\n")
	page := append(slices.Repeat([]byte(" "), os.Getpagesize()-len(line)), line...)
	_, err = unix.Write(pipe, page)
	s.check(err)
	<-reading // and takes nothing more
	for err == nil {
		_, err = unix.Write(pipe, page)
	}
	if !errors.Is(err, unix.EAGAIN) {
		s.t.Fatal(err)
	}
	return s.log.release
}

// barrier checks that seccomp is in force.
func (s *stalled) barrier() (end func()) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.Pid))
	s.check(err)
	if !strings.Contains(string(status), "Seccomp:\t2\n") {
		s.t.Fatalf("no filter:\n%s", status)
	}
	return func() {}
}

// A heldLog is read until it is held.
type heldLog struct {
	gate
	mu      sync.Mutex
	reading chan struct{}
}

// hold lets reads wait. The channel is closed by the first one.
func (h *heldLog) hold() (reading <-chan struct{}) {
	h.gate.Lock()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.reading = make(chan struct{})
	return h.reading
}

func (h *heldLog) release() { h.gate.Unlock() }

// Write implements [io.Writer].
func (h *heldLog) Write(p []byte) (int, error) {
	h.mu.Lock()
	if h.reading != nil {
		close(h.reading)
		h.reading = nil
	}
	h.mu.Unlock()
	return h.gate.Write(p)
}

// text returns one of two configs with so many CIDRs. In mode nftables they have a map, which
// goes a transaction after the rules that refer to it.
func (s *stalled) text(second bool) string {
	var b strings.Builder
	first := 10
	if second {
		first = 20
	}
	if s.mode == nft.ModeNFTables {
		fmt.Fprintf(&b, "snatAddresses: [198.51.100.%d, 198.51.100.%d]\n", first, first+1)
	}
	b.WriteString("nonMasqueradeCIDRs:\n")
	for i := range s.cidrs {
		fmt.Fprintf(&b, "- %d.%d.%d.%d/32\n", first+i>>23, i>>15&0xff, i>>7&0xff, i<<1&0xff)
	}
	return b.String()
}

// wants compiles a config for the addresses of the node.
func (s *stalled) wants(text string) nft.Ruleset {
	return wants(s.t, text, s.flag()).On(addressesOfStalled())
}

func (s *stalled) flag() string { return "--mode=" + string(s.mode) }

func addressesOfStalled() (all []netip.Addr) {
	for _, last := range []byte{10, 11, 20, 21} {
		all = append(all, netip.AddrFrom4([4]byte{198, 51, 100, last}))
	}
	return all
}

// chain is the one that has our rules.
func (s *stalled) chain() (family nfnetlink.Family, table, name string) {
	if s.mode == nft.ModeIPTables {
		return nfnetlink.IPv4, xtables.NATTable, cases.DefaultChain
	}
	return nfnetlink.Inet, nft.TableName, native.BaseChain
}

// rules returns the handles of our rules.
func (s *stalled) rules() (handles []uint64) {
	c := s.connect()
	defer c.Close()
	family, table, name := s.chain()
	s.until("the rules are read", func() bool {
		rules, _, err := c.FirstRules(family, table, name, func(nfnetlink.Rule) bool { return false })
		handles = nil
		for _, r := range rules {
			handles = append(handles, r.Handle)
		}
		return err == nil
	})
	return handles
}

// flush removes our rules.
func (s *stalled) flush() {
	c, b := s.connect(), &nfnetlink.Batch{}
	defer c.Close()
	family, table, name := s.chain()
	b.FlushChain(nfnetlink.ChainID{Family: family, Table: table, Name: name})
	s.check(c.Commit(b, 0))
}

// tamper changes what is exempt, and returns how to see that it was restored.
func (s *stalled) tamper() (restored func(nft.Ruleset) bool) {
	c, b := s.connect(), &nfnetlink.Batch{}
	defer c.Close()
	if s.mode == nft.ModeIPTables {
		family, table, name := s.chain()
		b.DelRule(nfnetlink.Rule{Family: family, Table: table, Chain: name, Handle: s.rules()[1]})
		s.check(c.Commit(b, 0))
		return s.restored
	}
	set := s.set()
	b.AddElements(nfnetlink.Inet, nft.TableName, set, []netip.Prefix{netip.MustParsePrefix("8.8.8.8/32")})
	s.check(c.Commit(b, 0))
	return func(nft.Ruleset) bool { return s.set() != set } // the other one is filled
}

// restored reports whether the kernel has the wanted rules, without the elements of sets.
func (s *stalled) restored(want nft.Ruleset) bool { return s.reads(want, layout.Frame) }

func (s *stalled) reads(want nft.Ruleset, depth layout.Depth) bool {
	k := s.kernel()
	defer k.Close()
	state, err := k.Read(s.t.Context(), want, depth)
	return err == nil && len(state.Drift()) == 0
}

// comes waits for something that the stall may delay beyond its bound. A fault of what the agent
// does delays it for ever. Then the kernel has all that is wanted.
func (s *stalled) comes(what string, within time.Duration, want nft.Ruleset, came func(nft.Ruleset) bool) {
	s.t.Helper()
	begun := time.Now()
	await := func(came func() bool) {
		for !came() {
			if time.Since(begun) > nfttest.Patient(within+timeout) {
				s.t.Fatalf("%s: not after %v; differences: %q", what, time.Since(begun), s.differences(want))
			}
			select {
			case <-time.After(50 * time.Millisecond):
			case <-s.Done():
				s.t.Fatalf("%s: the agent ended", what)
			}
		}
	}
	await(func() bool { return came(want) })
	took := time.Since(begun)
	begun = time.Now()
	await(func() bool { return s.reads(want, layout.Ours) })
	s.t.Logf("%s after %v", what, took.Round(time.Millisecond))
}

// Whatever keeps the agent from its work, next to whichever neighbor: a change of the file takes
// effect, what others change is restored, a bad file changes nothing, and what is late is not
// called rejected.
func TestStalledAgentNextToAProgramThatCommitsDoesWhatItPromises(t *testing.T) {
	nfttest.SkipIfShort(t)
	t.Parallel()
	var all []*stalled
	for i, stall := range stalls() {
		for m, mode := range modes {
			sizes := []int{10, 10_000, 100_000}
			if mode == nft.ModeIPTables {
				sizes = []int{10, xtables.MaxCIDRs}
			}
			for j, rate := range []int{5, 50, 500} {
				for k, cidrs := range sizes {
					// Usually, each stall is tried once in each mode.
					if usual := j == (i+m)%3 && k == (i+m)%2; usual || nfttest.Long() {
						all = append(all, &stalled{stall: stall, rate: rate, cidrs: cidrs, mode: mode})
					}
				}
			}
		}
	}
	for _, s := range all {
		t.Run(s.String(), func(t *testing.T) {
			t.Parallel()
			s.try(t)
		})
	}
}

func (s *stalled) try(t *testing.T) {
	n := newNode(t)
	for _, a := range addressesOfStalled() {
		n.check(n.AddAddr("lo", netip.PrefixFrom(a, a.BitLen())))
	}
	s.t, s.daemon = t, &daemon{testNode: n}
	first, second := s.text(false), s.text(true)
	n.swap(first)
	cmd := n.command(s.stall.env, "run", "--log-format=json", "--config="+n.path, "--probe-socket="+n.socket, s.flag(),
		"--resync-interval=3600", "--http-address="+httpAddress)
	cmd.Stdout = &s.log
	s.daemon = n.startCommand(cmd)
	want := s.wants(first)
	s.await("config_applied")
	n.holds(want)
	n.neighbor(time.Second / time.Duration(s.rate))
	end := s.stall.begin(s)
	time.Sleep(time.Second) // of stalled checks

	want = s.wants(second)
	n.swap(second)
	s.comes("change of the file", 30*time.Second, want, s.restored)
	s.flush()
	s.comes("rules", 10*time.Second, want, s.restored)
	elements := s.tamper()
	s.comes("elements", 30*time.Second, want, elements)

	rules := s.rules()
	n.swap(second + "- 10.0.0.0/33\n")
	s.until("the file is rejected", func() bool {
		reason, err := running.Probe(n.socket, "/readyz")
		return err == nil && strings.Contains(reason, "config rejected")
	})
	s.comes("bad file", 0, want, s.restored)
	if now := s.rules(); !slices.Equal(now, rules) {
		t.Errorf("the bad file changed the rules from %v to %v", rules, now)
	}
	s.flush()
	s.comes("rules next to a bad file", 10*time.Second, want, s.restored)

	end()
	_, metrics := n.get("/metrics")
	if rejected := regexp.MustCompile(`applies_total\{.*result="rejected"\} [^0].*`).FindString(metrics); rejected != "" {
		t.Errorf("counted: %s", rejected)
	}
	s.stop()
	expected := []string{
		"starting", "listening", "config_applied", "rules_restored", "repairs_slowed", "rules_delayed", "rules_accepted",
		"config_rejected", "exiting", "filler",
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
