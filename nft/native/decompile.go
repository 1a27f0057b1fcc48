package native

import (
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/rule"
)

// maxReadBack is how many CIDRs of a set are read back: as many as a config can
// have. A larger set, filled by another program, is not read: the kernel's time
// for it grows quadratically.
const maxReadBack = config.MaxCIDRs

// readWhole reads our table with all elements of the sets that the rules of its
// base chain refer to. It returns nil if there is no table.
func readWhole(c *nfnetlink.Conn) (*Own, error) {
	own, err := ReadOwn(c)
	if err != nil || own == nil {
		return nil, err
	}
	var names []string
	for _, r := range own.rules[BaseChain] {
		names = append(names, rule.Sets(r)...)
	}
	for _, f := range families() {
		for _, r := range own.rules[snatChain(f)] {
			names = append(names, rule.Sets(r)...)
		}
		names = append(names, snatSet(f)+nft.SideA, snatSet(f)+nft.SideB)
	}
	for _, name := range names {
		s, ok := own.Sets[name]
		// A set created by another program may contain anything.
		if !ok || s.Read || s.Flags != unix.NFT_SET_INTERVAL && s.Flags != unix.NFT_SET_MAP {
			continue
		}
		if err := s.readElements(c, maxReadBack); err != nil {
			return nil, err
		}
	}
	return own, nil
}

// families are both, without any questions.
func families() []nft.FamilyPolicy { return []nft.FamilyPolicy{{}, {IPv6: true}} }

// ReadBack returns the ruleset of the table, whose elements were read. It is ours
// if the table is equal to it, or if another program changed rules and the hash
// in their comments is still that of the policy. It is exact even if another
// program changed the elements of a set, but not if no config of this version
// compiles to the rules.
func (o *Own) ReadBack() layout.Found {
	found := layout.Found{Ruleset: nft.CompilePolicy(o.readPolicy(), Layout{})}
	table := found.Tables[0]
	if len(o.Differences(table)) == 0 {
		found.Ours, found.Exact = true, true
		return found
	}
	found.Ours = o.hasHash(found.Hash())
	held := o.rules[BaseChain]
	last := slices.Clone(table.Chains[len(table.Chains)-1].Rules)
	if len(held) > 0 {
		last[len(last)-1].Comment = rule.Comment(held[len(held)-1])
	}
	reported := table
	reported.Chains = slices.Clone(table.Chains)
	reported.Chains[len(reported.Chains)-1].Rules = last
	found.Exact = len(o.Differences(reported)) == 0
	return found
}

// empty reports whether the table has no effect.
func (o *Own) empty() bool { return len(o.rules[BaseChain]) == 0 }

// readPolicy reads the policy of the table. To verify it, the policy is compiled
// again and compared.
func (o *Own) readPolicy() nft.Policy {
	p := nft.Policy{Families: []nft.FamilyPolicy{{}}}
	counts := func(counter string) func(nfnetlink.Rule) bool {
		return func(r nfnetlink.Rule) bool { return strings.HasPrefix(rule.Counter(r), counter) }
	}
	if slices.ContainsFunc(o.rules[BaseChain], counts("masqueraded-v6")) {
		p.Families = append(p.Families, nft.FamilyPolicy{IPv6: true})
	}
	for i := range p.Families {
		o.readLists(&p.Families[i])
	}
	if _, enforced := o.chain(enforceChain); enforced {
		p.Enforce = &nft.Enforcement{}
		for _, r := range o.rules[enforceChain] {
			if m, ok := leftMark(r); ok {
				p.Enforce.Marks = append(p.Enforce.Marks, m)
			}
		}
	}
	for _, r := range o.rules[BaseChain] {
		if counts(string(nft.Masqueraded))(r) {
			p.AddMasquerade(r)
		}
	}
	for _, chain := range []string{portsChain, snatChain(families()[0]), snatChain(families()[1])} {
		var read nft.Policy
		for _, r := range o.rules[chain] {
			read.AddMasquerade(r)
		}
		p.RandomFully = p.RandomFully || read.RandomFully
		if len(p.Ports) == 0 { // the same in each chain
			p.Ports = read.Ports
		}
	}
	return o.readSNAT(p)
}

// readSNAT reads snatAddresses. Rules do not refer to the sets with the CIDRs in
// the config, and an unfinished update leaves two per family: then the hash in
// the rules identifies the current one.
func (o *Own) readSNAT(p nft.Policy) nft.Policy {
	all := []nft.Policy{p}
	for i := range p.Families {
		var further []nft.Policy
		for _, p := range all {
			for _, list := range o.snatLists(p.Families[i]) {
				p := p
				p.Families = slices.Clone(p.Families)
				p.Families[i].SNAT = nft.SNAT{List: list, Present: o.readPresent(p.Families[i])}
				further = append(further, p)
			}
		}
		all = further
	}
	for _, p := range all {
		if len(all) > 1 && o.hasHash(p.Hash()) {
			return p
		}
	}
	return all[0]
}

func (o *Own) snatLists(f nft.FamilyPolicy) []nft.List {
	var all []nft.List
	for _, side := range []string{nft.SideA, nft.SideB} {
		if held, ok := o.Sets[snatSet(f)+side]; ok {
			all = append(all, nft.List{CIDRs: cidrs(held.Holds)})
		}
	}
	if len(all) == 0 {
		return []nft.List{{}}
	}
	return all
}

// hasHash reports whether the comments of the rules have the hash.
func (o *Own) hasHash(hash string) bool {
	return slices.ContainsFunc(o.rules[BaseChain], func(r nfnetlink.Rule) bool { return strings.HasSuffix(rule.Comment(r), hash) })
}

// readLists fills the lists of a family from the sets that the rules refer to,
// and finds the rules of conditions without a list.
func (o *Own) readLists(f *nft.FamilyPolicy) {
	held := map[string][]config.CIDR{} // by the set's name without suffix
	for _, r := range o.rules[BaseChain] {
		for _, name := range rule.Sets(r) {
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
			f.Questions = append(f.Questions, nft.Question{Row: row})
		}
	}
}

func cidrs(ranges []iprange.Range) []config.CIDR {
	out := make([]config.CIDR, 0, len(ranges))
	for _, r := range ranges {
		if p, ok := r.Prefix(); ok {
			out = append(out, config.CIDR{Prefix: p})
		}
	}
	return out
}

// asks reports whether a rule of the base chain begins with the check of a
// condition without a list.
func asks(f nft.FamilyPolicy, row config.Row, r nfnetlink.Rule) bool {
	var want []nfnetlink.Expr
	for _, n := range matches(nft.Question{Row: row}, f)[0] {
		want = append(want, n.Bytecode(nfnetlink.Inet, nil)...)
	}
	return len(r.Exprs) >= len(want) && nfnetlink.EqualExprs(r.Exprs[:len(want)], want)
}

// interfaces returns the interfaces that a rule of the base chain checks, if it
// begins with a condition on them.
func interfaces(f nft.FamilyPolicy, row config.Row, r nfnetlink.Rule) []config.Interface {
	var found []config.Interface
	for s := range rule.Statements(r) {
		if s.Field != "iifname" && s.Field != "oifname" {
			continue
		}
		name := string(s.Value)
		if len(name) < unix.IFNAMSIZ {
			name += "*"
		}
		found = append(found, config.Interface{Name: strings.TrimRight(name, "\x00")})
	}
	var want []nfnetlink.Expr
	for _, match := range matches(nft.Question{Row: row, Interfaces: found}, f) {
		for _, n := range match {
			want = append(want, n.Bytecode(nfnetlink.Inet, nil)...)
		}
	}
	if len(found) == 0 || len(r.Exprs) < len(want) || !nfnetlink.EqualExprs(r.Exprs[:len(want)], want) {
		return nil
	}
	return found
}
