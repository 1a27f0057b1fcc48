package foreign

import (
	"net/netip"
	"testing"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfnetlink"
)

// Paths multiply: base chains, jumps from each, and chains that are reached again.
func TestSearchVisitsABoundedNumberOfRules(t *testing.T) {
	const bases, jumps, depth, rules = 20, 16, 4, 500
	handle := uint64(0)
	rule := func(chain string, exprs ...expr.Any) nfnetlink.Rule {
		handle++
		return nfnetlink.Rule{Family: nfnetlink.IPv4, Table: "t", Chain: chain, Handle: handle, Exprs: nfnetlink.Marshal(nfnetlink.IPv4, exprs...)}
	}
	marked := func(mark byte) []expr.Any {
		return []expr.Any{&expr.Meta{Key: expr.MetaKeyMARK, Register: 1}, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{mark, 0, 0, 0}}}
	}
	jumpsTo := func(chain, to string) (all []nfnetlink.Rule) {
		for i := range jumps {
			all = append(all, rule(chain, append(marked(byte(i)), &expr.Verdict{Kind: expr.VerdictJump, Chain: to})...))
		}
		return all
	}
	names := []string{"c0", "c1", "c2", "c3", "c4"}
	var s Snapshot
	for i := range depth {
		c := Chain{Chain: nfnetlink.Chain{Family: nfnetlink.IPv4, Table: "t", Name: names[i]}}
		for range rules {
			c.Rules = append(c.Rules, rule(names[i], append(marked(1), &expr.Masq{})...))
		}
		c.Rules = append(c.Rules, jumpsTo(names[i], names[i+1])...)
		s.Chains = append(s.Chains, c)
	}
	last := nfnetlink.Chain{Family: nfnetlink.IPv4, Table: "t", Name: names[depth]}
	s.Chains = append(s.Chains, Chain{Chain: last, Rules: []nfnetlink.Rule{rule(last.Name, &expr.Masq{})}})
	total := 0
	for i := range bases {
		hook := &nfnetlink.Hook{Type: "nat", Number: unix.NF_INET_POST_ROUTING, Priority: int32(i)}
		c := nfnetlink.Chain{Family: nfnetlink.IPv4, Table: "t", Name: "base" + string(rune('a'+i)), Hook: hook}
		s.Chains = append(s.Chains, Chain{Chain: c, Rules: jumpsTo(c.Name, names[0])})
	}
	for _, c := range s.Chains {
		total += len(c.Rules)
	}
	w := search(s, []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}, nil)
	if most := maxSteps + 2*total; w.steps > most {
		t.Errorf("%d rules visited, more than %d", w.steps, most)
	}
	if want := depth*rules + 1; len(w.conflicts) != want {
		t.Errorf("%d conflicts found, want %d", len(w.conflicts), want)
	}
}

// Each rule that accepts leaves one more range of destinations to the next.
func TestSearchComparesABoundedNumberOfRanges(t *testing.T) {
	const pairs = 4_000
	hook := &nfnetlink.Hook{Type: "nat", Number: unix.NF_INET_POST_ROUTING}
	c := Chain{Chain: nfnetlink.Chain{Family: nfnetlink.IPv4, Table: "t", Name: "base", Hook: hook}}
	add := func(exprs ...expr.Any) {
		handle := uint64(len(c.Rules))
		c.Rules = append(c.Rules, nfnetlink.Rule{Family: nfnetlink.IPv4, Table: "t", Chain: "base", Handle: handle, Exprs: nfnetlink.Marshal(nfnetlink.IPv4, exprs...)})
	}
	for i := range pairs {
		to := []byte{10, byte(i >> 8), byte(i), 0}
		add(&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: 16, Len: 4},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: to}, &expr.Verdict{Kind: expr.VerdictAccept})
		add(&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: 12, Len: 1},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{11}}, &expr.Masq{})
	}
	w := search(Snapshot{Chains: []Chain{c}}, []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}, nil)
	if most := maxWork + 10*len(c.Rules); w.work > most {
		t.Errorf("%d ranges compared, more than %d", w.work, most)
	}
	if len(w.conflicts) != pairs {
		t.Errorf("%d conflicts found, want %d", len(w.conflicts), pairs)
	}
}
