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

// A Removal says what is removed.
type Removal int

// The removals.
const (
	Ours       Removal = iota // what any mode of ours installed
	WithLegacy                // and the chains of iptables-based agents
	LegacyOnly                // these alone
)

// Cleanup removes rules in one transaction. It names what it removed; nothing
// where there was nothing.
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
			return append(removed, k.sayEmptied(p.Emptied)...), nil
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

// Installed names what [Kernel.Cleanup] would remove. It writes nothing.
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

// OnlyNAT says whether the base chain of our table is the only one of type nat in
// nf_tables. When it goes, the kernel stops translating in this namespace, and
// connections that are masqueraded end.
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

// removal plans the transaction that removes rules, and names what goes.
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
