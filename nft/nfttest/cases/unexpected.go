package cases

import (
	"slices"
	"testing"

	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"github.com/google/nftables/xt"

	"nft-masq-agent/config"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/xtables"
)

// CheckRules checks that reading rules from any program does not fail.
type CheckRules func(*testing.T, nfnetlink.Family, []nfnetlink.Rule)

// encode writes rules as bytes for the fuzzer, and decode reads its mutations. An
// expression is one byte for the length of the name, the name, two bytes for the
// length of the attributes, and the attributes; a length of 0 ends a rule.
func encode(rules []nfnetlink.Rule) []byte {
	var b []byte
	for _, r := range rules {
		for _, e := range r.Exprs {
			b = append(append(b, byte(len(e.Name))), e.Name...)
			b = append(append(b, byte(len(e.Data)>>8), byte(len(e.Data))), e.Data...)
		}
		b = append(b, 0)
	}
	return b
}

func decode(family nfnetlink.Family, b []byte) []nfnetlink.Rule {
	rules := []nfnetlink.Rule{{Family: family}}
	take := func(n int) []byte {
		n = min(n, len(b))
		out := b[:n:n]
		b = b[n:]
		return out
	}
	for len(b) > 0 && len(rules) < 100 {
		n := int(take(1)[0])
		if n == 0 {
			rules = append(rules, nfnetlink.Rule{Family: family})
			continue
		}
		e := nfnetlink.Expr{Name: string(take(n))}
		if size := take(2); len(size) == 2 {
			e.Data = take(int(size[0])<<8 | int(size[1]))
		}
		last := &rules[len(rules)-1]
		last.Exprs = append(last.Exprs, e)
	}
	return rules
}

// forEachChain calls fn with the bytecode of the chains of some cases.
func forEachChain(t testing.TB, fn func(nfnetlink.Family, []nfnetlink.Rule)) {
	t.Helper()
	for _, name := range []string{"default", "everything", "all-policies", "to-ports-force"} {
		c := Load(t, name)
		for _, m := range Modes() {
			for _, table := range c.Compile(m).Tables {
				for _, ch := range table.Chains {
					fn(table.Family, ch.Bytecode(table, nil))
				}
			}
		}
	}
}

// FuzzReadBack feeds rules with arbitrary expressions.
func FuzzReadBack(f *testing.F, check CheckRules) {
	f.Helper()
	forEachChain(f, func(family nfnetlink.Family, rules []nfnetlink.Rule) {
		f.Add(family == nfnetlink.IPv6, encode(rules))
	})
	f.Fuzz(func(t *testing.T, ipv6 bool, b []byte) {
		family := nfnetlink.IPv4
		if ipv6 {
			family = nfnetlink.IPv6
		}
		check(t, family, decode(family, b))
	})
}

// raw writes rules as netlink attributes, each after two bytes with its length.
func raw(rules []nfnetlink.Rule) []byte {
	var b []byte
	for _, r := range rules {
		attrs := nfnetlink.MarshalRule(r)
		b = append(append(b, byte(len(attrs)>>8), byte(len(attrs))), attrs...)
	}
	return b
}

// commented returns rules that have our comments but not the expressions that we
// write with them.
func commented(family nfnetlink.Family) (rules []nfnetlink.Rule) {
	comments := []string{xtables.CommentMasq}
	for _, row := range config.Conditions() {
		comments = append(comments, row.View)
	}
	for _, c := range comments {
		u := userdata.AppendString(nil, userdata.TypeComment, "ip-masq-agent: "+c)
		target := nfnetlink.Marshal(family, &expr.Target{Name: "MASQUERADE", Info: &xt.Unknown{2: 2, 60: 0}})
		rules = append(rules, nfnetlink.Rule{Family: family, UserData: u},
			nfnetlink.Rule{Family: family, UserData: u, Exprs: target},
			nfnetlink.Rule{Family: family, UserData: u, Exprs: append(nfnetlink.Marshal(family, &expr.Counter{}), target...)},
			nfnetlink.Rule{Family: family, UserData: u, Exprs: nfnetlink.Marshal(family, &expr.Payload{DestRegister: 1, Base: 1, Offset: 16, Len: 16}, &expr.Cmp{Register: 1, Data: make([]byte, 16)})})
	}
	return rules
}

// EachCommented checks rules that have our comments but not the expressions that
// we write with them.
func EachCommented(t *testing.T, check CheckRules) {
	t.Helper()
	for _, family := range []nfnetlink.Family{nfnetlink.IPv4, nfnetlink.IPv6} {
		for _, r := range commented(family) {
			check(t, family, []nfnetlink.Rule{r})
		}
		check(t, family, commented(family))
	}
}

// FuzzRawRules feeds rules in the kernel's encoding.
func FuzzRawRules(f *testing.F, check CheckRules) {
	f.Helper()
	forEachChain(f, func(family nfnetlink.Family, rules []nfnetlink.Rule) {
		f.Add(family == nfnetlink.IPv6, raw(rules))
	})
	f.Add(false, raw(commented(nfnetlink.IPv4)))
	f.Add(true, raw(commented(nfnetlink.IPv6)))
	f.Fuzz(func(t *testing.T, ipv6 bool, b []byte) {
		family := nfnetlink.IPv4
		if ipv6 {
			family = nfnetlink.IPv6
		}
		var rules []nfnetlink.Rule
		for len(b) > 2 && len(rules) < 100 {
			n := min(int(b[0])<<8|int(b[1]), len(b)-2)
			r, err := nfnetlink.ParseRule(family, b[2:2+n])
			if err != nil {
				return
			}
			rules, b = append(rules, r), b[2+n:]
		}
		check(t, family, rules)
	})
}

// EachChangedByte checks the rules of some cases, each time with a different byte changed.
func EachChangedByte(t *testing.T, check CheckRules) {
	t.Helper()
	step := 1
	if testing.Short() {
		step = 13
	}
	forEachChain(t, func(family nfnetlink.Family, rules []nfnetlink.Rule) {
		for i, r := range rules {
			if i > 2 && i < len(rules)-2 {
				continue
			}
			for j, e := range r.Exprs {
				for at := 0; at < min(len(e.Data), 64); at += step { // of a comment, only the beginning
					for _, change := range []byte{1, 0x10, 0x80, 0xff} {
						changed := slices.Clone(rules)
						changed[i].Exprs = slices.Clone(r.Exprs)
						changed[i].Exprs[j].Data = slices.Clone(e.Data)
						changed[i].Exprs[j].Data[at] ^= change
						check(t, family, changed)
					}
				}
			}
		}
	})
}
