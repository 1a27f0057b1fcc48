package rule_test

import (
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/facts"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/rule"
)

var update = flag.Bool("update", false, "regenerate the facts in testdata/facts")

// factsOf returns what others read of a rule, besides its text: for each statement the
// comparison, the translation, and what it writes.
func factsOf(r nfnetlink.Rule) (all []string) {
	add := func(format string, args ...any) { all = append(all, fmt.Sprintf(format, args...)) }
	add("%s", rule.String(r))
	translates, masquerades := false, false
	for s := range rule.Statements(r) {
		if s.Field != "" {
			words := s.Field + " " + s.Op
			switch {
			case s.Mask == nil:
			case strings.HasPrefix(s.Field, "meta mark"), strings.HasPrefix(s.Field, "ct"):
				words = fmt.Sprintf("%s & %#x", words, binary.NativeEndian.Uint32(s.Mask))
			default:
				words = fmt.Sprintf("%s & %x", words, s.Mask)
			}
			if s.Set != "" {
				words += " @" + s.Set
			}
			if r, ok := s.Range(); ok {
				words += " " + r.String()
			}
			add("%s", words)
		}
		if n := s.NAT; n.Source || n.Destination {
			if n.Source && !translates {
				translates, masquerades = true, n.Masquerade
			}
			words := map[bool]string{true: "source", false: ""}[n.Source] + map[bool]string{true: "destination"}[n.Destination]
			if n.Masquerade {
				words += " masquerade"
			}
			if n.Family != 0 {
				words += " " + n.Family.String()
			}
			if n.To.From.IsValid() {
				words += fmt.Sprintf(" to %s-%s", n.To.From, n.To.To)
			}
			if n.ToField != "" {
				words += " to field " + n.ToField
			}
			if n.ToMap != "" {
				words += fmt.Sprintf(" & %x to map %s", n.ToMask, strings.TrimRight(n.ToMap, "0123456789"))
			}
			add("%s ports %d-%d flags %x", words, n.MinPort, n.MaxPort, n.Flags)
		}
		if m := s.NewMark; m != nil {
			add("mark & %x ^ %x ? %x", m.Keep, m.Xor, m.Unknown)
		}
		if s.Write.Field != "" {
			add("write %s %s", s.Write.Field, s.Write.To)
		}
		if rule.Untracks(s.Expr) {
			add("untracked")
		}
	}
	source, fully := facts.NAT(r)
	if source {
		add("SourceNAT %t %t", masquerades, fully)
	}
	if source != translates {
		add("one decoder says that the source is translated")
	}
	if to, ok := facts.Target(r); ok {
		add("to %s", to)
	}
	if facts.Returns(r) {
		add("returns")
	}
	if n, ok := facts.Packets(r); ok {
		add("%d packets", n)
	}
	if sets := facts.Sets(r); sets != nil {
		add("sets %q", sets)
	}
	if c := facts.Comment(r); c != "" {
		add("comment %q", c)
	}
	return all
}

// Each file of testdata/facts has rules, each followed by its facts. It begins with family, table and
// chain, the program that loads them, and the text around them.
func TestFactsOfRules(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft", "iptables-nft-restore", "ip6tables-nft-restore")
	files, err := filepath.Glob("testdata/facts/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			t.Parallel()
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			head, rows, _ := strings.Cut(string(text), "\n\n")
			first, script, _ := strings.Cut(head, "\n")
			rules := slices.DeleteFunc(strings.SplitAfter(rows, "\n"), func(line string) bool {
				return line == "" || line[0] == '\t'
			})
			where := strings.Fields(first) // family, table, chain, program
			ns, c := dialNS(t)
			nfttest.Run(t, ns, strings.Replace(script, "RULES\n", strings.Join(rules, ""), 1)+"\n", where[3], where[4:]...)
			family := map[string]nfnetlink.Family{"ip": nfnetlink.IPv4, "ip6": nfnetlink.IPv6, "inet": nfnetlink.Inet}[where[0]]
			got := head + "\n\n"
			err = c.EachRule(family, where[1], where[2], func(r nfnetlink.Rule) error {
				if len(rules) == 0 {
					return errors.New("more rules than lines")
				}
				got += rules[0] + "\t" + strings.Join(factsOf(r), "\n\t") + "\n"
				rules = rules[1:]
				return nil
			})
			if err != nil || len(rules) > 0 {
				t.Fatalf("left are %q, %v", rules, err)
			}
			if *update {
				err = os.WriteFile(file, []byte(got), 0o644)
			}
			if diff := cmp.Diff(string(text), got); err != nil || diff != "" {
				t.Errorf("%v (-want +got):\n%s", err, diff)
			}
		})
	}
}

// Programs may use registers as nft does not.
func TestFactsOfRulesThatNFTDoesNotWrite(t *testing.T) {
	mark := &expr.Meta{Key: expr.MetaKeyMARK, Register: 1}
	bits := func(mask, xor uint32) *expr.Bitwise {
		return &expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: words(mask), Xor: words(xor)}
	}
	part := func(mask, xor byte) *expr.Bitwise {
		return &expr.Bitwise{
			SourceRegister: 1, DestRegister: 1, Len: 4, Mask: []byte{0, 0, 0, mask}, Xor: []byte{0, 0, 0, xor},
		}
	}
	seven := []byte{0, 0, 0, 7}
	equal := func(b []byte) *expr.Cmp { return &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: b} }
	source := nfnetlink.AddressPayload(false, true)
	number := func(n uint32) *expr.Immediate { return &expr.Immediate{Register: 1, Data: words(n)} }
	setMark := &expr.Meta{Key: expr.MetaKeyMARK, Register: 1, SourceRegister: true}
	toMap := &expr.Lookup{SourceRegister: 1, DestRegister: 1, IsDestRegSet: true, SetName: "m"}
	snat := &expr.NAT{Type: expr.NATTypeSourceNAT, Family: unix.NFPROTO_IPV4, RegAddrMin: 1}
	for _, tt := range []struct {
		name  string
		exprs []expr.Any
		want  string
	}{
		{"mark with inverted bits", []expr.Any{mark, bits(0xff, 5), equal(words(7))}, "meta mark & 0xff ^ 0x5 == 0x7"},
		{"constant", []expr.Any{&expr.Immediate{Register: 1, Data: seven}, equal(seven)}, "0x00000007 == 0x00000007"},
		{"mask of a mask", []expr.Any{mark, bits(0xff, 0), bits(0xf, 0), equal(seven)}, "<bitwise> 0x00000007; <bitwise> =="},
		{"mask of a constant", []expr.Any{number(5), bits(0xf, 0), equal(seven)}, "<bitwise> 0x00000007; <bitwise> =="},
		{"nothing in the register", []expr.Any{equal(seven)}, "<register 1> 0x00000007; <register 1> =="},
		{"nothing for the mark", []expr.Any{setMark}, "meta mark set <register 1>; mark & 0 ^ 0 ? ffffffff"},
		{"constant mark", []expr.Any{number(5), setMark}, "meta mark set 0x5; mark & 0 ^ 5 ? 0"},
		{
			"inverted mark",
			[]expr.Any{mark, bits(0xff, 0xf0), setMark},
			"meta mark set meta mark & 0xff ^ 0xf0; mark & ff ^ f0 ? 0",
		},
		{
			"masked mark of something else",
			[]expr.Any{&expr.Ct{Key: expr.CtKeyMARK, Register: 1}, bits(0xff, 0xf0), setMark},
			"meta mark set ct mark & 0xff ^ 0xf0; mark & 0 ^ f0 ? ff",
		},
		{
			"another register",
			[]expr.Any{&expr.Meta{Key: expr.MetaKeyMARK, Register: 2}, source, equal(seven)},
			"ip saddr 0.0.0.7; ip saddr == 0.0.0.7",
		},
		{"loaded twice", []expr.Any{mark, source, equal([]byte{10, 0, 0, 1})}, "ip saddr 10.0.0.1; ip saddr == 10.0.0.1"},
		{
			"loaded before another statement",
			[]expr.Any{source, &expr.Counter{}, &expr.Lookup{SourceRegister: 1, SetName: "s"}},
			`counter ip saddr @s; ip saddr == @s; 0 packets; sets ["s"]`,
		},
		{
			"compared twice",
			[]expr.Any{source, equal([]byte{10}), equal([]byte{10, 1})},
			"ip saddr 10.0.0.0/8 ip saddr 10.1.0.0/16; ip saddr == 10.0.0.0/8; ip saddr == 10.1.0.0/16",
		},
		{
			"forgotten",
			[]expr.Any{source, &expr.Socket{Register: 1}, equal([]byte{10, 0, 0, 1})},
			"<socket> <register 1> 0x0a000001; <register 1> ==",
		},
		{
			"range",
			[]expr.Any{mark, &expr.Range{Op: expr.CmpOpEq, Register: 1, FromData: words(1), ToData: words(2)}},
			"meta mark 0x1-0x2",
		},
		{
			"not a range",
			[]expr.Any{mark, &expr.Range{Op: expr.CmpOpNeq, Register: 1, FromData: words(1), ToData: words(2)}},
			"meta mark != 0x1-0x2",
		},
		{
			"from a map",
			[]expr.Any{source, toMap, snat},
			`snat to ip saddr map @m; source ip to field ip saddr &  to map m ports 0-0 flags 0; ` +
				`SourceNAT false false; sets ["m"]`,
		},
		{
			"from a map, inverted",
			[]expr.Any{source, part(0xff, 1), toMap, snat},
			`snat to ip saddr & 0.0.0.255 ^ 0.0.0.1 map @m; source ip ports 0-0 flags 0; SourceNAT false false; sets ["m"]`,
		},
		{
			"from a map, and masked",
			[]expr.Any{source, toMap, part(0xff, 0), snat},
			`snat to ip saddr map @m & 0x000000ff; source ip ports 0-0 flags 0; SourceNAT false false; sets ["m"]`,
		},
		{
			"to its own address",
			[]expr.Any{source, snat},
			"snat to ip saddr; source ip to field ip saddr ports 0-0 flags 0; SourceNAT false false",
		},
		{
			"to a part of it",
			[]expr.Any{source, part(0xff, 0), snat},
			"snat to ip saddr & 0.0.0.255; source ip ports 0-0 flags 0; SourceNAT false false",
		},
		{
			"to it with other bits",
			[]expr.Any{source, part(0xff, 1), snat},
			"snat to ip saddr & 0.0.0.255 ^ 0.0.0.1; source ip ports 0-0 flags 0; SourceNAT false false",
		},
		{
			"to a constant",
			[]expr.Any{&expr.Immediate{Register: 1, Data: []byte{10, 0, 0, 1}}, snat},
			"snat to 10.0.0.1; source ip to 10.0.0.1-10.0.0.1 ports 0-0 flags 0; SourceNAT false false",
		},
		{
			"to ports that are not constant",
			[]expr.Any{mark, &expr.Masq{ToPorts: true, RegProtoMin: 1, RegProtoMax: 1}},
			"masquerade to :meta mark; source masquerade ports 0-0 flags 0; SourceNAT true false",
		},
		{"to a short port", []expr.Any{
			&expr.Immediate{Register: 1, Data: []byte{7}}, &expr.Masq{ToPorts: true, RegProtoMin: 1, RegProtoMax: 1},
		}, "masquerade to :7; source masquerade ports 0-0 flags 0; SourceNAT true false"},
		{"written in part", []expr.Any{
			&expr.Immediate{Register: 1, Data: []byte{10, 0}},
			&expr.Payload{
				OperationType: expr.PayloadWrite, SourceRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: 12, Len: 2,
			},
		}, "ip saddr set 0x0a00; write ip saddr invalid IP"},
		{"drop", []expr.Any{&expr.Verdict{Kind: expr.VerdictDrop}}, "drop"},
		{
			"jump",
			[]expr.Any{&expr.Verdict{Kind: expr.VerdictJump, Chain: "a"}, &expr.Verdict{Kind: expr.VerdictReturn}},
			"jump a return; to a; returns",
		},
		{
			"limit in bytes",
			[]expr.Any{&expr.Limit{Type: expr.LimitTypePktBytes, Rate: 5, Unit: expr.LimitTimeHour}},
			"limit rate 5 bytes/hour",
		},
		{"limit over", []expr.Any{&expr.Limit{Rate: 5, Unit: expr.LimitTimeDay, Over: true}}, "limit rate over 5/day"},
		{"quota", []expr.Any{&expr.Objref{Type: unix.NFT_OBJECT_QUOTA, Name: "q"}}, "quota name q"},
	} {
		r := nfnetlink.Rule{Family: nfnetlink.IPv4, Exprs: nfnetlink.Marshal(nfnetlink.IPv4, tt.exprs...)}
		if got := strings.Join(factsOf(r), "; "); got != tt.want {
			t.Errorf("%s:\n\t%s\nwant\n\t%s", tt.name, got, tt.want)
		}
	}
}

// xt is a match or target of xtables with parameters.
func xt(kind, name string, revision uint32, info []byte) nfnetlink.Rule {
	var attrs []byte
	add := func(typ uint16, data []byte) {
		attrs = binary.NativeEndian.AppendUint16(attrs, uint16(4+len(data)))
		attrs = binary.NativeEndian.AppendUint16(attrs, typ)
		attrs = append(append(attrs, data...), make([]byte, -len(data)&3)...)
	}
	add(1, append([]byte(name), 0))
	add(2, binary.BigEndian.AppendUint32(nil, revision))
	add(3, info)
	return nfnetlink.Rule{Family: nfnetlink.IPv4, Exprs: []nfnetlink.Expr{{Name: kind, Attrs: attrs}}}
}

// words returns numbers of 32 bits in the machine's order.
func words(all ...uint32) (b []byte) {
	for _, n := range all {
		b = binary.NativeEndian.AppendUint32(b, n)
	}
	return b
}

// The size of the parameters distinguishes their revisions. Those of other sizes are not read.
func TestParametersAreReadByTheirSize(t *testing.T) {
	invert, none := []byte{1}, []byte{0}
	with := func(b []byte, more ...byte) []byte { return append(b, more...) }
	connmark := func(size, at int) []byte {
		b := with(words(0, 0, 0xff), make([]byte, size-12)...)
		if at < size {
			b[at] = 2
		}
		return b
	}
	for _, tt := range []struct {
		name string
		rule nfnetlink.Rule
		want string
	}{
		{"mark", xt("match", "mark", 1, with(words(5, 0xff), invert...)), "-m mark ! --mark 0x5/0xff; meta mark != & 0xff"},
		{"mark", xt("match", "mark", 1, with(words(5, 0xff), none...)), "-m mark --mark 0x5/0xff; meta mark == & 0xff"},
		{"long mark", xt("match", "mark", 1, words(5, 0xff, 0, 0)), "-m mark --mark 0x5/0xff; meta mark == & 0xff"},
		{"longer mark", xt("match", "mark", 1, with(words(5, 0xff, 0, 0), 0)), "-m mark <...>"},
		{"short mark", xt("match", "mark", 1, words(5, 0xff)), "-m mark <...>"},
		{"another match", xt("match", "other", 1, words(5, 0xff, 0)), "-m other <...>"},
		{"another match of that size", xt("match", "other", 1, words(4, 0)), "-m other <...>"},
		{"short addrtype", xt("match", "addrtype", 0, words(4)), "-m addrtype <...>"},
		{"long addrtype", xt("match", "addrtype", 2, words(4, 0, 0)), "-m addrtype <...>"},
		{"statistic", xt("match", "statistic", 0, words(0, 1<<30)), "-m statistic --mode random --probability 0.50000000000"},
		{"short statistic", xt("match", "statistic", 0, words(0)), "-m statistic <...>"},
		{"MARK", xt("target", "MARK", 2, words(5, 0xff)), "-j MARK --set-xmark 0x5/0xff; mark & ffffff00 ^ 5 ? 0"},
		{"short MARK", xt("target", "MARK", 1, words(5)), "-j MARK <...>; mark & 0 ^ 0 ? ffffffff"},
		{"another target", xt("target", "OTHER", 2, words(5, 0xff)), "-j OTHER <...>"},
		{"CONNMARK", xt("target", "CONNMARK", 1, connmark(16, 12)), "-j CONNMARK <...>; mark & ffffff00 ^ 0 ? ff"},
		{"short CONNMARK", xt("target", "CONNMARK", 1, connmark(12, 12)), "-j CONNMARK <...>"},
		{
			"CONNMARK, revision 2", xt("target", "CONNMARK", 2, connmark(16, 14)),
			"-j CONNMARK <...>; mark & ffffff00 ^ 0 ? ff",
		},
		{"CONNMARK, revision 2, which shifts", xt("target", "CONNMARK", 2, connmark(16, 12)), "-j CONNMARK <...>"},
		{"like CONNMARK", xt("target", "OTHER", 1, connmark(16, 12)), "-j OTHER <...>"},
		{"short CT", xt("target", "CT", 0, []byte{1}), "-j CT <...>"},
		{"CT", xt("target", "CT", 0, binary.NativeEndian.AppendUint16(nil, 1)), "-j CT <...>; untracked"},
		{"NOTRACK", xt("target", "NOTRACK", 0, nil), "-j NOTRACK <...>; untracked"},
		{"a match of that name", xt("match", "NOTRACK", 0, nil), "-m NOTRACK <...>"},
		{"like CT", xt("target", "OTHER", 0, []byte{1, 1}), "-j OTHER <...>"},
		{
			"short SNAT", xt("target", "SNAT", 0, make([]byte, 19)),
			"-j SNAT <...>; source ports 0-0 flags 0; SourceNAT false false",
		},
		{
			"SNAT", xt("target", "SNAT", 0, with(words(1, 1), 10, 0, 0, 1, 10, 0, 0, 2, 0, 7, 0, 9)),
			"-j SNAT --to-source 10.0.0.1-10.0.0.2; source to 10.0.0.1-10.0.0.2 ports 0-0 flags 1; SourceNAT false false",
		},
		{
			"SNAT with ports", xt("target", "SNAT", 0, with(words(1, 2), 10, 0, 0, 1, 10, 0, 0, 2, 0, 7, 0, 9)),
			"-j SNAT --to-source 7-9; source ports 7-9 flags 2; SourceNAT false false",
		},
	} {
		if got := strings.Join(factsOf(tt.rule), "; "); got != tt.want {
			t.Errorf("%s:\n\t%s\nwant\n\t%s", tt.name, got, tt.want)
		}
	}
}

func TestUserDataIsReadAsFarAsItIsValid(t *testing.T) {
	for _, tt := range []struct{ data, want string }{
		{"", ""},
		{"\x00", ""},
		{"\x00\x02ab", "ab"},
		{"\x05\x00", ""},
		{"\x00\x03ab\x00", "ab"},
		{"\x00\x03ab", ""},
		{"\x05\x01x\x00\x02ab", "ab"},
		{"\x05\x00\x00\x02ab", "ab"},
		{"\x05\x09x\x00\x02ab", ""},
		{"\x00\x01a\x00\x01b", "a"},
	} {
		if got := facts.UserData([]byte(tt.data), 0); got != tt.want {
			t.Errorf("%q: %q, want %q", tt.data, got, tt.want)
		}
	}
}
