package xtables

import (
	"hash/maphash"
	"sync"
	"time"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/rule"
)

// ruleCounters sums what the rules of our chain have counted. They are read over a
// connection and under a lock of their own: a scrape does not wait while chains are
// written.
type ruleCounters struct {
	mu      sync.Mutex
	conn    *nfnetlink.Conn
	tallies tallies
	last    []nft.Counts
	lastAt  time.Time
	lasted  time.Duration
}

// Counters implements [layout.Reader]: the sums over the chain's rules, which count no
// connection to this node, nor one that comes to the end of the chain because
// masqueradeSrcCIDRs does not have its source; of a rule that went, what it had counted
// when last read stays in the sum. If there are so many rules that reading them takes
// long, an answer is given again until a hundred times as long has passed.
func (c *ruleCounters) Counters(l nft.Layout) ([]nft.Counts, error) {
	of, ok := l.(Layout)
	if !ok {
		return nil, nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.lasted > cheap && time.Since(c.lastAt) < 100*c.lasted {
		return c.last, nil
	}
	start := time.Now()
	last, err := c.count(of.Name)
	if err == nil {
		c.last, c.lastAt, c.lasted = last, time.Now(), time.Since(start)
	}
	return last, err
}

// Close closes the connection.
func (c *ruleCounters) Close() error { return c.conn.Close() }

// cheap is what a reading may cost at each scrape.
const cheap = 10 * time.Millisecond

// A ruleID names a rule by what it says: one that moves is made anew, with what it
// has counted.
type ruleID struct {
	of   nft.Counts // family and verdict
	says uint64     // a hash
}

// tallies is what the rules of mode iptables-nft have counted: a rule that goes
// takes its count along, so what it had counted when last read is kept.
type tallies struct {
	seed  maphash.Seed
	rules map[ruleID]uint64
	total map[nft.Counts]uint64 // by family and verdict
}

// add takes in what the rules count now.
func (t *tallies) add(now map[ruleID]uint64) {
	for id, n := range now {
		// A rule that has counted less was made anew.
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
