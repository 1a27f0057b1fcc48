package kernel

import (
	"context"
	"fmt"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/nfnetlink"
)

// A Removal selects what Cleanup removes.
type Removal int

// The removals.
const (
	Ours       Removal = iota // what any of our modes installed
	WithLegacy                // also the chains of iptables-based agents
	LegacyOnly                // only those
)

// Cleanup removes rules in one transaction, and returns the names of what it
// removed.
func (k *Kernel) Cleanup(ctx context.Context, what Removal) ([]string, error) {
	k.verified.generation = 0
	s, plan, _, err := k.carryOut(nil, func(since *state) (*state, error) {
		return k.removable(ctx, what, since)
	}, func(s *state) (*layout.Plan, error) { return s.plan(nft.Ruleset{}, layout.Staged{}) })
	if err != nil {
		return nil, fmt.Errorf("remove: %w", err)
	}
	removed := s.names()
	if what != LegacyOnly {
		removed = append(removed, k.reportEmptied(plan.Emptied)...)
	}
	return removed, nil
}

// Installed returns the names of what [Kernel.Cleanup] would remove, without writing.
func (k *Kernel) Installed(ctx context.Context, what Removal) ([]string, error) {
	s, err := k.removable(ctx, what, nil)
	if err != nil {
		return nil, err
	}
	return s.names(), nil
}

// OnlyNAT reports whether the base chain of our table is the only one of type nat
// in nf_tables. When it is deleted, the kernel stops translating in this
// namespace, and masqueraded connections break.
func (k *Kernel) OnlyNAT(ctx context.Context) (bool, error) {
	ours := false
	for _, f := range []nfnetlink.Family{nfnetlink.IPv4, nfnetlink.IPv6, nfnetlink.Inet} {
		chains, err := again(ctx, func() ([]nfnetlink.Chain, error) { return k.conn.Chains(f) })
		if err != nil {
			return false, err
		}
		for _, c := range chains {
			switch {
			case c.Hook == nil || c.Hook.Type != "nat":
			case c.Family == nfnetlink.Inet && c.Table == nft.TableName:
				ours = true
			default:
				return false, nil
			}
		}
	}
	return ours, nil
}

// removable reads what can be removed.
func (k *Kernel) removable(ctx context.Context, what Removal, since *state) (*state, error) {
	s, err := again(ctx, func() (*state, error) {
		return k.read(ctx, nft.Ruleset{}, Look{Others: true, TakeOver: what != Ours}, layout.Scope{Rules: true}, since)
	})
	if err == nil && what == LegacyOnly {
		s.held = nil
	}
	return s, err
}

// names returns the names of what a removal removes.
func (s *state) names() (names []string) {
	for _, l := range s.legacy {
		names = append(names, "another agent's "+l.String())
	}
	for _, l := range s.leftovers(nft.Ruleset{}) {
		names = append(names, l.Name+l.Place)
	}
	return names
}
