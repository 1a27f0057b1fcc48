package nftrace

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/nftables/expr"
	"github.com/google/nftables/xt"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/kernel"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
)

// Of enum nft_trace_types. On Linux 5.10 a chain ends also because of a rule that returns, which the event then names.
const (
	endsWithReturn = 2
	matchesRule    = 3
)

// The answer is the packet that came first, and never one of which more may come.
func TestTheAnswerIsTheFirstPacketThatEnded(t *testing.T) {
	now := time.Now()
	long := now.Add(-2 * quiet)
	for name, tt := range map[string]struct {
		packets map[uint32]*packet
		over    bool
		want    uint32 // 0: none
	}{
		"the first of two": {
			packets: map[uint32]*packet{
				1: {new: true, began: now.Add(-time.Minute), last: long}, 2: {new: true, began: now.Add(-time.Hour), last: long},
				3: {dropped: true, began: now, last: now},
			},
			want: 2,
		},
		"one that goes on":                   {packets: map[uint32]*packet{1: {new: true, last: now}}},
		"one that goes on, and time is over": {packets: map[uint32]*packet{1: {new: true, last: now}}, over: true},
		"one that went no further": {
			packets: map[uint32]*packet{1: {new: true, last: now.Add(-2 * egressTime)}}, over: true, want: 1,
		},
		"one that arrived as time was over": {
			packets: map[uint32]*packet{1: {new: true, arrived: true, last: now}}, over: true, want: 1,
		},
		"one of a known connection": {packets: map[uint32]*packet{1: {last: long}}},
	} {
		for range 10 { // a map has no order
			got := answer(tt.packets, tt.over)
			if got != tt.packets[tt.want] {
				t.Errorf("%s: %+v", name, got)
			}
		}
	}
}

// own is a chain of the table that traces, others are those of other programs.
func own(name string) nfnetlink.ChainID {
	return nfnetlink.ChainID{Family: nfnetlink.Inet, Table: kernel.TraceTable, Name: name}
}

var foreign = nfnetlink.ChainID{Family: nfnetlink.IPv4, Table: "x", Name: "y"}

func TestEventsBelongToPacketsThatBeganInTheTable(t *testing.T) {
	packets := map[uint32]*packet{}
	seen := func(source string) *head { return &head{src: netip.MustParseAddrPort(source)} }
	for _, e := range []event{
		{packet: 1, chain: foreign, code: accept, head: seen("10.0.0.1:1")}, // another program traces it
		{packet: 2, chain: own(beforeTracking + "prerouting"), code: accept, head: seen("10.0.0.2:1")},
		{packet: 2, chain: foreign, code: accept},
		{packet: 2, chain: own(endOf + "postrouting"), code: accept, head: seen("10.0.0.2:1")}, // of a known connection
		{packet: 3, chain: own(afterTracking + "output"), code: accept, head: seen("10.0.0.3:1")},
		{packet: 3, chain: own(endOf + "postrouting"), code: accept, head: seen("10.0.0.3:2"), loopback: true},
		{packet: 4, chain: own(beforeTracking + "prerouting"), code: accept, head: seen("10.0.0.3:2")}, // the same one
		{packet: 4, chain: own(endOf + "input"), code: accept, head: seen("10.0.0.3:2")},
		{packet: 5, chain: own(afterTracking + "prerouting"), code: accept, head: seen("10.0.0.5:1")},
		{packet: 5, chain: own(endOf + "postrouting"), code: accept, head: seen("10.0.0.5:1")},
		{packet: 6, chain: own(afterTracking + "prerouting"), code: accept, head: seen("10.0.0.5:1")}, // sent again
		{packet: 6, chain: foreign, kind: endsWithReturn, code: unix.NFT_CONTINUE},
		{packet: 6, chain: foreign, kind: matchesRule, code: drop},
		{packet: 7, chain: own(afterTracking + "prerouting"), code: accept, head: seen("10.0.0.7:1")},
		{packet: 8, chain: own(afterRouting + "forward"), code: accept, head: seen("10.0.0.7:1")}, // a bridge handed it on
		{packet: 8, chain: own(endOf + "postrouting"), code: accept, head: seen("10.0.0.7:1")},
		{packet: 9, chain: own(afterRouting + "forward"), code: accept, head: seen("10.0.0.3:2")}, // that one has arrived
	} {
		take(packets, e)
		if p := packets[3]; p != nil && p.arrived != (len(packets) > 2 && packets[4] != nil && len(p.events) == 4) {
			t.Errorf("after %+v: %+v", e, p)
		}
		if p := packets[6]; p != nil && p.dropped != (len(p.events) == 3) {
			t.Errorf("after %+v: %+v", e, p)
		}
	}
	got := ""
	for id := range uint32(10) {
		if p := packets[id]; p != nil {
			got += fmt.Sprintf("%d: %d events, new %t, arrived %t\n", id, len(p.events), p.new, p.arrived)
		}
	}
	nfttest.Same(t, "packets (-want +got)", "2: 3 events, new false, arrived false\n3: 4 events, new true, arrived true\n"+
		"4: 4 events, new true, arrived true\n5: 2 events, new true, arrived true\n6: 3 events, new true, arrived false\n"+
		"7: 3 events, new true, arrived true\n8: 3 events, new true, arrived true\n"+
		"9: 1 events, new false, arrived false\n",
		got)
}

func TestWhatIsKeptOfPacketsIsBounded(t *testing.T) {
	packets := map[uint32]*packet{}
	for i := range uint32(maxPackets + 9) {
		take(packets, event{packet: i, chain: own(beforeTracking + "output"), code: accept})
	}
	for range maxEvents + 9 {
		take(packets, event{packet: 1, chain: foreign, code: accept})
	}
	if len(packets) != maxPackets || len(packets[1].events) != maxEvents {
		t.Errorf("%d packets, %d events", len(packets), len(packets[1].events))
	}
	take(packets, event{packet: 1, chain: foreign, code: drop}) // the end is not missed
	take(packets, event{packet: 1, chain: foreign, kind: endsWithReturn, code: unix.NFT_CONTINUE})
	if answer(packets, false) != packets[1] {
		t.Error("a packet with more events has no end")
	}
}

func TestEventsAreReadFromMessages(t *testing.T) {
	v4 := []byte{0x45, 9: unix.IPPROTO_UDP, 12: 10, 244, 1, 2, 203, 0, 113, 9}
	v6 := make([]byte, 40)
	v6[0] = 0x60
	v6[6] = unix.IPPROTO_ICMPV6
	copy(v6[8:], netip.MustParseAddr("fd00::2").AsSlice())
	copy(v6[24:], netip.MustParseAddr("2001:db8::9").AsSlice())
	tcp6 := append([]byte(nil), v6...)
	tcp6[6] = unix.IPPROTO_TCP
	ports := []byte{15, 160, 0, 53, 0, 7, 0, 0}
	for name, tt := range map[string]struct {
		network, transport []byte
		want               string
	}{
		"UDP":                    {v4, ports, "17 10.244.1.2:4000 203.0.113.9:53"},
		"ICMPv6":                 {v6, ports, "58 [fd00::2]:7 [2001:db8::9]:0"},
		"TCP of IPv6":            {tcp6, ports, "6 [fd00::2]:4000 [2001:db8::9]:53"},
		"a short header":         {v4, ports[:7], "17 10.244.1.2:0 203.0.113.9:0"},
		"a short packet":         {v4[:19], ports, "0 invalid AddrPort invalid AddrPort"},
		"a short packet of IPv6": {v6[:39], ports, "0 invalid AddrPort invalid AddrPort"},
		"of no version":          {make([]byte, 40), ports, "0 invalid AddrPort invalid AddrPort"},
		"of another version":     {append([]byte{0x50}, v6[1:]...), ports, "0 invalid AddrPort invalid AddrPort"},
	} {
		h := parseHead(tt.network, tt.transport)
		if got := fmt.Sprint(h.protocol, " ", h.src, " ", h.dst); got != tt.want {
			t.Errorf("%s: %s, want %s", name, got, tt.want)
		}
	}
	number := func(typ uint16, n uint32) netlink.Attribute {
		return netlink.Attribute{Type: typ, Data: binary.BigEndian.AppendUint32(nil, n)}
	}
	b, err := netlink.MarshalAttributes([]netlink.Attribute{
		number(traceID, 7), number(traceType, endsWithPolicy), number(tracePolicy, accept), number(traceOutType, 772),
		{Type: traceTable, Data: []byte("x\x00")},
		{Type: traceChain, Data: []byte("y\x00")},
		{Type: traceNetworkHeader, Data: v4},
	})
	nfttest.NoError(t, err)
	m := netlink.Message{Data: append([]byte{unix.NFPROTO_IPV4, 0, 0, 0}, b...)}
	m.Header.Type = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_TRACE
	e, ok := parseEvent(m)
	if !ok || e.packet != 7 || e.chain != foreign || e.code != accept || e.drops() || !e.loopback || e.head == nil ||
		e.head.src.Addr() != netip.MustParseAddr("10.244.1.2") {
		t.Errorf("%+v, %t", e, ok)
	}
	if _, ok := parseEvent(netlink.Message{Header: m.Header, Data: m.Data[:3]}); ok {
		t.Error("a message without a header is an event")
	}
	m.Header.Type++
	if _, ok := parseEvent(m); ok {
		t.Error("another message is an event")
	}
	for _, tt := range []struct {
		event
		want bool
	}{
		{event{kind: matchesRule, code: drop}, true},
		{event{kind: endsWithPolicy, code: drop}, true},
		{event{kind: endsWithReturn, code: unix.NFT_CONTINUE}, false},
		{event{kind: matchesRule, code: accept}, false},
	} {
		if tt.drops() != tt.want {
			t.Errorf("%+v drops: %t", tt.event, !tt.want)
		}
	}
}

// What cannot be read of a rule leaves its verdict.
func TestTheWayOfAPacketIsThatOfItsEvents(t *testing.T) {
	c := nfnetlink.New(func() (*netlink.Conn, error) { return nil, errors.New("no kernel") })
	src := netip.MustParseAddrPort("10.244.1.2:4000")
	sent := &head{unix.IPPROTO_UDP, src, netip.MustParseAddrPort("10.96.0.10:53")}
	left := &head{unix.IPPROTO_UDP, src, netip.MustParseAddrPort("203.0.113.9:53")}
	other := &head{unix.IPPROTO_UDP, netip.MustParseAddrPort("192.0.2.1:9"), left.dst}
	agent := nfnetlink.ChainID{Family: nfnetlink.Inet, Table: "nft-masq-agent", Name: "postrouting"}
	in := func(chain string) nfnetlink.ChainID {
		return nfnetlink.ChainID{Family: nfnetlink.IPv4, Table: "x", Name: chain}
	}
	begins := event{chain: own(beforeTracking + "prerouting"), kind: matchesRule, head: sent}
	rule := func(chain nfnetlink.ChainID, code int32) event {
		return event{chain: chain, kind: matchesRule, handle: 4, code: code}
	}
	first := func(e event, h *head) event {
		e.head = h
		return e
	}
	for name, tt := range map[string]struct {
		events []event
		want   string
	}{
		"it went no further": {
			[]event{begins, first(rule(in("pre"), accept), sent)},
			"udp 10.244.1.2:4000 to 10.96.0.10:53 lost; pre: 0 accept",
		},
		"it left to another destination": {
			[]event{begins, first(rule(in("pre"), accept), sent), {chain: own(endOf + "postrouting"), head: left}},
			"udp 10.244.1.2:4000 to 10.96.0.10:53 kept, endpoint 203.0.113.9:53, as 10.244.1.2:4000; pre: 0 accept",
		},
		"it arrived with another source": {
			[]event{begins, {chain: own(endOf + "input"), head: other}, {chain: own(endOf + "input")}},
			"udp 10.244.1.2:4000 to 10.96.0.10:53 translated, local, endpoint 203.0.113.9:53, as 192.0.2.1:9",
		},
		"the agent returned it": {
			[]event{begins, first(rule(agent, unix.NFT_RETURN), sent), {chain: own(endOf + "postrouting"), head: sent}},
			"udp 10.244.1.2:4000 to 10.96.0.10:53 kept, by agent return, as 10.244.1.2:4000; postrouting: 0 return",
		},
		"dropped by a rule": {
			[]event{begins, first(rule(in("pre"), drop), sent)},
			"udp 10.244.1.2:4000 to 10.96.0.10:53 dropped, by other drop; pre: 0 drop",
		},
		"dropped by a policy": {
			[]event{
				begins, first(event{chain: in("pre"), kind: endsWithPolicy, code: accept}, sent),
				first(event{chain: in("forward"), kind: endsWithPolicy, code: drop}, sent),
			},
			"udp 10.244.1.2:4000 to 10.96.0.10:53 dropped, by other drop; pre: policy accept; forward: policy drop",
		},
		"jumps": {
			[]event{
				begins, first(rule(in("pre"), unix.NFT_JUMP), sent), rule(in("a"), unix.NFT_JUMP),
				rule(in("b"), unix.NFT_CONTINUE), rule(in("b"), unix.NFT_RETURN),
				{chain: in("a"), kind: endsWithReturn, code: unix.NFT_CONTINUE},
				{chain: in("pre"), kind: matchesRule},
				rule(in("pre"), accept), first(rule(in("late"), accept), sent),
			},
			"udp 10.244.1.2:4000 to 10.96.0.10:53 lost; pre: 0 jump, 1 jump, 2 return, 0 accept; late: 0 accept",
		},
		"the first events were lost": {[]event{rule(in("pre"), accept)}, "0  to  lost"},
	} {
		got := describe(c, tt.events)
		text := fmt.Sprintf("%s %s to %s %s", got.Protocol, got.Source, got.Destination, got.Outcome)
		if got.Rule != nil {
			text += fmt.Sprintf(", by %s %s", got.Rule.Owner, got.Rule.Action)
		}
		if got.Local {
			text += ", local"
		}
		if got.Endpoint != "" {
			text += ", endpoint " + got.Endpoint
		}
		if got.SeenAs != "" {
			text += ", as " + got.SeenAs
		}
		for _, chain := range got.Chains {
			var words []string
			for _, r := range chain.Rules {
				words = append(words, fmt.Sprint(r.Depth, " ", r.Action))
			}
			if chain.Policy != "" {
				words = append(words, "policy "+chain.Policy)
			}
			text += "; " + chain.Name + ": " + strings.Join(words, ", ")
		}
		if text != tt.want {
			t.Errorf("%s: %s, want %s", name, text, tt.want)
		}
	}
}

// The rule that decides is the last one with an effect on the outcome.
func TestTheRuleThatDecides(t *testing.T) {
	for _, tt := range []struct {
		outcome Outcome
		rules   string // OWNER:ACTION
		want    string // outcome, and number of the rule from 1
	}{
		{Kept, "", "kept 0"},
		{Kept, "other:accept agent:return other:return", "kept 2"},
		{Kept, "agent:accept other:jump", "kept 1"},
		{Kept, "other:masquerade agent:return", "kept 1"},
		{Kept, "other:notrack agent:return", "untracked 1"},
		{Kept, "other:notrack other:snat", "kept 2"},
		{Translated, "other:notrack other:snat agent:accept", "translated 2"},
		{Translated, "other:saddr-set other:masquerade", "translated 2"},
		{Translated, "other:accept", "translated 0"},
		{Lost, "other:masquerade agent:return", "lost 0"},
		{Kept, "other:masquerade other:drop", "dropped 2"},
		{Lost, "other:reject agent:return", "rejected 1"},
	} {
		trace := Trace{Outcome: tt.outcome, SeenAs: "192.0.2.1:9", Chains: []Chain{{}}}
		for text := range strings.FieldsSeq(tt.rules) {
			owner, action, _ := strings.Cut(text, ":")
			r := Rule{Owner: Owner(owner), Action: strings.ReplaceAll(action, "-", " ")}
			trace.Chains[0].Rules = append(trace.Chains[0].Rules, r)
		}
		trace.decide()
		number := 0
		for i := range trace.Chains[0].Rules {
			if trace.Rule == &trace.Chains[0].Rules[i] {
				number = i + 1
			}
		}
		got := fmt.Sprint(trace.Outcome, " ", number)
		ended := trace.Outcome == Dropped || trace.Outcome == Rejected
		if got != tt.want || ended != (trace.SeenAs == "") {
			t.Errorf("%s by %s: %s, seen as %s, want %s", tt.outcome, tt.rules, got, trace.SeenAs, tt.want)
		}
	}
}

func TestRulesHaveTheActionThatHadAnEffect(t *testing.T) {
	snat := &expr.NAT{Type: expr.NATTypeSourceNAT, Family: unix.NFPROTO_IPV4, RegAddrMin: 1}
	dnat := &expr.NAT{Type: expr.NATTypeDestNAT, Family: unix.NFPROTO_IPV4, RegAddrMin: 1}
	writes := func(base expr.PayloadBase, offset, n uint32) *expr.Payload {
		return &expr.Payload{
			OperationType: expr.PayloadWrite, SourceRegister: 1, Base: base, Offset: offset, Len: n,
		}
	}
	reads := &expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: 12, Len: 4}
	network, transport := expr.PayloadBaseNetworkHeader, expr.PayloadBaseTransportHeader
	netmap := &expr.Target{Name: "NETMAP", Info: &xt.Unknown{}}
	for _, tt := range []struct {
		e     expr.Any
		code  int32
		chain string
		ipv6  bool
		want  string
	}{
		{e: &expr.Masq{}, code: accept, want: "masquerade"},
		{e: &expr.Masq{}, code: drop},
		{e: snat, code: accept, want: "snat"},
		{e: snat, code: drop},
		{e: dnat, code: accept, want: "dnat"},
		{e: dnat, code: drop},
		{e: netmap, code: accept, chain: "POSTROUTING", want: "snat"},
		{e: netmap, code: accept, chain: "INPUT", want: "snat"},
		{e: netmap, code: accept, chain: "PREROUTING", want: "dnat"},
		{e: netmap, code: accept, chain: "OUTPUT", want: "dnat"},
		{e: netmap, code: drop, chain: "OUTPUT"},
		{e: &expr.Reject{}, code: drop, want: "reject"},
		{e: &expr.Reject{}, code: unix.NFT_CONTINUE},
		{e: &expr.Notrack{}, code: unix.NFT_CONTINUE, want: "notrack"},
		{e: &expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: 1}, code: accept, want: "mark"},
		{e: &expr.Meta{Key: expr.MetaKeyMARK, Register: 1}, code: accept},
		{e: &expr.Meta{Key: expr.MetaKeyPRIORITY, SourceRegister: true, Register: 1}, code: accept},
		{e: reads, code: accept},
		{e: writes(network, 12, 4), code: accept, want: rewrite},
		{e: writes(network, 10, 4), code: accept, want: rewrite},
		{e: writes(network, 15, 1), code: accept, want: rewrite},
		{e: writes(network, 16, 4), code: accept},
		{e: writes(network, 8, 4), code: accept},
		{e: writes(transport, 12, 4), code: accept},
		{e: writes(network, 8, 16), code: accept, ipv6: true, want: rewrite},
		{e: writes(network, 23, 1), code: accept, ipv6: true, want: rewrite},
		{e: writes(network, 24, 16), code: accept, ipv6: true},
		{e: writes(network, 4, 4), code: accept, ipv6: true},
	} {
		rule := nfnetlink.Rule{Chain: tt.chain, Exprs: nfnetlink.Marshal(nfnetlink.IPv4, &expr.Counter{}, tt.e)}
		if got := (reader{ipv6: tt.ipv6}).action(rule, tt.code); got != tt.want {
			t.Errorf("%+v of %s, verdict %d: %q, want %q", tt.e, tt.chain, tt.code, got, tt.want)
		}
	}
}

func TestNamesOfVerdictsHooksAndCommands(t *testing.T) {
	for code, want := range map[int32]string{
		drop: "drop", accept: "accept", queue: "queue", 7<<16 | queue: "queue", unix.NFT_GOTO: "goto",
		unix.NFT_CONTINUE: "", 4: "verdict 4",
	} {
		if got := verdictName(code); got != want {
			t.Errorf("%d: %q, want %q", code, got, want)
		}
	}
	for _, tt := range []struct {
		family nfnetlink.Family
		number uint32
		want   string
	}{
		{nfnetlink.IPv4, 0, "prerouting"},
		{nfnetlink.Inet, 4, "postrouting"},
		{nfnetlink.Inet, 5, "hook 5"},
		{unix.NFPROTO_NETDEV, 0, "ingress"},
		{unix.NFPROTO_NETDEV, 1, "egress"},
		{unix.NFPROTO_NETDEV, 2, "hook 2"},
	} {
		if got := hookName(tt.family, tt.number); got != tt.want {
			t.Errorf("%s %d: %q, want %q", tt.family, tt.number, got, tt.want)
		}
	}
	for id, want := range map[nfnetlink.ChainID]string{
		foreign: "nft -a list chain ip x y",
		{Family: nfnetlink.IPv4, Table: "x", Name: "a b"}: "nft -a list table ip x",
		{Family: nfnetlink.IPv4, Table: "a b", Name: "y"}: "nft -a list ruleset ip",
	} {
		if got := Command(id); got != want {
			t.Errorf("%+v: %q, want %q", id, got, want)
		}
	}
	for id, want := range map[nfnetlink.ChainID]Owner{
		{Family: nfnetlink.Inet, Table: "nft-masq-agent"}: Agent, {Family: nfnetlink.IPv4, Table: "nft-masq-agent"}: Other,
		{Family: nfnetlink.Inet, Table: "x"}: Other,
	} {
		if got := ownerOf(id); got != want {
			t.Errorf("%+v: %s, want %s", id, got, want)
		}
	}
	for err, want := range map[error]bool{unix.EINVAL: true, unix.EAFNOSUPPORT: true, unix.EPERM: false} {
		if got := unsupported(err); !errors.Is(got, err) || errors.Is(got, ErrUnsupported) != want {
			t.Errorf("%v: %v", err, got)
		}
	}
}

func TestTextOfATrace(t *testing.T) {
	masquerades := Rule{
		Family: "ip", Table: "nat", Chain: "c", Handle: 7, Comment: "all pods", Action: "masquerade", Depth: 1, Owner: Other,
		Command: "nft -a list chain ip nat c",
	}
	way := []Chain{{
		Hook: "postrouting", Priority: 100, Family: "ip", Table: "nat", Name: "post", Rules: []Rule{
			{Handle: 4, Action: "jump", Target: "c"}, masquerades,
		},
	}, {Hook: "forward", Family: "inet", Table: "filter", Name: "f", Policy: "accept"}}
	of := func(owner Owner, action string) *Rule {
		return &Rule{Family: "ip", Table: "x", Chain: "y", Handle: 4, Owner: owner, Action: action, Command: "nft -a"}
	}
	policy := of(Other, "drop")
	policy.Handle = 0
	for _, tt := range []struct {
		trace Trace
		want  string
	}{
		{
			Trace{Outcome: Translated, SeenAs: "192.0.2.1:9", Rule: &masquerades, Chains: way},
			"203.0.113.9:53 sees 192.0.2.1:9, not the sender's 10.244.1.2:9: another program's rule with handle 7 in chain ip " +
				"nat c masquerades it\n  comment: 'all pods'\n  on the node: nft -a list chain ip nat c\n" +
				"  if the destination should see the sender: turn this rule off, or set enforceNonMasquerade\n\n" +
				"The first packet (udp, 10.244.1.2:9 to 203.0.113.9:53) met these chains:\n" +
				"  postrouting  100  ip nat post\n                    handle 4: jump c\n" +
				"                      handle 7: masquerade  # 'all pods'\n  forward        0  inet filter f: accept (policy)\n",
		},
		{
			Trace{Outcome: Translated, Endpoint: "10.9.0.9:53"},
			"203.0.113.9:53 (endpoint 10.9.0.9:53) sees another address, not the sender's 10.244.1.2:9: no rule of nf_tables " +
				"translates the source\n\nThe first packet (udp, 10.244.1.2:9 to 203.0.113.9:53) met these chains:\n  none\n",
		},
		{
			Trace{Outcome: Translated, SeenAs: "192.0.2.1:9", Rule: of(Agent, "snat")},
			"203.0.113.9:53 sees 192.0.2.1:9, not the sender's 10.244.1.2:9: this agent's rule with handle 4 in chain ip x y " +
				"translates the source\n  on the node: nft -a\n\nThe first",
		},
		{
			Trace{Outcome: Kept, SeenAs: "10.244.1.2:9", Local: true, Rule: of(Agent, "return")},
			"this node, at 203.0.113.9:53, sees 10.244.1.2:9, the sender's address: this agent's rule with handle 4 in chain " +
				"ip x y exempts it\n",
		},
		{
			Trace{Outcome: Kept, SeenAs: "10.244.1.2:9"},
			"203.0.113.9:53 sees 10.244.1.2:9, the sender's address: no rule of nf_tables translates the source\n",
		},
		{
			Trace{Outcome: Untracked, SeenAs: "10.244.1.2:9", Rule: of(Older, "notrack")},
			"203.0.113.9:53 sees 10.244.1.2:9, the sender's address: an older masquerade agent's rule with handle 4 in " +
				"chain ip x y keeps it from being tracked, so that nothing translates it\n  on the node: nft -a\n\n",
		},
		{
			Trace{Outcome: Dropped, Rule: policy},
			"203.0.113.9:53 does not see the packet from 10.244.1.2:9: the policy of another program's chain ip x y drops it\n",
		},
		{
			Trace{Outcome: Rejected, Rule: of(Other, "reject")},
			"203.0.113.9:53 does not see the packet from 10.244.1.2:9: another program's rule with handle 4 in chain ip x y " +
				"rejects it\n",
		},
		{
			Trace{Outcome: Kept, SeenAs: "10.244.1.2:9", Rule: of(Other, "tproxy")},
			"203.0.113.9:53 sees 10.244.1.2:9, the sender's address: another program's rule with handle 4 in chain ip x y " +
				"decides: tproxy\n",
		},
		{
			Trace{Outcome: Lost},
			"203.0.113.9:53 does not see the packet from 10.244.1.2:9: it ended on this node, and no rule of nf_tables dropped",
		},
	} {
		tt.trace.Protocol = "udp"
		tt.trace.Source = "10.244.1.2:9"
		tt.trace.Destination = "203.0.113.9:53"
		if got := tt.trace.String(); !strings.HasPrefix(got, tt.want) {
			t.Errorf("%s\nwant\n%s", got, tt.want)
		}
	}
}
