package native

import (
	"encoding/binary"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/ruletext"
)

// mostReadBack is how many CIDRs of a set are read back. A set that somebody has
// filled with more is not read: the kernel's time for it grows with the square.
const mostReadBack = 200_000

// ReadWhole reads our table with all elements of the sets that the rules of its base
// chain refer to; nil where there is none.
func ReadWhole(c *nfnetlink.Conn) (*Own, error) {
	own, err := ReadOwn(c)
	if err != nil || own == nil {
		return nil, err
	}
	for _, r := range own.rules[BaseChain] {
		for _, name := range lookups(r) {
			s, ok := own.Sets[name]
			// A set that somebody made may hold anything.
			if !ok || s.Read || s.Flags != unix.NFT_SET_INTERVAL {
				continue
			}
			if err := s.ReadElements(c, mostReadBack); err != nil {
				return nil, err
			}
		}
	}
	return own, nil
}

// ReadBack returns the ruleset that the table, whose elements were read, decides by. It
// is ours if the table is just that, or if somebody has changed the rules and the hash
// in their comments is still that of the policy. It is exact also if somebody has
// changed the elements of a set since, but not if the rules are others than some config
// of this version yields.
func (o *Own) ReadBack() layout.Found {
	found := layout.Found{Ruleset: nft.CompilePolicy(o.readPolicy(), Layout{})}
	table := found.Tables[0]
	if len(o.Differences(table)) == 0 {
		found.Ours, found.Exact = true, true
		return found
	}
	held := o.rules[BaseChain]
	found.Ours = slices.ContainsFunc(held, func(r nfnetlink.Rule) bool {
		return strings.HasSuffix(ruletext.Comment(r), found.Hash())
	})
	last := slices.Clone(table.Chains[len(table.Chains)-1].Rules)
	if len(held) > 0 {
		last[len(last)-1].Comment = ruletext.Comment(held[len(held)-1])
	}
	said := table
	said.Chains = slices.Clone(table.Chains)
	said.Chains[len(said.Chains)-1].Rules = last
	found.Exact = len(o.Differences(said)) == 0
	return found
}

// Empty says that the table decides nothing.
func (o *Own) Empty() bool { return len(o.rules[BaseChain]) == 0 }

// readPolicy reads what the table decides. Whether it is ours shows when the policy
// is compiled again and compared.
func (o *Own) readPolicy() nft.Policy {
	p := nft.Policy{Families: []nft.FamilyPolicy{{}}}
	if o.counts("masqueraded-v6") {
		p.Families = append(p.Families, nft.FamilyPolicy{IPv6: true})
	}
	for i := range p.Families {
		o.readLists(&p.Families[i])
	}
	if _, enforced := o.chain(EnforceChain); enforced {
		p.Enforce = &nft.Enforcement{}
		for _, r := range o.rules[EnforceChain] {
			if m, ok := leftMark(r); ok {
				p.Enforce.Marks = append(p.Enforce.Marks, m)
			}
		}
	}
	for _, chain := range sortedKeys(o.rules) {
		for _, r := range o.rules[chain] {
			if chain != BaseChain || countsMasqueraded(r) {
				addMasquerade(&p, r)
			}
		}
	}
	return p
}

// counts says whether a rule of the base chain adds to the counter.
func (o *Own) counts(counter string) bool {
	return slices.ContainsFunc(o.rules[BaseChain], func(r nfnetlink.Rule) bool {
		return slices.ContainsFunc(r.Exprs, func(e nfnetlink.Expr) bool {
			return e.Name == "objref" && e.Str(unix.NFTA_OBJREF_IMM_NAME) == counter
		})
	})
}

// countsMasqueraded tells our masquerades in the base chain from those of others.
func countsMasqueraded(r nfnetlink.Rule) bool {
	return slices.ContainsFunc(r.Exprs, func(e nfnetlink.Expr) bool {
		return e.Name == "objref" && strings.HasPrefix(e.Str(unix.NFTA_OBJREF_IMM_NAME), string(nft.Masqueraded))
	})
}

// readLists fills the lists of a family from the sets that the rules refer to, and
// finds the rules of conditions without a list.
func (o *Own) readLists(f *nft.FamilyPolicy) {
	held := map[string][]config.CIDR{} // by the set's name without side
	for _, r := range o.rules[BaseChain] {
		for _, name := range lookups(r) {
			set := strings.TrimSuffix(strings.TrimSuffix(name, nft.SideA), nft.SideB)
			if s, ok := o.Sets[name]; ok && len(held[set]) == 0 {
				held[set] = cidrs(s.Holds)
			}
		}
	}
	for _, row := range config.Conditions() {
		found := func(r nfnetlink.Rule) bool { return asks(*f, row, r) }
		switch {
		case row.Set != "":
			f.Add(row, nft.List{CIDRs: held[row.Set+f.Suffix()]})
		case row.HasInterfaces():
			var found []config.Interface
			for _, r := range o.rules[BaseChain] {
				found = append(found, interfaces(*f, row, r)...)
			}
			f.AddInterfaces(row, found)
		case slices.ContainsFunc(o.rules[BaseChain], found):
			f.Questions = append(f.Questions, nft.Question{Condition: row})
		}
	}
}

func cidrs(ranges []iprange.Range) []config.CIDR {
	var out []config.CIDR
	for _, r := range ranges {
		if p, ok := r.Prefix(); ok {
			out = append(out, config.CIDR{Prefix: p})
		}
	}
	return out
}

// addMasquerade reads the switches and ports of a masquerade: of the ones with
// ports those for TCP stand for all.
func addMasquerade(p *nft.Policy, r nfnetlink.Rule) {
	if len(r.Exprs) == 0 || r.Exprs[len(r.Exprs)-1].Name != "masq" {
		return
	}
	masq := r.Exprs[len(r.Exprs)-1]
	p.RandomFully = masq.Uint32(unix.NFTA_MASQ_FLAGS)&(1<<4) != 0
	if masq.Attr(unix.NFTA_MASQ_REG_PROTO_MIN) == nil || len(r.Exprs) < 4 {
		return
	}
	proto := r.Exprs[1].Value(unix.NFTA_CMP_DATA)
	low := r.Exprs[len(r.Exprs)-3].Value(unix.NFTA_IMMEDIATE_DATA)
	high := r.Exprs[len(r.Exprs)-2].Value(unix.NFTA_IMMEDIATE_DATA)
	if r.Exprs[len(r.Exprs)-3].Name != "immediate" { // a range of one port has one
		low = high
	}
	if len(proto) == 1 && proto[0] == unix.IPPROTO_TCP && len(low) == 2 && len(high) == 2 {
		p.Ports = append(p.Ports, nft.PortRange{Min: binary.BigEndian.Uint16(low), Max: binary.BigEndian.Uint16(high)})
	}
}

// asks reports whether a rule of the base chain begins by asking for a condition
// without a list.
func asks(f nft.FamilyPolicy, row config.Condition, r nfnetlink.Rule) bool {
	var want []nfnetlink.Expr
	for _, n := range matches(nft.Question{Condition: row}, f)[0] {
		want = append(want, n.Bytecode(nfnetlink.Inet, nil)...)
	}
	return len(r.Exprs) >= len(want) && nfnetlink.EqualExprs(r.Exprs[:len(want)], want)
}

// interfaces returns the interfaces for which a rule of the base chain asks, if it
// begins by asking for a condition on them.
func interfaces(f nft.FamilyPolicy, row config.Condition, r nfnetlink.Rule) []config.Interface {
	var found []config.Interface
	for at := 3; at < len(r.Exprs) && r.Exprs[at].Name == "cmp"; at += 2 {
		name := string(r.Exprs[at].Value(unix.NFTA_CMP_DATA))
		if len(name) < unix.IFNAMSIZ {
			name += "*"
		}
		found = append(found, config.Interface{Name: strings.TrimRight(name, "\x00")})
	}
	var want []nfnetlink.Expr
	for _, match := range matches(nft.Question{Condition: row, Interfaces: found}, f) {
		for _, n := range match {
			want = append(want, n.Bytecode(nfnetlink.Inet, nil)...)
		}
	}
	if len(found) == 0 || len(r.Exprs) < len(want) || !nfnetlink.EqualExprs(r.Exprs[:len(want)], want) {
		return nil
	}
	return found
}
