package kernel

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
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
func (k *Kernel) Cleanup(what Removal) ([]string, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	defer k.seen.forget()
	k.at = 0
	var err error
	for range attempts {
		var s *state
		if s, err = k.readRules(nft.Ruleset{}, Look{Others: true, TakeOver: what != Ours}); err != nil {
			return nil, err
		}
		b, removed := s.removal(what)
		if err = k.conn.Commit(b, s.generation); err == nil {
			if what == LegacyOnly {
				return removed, nil
			}
			return append(removed, k.sayHeld(s.held(nft.Ruleset{}))...), nil
		}
		if !errors.Is(err, unix.ERESTART) {
			break
		}
	}
	return nil, fmt.Errorf("remove: %w", err)
}

// Installed names what [Kernel.Cleanup] would remove. It writes nothing.
func (k *Kernel) Installed(what Removal) ([]string, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	defer k.seen.forget()
	s, err := again(func() (*state, error) { return k.readRules(nft.Ruleset{}, Look{Others: true, TakeOver: what != Ours}) })
	if err != nil {
		return nil, err
	}
	_, names := s.removal(what)
	return names, nil
}

// OnlyNAT says whether the base chain of our table is the only one of type nat in
// nf_tables. When it goes, the kernel stops translating in this namespace, and
// connections that are masqueraded end.
func (k *Kernel) OnlyNAT() (bool, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	ours := false
	for _, f := range []nfnetlink.Family{nfnetlink.IPv4, nfnetlink.IPv6, nfnetlink.Inet} {
		chains, err := again(func() ([]nfnetlink.Chain, error) { return k.conn.Chains(f) })
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

// removal plans the transaction that removes rules.
func (s *state) removal(what Removal) (b *nfnetlink.Batch, removed []string) {
	b = &nfnetlink.Batch{}
	for _, l := range s.legacy {
		l.Remove(b)
		removed = append(removed, "another agent's "+l.String())
	}
	if what == LegacyOnly {
		return b, removed
	}
	if s.own != nil {
		b.DelTable(s.own.Family, s.own.Name)
		removed = append(removed, fmt.Sprintf("table inet %s", nft.TableName))
	}
	for _, n := range s.nat {
		s.remove(b, n, nft.Ruleset{})
		for _, c := range n.Leftovers("", false) {
			removed = append(removed, fmt.Sprintf("chain %s in table %s nat", c, n.Family))
		}
	}
	return b, removed
}
