package tables

import (
	"net/netip"
	"slices"
	"sync"
	"testing"

	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"github.com/google/nftables/xt"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest/cases"
)

// encode writes rules as bytes for the fuzzer, and decode reads whatever it makes
// of them: expressions as one byte for the length of the name, the name, two
// bytes for the length of the attributes and these; a length of 0 ends a rule.
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
		c := cases.Load(t, name)
		for _, m := range cases.Modes() {
			for _, table := range c.Compile(m).Tables {
				for _, ch := range table.Chains {
					fn(table.Family, ch.Bytecode(table, nil))
				}
			}
		}
	}
}

func FuzzReadBack(f *testing.F) {
	forEachChain(f, func(family nfnetlink.Family, rules []nfnetlink.Rule) {
		f.Add(family == nfnetlink.IPv6, encode(rules))
	})
	f.Fuzz(func(t *testing.T, ipv6 bool, b []byte) {
		family := nfnetlink.IPv4
		if ipv6 {
			family = nfnetlink.IPv6
		}
		readOdd(t, family, decode(family, b))
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

// commented are rules that have our comments and lack what we write with them.
func commented(family nfnetlink.Family) (rules []nfnetlink.Rule) {
	comments := []string{nft.CommentMasq}
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

func TestRulesWithOurCommentsAloneAreReadBack(t *testing.T) {
	for _, family := range []nfnetlink.Family{nfnetlink.IPv4, nfnetlink.IPv6} {
		for _, r := range commented(family) {
			readOdd(t, family, []nfnetlink.Rule{r})
			repairOdd(family, []nfnetlink.Rule{r})
		}
		readOdd(t, family, commented(family))
	}
}

func FuzzRawRules(f *testing.F) {
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
		readOdd(t, family, rules)
		repairOdd(family, rules)
	})
}

func TestRulesChangedByOneByteAreReadBack(t *testing.T) {
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
				for at := 0; at < min(len(e.Data), 64); at += step { // of a comment, the beginning
					for _, change := range []byte{1, 0x10, 0x80, 0xff} {
						changed := slices.Clone(rules)
						changed[i].Exprs = slices.Clone(r.Exprs)
						changed[i].Exprs[j].Data = slices.Clone(e.Data)
						changed[i].Exprs[j].Data[at] ^= change
						readOdd(t, family, changed)
					}
				}
			}
		}
	})
}

// odd returns tables of either mode in which these are the rules.
func odd(family nfnetlink.Family, rules []nfnetlink.Rule) (*Shared, *Own) {
	n := &Shared{Family: family, present: true, rules: rules, chains: map[string][]nfnetlink.Rule{cases.DefaultChain: rules}}
	own := &Own{rules: map[string][]nfnetlink.Rule{nft.BaseChain: rules}, Sets: map[string]*HeldSet{}}
	for _, r := range rules {
		for _, name := range lookups(r) {
			own.Sets[name] = &HeldSet{Read: true, Holds: []iprange.Range{iprange.Of(netip.MustParsePrefix("169.254.0.0/16")), {}}}
		}
	}
	return n, own
}

// repairOdd compares such rules with those of the defaults and plans what makes them
// these: nothing panics.
func repairOdd(family nfnetlink.Family, rules []nfnetlink.Rule) {
	n, own := odd(family, rules)
	native, shared := wanted()
	_ = n.Differences(shared, cases.DefaultChain)
	n.Ensure(&nfnetlink.Batch{}, shared, cases.DefaultChain)
	_ = own.Differences(native)
	_, sides := Stage(native, own, SmallBatch)
	Flip(&nfnetlink.Batch{}, native, sides, own)
}

// wanted returns the tables of the defaults, native and shared.
var wanted = sync.OnceValues(func() (native, shared nft.Table) {
	tableOf := func(m nft.Mode) nft.Table {
		return nft.Compile(config.Default(config.Defaults{}), nft.Options{Mode: m, Chain: cases.DefaultChain}).Tables[0]
	}
	return tableOf(nft.ModeNFTables), tableOf(nft.ModeIPTables)
})

// readOdd reads rules back that anybody may have made: nothing panics, and what
// counts as ours is just what we write.
func readOdd(t *testing.T, family nfnetlink.Family, rules []nfnetlink.Rule) {
	t.Helper()
	n, own := odd(family, rules)
	if p, err := n.Policy(OwnChain{cases.DefaultChain, cases.DefaultChain}); err == nil {
		want := nft.SharedTable(p.Families[0], p, cases.DefaultChain, nft.CommentPrefixes(cases.DefaultChain)[0]).Chain(cases.DefaultChain)
		if !slices.EqualFunc(want.Bytecode(nft.Table{Family: family}, nil), rules, sameXT) {
			t.Errorf("%v is taken for ours", rules)
		}
	}
	_ = n.Ours()
	_ = n.Foreign(cases.DefaultChain)
	_ = n.Held(OwnChain{cases.DefaultChain, cases.DefaultChain})
	_, _ = own.Ruleset()
	_, _ = own.Policy()
}
