package kernel

import (
	"net/netip"
	"slices"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/foreign"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/tables"
)

// Others is what else masquerades on this node.
type Others struct {
	// Legacy are chains and jumps of iptables-based agents.
	Legacy []foreign.LegacyChain
	// Conflicts are rules that masquerade what the policy exempts.
	Conflicts []foreign.Conflict
}

// OlderAgentDecides says whether packets meet rules of an iptables-based agent.
func (o Others) OlderAgentDecides() bool {
	return slices.ContainsFunc(o.Legacy, foreign.LegacyChain.Decides)
}

// Others looks for the rules of others. It reads every chain that a packet can
// meet in a nat chain of postrouting, and no other.
func (k *Kernel) Others(want nft.Ruleset) (Others, error) {
	snapshot, err := k.snapshot(want)
	if err != nil {
		return Others{}, err
	}
	return Others{
		Legacy:    foreign.Legacy(snapshot),
		Conflicts: foreign.Conflicts(snapshot, want.Policy.ExemptDestinations()),
	}, nil
}

// Rewrites finds all rules of others that can rewrite a source address.
func (k *Kernel) Rewrites(want nft.Ruleset) ([]foreign.Rewrite, error) {
	snapshot, err := k.snapshot(want)
	if err != nil {
		return nil, err
	}
	return foreign.Rewrites(snapshot), nil
}

func (k *Kernel) snapshot(want nft.Ruleset) (foreign.Snapshot, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return again(func() (foreign.Snapshot, error) {
		s, err := k.readRules(want, Look{Others: true})
		if err != nil {
			return foreign.Snapshot{}, err
		}
		return foreign.Read(&k.seen, s.isOurs(want))
	})
}

// isOurs tells the chains of ours from all others: those of our table, those of
// the wanted name, which are or will be ours, and those that some config of
// this version yields.
func (s *state) isOurs(want nft.Ruleset) func(nfnetlink.Chain) bool {
	ours := map[nfnetlink.Family][]string{}
	for _, n := range s.nat {
		chains := n.Ours()
		if want.Mode == nft.ModeIPTables {
			chains = append(chains, tables.OwnChain{Name: want.Chain, Text: want.Chain})
		}
		for _, c := range chains {
			ours[n.Family] = append(ours[n.Family], c.Members()...)
		}
	}
	return func(c nfnetlink.Chain) bool {
		if c.Family == nfnetlink.Inet {
			return c.Table == nft.TableName
		}
		return c.Table == nft.NATTable && slices.Contains(ours[c.Family], c.Name)
	}
}

// readLegacy finds what a take-over removes.
func (k *Kernel) readLegacy(s *state, want nft.Ruleset) error {
	snapshot, err := foreign.Read(&k.seen, s.isOurs(want))
	if err != nil {
		return err
	}
	s.legacy = foreign.Legacy(snapshot)
	return nil
}

// Rewritten reports whether one of the rules can meet a connection; dnat says that
// its destination was translated.
func Rewritten(rules []foreign.Rewrite) func(src, dst netip.Addr, dnat bool) bool {
	return func(src, dst netip.Addr, dnat bool) bool {
		return slices.ContainsFunc(rules, func(r foreign.Rewrite) bool { return r.Meets(src, dst, dnat) })
	}
}
