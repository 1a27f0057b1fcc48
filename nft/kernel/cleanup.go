package kernel

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
)

// Cleanup removes what any mode of ours installed, and with legacy the chains of
// iptables-based agents, in one transaction. It names what it removed; nothing
// where there was nothing.
func (k *Kernel) Cleanup(legacy bool) ([]string, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	defer k.seen.forget()
	k.at = 0
	var err error
	for range attempts {
		var s *state
		if s, err = k.readRules(nft.Ruleset{}, Look{Others: true, TakeOver: legacy}); err != nil {
			return nil, err
		}
		b, removed := s.removal()
		if err = k.conn.Commit(b, s.generation); err == nil {
			return append(removed, k.sayHeld(s.held(nft.Ruleset{}))...), nil
		}
		if !errors.Is(err, unix.ERESTART) {
			break
		}
	}
	return nil, fmt.Errorf("remove: %w", err)
}

// Installed names what [Kernel.Cleanup] would remove. It writes nothing.
func (k *Kernel) Installed(legacy bool) ([]string, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	defer k.seen.forget()
	s, err := again(func() (*state, error) { return k.readRules(nft.Ruleset{}, Look{Others: true, TakeOver: legacy}) })
	if err != nil {
		return nil, err
	}
	_, names := s.removal()
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

// removal plans the transaction that removes all that is ours.
func (s *state) removal() (b *nfnetlink.Batch, removed []string) {
	b = &nfnetlink.Batch{}
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
	for _, l := range s.legacy {
		l.Remove(b)
		removed = append(removed, "another agent's "+l.String())
	}
	return b, removed
}
