package xtables

import (
	"hash/maphash"
	"sync"
	"time"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/rule"
)

// ruleCounters sums the counters of our chain's rules. It has a separate
// connection and lock, so that a scrape does not wait while chains are written.
type ruleCounters struct {
	mu      sync.Mutex
	conn    *nfnetlink.Conn
	tallies tallies
	last    []nft.Counts
	lastAt  time.Time
	lasted  time.Duration
}

// Counters implements [layout.Reader]: sums over the chain's rules. They do not
// count connections to this node, nor those that reach the end of the chain
// because masqueradeSrcCIDRs does not contain their source. The last known count
// of a deleted rule stays in the sum. If reading takes long, the result is cached
// for a hundred times as long.
func (c *ruleCounters) Counters(l nft.Layout) ([]nft.Counts, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.lasted > cheap && time.Since(c.lastAt) < 100*c.lasted {
		return c.last, nil
	}
	start := time.Now()
	last, err := c.count(l.Chain())
	if err == nil {
		c.last, c.lastAt, c.lasted = last, time.Now(), time.Since(start)
	}
	return last, err
}

// Close closes the connection.
func (c *ruleCounters) Close() error { return c.conn.Close() }

// cheap is how long reading may take at each scrape.
const cheap = 10 * time.Millisecond

// A ruleID identifies a rule by its content: a rule that moves is created again,
// with its counter.
type ruleID struct {
	of   nft.Counts // family and verdict
	says uint64     // a hash
}

// tallies accumulates the counters of rules in mode iptables-nft: a deleted rule
// loses its counter, so its last known count is kept.
type tallies struct {
	seed  maphash.Seed
	rules map[ruleID]uint64
	total map[nft.Counts]uint64 // by family and verdict
}

// add updates the totals with the current counters.
func (t *tallies) add(now map[ruleID]uint64) {
	for id, n := range now {
		// A rule with a lower count was created again.
		if before := t.rules[id]; n >= before {
			n -= before
		}
		t.total[id.of] += n
	}
	t.rules = now
}

func (c *ruleCounters) count(chain string) ([]nft.Counts, error) {
	if c.tallies.total == nil {
		c.tallies = tallies{seed: maphash.MakeSeed(), total: map[nft.Counts]uint64{}}
	}
	now := map[ruleID]uint64{}
	var found []nft.Counts
	for _, f := range families() {
		exempt := nft.Counts{IPv6: f == nfnetlink.IPv6, Verdict: nft.Exempt}
		masqueraded := nft.Counts{IPv6: f == nfnetlink.IPv6, Verdict: nft.Masqueraded}
		present := false
		for _, name := range WithSubchains(chain) {
			err := c.conn.EachRule(f, NATTable, name, func(r nfnetlink.Rule) error {
				present = true
				packets, _ := rule.Packets(r)
				says := maphash.String(c.tallies.seed, nfnetlink.Key(r.Exprs))
				if _, masquerades := rule.Masquerades(r); masquerades {
					now[ruleID{masqueraded, says}] += packets
				} else if rule.Returns(r) {
					now[ruleID{exempt, says}] += packets
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
	c.tallies.add(now)
	for i, of := range found {
		found[i].Packets = c.tallies.total[of]
	}
	return found, nil
}
