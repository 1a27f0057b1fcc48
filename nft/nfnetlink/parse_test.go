package nfnetlink

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"
)

func TestAttributesAreReadAsWritten(t *testing.T) {
	var a Attrs
	a.str(1, "")
	a.str(2, "name")
	a.AddUint32(3, 0xfffffffe)
	a.uint64(4, 1<<63|5)
	a.AddBytes(5, []byte{1, 2, 3, 0, 5})
	a.AddBytes(6, nil)
	a.nest(7, func() {
		a.str(1, "inner")
		a.nest(2, func() { a.AddUint32(1, 9) })
	})
	a.AddUint32(8, 1)
	if len(a)%attrAlign != 0 {
		t.Errorf("the attributes have %d bytes, want a multiple of %d", len(a), attrAlign)
	}
	var got []any
	var read func(b []byte, nested ...uint16)
	read = func(b []byte, nested ...uint16) {
		if err := Each(b, func(typ uint16, data []byte) error {
			if len(nested) > 0 && typ == nested[0] {
				got = append(got, "nest")
				read(data, nested[1:]...)
				return nil
			}
			got = append(got, typ, string(data))
			return nil
		}); err != nil {
			t.Error(err)
		}
	}
	read(a, 7, 2)
	want := []any{
		uint16(1), "\x00", uint16(2), "name\x00", uint16(3), "\xff\xff\xff\xfe",
		uint16(4), "\x80\x00\x00\x00\x00\x00\x00\x05", uint16(5), "\x01\x02\x03\x00\x05", uint16(6), "",
		"nest", uint16(1), "inner\x00", "nest", uint16(1), "\x00\x00\x00\x09", uint16(8), "\x00\x00\x00\x01",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("attributes (-written +read):\n%s", diff)
	}
}

func TestMalformedAttributesAreErrors(t *testing.T) {
	header := func(n, typ uint16) []byte {
		return binary.NativeEndian.AppendUint16(binary.NativeEndian.AppendUint16(nil, n), typ)
	}
	for _, tt := range []struct {
		name string
		b    []byte
		err  bool
	}{
		{"nothing", nil, false},
		{"an empty one", header(4, 1), false},
		{"less than a header", []byte{4, 0, 1}, false}, // padding
		{"length 0", header(0, 1), true},
		{"shorter than its header", header(3, 1), true},
		{"longer than the message", header(9, 1), true},
		{"without its padding", append(header(5, 1), 7), false},
		{"a malformed one after a valid one", append(header(4, 1), header(8, 2)...), true},
	} {
		err := Each(tt.b, func(uint16, []byte) error { return nil })
		if (err != nil) != tt.err {
			t.Errorf("%s: error %v", tt.name, err)
		}
	}
}

// attr writes one attribute.
func attr(typ uint16, data ...byte) []byte {
	var a Attrs
	a.AddBytes(typ, data)
	return a
}

func TestExpressionsAreComparedByEffect(t *testing.T) {
	value := func(b ...byte) []byte { return attr(unix.NFTA_DATA_VALUE, b...) }
	compare := func(op byte, b ...byte) Expr {
		return Expr{Name: "cmp", Attrs: bytes.Join([][]byte{
			attr(unix.NFTA_CMP_SREG, 0, 0, 0, 1), attr(unix.NFTA_CMP_OP, 0, 0, 0, op), attr(unix.NFTA_CMP_DATA, value(b...)...),
		}, nil)}
	}
	lookup := func(set string) Expr { return Expr{"lookup", attr(unix.NFTA_LOOKUP_SET, []byte(set)...)} }
	jump := func(chain string) Expr {
		verdict := attr(unix.NFTA_VERDICT_CODE, 0xff, 0xff, 0xff, 0xfd)
		verdict = append(verdict, attr(unix.NFTA_VERDICT_CHAIN, []byte(chain)...)...)
		return Expr{"immediate", attr(unix.NFTA_IMMEDIATE_DATA, attr(unix.NFTA_DATA_VERDICT, verdict...)...)}
	}
	eq := compare(0, 10)
	for _, tt := range []struct {
		name string
		a, b Expr
		want bool
	}{
		{"itself", eq, eq, true},
		{"another name", eq, Expr{Name: "range", Attrs: eq.Attrs}, false},
		{"another value", eq, compare(0, 11), false},
		{"a longer value that ends in zero", eq, compare(0, 10, 0), false}, // 10.0.0.0/8 and /16
		{"another operator", eq, compare(1, 10), false},
		{"another chain", jump("c"), jump("d"), false},
		{"a chain with and without zero", jump("c"), jump("c\x00"), true},
		{
			"a map of verdicts",
			Expr{"lookup", attr(unix.NFTA_LOOKUP_SET, 'a')},
			Expr{"lookup", append(attr(unix.NFTA_LOOKUP_SET, 'a'), attr(unix.NFTA_LOOKUP_DREG, 0, 0, 0, 0)...)},
			false,
		},
		{
			"another order, a zero left out, the nesting flag",
			eq,
			Expr{Name: "cmp", Attrs: append(attr(unix.NFTA_CMP_DATA|unix.NLA_F_NESTED, value(10)...),
				attr(unix.NFTA_CMP_SREG, 0, 0, 0, 1)...)},
			true,
		},
		{"a string with and without zero", lookup("set-a"), lookup("set-a\x00"), true},
		{"another string", lookup("set-a"), lookup("set-b"), false},
		{"counters", Expr{"counter", attr(unix.NFTA_COUNTER_PACKETS, 0, 0, 0, 0, 0, 0, 0, 7)}, Expr{Name: "counter"}, true},
		{"malformed ones", Expr{Name: "x", Attrs: []byte{1, 0, 0, 0}}, Expr{Name: "x", Attrs: []byte{2, 0, 0, 0}}, false},
		{"only unknown attributes", Expr{Name: "x", Attrs: attr(77, 1)}, Expr{Name: "x"}, false},
	} {
		if Same([]Expr{tt.a}, []Expr{tt.b}) != tt.want {
			t.Errorf("%s: equal is not %t", tt.name, tt.want)
		}
	}
	for name, types := range map[string][]uint16{
		"immediate": {unix.NFTA_IMMEDIATE_DATA}, "bitwise": {unix.NFTA_BITWISE_MASK, unix.NFTA_BITWISE_XOR},
		"range": {unix.NFTA_RANGE_FROM_DATA, unix.NFTA_RANGE_TO_DATA},
	} {
		for _, typ := range types {
			short, long := Expr{name, attr(typ, value(1)...)}, Expr{name, attr(typ, value(1, 0)...)}
			if Same([]Expr{short}, []Expr{long}) {
				t.Errorf("%s: value %d is equal to a longer one that ends in zero", name, typ)
			}
		}
	}
	if Same([]Expr{eq, eq}, []Expr{eq}) {
		t.Error("lists are not compared as a whole")
	}
}

func TestRulesSayWhatTheyDo(t *testing.T) {
	target := func(name string) []Expr {
		return []Expr{{"target", attr(unix.NFTA_TARGET_NAME, []byte(name+"\x00")...)}}
	}
	nat := func(typ byte) []Expr { return []Expr{{"nat", attr(unix.NFTA_NAT_TYPE, 0, 0, 0, typ)}} }
	for _, tt := range []struct {
		exprs []Expr
		want  string // the target, whether it returns, what it has counted, whether it translates sources
	}{
		{nil, "- false - false"},
		{Marshal(IPv4, &expr.Verdict{Kind: expr.VerdictJump, Chain: "d"}), "d false - false"},
		{Marshal(IPv4, &expr.Verdict{Kind: expr.VerdictGoto, Chain: "d"}), "d false - false"},
		{Marshal(IPv4, &expr.Verdict{Kind: expr.VerdictReturn}), "- true - false"},
		{Marshal(IPv4, &expr.Verdict{Kind: expr.VerdictAccept}), "- false - false"},
		{Marshal(IPv4, &expr.Counter{Packets: 7}, &expr.Verdict{Kind: expr.VerdictReturn}), "- true 7 false"},
		{[]Expr{Masquerade(false, 0, 0)}, "- false - true"},
		{nat(unix.NFT_NAT_SNAT), "- false - true"},
		{nat(unix.NFT_NAT_DNAT), "- false - false"},
		{target("MASQUERADE"), "- false - true"},
		{target("SNAT"), "- false - true"},
		{target("DNAT"), "- false - false"},
	} {
		r := Rule{Exprs: tt.exprs}
		chain, jumps := r.Target()
		if !jumps {
			chain += "-"
		}
		packets, counts := r.Packets()
		counted := fmt.Sprint(packets)
		if !counts {
			counted = "-"
		}
		if got := fmt.Sprint(chain, " ", r.Returns(), " ", counted, " ", r.TranslatesSources()); got != tt.want {
			t.Errorf("%v: %s, want %s", tt.exprs, got, tt.want)
		}
	}
}

func TestCommentsAreThoseOfIPTablesOrNFT(t *testing.T) {
	match := func(name, info string) []Expr {
		return []Expr{{"match", append(attr(unix.NFTA_MATCH_NAME, []byte(name+"\x00")...),
			attr(unix.NFTA_MATCH_INFO, []byte(info+"\x00\x00")...)...)}}
	}
	ofNFT := userdata.AppendString(nil, userdata.TypeComment, "nft's")
	for i, tt := range []struct {
		rule Rule
		want string
	}{
		{Rule{}, ""},
		{Rule{UserData: ofNFT}, "nft's"},
		{Rule{UserData: ofNFT, Exprs: match("mark", "x")}, "nft's"},
		{Rule{UserData: ofNFT, Exprs: match("comment", "of iptables")}, "of iptables"},
		{Rule{UserData: Signature()}, ""},
		{Rule{UserData: []byte{CommentData, 9, 'x'}}, ""}, // a wrong length
	} {
		if got := tt.rule.Comment(); got != tt.want {
			t.Errorf("%d: %q, want %q", i, got, tt.want)
		}
	}
}

func TestAddressesAreLoadedFromTheirPlaces(t *testing.T) {
	for _, tt := range []struct {
		ipv6, source bool
		offset, size uint32
	}{{false, true, 12, 4}, {false, false, 16, 4}, {true, true, 8, 16}, {true, false, 24, 16}} {
		if p := AddressPayload(tt.ipv6, tt.source); p.Offset != tt.offset || p.Len != tt.size {
			t.Errorf("%+v: %d bytes at %d", tt, p.Len, p.Offset)
		}
	}
}

// A chain that is created again can be emptied and deleted again.
func TestBatchDeletesOnceAndKnowsWhetherItChangesSomething(t *testing.T) {
	chain, rule := Chain{Table: "t", Name: "c"}, Rule{Table: "t", Chain: "c", Handle: 7}
	for i, tt := range []struct {
		do      func(b *Batch)
		length  int
		changes bool
	}{
		{func(*Batch) {}, 0, false},
		{func(b *Batch) { b.AddTable(Inet, "t"); b.AddChain(chain); b.AddCounter(Inet, "t", "o") }, 3, false},
		{func(b *Batch) { b.FlushChain(chain.ID()); b.FlushChain(chain.ID()) }, 2, false},
		{func(b *Batch) { b.DelRule(rule); b.DelRule(rule) }, 1, false},
		{func(b *Batch) { b.DelChain(chain.ID()); b.DelChain(chain.ID()); b.FlushChain(chain.ID()) }, 1, true},
		{func(b *Batch) {
			b.DelChain(chain.ID())
			b.AddChain(chain)
			b.FlushChain(chain.ID())
			b.DelChain(chain.ID())
		}, 4, true},
		{func(b *Batch) { b.AddRule(rule) }, 1, true},
		{func(b *Batch) { b.DelRule(rule) }, 1, false},
		{func(b *Batch) { b.DelTable(Inet, "t") }, 1, true},
		{func(b *Batch) { b.DelSet(Inet, "t", "s") }, 1, true},
		{func(b *Batch) { b.DelObject(Object{Table: "t", Name: "o"}) }, 1, true},
		{func(b *Batch) { b.AddElements(Inet, "t", "s", []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}) }, 1, true},
	} {
		b := &Batch{}
		tt.do(b)
		if b.Len() != tt.length || b.Changes() != tt.changes {
			t.Errorf("%d: %d messages, want %d; changes %t", i, b.Len(), tt.length, b.Changes())
		}
	}
}

func TestExpressionAccessors(t *testing.T) {
	es := Marshal(IPv4,
		&expr.Verdict{Kind: expr.VerdictGoto, Chain: "elsewhere"},
		&expr.Verdict{Kind: expr.VerdictReturn},
		&expr.Immediate{Register: 1, Data: []byte{1, 2}},
		&expr.Lookup{SourceRegister: 1, SetName: "set", Invert: true},
		&expr.Masq{FullyRandom: true},
		&expr.Lookup{SourceRegister: 1, DestRegister: unix.NFT_REG_VERDICT, IsDestRegSet: true, SetName: "map"})
	code, chain, ok := es[0].Verdict()
	if code != unix.NFT_GOTO || chain != "elsewhere" || !ok {
		t.Errorf("goto is %d %q %t", code, chain, ok)
	}
	if code, chain, ok := es[1].Verdict(); code != unix.NFT_RETURN || chain != "" || !ok {
		t.Errorf("return is %d %q %t", code, chain, ok)
	}
	if _, _, ok := es[2].Verdict(); ok || !bytes.Equal(es[2].Value(unix.NFTA_IMMEDIATE_DATA), []byte{1, 2}) {
		t.Errorf("value is %v, a verdict %t", es[2].Value(unix.NFTA_IMMEDIATE_DATA), ok)
	}
	if es[3].Str(unix.NFTA_LOOKUP_SET) != "set" || es[3].Uint32(unix.NFTA_LOOKUP_FLAGS) != unix.NFT_LOOKUP_F_INV {
		t.Errorf("lookup is %x", es[3].Attrs)
	}
	if es[3].Attr(99) != nil || es[3].Str(99) != "" || es[3].Uint32(99) != 0 || es[3].Value(99) != nil {
		t.Error("an absent attribute has a value")
	}
	if es[3].JumpsByMap() || !es[5].JumpsByMap() {
		t.Errorf("%x jumps by a map, or %x does not", es[3].Attrs, es[5].Attrs)
	}
	if nat := SourceNAT(IPv4, true, 1, 0, 0); nat.Uint32(unix.NFTA_NAT_FLAGS) != NATAddresses|NATRandomFully {
		t.Errorf("snat is %x", nat.Attrs)
	}
	masq := Masquerade(true, 1, 2)
	if masq.Uint32(unix.NFTA_MASQ_FLAGS) != 0x12 || masq.Uint32(unix.NFTA_MASQ_REG_PROTO_MAX) != 2 {
		t.Errorf("masquerade is %x", masq.Attrs)
	}
}

// seeds returns attributes of each kind that is parsed.
func seeds() [][]byte {
	rule := ruleAttrs(Rule{
		Table: "t", Chain: "c", UserData: []byte{0, 2, 'x', 0},
		Exprs: append(Marshal(IPv4,
			&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: 16, Len: 4},
			&expr.Cmp{Register: 1, Data: []byte{10, 0, 0, 1}},
			&expr.Counter{Packets: 1, Bytes: 2},
			&expr.Verdict{Kind: expr.VerdictJump, Chain: "d"},
		), Masquerade(false, 1, 1)),
	})
	b := Batch{}
	b.AddTable(Inet, "t")
	b.AddChain(Chain{Table: "t", Name: "c", Hook: &Hook{Type: "nat", Number: 4, Priority: -5}})
	b.AddSet(Set{Table: "t", Name: "s", Flags: unix.NFT_SET_INTERVAL, KeyLen: 4, UserData: []byte{0, 1, 2}})
	b.AddElements(Inet, "t", "s", []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fe80::/10")})
	b.AddCounter(Inet, "t", "o")
	out := [][]byte{rule}
	for _, m := range b.msgs {
		out = append(out, m.Data[4:])
	}
	return out
}

func FuzzParse(f *testing.F) {
	for _, s := range seeds() {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		given := bytes.Clone(b)
		for _, parse := range []func(){
			func() { _ = parseTable(Inet, b) },
			func() { _ = parseChain(Inet, b) },
			func() { _ = parseSet(Inet, b) },
			func() { _ = parseObject(Inet, b) },
			func() {
				for _, r := range Ranges(boundsOf(b)) {
					_ = r.String()
				}
			},
			func() {
				for _, e := range ParseRule(IPv4, b).Exprs {
					useExpr(t, e)
				}
			},
		} {
			parse()
		}
		if !bytes.Equal(b, given) {
			t.Error("the input was modified")
		}
	})
}

func boundsOf(b []byte) (bounds []Bound) {
	_ = parseElements(b, func(e Element) error {
		addr, _ := netip.AddrFromSlice(e.Key)
		bounds = append(bounds, Bound{Addr: addr, End: e.End})
		return nil
	})
	return bounds
}

func useExpr(t *testing.T, e Expr) {
	t.Helper()
	if !bytes.Equal(e.canonical(), Expr{e.Name, bytes.Clone(e.Attrs)}.canonical()) {
		t.Errorf("expression %s %x is not equal to itself", e.Name, e.Attrs)
	}
	_, _, _ = e.Verdict()
	for typ := range uint16(12) {
		_, _, _ = e.Attr(typ), e.Value(typ), e.Uint32(typ)
		_ = e.Str(typ)
	}
}
