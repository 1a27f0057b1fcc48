package nft

import (
	"encoding/binary"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/ruletext"
)

// ReadBack gives the ruleset that a previous run, of whichever mode, left in
// the kernel; false where there is none, or none that this version could have
// written. Its CIDRs have no place in a file.
func (k *Kernel) ReadBack() (Ruleset, bool, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	own, err := again(k.readWhole)
	if err != nil {
		return Ruleset{}, false, err
	}
	if own != nil {
		if r := compile(own.policy(), Options{Mode: ModeNFTables}); len(own.differences(r.Tables[0])) == 0 {
			return r, true, nil
		}
	}
	return k.readBackXT()
}

// Live gives the policy by which the kernel decides now, also where somebody
// has changed the elements of a set since; false where there are no rules, or
// others than some config of this version yields.
func (k *Kernel) Live() (Policy, bool, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	own, err := again(k.readWhole)
	if err != nil {
		return Policy{}, false, err
	}
	if own != nil {
		r := compile(own.policy(), Options{Mode: ModeNFTables})
		base := r.Tables[0].Chains[len(r.Tables[0].Chains)-1]
		if held := own.rules[chainName]; len(held) > 0 {
			base.Rules[len(base.Rules)-1].Comment = ruletext.Comment(held[len(held)-1])
		}
		return r.Policy, len(own.differences(r.Tables[0])) == 0, nil
	}
	r, found, err := k.readBackXT()
	return r.Policy, found, err
}

// readWhole reads our table with all elements.
func (k *Kernel) readWhole() (*ownTable, error) {
	own, err := readOwn(k.conn)
	if err != nil || own == nil {
		return nil, err
	}
	for _, name := range sortedKeys(own.sets) {
		s := own.sets[name]
		if s.holds, err = k.conn.Elements(s.Family, s.Table, s.Name); err != nil {
			return nil, err
		}
		s.read = true
	}
	return own, nil
}

// policy reads what the table decides. Whether it is ours shows when the policy
// is compiled again and compared.
func (o *ownTable) policy() Policy {
	p := Policy{Families: []FamilyPolicy{{}}}
	if o.counts("masqueraded-v6") {
		p.Families = append(p.Families, FamilyPolicy{IPv6: true})
	}
	for i := range p.Families {
		o.readLists(&p.Families[i])
	}
	for _, chain := range sortedKeys(o.rules) {
		for _, r := range o.rules[chain] {
			p.addMasquerade(r)
		}
	}
	return p
}

// counts says whether a rule of the base chain adds to the counter.
func (o *ownTable) counts(counter string) bool {
	return slices.ContainsFunc(o.rules[chainName], func(r nfnetlink.Rule) bool {
		return slices.ContainsFunc(r.Exprs, func(e nfnetlink.Expr) bool {
			return e.Name == "objref" && e.Str(unix.NFTA_OBJREF_IMM_NAME) == counter
		})
	})
}

// readLists fills the lists of a family from the sets that the rules refer to.
func (o *ownTable) readLists(f *FamilyPolicy) {
	lists := map[string]*List{
		"masq-src" + f.suffix(): &f.MasqSrc, "non-masq-src" + f.suffix(): &f.NonMasqSrc,
		"force-masq" + f.suffix(): &f.Force, "non-masq" + f.suffix(): &f.NonMasq,
	}
	for _, r := range o.rules[chainName] {
		for _, name := range lookups(r) {
			list := lists[strings.TrimSuffix(strings.TrimSuffix(name, sideA), sideB)]
			held, ok := o.sets[name]
			if list == nil || !ok || len(list.CIDRs) > 0 {
				continue
			}
			for _, r := range held.holds {
				if p, ok := r.Prefix(); ok {
					list.CIDRs = append(list.CIDRs, config.CIDR{Prefix: p})
				}
			}
		}
	}
}

// addMasquerade reads the switches and ports of a masquerade: of the ones with
// ports those for TCP stand for all.
func (p *Policy) addMasquerade(r nfnetlink.Rule) {
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
		p.Ports = append(p.Ports, PortRange{binary.BigEndian.Uint16(low), binary.BigEndian.Uint16(high)})
	}
}

// readBackXT reads a policy of mode iptables-nft.
func (k *Kernel) readBackXT() (Ruleset, bool, error) {
	s, err := again(func() (*state, error) {
		s := &state{}
		return s, k.readShared(s, Ruleset{}, true)
	})
	if err != nil {
		return Ruleset{}, false, err
	}
	names := s.shared(nfnetlink.IPv4).ours()
	if len(names) == 0 {
		return Ruleset{}, false, nil
	}
	p, err := s.shared(nfnetlink.IPv4).policy(names[0])
	if err != nil {
		return Ruleset{}, false, err
	}
	if six, err := s.shared(nfnetlink.IPv6).policy(names[0]); err == nil && slices.Contains(s.shared(nfnetlink.IPv6).ours(), names[0]) {
		p.Families = append(p.Families, six.Families...)
	}
	return compile(p, Options{Mode: ModeIPTables, Chain: names[0]}), true, nil
}
