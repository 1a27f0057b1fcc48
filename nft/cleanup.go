package nft

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfnetlink"
)

// Cleanup removes what any mode of ours installed, and with legacy the chains of
// iptables-based agents, in one transaction. It names what it removed; nothing
// where there was nothing.
func (k *Kernel) Cleanup(legacy bool) ([]string, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.at = 0
	var err error
	for range attempts {
		var s *state
		if s, err = k.readRules(Ruleset{}, Look{Others: true, TakeOver: legacy}); err != nil {
			return nil, err
		}
		b, removed := s.removal()
		if err = k.conn.Commit(b, s.generation); err == nil {
			return removed, nil
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
	s, err := k.readRules(Ruleset{}, Look{Others: true, TakeOver: legacy})
	if err != nil {
		return nil, err
	}
	_, names := s.removal()
	return names, nil
}

// removal plans the transaction that removes all that is ours.
func (s *state) removal() (b *nfnetlink.Batch, removed []string) {
	b = &nfnetlink.Batch{}
	if s.own != nil {
		b.DelTable(s.own.Family, s.own.Name)
		removed = append(removed, fmt.Sprintf("table inet %s", TableName))
	}
	for _, n := range s.nat {
		left := n.leftovers("", false)
		if len(left) > 0 {
			n.remove(b, left)
		}
		for _, name := range left {
			removed = append(removed, fmt.Sprintf("chain %s in table %s nat", name, n.family))
		}
	}
	for _, l := range s.legacy {
		l.Remove(b)
		removed = append(removed, "another agent's "+l.String())
	}
	return b, removed
}

// Counts says how many connections went which way since the counters were made.
type Counts struct {
	IPv6    bool
	Verdict Verdict
	Packets uint64 // a counter of a nat chain counts connections
}

// Counters reads the named counters of mode nftables; none where the table is
// not there. No set is read.
func (k *Kernel) Counters() ([]Counts, error) {
	objects, err := k.conn.Objects(nfnetlink.Inet, TableName)
	if err != nil {
		if nfnetlink.IsNotExist(err) {
			return nil, nil
		}
		return nil, err
	}
	var out []Counts
	for _, o := range objects {
		for _, f := range []FamilyPolicy{{}, {IPv6: true}} {
			for _, v := range []Verdict{Local, Exempt, Masqueraded} {
				if o.Name == string(v)+f.suffix() {
					out = append(out, Counts{IPv6: f.IPv6, Verdict: v, Packets: o.Packets})
				}
			}
		}
	}
	return out, nil
}
