package kernel

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

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
	err := error(unix.ERESTART)
	for try := 0; try < attempts && errors.Is(err, unix.ERESTART); try++ {
		s, plan, removed, readErr := k.removal(ctx, what)
		if readErr != nil {
			return nil, readErr
		}
		if err = k.commit(plan.Batches(), s.generation); err == nil && what != LegacyOnly {
			removed = append(removed, k.reportEmptied(plan.Emptied)...)
		}
		if err == nil {
			return removed, nil
		}
	}
	return nil, fmt.Errorf("remove: %w", err)
}

// Installed returns the names of what [Kernel.Cleanup] would remove, without writing.
func (k *Kernel) Installed(ctx context.Context, what Removal) ([]string, error) {
	_, _, names, err := k.removal(ctx, what)
	return names, err
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

// removal reads what is to be removed, plans its removal, and returns its names.
func (k *Kernel) removal(ctx context.Context, what Removal) (s *state, p *layout.Plan, names []string, err error) {
	s, err = again(ctx, func() (*state, error) {
		return k.read(ctx, nft.Ruleset{}, Look{Others: true, TakeOver: what != Ours}, layout.Scope{Rules: true}, nil)
	})
	if err != nil {
		return nil, nil, nil, err
	}
	if what == LegacyOnly {
		s.held = nil
	}
	for _, l := range s.legacy {
		names = append(names, "another agent's "+l.String())
	}
	for _, l := range s.leftovers(nft.Ruleset{}) {
		names = append(names, l.Name+l.Place)
	}
	p, err = s.plan(nft.Ruleset{}, layout.Staged{})
	return s, p, names, err
}
