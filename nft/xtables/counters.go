package xtables

import (
	"sync"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/rule"
)

// A ruleID identifies a rule by its content: a rule that moves is created again,
// with its counter.
type ruleID struct {
	of      nft.Counts // family and verdict
	content string
}

// Tallies are sums of the counters of our rules. A deleted rule loses its counter, so its
// last known count is kept. The zero value has none.
type Tallies struct {
	mu    sync.Mutex
	rules map[ruleID]uint64
	total map[nft.Counts]uint64 // by family and verdict
}

// add updates the totals with the current counters.
func (t *Tallies) add(now map[ruleID]uint64) {
	for id, n := range now {
		// A rule with a lower count was created again.
		if before := t.rules[id]; n >= before {
			n -= before
		}
		t.total[id.of] += n
	}
	t.rules = now
}

// Counters reads the number of connections by verdict from the rules of a chain; nothing
// if there are none. It does not count connections to this node, nor those that reach the
// end of the chain because masqueradeSrcCIDRs does not contain their source.
func (t *Tallies) Counters(c *nfnetlink.Conn, chain string) ([]nft.Counts, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.total == nil {
		t.total = map[nft.Counts]uint64{}
	}
	now := map[ruleID]uint64{}
	var found []nft.Counts
	for _, f := range []nfnetlink.Family{nfnetlink.IPv4, nfnetlink.IPv6} {
		exempt := nft.Counts{IPv6: f == nfnetlink.IPv6, Verdict: nft.Exempt}
		masqueraded := nft.Counts{IPv6: f == nfnetlink.IPv6, Verdict: nft.Masqueraded}
		present := false
		for _, name := range WithSubchains(chain) {
			err := c.EachRule(f, NATTable, name, func(r nfnetlink.Rule) error {
				present = true
				packets, _ := rule.Packets(r)
				content := nfnetlink.Key(r.Exprs)
				if _, masquerades := rule.SourceNAT(r); masquerades {
					now[ruleID{masqueraded, content}] += packets
				} else if rule.Returns(r) {
					now[ruleID{exempt, content}] += packets
				}
				return nil
			})
			if err != nil && !nfnetlink.IsNotExist(err) {
				return nil, err
			}
		}
		if present {
			found = append(found, exempt, masqueraded)
		}
	}
	t.add(now)
	for i, of := range found {
		found[i].Packets = t.total[of]
	}
	return found, nil
}
