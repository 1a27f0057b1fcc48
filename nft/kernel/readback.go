package kernel

import (
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/xtables"
)

// ReadBack gives the ruleset that a previous run, of whichever mode, left in
// the kernel; false where there is none, or none that this version could have
// written. Its CIDRs have no place in a file.
func (k *Kernel) ReadBack() (nft.Ruleset, bool, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	own, err := k.readWhole()
	if err != nil {
		return nft.Ruleset{}, false, err
	}
	if own != nil {
		if r, ok := own.Ruleset(); ok {
			return r, true, nil
		}
	}
	return k.readBackXT((*xtables.Shared).Ours)
}

// readWhole reads our table with all elements of its sets; nil where there is none.
func (k *Kernel) readWhole() (*native.Own, error) {
	return again(func() (*native.Own, error) { return native.ReadWhole(k.conn) })
}

// Live gives the policy by which the kernel decides now, also where somebody
// has changed the elements of a set since, or wrote the rules of mode iptables-nft in
// our place; false where there are no rules, or others than some config of this
// version yields.
func (k *Kernel) Live() (nft.Policy, bool, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	own, err := k.readWhole()
	if err != nil {
		return nft.Policy{}, false, err
	}
	if own != nil {
		p, ok := own.Policy()
		return p, ok, nil
	}
	r, found, err := k.readBackXT((*xtables.Shared).Alike)
	return r.Policy, found, err
}

// Held gives what the kernel holds of ours, whatever somebody has done to it since;
// false where there is nothing. The chain is where mode iptables-nft would be. With
// alike it need not be ours: an older agent may have written it.
func (k *Kernel) Held(chain string, alike bool) (nft.Ruleset, bool, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	own, err := k.readWhole()
	if err != nil {
		return nft.Ruleset{}, false, err
	}
	if own != nil && !own.Empty() {
		r, _ := own.Ruleset()
		return r, true, nil
	}
	of := (*xtables.Shared).Ours
	if alike {
		of = (*xtables.Shared).Alike
	}
	if r, found, err := k.readBackXT(of); found || err != nil {
		return r, found, err
	}
	wanted := nft.Ruleset{Layout: xtables.Layout{Name: chain}}
	s, err := again(func() (*state, error) { return k.readRules(wanted, Look{}) })
	if err != nil {
		return nft.Ruleset{}, false, err
	}
	p := nft.Policy{}
	for _, n := range s.nat {
		if !n.JumpsTo(chain) || !alike && n.Unsigned(chain) {
			continue
		}
		held := n.Held(xtables.OwnChain{Name: chain, Text: chain})
		if len(p.Families) > 0 {
			held.Families = append(p.Families, held.Families...)
		}
		p = held
	}
	return nft.CompilePolicy(p, xtables.Layout{Name: chain}), len(p.Families) > 0, nil
}

// readBackXT reads a policy of mode iptables-nft from the first of the chains.
func (k *Kernel) readBackXT(of func(*xtables.Shared) []xtables.OwnChain) (nft.Ruleset, bool, error) {
	s, err := again(func() (*state, error) {
		s := &state{}
		k.seen.forget()
		return s, k.readShared(s, nft.Ruleset{}, Look{Others: true})
	})
	if err != nil {
		return nft.Ruleset{}, false, err
	}
	chains := of(s.shared(nfnetlink.IPv4))
	if len(chains) == 0 {
		return nft.Ruleset{}, false, nil
	}
	chain := chains[0].Text
	p, err := s.shared(nfnetlink.IPv4).Policy(chains[0])
	if err != nil {
		return nft.Ruleset{}, false, err
	}
	for _, c := range of(s.shared(nfnetlink.IPv6)) {
		if six, err := s.shared(nfnetlink.IPv6).Policy(c); err == nil && c.Text == chain && len(p.Families) == 1 {
			p.Families = append(p.Families, six.Families...)
		}
	}
	return nft.CompilePolicy(p, xtables.Layout{Name: chain}), true, nil
}
