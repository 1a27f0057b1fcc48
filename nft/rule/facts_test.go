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
	"nft-masq-agent/nft/nfttest/modes"
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
		if n := s.NAT; n != nil {
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
		if s.Write != nil {
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
			n := modes.New(t, nil)
			nfttest.Run(t, n.NS, strings.Replace(script, "RULES\n", strings.Join(rules, ""), 1)+"\n", where[3], where[4:]...)
			family := map[string]nfnetlink.Family{"ip": nfnetlink.IPv4, "ip6": nfnetlink.IPv6, "inet": nfnetlink.Inet}[where[0]]
			got := head + "\n\n"
			err = n.Conn.EachRule(family, where[1], where[2], func(r nfnetlink.Rule) error {
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
			golden(t, file, got, *update)
		})
	}
}

// golden compares a file with what it should be, or writes it.
func golden(t *testing.T, file, got string, write bool) {
	t.Helper()
	if write {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if diff := cmp.Diff(string(want), got); err != nil || diff != "" {
		t.Errorf("%s: %v (-want +got):\n%s", file, err, diff)
	}
}

// Programs may use registers as nft does not, and revisions of matches and targets that iptables does not write: the
// size of their parameters distinguishes these. Those of other sizes are not read. testdata/built.txt has the facts.
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
	invert, none, state := []byte{1}, []byte{0}, make([]byte, 156)
	state[146], state[147] = 1, 0x20
	binary.NativeEndian.PutUint16(state[150:], 8)
	with := func(b []byte, more ...byte) []byte { return append(b, more...) }
	connmark := func(size, at int) []byte {
		b := with(words(0, 0, 0xff), make([]byte, size-12)...)
		if at < size {
			b[at] = 2
		}
		return b
	}
	of := func(exprs ...expr.Any) nfnetlink.Rule {
		return nfnetlink.Rule{Family: nfnetlink.IPv4, Exprs: nfnetlink.Marshal(nfnetlink.IPv4, exprs...)}
	}
	got := ""
	for _, tt := range []struct {
		name string
		rule nfnetlink.Rule
	}{
		{"mark with inverted bits", of(mark, bits(0xff, 5), equal(words(7)))},
		{"constant", of(&expr.Immediate{Register: 1, Data: seven}, equal(seven))},
		{"mask of a mask", of(mark, bits(0xff, 0), bits(0xf, 0), equal(seven))},
		{"mask of a constant", of(number(5), bits(0xf, 0), equal(seven))},
		{"nothing in the register", of(equal(seven))},
		{"nothing for the mark", of(setMark)},
		{"constant mark", of(number(5), setMark)},
		{"inverted mark", of(mark, bits(0xff, 0xf0), setMark)},
		{"masked mark of something else", of(&expr.Ct{Key: expr.CtKeyMARK, Register: 1}, bits(0xff, 0xf0), setMark)},
		{"another register", of(&expr.Meta{Key: expr.MetaKeyMARK, Register: 2}, source, equal(seven))},
		{"loaded twice", of(mark, source, equal([]byte{10, 0, 0, 1}))},
		{"loaded before another statement", of(source, &expr.Counter{}, &expr.Lookup{SourceRegister: 1, SetName: "s"})},
		{"compared twice", of(source, equal([]byte{10}), equal([]byte{10, 1}))},
		{"forgotten", of(source, &expr.Socket{Register: 1}, equal([]byte{10, 0, 0, 1}))},
		{"range", of(mark, &expr.Range{Op: expr.CmpOpEq, Register: 1, FromData: words(1), ToData: words(2)})},
		{"not a range", of(mark, &expr.Range{Op: expr.CmpOpNeq, Register: 1, FromData: words(1), ToData: words(2)})},
		{"from a map", of(source, toMap, snat)},
		{"from a map, inverted", of(source, part(0xff, 1), toMap, snat)},
		{"from a map, and masked", of(source, toMap, part(0xff, 0), snat)},
		{"to its own address", of(source, snat)},
		{"to a part of it", of(source, part(0xff, 0), snat)},
		{"to it with other bits", of(source, part(0xff, 1), snat)},
		{"to a constant", of(&expr.Immediate{Register: 1, Data: []byte{10, 0, 0, 1}}, snat)},
		{"to ports that are not constant", of(mark, &expr.Masq{ToPorts: true, RegProtoMin: 1, RegProtoMax: 1})},
		{"to a short port", of(
			&expr.Immediate{Register: 1, Data: []byte{7}},
			&expr.Masq{ToPorts: true, RegProtoMin: 1, RegProtoMax: 1},
		)},
		{"written in part", of(
			&expr.Immediate{Register: 1, Data: []byte{10, 0}},
			&expr.Payload{
				OperationType: expr.PayloadWrite, SourceRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: 12, Len: 2,
			},
		)},
		{"drop", of(&expr.Verdict{Kind: expr.VerdictDrop})},
		{"jump", of(&expr.Verdict{Kind: expr.VerdictJump, Chain: "a"}, &expr.Verdict{Kind: expr.VerdictReturn})},
		{"limit in bytes", of(&expr.Limit{Type: expr.LimitTypePktBytes, Rate: 5, Unit: expr.LimitTimeHour})},
		{"limit over", of(&expr.Limit{Rate: 5, Unit: expr.LimitTimeDay, Over: true})},
		{"quota", of(&expr.Objref{Type: unix.NFT_OBJECT_QUOTA, Name: "q"})},
		{"mark", xt("match", "mark", 1, with(words(5, 0xff), invert...))},
		{"mark, not inverted", xt("match", "mark", 1, with(words(5, 0xff), none...))},
		{"long mark", xt("match", "mark", 1, words(5, 0xff, 0, 0))},
		{"longer mark", xt("match", "mark", 1, with(words(5, 0xff, 0, 0), 0))},
		{"short mark", xt("match", "mark", 1, words(5, 0xff))},
		{"another match", xt("match", "other", 1, words(5, 0xff, 0))},
		{"another match of that size", xt("match", "other", 1, words(4, 0))},
		{"short addrtype", xt("match", "addrtype", 0, words(4))},
		{"long addrtype", xt("match", "addrtype", 2, words(4, 0, 0))},
		{"conntrack", xt("match", "conntrack", 3, state)},
		{"like conntrack", xt("match", "other", 3, state)},
		{"statistic", xt("match", "statistic", 0, words(0, 1<<30))},
		{"short statistic", xt("match", "statistic", 0, words(0))},
		{"MARK", xt("target", "MARK", 2, words(5, 0xff))},
		{"short MARK", xt("target", "MARK", 1, words(5))},
		{"another target", xt("target", "OTHER", 2, words(5, 0xff))},
		{"CONNMARK", xt("target", "CONNMARK", 1, connmark(16, 12))},
		{"short CONNMARK", xt("target", "CONNMARK", 1, connmark(12, 12))},
		{"CONNMARK, revision 2", xt("target", "CONNMARK", 2, connmark(16, 14))},
		{"CONNMARK, revision 2, which shifts", xt("target", "CONNMARK", 2, connmark(16, 12))},
		{"like CONNMARK", xt("target", "OTHER", 1, connmark(16, 12))},
		{"short CT", xt("target", "CT", 0, []byte{1})},
		{"CT", xt("target", "CT", 0, binary.NativeEndian.AppendUint16(nil, 1))},
		{"NOTRACK", xt("target", "NOTRACK", 0, nil)},
		{"a match of that name", xt("match", "NOTRACK", 0, nil)},
		{"like CT", xt("target", "OTHER", 0, []byte{1, 1})},
		{"short SNAT", xt("target", "SNAT", 0, make([]byte, 19))},
		{"SNAT", xt("target", "SNAT", 0, with(words(1, 1), 10, 0, 0, 1, 10, 0, 0, 2, 0, 7, 0, 9))},
		{"SNAT with ports", xt("target", "SNAT", 0, with(words(1, 2), 10, 0, 0, 1, 10, 0, 0, 2, 0, 7, 0, 9))},
	} {
		got += tt.name + "\n\t" + strings.Join(factsOf(tt.rule), "\n\t") + "\n"
	}
	golden(t, "testdata/built.txt", got, *update)
}

// xt is a match or target of xtables with parameters.
func xt(kind, name string, revision uint32, info []byte) nfnetlink.Rule {
	var attrs nfnetlink.Attrs
	attrs.AddBytes(unix.NFTA_TARGET_NAME, append([]byte(name), 0)) // those of matches have the same numbers
	attrs.AddUint32(unix.NFTA_TARGET_REV, revision)
	attrs.AddBytes(unix.NFTA_TARGET_INFO, info)
	return nfnetlink.Rule{Family: nfnetlink.IPv4, Exprs: []nfnetlink.Expr{{Name: kind, Attrs: attrs}}}
}

// words returns numbers of 32 bits in the machine's order.
func words(all ...uint32) (b []byte) {
	for _, n := range all {
		b = binary.NativeEndian.AppendUint32(b, n)
	}
	return b
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
