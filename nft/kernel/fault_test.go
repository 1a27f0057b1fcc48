package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/xtables"
)

// faults counts the calls on sockets and makes one of them fail.
type faults struct {
	dial  func() (*netlink.Conn, error)
	calls int
	at    int // the call that fails, counted from 1; 0: none
	fault fault
	seen  []call // the kind of each call
	// bystander writes something that is not ours, which increments the kernel's
	// generation.
	bystander func()
	// What a test does before and after a request or transaction; nil: nothing.
	before func(call, []netlink.Message)
	after  func(call, []netlink.Message, error)
}

// A fault is a way to fail.
type fault struct {
	how   how
	errno unix.Errno
}

func (f fault) String() string { return fmt.Sprintf("%s: %v", f.how, f.errno) }

type how string

const (
	rejected    how = "the kernel rejects it"        // it replies with an error
	notSent     how = "sending fails"                // the kernel receives nothing
	sentAndLost how = "sending seems to fail"        // the kernel receives it
	notReceived how = "the reply is lost"            //
	torn        how = "half of the reply is missing" // inconsistent due to another program's transaction
	interrupted how = "the reply is marked as interrupted"
	dead        how = "nothing works from now on" // as if the process were killed
	rejecting   how = "the kernel rejects every transaction from now on"
)

// A call is the kind of a call on a socket.
type call string

const (
	callSend    call = "send"
	callCommit  call = "commit"
	callReceive call = "receive"
)

// fails returns how a call fails, if it is the chosen one.
func (f *faults) fails(c call) (fault, bool) {
	f.calls++
	f.seen = append(f.seen, c)
	if f.fault.how == rejecting {
		return f.fault, c == callCommit && f.at > 0 && f.calls >= f.at
	}
	return f.fault, f.at > 0 && (f.calls == f.at || f.calls > f.at && f.fault.how == dead)
}

// open returns a kernel whose connection fails as planned.
func (f *faults) open() *Kernel {
	return New(nfnetlink.New(func() (*netlink.Conn, error) {
		nl, err := f.dial()
		if err != nil {
			return nil, err
		}
		return netlink.NewConn(&faultySocket{Conn: nl, faults: f}, nl.PID()), nil
	}))
}

// A faultySocket is between a connection and the kernel. nltest.Dial cannot be
// used: it loses the replies to a batch when the next message is sent.
type faultySocket struct {
	*netlink.Conn
	*faults
	pending []error // errors that were not received yet
	last    uint32  // sequence of the last request
}

func (s *faultySocket) Send(m netlink.Message) error { return s.SendMessages([]netlink.Message{m}) }

func (s *faultySocket) SendMessages(msgs []netlink.Message) error {
	c := callCommit
	if len(msgs) < 3 { // a request, or an empty transaction
		c = callSend
	}
	forward := func() error {
		_, err := s.Conn.SendMessages(msgs)
		return err
	}
	s.last = msgs[len(msgs)/2].Header.Sequence // which an error is about
	if s.before != nil {
		s.before(c, msgs)
	}
	f, fails := s.fails(c)
	switch {
	case !fails:
		err := forward()
		if s.after != nil {
			s.after(c, msgs, err)
		}
		return err
	case f.how == rejected, f.how == rejecting:
		if c == callSend && f.errno == unix.ENOENT {
			s.bystander() // which deleted the requested object
		}
		s.pending = append(s.pending, &netlink.OpError{Op: "receive", Err: f.errno, Sequence: s.last})
		return nil
	case f.how == sentAndLost:
		if err := forward(); err != nil {
			return err
		}
	}
	return os.NewSyscallError("sendmsg", f.errno)
}

func (s *faultySocket) Receive() ([]netlink.Message, error) {
	f, fails := s.fails(callReceive)
	if len(s.pending) > 0 {
		err := s.pending[0]
		s.pending = s.pending[1:]
		return rejection(err)
	}
	if fails && f.how == dead {
		return nil, os.NewSyscallError("recvmsg", f.errno)
	}
	msgs, err := s.Conn.Receive()
	if err != nil {
		return rejection(err)
	}
	switch {
	case !fails:
	case f.how == torn && len(msgs) > 0 && msgs[0].Header.Flags&netlink.Multi != 0: // of a dump
		s.bystander()
		msgs = msgs[:len(msgs)/2]
	case f.how == interrupted && len(msgs) > 0:
		msgs[0].Header.Flags |= netlink.DumpInterrupted
	case f.how == notReceived:
		return nil, os.NewSyscallError("recvmsg", f.errno)
	}
	// The end of a multipart message, which the real connection removed.
	return append(msgs, netlink.Message{Header: netlink.Header{
		Type: netlink.Done, Flags: netlink.Multi,
		Sequence: s.last,
	}}), nil
}

// rejection returns the message for an error of the kernel, from which the connection above
// makes the same error again.
func rejection(err error) ([]netlink.Message, error) {
	var op *netlink.OpError
	var errno unix.Errno
	if !errors.As(err, &op) || op.Sequence == 0 || !errors.As(op.Err, &errno) {
		return nil, err
	}
	data := append(binary.NativeEndian.AppendUint32(nil, uint32(-int32(errno))), make([]byte, unix.NLMSG_HDRLEN)...)
	return []netlink.Message{{Header: netlink.Header{Type: netlink.Error, Sequence: op.Sequence}, Data: data}}, nil
}

func (s *faultySocket) ReceiveIter() iter.Seq2[netlink.Message, error] {
	return func(yield func(netlink.Message, error) bool) {
		msgs, err := s.Receive()
		if err != nil {
			yield(netlink.Message{}, err)
			return
		}
		for _, m := range msgs {
			if !yield(m, nil) {
				return
			}
		}
	}
}

// A transition is an update: from one ruleset, or from none, to another.
type transition struct {
	name     string
	from, to *nft.Ruleset
	allowed  string // what may be effective in between, in addition to the two
}

func transitions() []transition {
	small := config.Config{NonMasqueradeCIDRs: cases.CIDRs("10.0.0.0/8", "192.168.0.0/16", "fd00::/8"), EnableIPv6: true}
	policies := small
	policies.NonMasqueradeCIDRs = cases.CIDRs("10.0.0.0/9", "10.128.0.0/9", "192.168.0.0/16")
	policies.ForceMasqueradeCIDRs = cases.CIDRs("10.9.0.0/16")
	policies.MasqueradeSrcCIDRs = cases.CIDRs("10.244.0.0/16", "fd00:10::/32")
	ports := []nft.PortRange{{Min: 1024, Max: 2047}, {Min: 4096, Max: 4096}}
	without6 := config.Config{NonMasqueradeCIDRs: cases.CIDRs("10.0.0.0/8", "100.64.0.0/10")}
	nf := func(c config.Config) *nft.Ruleset {
		return new(nft.Compile(c, nft.Options{Layout: native.Layout{}, RandomFully: true}))
	}
	xt := func(c config.Config) *nft.Ruleset { return new(xtOf(c)) }
	nfPorts := new(nft.Compile(policies, nft.Options{Layout: native.Layout{}, Ports: ports}))
	xtPorts := new(nft.Compile(policies, nft.Options{Layout: xtables.Layout{ChainName: cases.DefaultChain}, Ports: ports}))
	return []transition{
		{"first installation", nil, nf(small), "none"},
		{"change", nf(small), nf(policies), ""},
		{"change of all", nf(small), nfPorts, ""},
		{"IPv6 off", nf(small), nf(without6), ""},
		{"first installation for iptables", nil, xt(small), "none"},
		{"change for iptables", xt(small), xtPorts, ""},
		{"change back for iptables", xtPorts, xt(small), ""},
		{"IPv6 off for iptables", xt(small), xt(without6), ""},
		{"to mode iptables-nft", nf(small), xt(policies), "from+to"},
		{"to mode nftables", xt(small), nf(policies), ""},
		{"to fixed source addresses", nf(small), new(fixed("198.51.100.211", "198.51.100.212", "2001:db8:5::2")), ""},
		{
			"addresses change", new(fixed("198.51.100.211", "198.51.100.212")),
			new(fixed("198.51.100.213", "198.51.100.212", "2001:db8:5::2")), "",
		},
	}
}

// may reports whether something may be effective.
func (tr transition) may(effective string) bool {
	return effective == "to" || effective == tr.allowed || tr.from != nil && effective == "from"
}

// effective returns which ruleset is effective: "none", "from", "to", "from+to",
// or else a mixture, with its differences from both.
func (tr transition) effective(t *testing.T, c *nfnetlink.Conn) string {
	t.Helper()
	var found, why []string
	wanted := map[nft.Mode]bool{}
	for _, side := range []struct {
		name string
		*nft.Ruleset
	}{{"from", tr.from}, {"to", tr.to}} {
		if side.Ruleset == nil || empty(t, c, side.Mode()) {
			continue
		}
		if diffs := undecided(t, c, *side.Ruleset); len(diffs) == 0 {
			found = append(found, side.name)
			wanted[side.Mode()] = true
		} else {
			why = append(why, side.name+": "+strings.Join(diffs, "; "))
		}
	}
	for _, m := range cases.Modes() {
		if !wanted[m] && !empty(t, c, m) {
			return "mixture " + strings.Join(append(found, why...), " and ")
		}
	}
	if len(found) == 0 {
		return "none"
	}
	return strings.Join(found, "+")
}

// empty reports whether no rule of a mode is effective.
func empty(t *testing.T, c *nfnetlink.Conn, m nft.Mode) bool {
	t.Helper()
	if m == nft.ModeIPTables {
		return len(jumps(t, c, nfnetlink.IPv4))+len(jumps(t, c, nfnetlink.IPv6)) == 0
	}
	return len(rulesOf(t, c, nfnetlink.Inet, nft.TableName, native.BaseChain)) == 0
}

// undecided describes how the effective rules differ from a ruleset. What no rule
// refers to does not matter.
func undecided(t *testing.T, c *nfnetlink.Conn, want nft.Ruleset) []string {
	t.Helper()
	diffs, err := New(c).Diff(t.Context(), want, nft.Contents)
	nfttest.NoError(t, err)
	return slices.DeleteFunc(diffs, func(d string) bool {
		return strings.HasSuffix(d, "is not in the config") ||
			strings.HasPrefix(d, "leftover chain") && strings.HasSuffix(d, "table ip nat") &&
				len(jumps(t, c, nfnetlink.IPv4)) == 0 ||
			strings.HasPrefix(d, "leftover chain") && strings.HasSuffix(d, "table ip6 nat") &&
				len(jumps(t, c, nfnetlink.IPv6)) == 0
	})
}

// A rig is a namespace in which transitions are repeated.
type rig struct {
	*testing.T
	ns      *nfttest.NS
	conn    *nfnetlink.Conn // a healthy one
	closing sync.WaitGroup  // closing a socket after a deletion takes long
	// bystander writes something that is not ours.
	bystander func()
}

func newRig(t *testing.T) *rig {
	ns := nfttest.NewNS(t, "node")
	r := &rig{T: t, ns: ns, conn: connect(t, ns), bystander: commits(t, ns)}
	t.Cleanup(r.closing.Wait)
	return r
}

func (r *rig) faults(at int, f fault) *faults {
	return &faults{dial: dialIn(r.ns), at: at, fault: f, bystander: r.bystander}
}

// reset empties the namespace and installs the start of a transition.
func (r *rig) reset(tr transition) {
	r.Helper()
	b := &nfnetlink.Batch{}
	for _, f := range []nfnetlink.Family{nfnetlink.IPv4, nfnetlink.IPv6, nfnetlink.Inet} {
		tables, err := r.conn.Tables(f)
		nfttest.NoError(r, err)
		for _, table := range tables {
			b.DelTable(f, table.Name)
		}
	}
	nfttest.NoError(r, r.conn.Commit(b))
	if tr.from != nil {
		apply(r, New(r.conn), *tr.from, nft.Contents)
	}
}

// run makes the transition with a fault. It checks that one of the two rulesets
// is effective afterwards, and that the next attempt succeeds, in the same
// process or in a new one.
func (r *rig) run(tr transition, f *faults, restart bool) {
	r.Helper()
	r.reset(tr)
	k := f.open()
	defer r.closing.Go(func() { _ = k.Close() })
	done, err := k.Apply(r.Context(), *tr.to, nft.WithLeftovers)
	if gen, genErr := r.conn.Generation(); f.at == 0 && (err != nil || genErr != nil || done.Generation != gen) {
		r.Errorf("Apply returned generation %d, %v; the kernel has %d, %v", done.Generation, err, gen, genErr)
	}
	if f.at > f.calls { // on a busy machine the kernel may have interrupted the first run, but not this one
		return
	}
	what := fmt.Sprintf("call %d (%s) of %d: %s", f.at, f.seen[max(f.at-1, 0)], f.calls, f.fault)
	effective := tr.effective(r.T, r.conn)
	// If the kernel interrupted the first run, the same number may be a call after the last transaction.
	rejected := f.fault.how == rejecting && slices.Contains(f.seen[max(f.at-1, 0):], callCommit)
	if !tr.may(effective) || err == nil && effective != "to" || rejected && !errors.Is(err, f.fault.errno) {
		r.Errorf("%s: Apply returned %v; effective is %s", what, err, effective)
	}
	f.at = 0
	next := k
	if restart {
		next = New(r.conn)
	}
	a, err := next.Apply(r.Context(), *tr.to, nft.WithLeftovers)
	if err != nil {
		r.Errorf("%s: the next Apply: %v", what, err)
	}
	diffs, err := New(r.conn).Diff(r.Context(), *tr.to, everything)
	if err != nil || len(diffs) > 0 {
		r.Errorf("%s: after the next Apply: %v %q", what, err, diffs)
	}
	if gen, err := r.conn.Generation(); err != nil || a.Generation != gen {
		r.Errorf("%s: returns generation %d, the kernel has %d: %v", what, a.Generation, gen, err)
	}
}

// errnos are the errors with which the kernel rejects a request.
var errnos = []unix.Errno{unix.ENOBUFS, unix.EINTR, unix.ERESTART, unix.EBUSY, unix.EPERM, unix.ENOMEM, unix.ENOENT}

// faultsOf returns the ways in which a call can fail. Unless LONG is set, a read
// fails in one way, a different one for each call; in a short run, so does a
// transaction.
func faultsOf(c call, n int) []fault {
	var all []fault
	if c == callReceive {
		all = append(all, fault{how: torn}, fault{how: interrupted})
		for _, e := range []unix.Errno{unix.ENOBUFS, unix.EINTR, unix.ENOMEM} {
			all = append(all, fault{notReceived, e})
		}
	} else {
		for _, e := range errnos {
			all = append(all, fault{rejected, e})
		}
		for _, e := range []unix.Errno{unix.ENOBUFS, unix.EINTR, unix.ENOMEM, unix.EPERM} {
			all = append(all, fault{notSent, e})
		}
		all = append(all, fault{sentAndLost, unix.ENOBUFS})
		if c == callCommit {
			all = append(all, fault{rejecting, unix.ENOMEM}, fault{rejecting, unix.EPERM})
		}
	}
	if nfttest.Long() || c == callCommit && !testing.Short() {
		return all
	}
	return []fault{all[n/2%len(all)]}
}

func TestAnyCallMayFail(t *testing.T) {
	t.Parallel()
	for _, tr := range transitions() {
		t.Run(tr.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			whole := r.faults(0, fault{})
			r.run(tr, whole, true)
			for n, kind := range whole.seen {
				if n%nfttest.Rounds(60, 1, 1) > 0 {
					continue
				}
				for i, f := range faultsOf(kind, n) {
					r.run(tr, r.faults(n+1, f), (n/2+i)%2 == 0)
				}
			}
		})
	}
}

func TestKilledAgentLeavesTheOldOrTheNewRules(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t) // kills an agent at many points of an update
	before, after := tamperConfig(4500), tamperConfig(4500)
	after.NonMasqueradeCIDRs = after.NonMasqueradeCIDRs[1:] // filled in two transactions
	for i := range 4500 {
		p := netip.PrefixFrom(netip.AddrFrom16([16]byte{0x26, 0, byte(i >> 8), byte(i)}), 32)
		after.NonMasqueradeCIDRs = append(after.NonMasqueradeCIDRs, config.CIDR{Prefix: p})
	}
	from, to := nft.Compile(before, nft.Options{Layout: native.Layout{}}),
		nft.Compile(after, nft.Options{Layout: native.Layout{}})
	for _, tr := range append(transitions(), transition{"many CIDRs", &from, &to, ""}) {
		t.Run(tr.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			whole := r.faults(0, fault{})
			r.run(tr, whole, true)
			for n, kind := range whole.seen {
				// Nothing changes between two reads: only calls after a commit make a difference.
				if n == 0 || kind == callCommit || whole.seen[n-1] == callCommit {
					r.run(tr, r.faults(n+1, fault{dead, unix.EPERM}), true)
				}
				if kind == callCommit { // what it has staged is no obstacle to the next attempt
					r.run(tr, r.faults(n+1, fault{rejecting, unix.ENOMEM}), false)
				}
			}
		})
	}
}

// Several faults, and other programs' transactions, during one Apply: it fails or does what it says, and
// the next one is right.
func TestSeveralFaultsOfOneApply(t *testing.T) {
	t.Parallel()
	r, m := rand.New(rand.NewPCG(49, 0)), cases.NewMaker(49)
	ns := nfttest.NewNS(t, "node")
	bystander := commits(t, ns)
	kinds := []fault{
		{rejected, unix.ERESTART},
		{rejected, unix.ENOENT},
		{rejected, unix.EINTR},
		{notSent, unix.EINTR},
		{notReceived, unix.ENOBUFS},
		{interrupted, 0},
		{torn, 0},
		{sentAndLost, unix.ENOBUFS},
		{rejected, unix.EBUSY},
		{rejected, unix.EEXIST},
		{rejected, unix.EINVAL},
	}
	f, on := &faults{dial: dialIn(ns), bystander: bystander}, false
	f.before = func(call, []netlink.Message) {
		switch {
		case !on || r.IntN(6) > 0:
		case r.IntN(2) == 0:
			bystander()
		default:
			f.fault, f.at = kinds[r.IntN(len(kinds))], f.calls+1+r.IntN(2)
		}
	}
	k := f.open()
	for range nfttest.Rounds(10, 60, 600) {
		mode := cases.Modes()[m.IntN(len(cases.Modes()))]
		want := nft.Compile(m.Config(), m.Options(mode)).WithAddresses(m.Addresses())
		on = true
		a, err := k.Apply(t.Context(), want, nft.WithLeftovers)
		on, f.at = false, 0
		if err == nil && a.Generation != 0 && a.Generation == generation(t, ns) {
			if diffs, err := open(t, ns).Diff(t.Context(), want, everything); err != nil || len(diffs) > 0 {
				t.Fatalf("said to be right at generation %d, but %q, %v", a.Generation, diffs, err)
			}
		}
		apply(t, k, want, nft.WithLeftovers)
		inSync(t, ns, want)
	}
}

// A change of a set takes two transactions, and the outcome of each is asked for. Before the second one, the
// generation, the table and its sets are read, after an empty transaction. The others read: the generation, after
// which an empty transaction takes two, the table, its chains, the rules of each chain, sets, counters, and without a
// change the elements of each set; a full check also the table of a trace.
func TestRequestsOfAnApplyAreFew(t *testing.T) {
	for _, tt := range []struct {
		mode         nft.Mode
		depth        nft.Depth
		change, read int
	}{
		{nft.ModeNFTables, nft.Contents, 18, 10},
		{nft.ModeNFTables, nft.WithLeftovers, 21, 13},
		{nft.ModeIPTables, nft.Contents, 16, 13},
		{nft.ModeIPTables, nft.WithLeftovers, 26, 23},
	} {
		f := &faults{dial: dialIn(nfttest.NewNS(t, "node"))}
		k, c := f.open(), cases.Load(t, "both-families")
		requests := func() int {
			f.seen = nil
			apply(t, k, c.Compile(tt.mode), tt.depth)
			return len(slices.DeleteFunc(f.seen, func(c call) bool { return c == callReceive }))
		}
		requests()
		c.Config.NonMasqueradeCIDRs = append(cases.CIDRs("198.51.100.0/24"), c.Config.NonMasqueradeCIDRs...)
		if change, read := requests(), requests(); change != tt.change || read != tt.read {
			t.Errorf("%s, depth %d: a change takes %d requests, want %d; without one there are %d, want %d", tt.mode, tt.depth,
				change, tt.change, read, tt.read)
		}
		if err := k.Close(); err != nil {
			t.Error(err)
		}
	}
}
