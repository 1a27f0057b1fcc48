package kernel

import (
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
	k.mu.Lock()
	defer k.mu.Unlock()
	snapshot, err := again(func() (foreign.Snapshot, error) {
		s, err := k.readRules(want, Look{Others: true})
		if err != nil {
			return foreign.Snapshot{}, err
		}
		return foreign.Read(&k.seen, s.isOurs(want))
	})
	if err != nil {
		return Others{}, err
	}
	return Others{
		Legacy:    foreign.Legacy(snapshot),
		Conflicts: foreign.Conflicts(snapshot, want.Policy.ExemptDestinations()),
	}, nil
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
