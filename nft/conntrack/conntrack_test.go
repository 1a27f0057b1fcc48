package conntrack

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/judge"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
)

func TestMain(m *testing.M) { os.Exit(nfttest.Main(m)) }

// newTable returns a table that dials with dial.
func newTable(dial func() (*netlink.Conn, error)) *Tracker {
	return &Tracker{func() *nfnetlink.Conn { return nfnetlink.New(dial) }, sampleSize, maxNoted}
}

// anyTime is the beginning of a dump of which nothing is kept.
func anyTime() {}

// attr returns an attribute with a number.
func attr(typ uint16, n uint32) netlink.Attribute {
	return netlink.Attribute{Type: typ, Data: binary.BigEndian.AppendUint32(nil, n)}
}

// clone returns a copy of a visited entry of which everything stays valid.
func (e *Entry) clone() Entry {
	c := *e
	c.tuple = slices.Clone(e.tuple)
	return c
}

// dialIn returns a dialler whose sockets are in the namespace.
func dialIn(ns *nfttest.NS) func() (*netlink.Conn, error) {
	return func() (*netlink.Conn, error) { return nfttest.DialNetfilter(ns) }
}

// entries collects a whole dump.
func entries(t *testing.T, table *Tracker) []Entry {
	t.Helper()
	var all []Entry
	err := table.Dump(t.Context(), func() { all = nil }, func(e *Entry) error {
		all = append(all, e.clone())
		return nil
	})
	nfttest.NoError(t, err)
	return all
}

func find(t *testing.T, table *Tracker, protocol uint8, src netip.AddrPort) Entry {
	t.Helper()
	all := entries(t, table)
	for _, e := range all {
		if e.Original.Protocol == protocol && e.Original.Src == src {
			return e
		}
	}
	t.Fatalf("no entry of %s from %s among %+v", ProtocolName(protocol), src, all)
	return Entry{}
}

// remove deletes an entry if it is still there, and reports whether it was.
func remove(t *testing.T, table *Tracker, e Entry) bool {
	t.Helper()
	return removeIf(t, table, e, func(*Entry) bool { return true })
}

func removeIf(t *testing.T, table *Tracker, e Entry, doomed func(*Entry) bool) bool {
	t.Helper()
	c := table.dial()
	defer func() { _ = c.Close() }()
	err := e.remove(c, doomed)
	if err != nil && !errors.Is(err, unix.ENOENT) {
		t.Fatal(err)
	}
	return err == nil
}

// natRules translate the source of traffic to 203.0.113.0/24 and 2001:db8:1::/64,
// and the destination 198.18.0.10 and 2001:db8:2::10, as a Service does.
const natRules = `table inet t {
	chain pre {
		type nat hook prerouting priority dstnat;
		ip daddr 198.18.0.10 dnat ip to 203.0.113.9
		ip6 daddr 2001:db8:2::10 dnat ip6 to 2001:db8:1::1
	}
	chain post {
		type nat hook postrouting priority srcnat;
		ip daddr 203.0.113.0/24 masquerade fully-random
		ip6 daddr 2001:db8:1::/64 masquerade fully-random
	}
}
`

func TestEntriesMatchThePackets(t *testing.T) {
	t.Parallel()
	top := nfttest.NewTopology(t)
	nfttest.NFT(t, top.Node, natRules, "-f", "-")
	table := newTable(dialIn(top.Node))
	for proto, number := range map[nfttest.Proto]uint8{
		nfttest.UDP: unix.IPPROTO_UDP, nfttest.TCP: unix.IPPROTO_TCP, nfttest.SCTP: unix.IPPROTO_SCTP,
		nfttest.ICMP: unix.IPPROTO_ICMP, // of IPv4
	} {
		for dst, to := range map[string]string{
			"203.0.113.9:8081":      "203.0.113.9:8081",
			"10.9.0.9:8082":         "10.9.0.9:8082",
			"198.18.0.10:8083":      "203.0.113.9:8083",
			"[2001:db8:1::1]:8081":  "[2001:db8:1::1]:8081",
			"[fd00:9::9]:8082":      "[fd00:9::9]:8082",
			"[2001:db8:2::10]:8083": "[2001:db8:1::1]:8083",
		} {
			flow := nfttest.Flow{Proto: proto, From: top.Pod, To: top.Outside, Dst: netip.MustParseAddrPort(dst)}
			s := nfttest.MustSend(t, top, flow)
			asked, reached, number := flow.Dst, netip.MustParseAddrPort(to), number
			if proto == nfttest.ICMP { // both ports are the identifier
				asked, reached = withPort(asked, s.Sent.Port()), withPort(reached, s.Seen.Port())
				if asked.Addr().Is6() {
					number = unix.IPPROTO_ICMPV6
				}
			}
			e := find(t, table, number, s.Sent)
			if e.Original.Dst != asked || e.Destination() != reached || e.SeenAs() != s.Seen {
				t.Errorf("%s to %s, sent from %s, seen from %s: %+v", proto, dst, s.Sent, s.Seen, e)
			}
			want, translated := flow.Dst.Port() != 8082, e.SeenAs() != e.Original.Src
			if translated != want || (e.Status&SrcNAT != 0) != want || e.Zone != 0 {
				t.Errorf("%s to %s: translated %t, status %b, want %t", proto, dst, translated, e.Status, want)
			}
			stateless := proto == nfttest.UDP || proto == nfttest.ICMP
			if (e.State == "") != stateless || proto == nfttest.SCTP && e.State != "CLOSED" || e.ID == 0 {
				t.Errorf("%s to %s: state %q, id %d", proto, dst, e.State, e.ID)
			}
			if proto != nfttest.TCP && !remove(t, table, e) { // that connection is closed
				t.Errorf("%s to %s is not deleted", proto, dst)
			}
		}
	}
}

// The same addresses and ports are in three zones, which the packet's DSCP selects.
func TestZonesOfBothAndOfOneDirectionAreSpared(t *testing.T) {
	t.Parallel()
	top := nfttest.NewTopology(t)
	nfttest.NFT(t, top.Node, `table inet t {
	chain raw {
		type filter hook prerouting priority raw
		ip dscp 1 ct zone set 7
		ip dscp 2 ct original zone set 8
		ip6 dscp 1 ct zone set 7
		ip6 dscp 2 ct original zone set 8
	}
	chain post { type nat hook postrouting priority srcnat; masquerade; }
}`, "-f", "-")
	table := newTable(dialIn(top.Node))
	exempt := comparisonOf(func(c *config.Config) { c.NonMasqueradeCIDRs = cases.CIDRs("0.0.0.0/0", "::/0") })
	for _, flow := range []nfttest.Flow{
		{Src: netip.AddrPortFrom(top.PodV4, 4000), Dst: netip.MustParseAddrPort("203.0.113.9:53")},
		{Src: netip.AddrPortFrom(top.PodV6, 4000), Dst: netip.MustParseAddrPort("[2001:db8:1::1]:53")},
	} {
		flow.Proto, flow.From = nfttest.UDP, top.Pod
		zones := map[uint16]Entry{}
		for dscp := range 3 {
			nfttest.NFT(t, top.Pod, fmt.Sprintf(
				"table inet t { chain c { type filter hook output priority 0; ip dscp set %d; ip6 dscp set %[1]d; }; }", dscp,
			), "-f", "-")
			nfttest.MustSend(t, top, flow)
			nfttest.NFT(t, top.Pod, "", "flush", "ruleset")
		}
		for _, e := range entries(t, table) {
			if e.Original.Dst == flow.Dst {
				zones[e.Zone] = e
			}
		}
		if len(zones) != 3 {
			t.Fatalf("entries: %+v", zones)
		}
		for _, zone := range []uint16{7, 8, 0} {
			e := zones[zone]
			removed := removeIf(t, table, e, func(e *Entry) bool {
				_, found := exempt.Compare(e)
				return found == Contradicts
			})
			if removed != (zone == 0) {
				t.Errorf("%s in zone %d: deleted: %t", flow.Dst, zone, removed)
			}
		}
		left := slices.DeleteFunc(entries(t, table), func(e Entry) bool { return e.Original.Dst != flow.Dst })
		if len(left) != 2 {
			t.Errorf("left: %+v", left)
		}
	}
}

// throughSocket returns a dialler of sockets that fail as reply returns for the message that they receive; n counts
// them from 0.
func throughSocket(dial func() (*netlink.Conn, error), reply func(n int) error) func() (*netlink.Conn, error) {
	return func() (*netlink.Conn, error) {
		n := -1
		return nfttest.Through(dial, nil, func(*netlink.Message) error { n++; return reply(n) })()
	}
}

// changing returns a dialler of sockets that change what is sent and received.
func changing(
	dial func() (*netlink.Conn, error), request, response func(*netlink.Message),
) func() (*netlink.Conn, error) {
	by := func(change func(*netlink.Message)) func(*netlink.Message) error {
		return func(m *netlink.Message) error {
			if change != nil {
				change(m)
			}
			return nil
		}
	}
	return nfttest.Through(dial, by(request), by(response))
}

func TestInterruptedDumpIsRestarted(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNS(t, "node")
	insert(t, ns, untranslated(20, "203.0.113.9")...)
	for _, failures := range []int{1, 4} {
		for _, cause := range []error{unix.ENOBUFS, nfnetlink.ErrReadAgain} {
			failed, seen := 0, 0
			table := newTable(throughSocket(dialIn(ns), func(int) error {
				if seen != 10 || failed == failures {
					return nil
				}
				failed++
				return cause
			}))
			err := table.Dump(t.Context(), func() { seen = 0 }, func(*Entry) error {
				seen++
				return nil
			})
			if err != nil || seen != 20 || failed != failures {
				t.Errorf("%d of %d failures (%v): %d entries: %v", failed, failures, cause, seen, err)
			}
		}
	}
	seen := 0
	var table *Tracker
	table = newTable(nfttest.Through(dialIn(ns), nil, func(m *netlink.Message) error {
		if m.Header.Type&0xff != 0 { // it is no entry
			return nil
		}
		seen++
		if seen == 10 {
			table.noteLimit = maxNoted
			return unix.ENOBUFS
		}
		return nil
	}))
	comparison := comparisonOf(func(*config.Config) {})
	found, err := table.Gather(t.Context(), comparison, History{})
	if err != nil || found.Examined != 20 || found.Counts[0].Undated != 20 {
		t.Errorf("%+v: %v", found, err)
	}
	seen = 0
	table.noteLimit = 5 // which more connections exceed when the dump is interrupted
	if noted, full, err := table.Note(t.Context(), comparison); err != nil || full || len(noted) != 20 {
		t.Errorf("noted %v, full %t: %v", noted, full, err)
	}
}

func TestDumpEndsWhenTheVisitorStops(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNS(t, "node")
	const all = 5000
	insert(t, ns, untranslated(all, "203.0.113.9")...)
	messages := 0
	table := newTable(throughSocket(dialIn(ns), func(int) error {
		messages++
		return nil
	}))
	seen := 0
	err := table.Dump(t.Context(), anyTime, func(*Entry) error {
		if seen++; seen == 10 {
			return errStop
		}
		return nil
	})
	if err != nil || seen != 10 || messages > all/2 {
		t.Errorf("%d entries of %d messages: %v", seen, messages, err)
	}
	own := errors.New("enough")
	fails := func(*Entry) error { return own }
	if err := table.Dump(t.Context(), anyTime, fails); !errors.Is(err, own) {
		t.Errorf("the visitor's error became %v", err)
	}
}

// untranslated returns n connections of UDP from pods to the port 53 of an address.
func untranslated(n int, dst string) (all []Entry) {
	to := netip.AddrPortFrom(netip.MustParseAddr(dst), 53)
	for i := range n {
		pod := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 244, byte(i >> 22), byte(i >> 14)}), uint16(1024+i%(1<<14)))
		original, reply := Tuple{pod, to, unix.IPPROTO_UDP}, Tuple{to, pod, unix.IPPROTO_UDP}
		all = append(all, Entry{Key: Key{Original: original, Reply: reply}})
	}
	return all
}

// insert creates entries, without packets.
func insert(t testing.TB, ns *nfttest.NS, all ...Entry) {
	t.Helper()
	nl, err := dialIn(ns)()
	nfttest.NoError(t, err)
	defer nl.Close()
	encode := func(tuple Tuple) []byte {
		e := netlink.NewAttributeEncoder()
		e.ByteOrder = binary.BigEndian
		e.Nested(ctaTupleIP, func(e *netlink.AttributeEncoder) error {
			e.Bytes(ctaIPv4Src, tuple.Src.Addr().AsSlice())
			e.Bytes(ctaIPv4Dst, tuple.Dst.Addr().AsSlice())
			return nil
		})
		e.Nested(ctaTupleProto, func(e *netlink.AttributeEncoder) error {
			e.Uint8(ctaProtoNum, tuple.Protocol)
			e.Uint16(ctaProtoSrcPort, tuple.Src.Port())
			e.Uint16(ctaProtoDstPort, tuple.Dst.Port())
			return nil
		})
		b, err := e.Encode()
		nfttest.NoError(t, err)
		return b
	}
	for i, e := range all {
		var a nfnetlink.Attrs
		a.AddBytes(ctaTupleOrig|unix.NLA_F_NESTED, encode(e.Original))
		a.AddBytes(ctaTupleReply|unix.NLA_F_NESTED, encode(e.Reply))
		a.AddUint32(ctaTimeout, 600)
		m := request(0, netlink.Create|netlink.Excl|netlink.Acknowledge, unix.AF_INET, a)
		if _, err := nl.Execute(m); err != nil {
			t.Fatalf("entry %d: %v", i, err)
		}
	}
}

// What the counters count is rare, so the test changes the kernel's replies.
func TestStatsMatchTheTableAndSumUpAllProcessors(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNS(t, "node")
	insert(t, ns, untranslated(7, "203.0.113.9")...)
	processors := uint64(0)
	table := newTable(changing(dialIn(ns), nil, func(m *netlink.Message) {
		if m.Header.Type&0xff != msgStatsCPU {
			return
		}
		processors++
		err := nfnetlink.Each(m.Data[headerLen:], func(typ uint16, data []byte) error {
			binary.BigEndian.PutUint32(data, 1<<(2*typ)) // from 1 << 4 to 1 << 26
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	}))
	s, err := table.Stats()
	want := Stats{7, s.Limit, processors << 18, processors << 20}
	if err != nil || s != want || processors == 0 || s.Limit == 0 || s.Limit == s.Entries {
		t.Errorf("%+v of %d processors, want %+v: %v", s, processors, want, err)
	}
}

func TestRepliesToOtherRequestsAreErrors(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNS(t, "node")
	insert(t, ns, untranslated(1, "203.0.113.9")...)
	for name, tt := range map[string]struct {
		change func(*netlink.Message)
		ok     bool
	}{
		"nothing":              {func(*netlink.Message) {}, true},
		"the sequence":         {func(m *netlink.Message) { m.Header.Sequence++ }, false},
		"no header":            {func(m *netlink.Message) { m.Data = m.Data[:headerLen-1] }, false},
		"a header and no more": {func(m *netlink.Message) { m.Data = m.Data[:headerLen] }, true},
	} {
		err := newTable(changing(dialIn(ns), nil, tt.change)).Dump(t.Context(), anyTime,
			func(*Entry) error { return nil })
		if (err == nil) != tt.ok {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestCausesAreNamed(t *testing.T) {
	for err, want := range map[error]error{
		unix.EPERM: ErrNotPermitted, unix.EINVAL: ErrUnsupported, unix.EOPNOTSUPP: ErrUnsupported,
		unix.EPROTONOSUPPORT: ErrUnsupported, unix.ENOMEM: nil,
	} {
		got := described("read connections", err)
		if !errors.Is(got, err) || errors.Is(got, ErrNotPermitted) != (want == ErrNotPermitted) ||
			errors.Is(got, ErrUnsupported) != (want == ErrUnsupported) {
			t.Errorf("%v: %v", err, got)
		}
	}
	if err := described("", nil); err != nil {
		t.Error(err)
	}
}

func TestProtocolsHaveNames(t *testing.T) {
	for p, want := range map[uint8]string{6: "tcp", 17: "udp", 132: "sctp", 58: "icmpv6", 89: "89"} {
		if got := ProtocolName(p); got != want {
			t.Errorf("%d: %s", p, got)
		}
		if got := ParseProtocol(want); got != p && got+89 != p {
			t.Errorf("%s: %d", want, got)
		}
	}
	for p, want := range map[uint8]bool{6: true, 17: true, 1: false, 47: false} {
		if HasPorts(p) != want {
			t.Errorf("%d has ports: %t", p, !want)
		}
	}
	for address, want := range map[netip.AddrPort]string{
		{}:                                      "",
		netip.MustParseAddrPort("10.9.0.9:0"):   "10.9.0.9",
		netip.MustParseAddrPort("[fd00::9]:53"): "[fd00::9]:53",
		netip.MustParseAddrPort("10.9.0.9:53"):  "10.9.0.9:53",
		netip.AddrPortFrom(netip.Addr{}, 53):    "",
	} {
		if got := HostPort(address); got != want {
			t.Errorf("%s: %q, want %q", address, got, want)
		}
	}
}

func TestStatesWithoutFurtherPackets(t *testing.T) {
	for _, tt := range []struct {
		state  string
		status Status
		want   bool
	}{
		{"", 0, true},
		{"ESTABLISHED", SeenReply, true},
		{"TIME_WAIT", SeenReply, false},
		{"CLOSE", SeenReply, false},
		{"CLOSED", 0, true},
		{"CLOSED", SeenReply, false},
	} {
		if got := (&Entry{State: tt.state, Status: tt.status}).Open(); got != tt.want {
			t.Errorf("%+v: %t", tt, got)
		}
	}
}

// Many namespaces share a node's memory, and an agent runs for months.
func TestEachCallClosesItsSockets(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNS(t, "node")
	var sockets []*netlink.Conn
	table := newTable(func() (*netlink.Conn, error) {
		nl, err := dialIn(ns)()
		sockets = append(sockets, nl)
		return nl, err
	})
	if empty, err := table.Gather(t.Context(), comparisonOf(func(*config.Config) {}), History{}); err != nil ||
		empty.Examined != 0 || len(empty.Counts) > 0 {
		t.Errorf("of no connections: %+v: %v", empty, err)
	}
	insert(t, ns, untranslated(1, "203.0.113.9")...)
	all := entries(t, table)
	deleted, err := table.Delete(t.Context(), toward("203.0.113.9"))
	if len(all) != 1 || err != nil || deleted != 1 {
		t.Errorf("deleted %d of %v: %v", deleted, all, err)
	}
	for i, nl := range sockets {
		if nl.SetDeadline(time.Time{}) == nil {
			t.Errorf("socket %d of %d is open", i, len(sockets))
		}
	}
}

// Attributes of another kernel, which this package does not know, are skipped.
func TestAttributesOfOtherKernelsAreSkipped(t *testing.T) {
	nest := func(typ uint16, inner ...netlink.Attribute) netlink.Attribute {
		b, err := netlink.MarshalAttributes(inner)
		nfttest.NoError(t, err)
		return netlink.Attribute{Type: typ | unix.NLA_F_NESTED, Data: b}
	}
	state := func(protocol uint16, n byte) netlink.Attribute {
		return nest(ctaProtoInfo, nest(protocol, netlink.Attribute{Type: ctaState, Data: []byte{n}},
			netlink.Attribute{Type: 9, Data: []byte{1}}))
	}
	start := []byte{0, 0, 0, 0, 0, 0, 1, 0}
	for _, tt := range []struct {
		name string
		attr netlink.Attribute
		want Entry
	}{
		{"timeout", attr(ctaTimeout, 600), Entry{Timeout: 600}},
		{"state", state(ctaProtoInfoTCP, 3), Entry{State: "ESTABLISHED"}},
		{"state of SCTP", state(ctaProtoInfoSCTP, 8), Entry{State: "HEARTBEAT_SENT"}},
		{"unknown state", state(ctaProtoInfoSCTP, 9), Entry{}},
		{"state of another protocol", state(7, 1), Entry{}},
		{
			"start", nest(ctaTimestamp, netlink.Attribute{Type: ctaTimestampStart, Data: start}),
			Entry{Started: time.Unix(0, 256)},
		},
		{"end", nest(ctaTimestamp, netlink.Attribute{Type: 2, Data: start}), Entry{}},
		{"short start", nest(ctaTimestamp, netlink.Attribute{Type: ctaTimestampStart, Data: start[:4]}), Entry{}},
		{"number of three bytes", netlink.Attribute{Type: ctaID, Data: start[:3]}, Entry{}},
		{"unknown", attr(77, 1), Entry{}},
	} {
		b, err := netlink.MarshalAttributes([]netlink.Attribute{tt.attr})
		nfttest.NoError(t, err)
		e := Entry{State: "of the entry before"}
		if err := e.decode(b); err != nil || !reflect.DeepEqual(e, tt.want) {
			t.Errorf("%s: %+v, %v", tt.name, e, err)
		}
	}
}

func TestMissingCapabilityIsNamed(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNS(t, "node")
	err := ns.Do(func() error {
		runtime.LockOSThread() // capabilities are per thread; this one ends with Do
		head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var caps [2]unix.CapUserData
		if err := unix.Capset(&head, &caps[0]); err != nil {
			return err
		}
		table := New()
		_, statsErr := table.Stats()
		for what, err := range map[string]error{
			"dump":  table.Dump(t.Context(), anyTime, func(*Entry) error { return nil }),
			"stats": statsErr,
		} {
			if !errors.Is(err, ErrNotPermitted) || !errors.Is(err, unix.EPERM) || !strings.Contains(err.Error(), "NET_ADMIN") {
				t.Errorf("%s: %v", what, err)
			}
		}
		return nil
	})
	nfttest.NoError(t, err)
}

func TestFullestDestinationAndDropsAreReported(t *testing.T) {
	t.Parallel()
	top := nfttest.NewTopology(t)
	nfttest.NFT(t, top.Node, `table inet t {
	chain post {
		type nat hook postrouting priority srcnat;
		meta nfproto ipv4 udp dport 53 masquerade to :20000-20009
		meta nfproto ipv6 meta l4proto sctp masquerade
	}
}`, "-f", "-")
	table := newTable(dialIn(top.Node))
	send := func(n int, dst string) {
		for range n {
			c, err := top.Pod.DialContext(t.Context(), "udp", dst)
			nfttest.NoError(t, err)
			defer c.Close()
			if _, err := c.Write([]byte("x")); err != nil {
				t.Fatal(err)
			}
		}
	}
	// arrived waits until everything sent so far has passed the node.
	arrived := func(port uint16) {
		dst := netip.AddrPortFrom(top.OutsideV4, port)
		nfttest.MustSend(t, top, nfttest.Flow{Proto: nfttest.UDP, From: top.Pod, Dst: dst})
	}
	for range 8 {
		dst := netip.MustParseAddrPort("203.0.113.9:53")
		nfttest.MustSend(t, top, nfttest.Flow{Proto: nfttest.UDP, From: top.Pod, Dst: dst})
	}
	policy := nft.Policy{Ports: []nft.PortRange{{Min: 1, Max: 100}, {Min: 1000, Max: 65535}}}
	comparison := NewComparison(policy, newNode(nil, nil, nil))
	half := newTable(dialIn(top.Node))
	half.sampleLimit = 4
	found, err := half.Gather(t.Context(), comparison, History{})
	if err != nil || !found.Partial || found.Examined != 4 || found.Fullest.Used != 8 {
		t.Errorf("of a sample: %+v: %v", found, err)
	}
	send(3, "203.0.113.8:53")
	for port := range uint16(2) {
		dst := netip.AddrPortFrom(top.OutsideV6, 6000+port)
		nfttest.MustSend(t, top, nfttest.Flow{Proto: nfttest.SCTP, From: top.Pod, Dst: dst})
	}
	arrived(7000)
	const all = 100 + 65535 - 1000 + 1
	check := func(used int, failed bool) {
		t.Helper()
		found, err := table.Gather(t.Context(), comparison, History{})
		if err != nil || found.Fullest.Used != used || found.Fullest.Among.Ports != all {
			t.Errorf("%+v: %v, want %d of %d", found.Fullest, err, used, all)
		}
		s, err := table.Stats()
		if err != nil || (s.InsertFailed+s.Drop > 0) != failed {
			t.Errorf("%+v: %v, want failures: %t", s, err, failed)
		}
	}
	check(8, false)
	send(5, "203.0.113.9:53")
	arrived(7001)
	check(10, true) // beyond the last port
}

func anyPorts(netip.AddrPort) (judge.PortScope, bool) {
	return judge.PortScope{Block: -1, Ports: 64512}, true
}

func TestTallyNeverHasMoreKeys(t *testing.T) {
	tally := Tally{}
	add := func(n int) {
		e := entryOf(unix.IPPROTO_UDP, "10.244.1.2:4000", "", "203.0.113.9:53", "192.0.2.1:20000")
		e.Reply.Src = netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 18, byte(n >> 8), byte(n)}), 53)
		e.Status = SrcNAT
		tally.Add(&e, anyPorts)
	}
	for n := range maxKeys + 9 {
		add(n)
	}
	if len(tally) != maxKeys {
		t.Errorf("the tally has %d keys, want no more than %d", len(tally), maxKeys)
	}
	add(0)
	if top := tally.Fullest(); len(tally) != maxKeys || top.Used != 2 {
		t.Errorf("a known key makes %d keys, want %d, and is %+v, want it used twice", len(tally), maxKeys, top)
	}
}

func TestPortIsUsedByTranslatedConnectionsOfTheSameKeyAlone(t *testing.T) {
	const pod, dst, node = "10.244.1.2:4000", "203.0.113.9:53", "192.0.2.1:20000"
	first := entryOf(unix.IPPROTO_UDP, pod, "", dst, node)
	first.Status = SrcNAT
	if tally := (Tally{}); tally.Fullest().Share() != 0 {
		t.Error("the share of no port is not 0")
	}
	none := Tally{}
	none.Add(&first, func(netip.AddrPort) (judge.PortScope, bool) { return judge.PortScope{}, false })
	if len(none) > 0 {
		t.Errorf("a port that the policy did not choose: %v", none)
	}
	for _, tt := range []struct {
		protocol     uint8
		dst, seen    string
		untranslated bool
		is           bool
	}{
		{unix.IPPROTO_UDP, dst, "192.0.2.1:20001", false, true},
		{unix.IPPROTO_UDP, dst, node, true, false},
		{unix.IPPROTO_UDP, "203.0.113.9:54", node, false, false},
		{unix.IPPROTO_UDP, dst, "192.0.2.2:20000", false, false},
		{unix.IPPROTO_TCP, dst, node, false, false},
	} {
		e := entryOf(tt.protocol, pod, "", tt.dst, tt.seen)
		if !tt.untranslated {
			e.Status = SrcNAT
		}
		tally := Tally{}
		tally.Add(&first, anyPorts)
		tally.Add(&e, anyPorts)
		if same := tally.Fullest().Used == 2; same != tt.is {
			t.Errorf("%+v: %v", tt, tally)
		}
	}
	echo := entryOf(unix.IPPROTO_ICMP, pod, "", dst, node)
	echo.Status = SrcNAT
	tally := Tally{}
	if tally.Add(&echo, anyPorts); len(tally) > 0 {
		t.Error("ICMP has no ports")
	}
}
