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
	release, err := k.acquire(ctx)
	if err != nil {
		return nil, err
	}
	defer release()
	defer k.seen.Forget()
	k.verified.generation = 0
	for range attempts {
		var s *state
		if s, err = k.readAll(ctx, what); err != nil {
			return nil, err
		}
		var p *layout.Plan
		var removed []string
		if p, removed, err = s.removal(what); err != nil {
			return nil, err
		}
		if err = k.commit(p.Batches(), s.generation); err == nil {
			if what == LegacyOnly {
				return removed, nil
			}
			return append(removed, k.reportEmptied(p.Emptied)...), nil
		}
		if !errors.Is(err, unix.ERESTART) {
			break
		}
	}
	return nil, fmt.Errorf("remove: %w", err)
}

// readAll reads what can be removed.
func (k *Kernel) readAll(ctx context.Context, what Removal) (*state, error) {
	return k.read(ctx, nft.Ruleset{}, Look{Others: true, TakeOver: what != Ours}, layout.Scope{Rules: true})
}

// Installed returns the names of what [Kernel.Cleanup] would remove, without writing.
func (k *Kernel) Installed(ctx context.Context, what Removal) ([]string, error) {
	release, err := k.acquire(ctx)
	if err != nil {
		return nil, err
	}
	defer release()
	defer k.seen.Forget()
	s, err := again(ctx, func() (*state, error) { return k.readAll(ctx, what) })
	if err != nil {
		return nil, err
	}
	_, names, err := s.removal(what)
	return names, err
}

// OnlyNAT reports whether the base chain of our table is the only one of type nat
// in nf_tables. When it is deleted, the kernel stops translating in this
// namespace, and masqueraded connections break.
func (k *Kernel) OnlyNAT(ctx context.Context) (bool, error) {
	release, err := k.acquire(ctx)
	if err != nil {
		return false, err
	}
	defer release()
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

// removal plans the transaction that removes rules, and returns the names of what
// it removes.
func (s *state) removal(what Removal) (p *layout.Plan, removed []string, err error) {
	for _, l := range s.legacy {
		removed = append(removed, "another agent's "+l.String())
	}
	if what == LegacyOnly {
		return (&state{legacy: s.legacy}).planned(removed)
	}
	for _, h := range s.held {
		for _, l := range h.Leftovers(nft.Ruleset{}) {
			removed = append(removed, l.Name+l.Place)
		}
	}
	return s.planned(removed)
}

func (s *state) planned(removed []string) (*layout.Plan, []string, error) {
	p, err := s.plan(nft.Ruleset{}, layout.Staged{})
	return p, removed, err
}
