package kernel

import (
	"encoding/binary"
	"hash/maphash"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/xtables"
)

// Counts says how many connections went which way since the counters were made.
type Counts struct {
	IPv6    bool
	Verdict nft.Verdict
	Packets uint64 // a counter of a nat chain counts connections
}

// Counters reads how many connections went which way; nothing where no rules
// are. In mode nftables these are the named counters of the table, and no set
// is read. In mode iptables-nft they are the sums over the chain's rules, which
// counts no connection to this node, nor one that comes to the end of the chain
// because masqueradeSrcCIDRs does not have its source; of a rule that went, what
// it had counted when this Kernel last read it stays in the sum. Where there are so many
// rules that reading them takes long, an answer is given again until a hundred
// times as long has passed.
func (k *Kernel) Counters(l nft.Layout) ([]Counts, error) {
	if l.Mode() == nft.ModeNFTables {
		return k.namedCounters()
	}
	k.countMu.Lock()
	defer k.countMu.Unlock()
	c := &k.counts
	if c.cost > cheap && time.Since(c.at) < 100*c.cost {
		return c.last, nil
	}
	start := time.Now()
	last, err := k.ruleCounters(l.Chain())
	if err == nil {
		*c = cachedCounts{last, time.Now(), time.Since(start)}
	}
	return last, err
}

// cheap is what a reading may cost at each scrape.
const cheap = 10 * time.Millisecond

type cachedCounts struct {
	last []Counts
	at   time.Time
	cost time.Duration
}

func (k *Kernel) namedCounters() ([]Counts, error) {
	objects, err := k.countConn.Objects(nfnetlink.Inet, nft.TableName)
	if err != nil {
		if nfnetlink.IsNotExist(err) {
			return nil, nil
		}
		return nil, err
	}
	var out []Counts
	for _, o := range objects {
		for _, f := range []nft.FamilyPolicy{{}, {IPv6: true}} {
			for _, v := range []nft.Verdict{nft.Local, nft.Exempt, nft.Masqueraded} {
				if o.Name == string(v)+f.Suffix() {
					out = append(out, Counts{IPv6: f.IPv6, Verdict: v, Packets: o.Packets})
				}
			}
		}
	}
	return out, nil
}

// A ruleID names a rule by what it says: one that moves is made anew, with what it
// has counted.
type ruleID struct {
	of   Counts // family and verdict
	says uint64 // a hash
}

// tallies is what the rules of mode iptables-nft have counted: a rule that goes
// takes its count along, so what it had counted when last read is kept.
type tallies struct {
	seed  maphash.Seed
	rules map[ruleID]uint64
	total map[Counts]uint64 // by family and verdict
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

func (k *Kernel) ruleCounters(chain string) ([]Counts, error) {
	if k.tallies.total == nil {
		k.tallies = tallies{seed: maphash.MakeSeed(), total: map[Counts]uint64{}}
	}
	now := map[ruleID]uint64{}
	var found []Counts
	for _, f := range []nfnetlink.Family{nfnetlink.IPv4, nfnetlink.IPv6} {
		exempt := Counts{IPv6: f == nfnetlink.IPv6, Verdict: nft.Exempt}
		masqueraded := Counts{IPv6: f == nfnetlink.IPv6, Verdict: nft.Masqueraded}
		present := false
		for _, name := range xtables.WithSubchains(chain) {
			rules, err := k.countConn.Rules(f, xtables.NATTable, name)
			if err != nil && !nfnetlink.IsNotExist(err) {
				return nil, err
			}
			for _, r := range rules {
				present = true
				packets, code, masq := counted(r)
				says := maphash.String(k.tallies.seed, nfnetlink.Key(r.Exprs))
				switch {
				case masq:
					now[ruleID{masqueraded, says}] += packets
				case code == unix.NFT_RETURN:
					now[ruleID{exempt, says}] += packets
				}
			}
		}
		if present {
			found = append(found, exempt, masqueraded)
		}
	}
	k.tallies.add(now)
	for i, c := range found {
		found[i].Packets = k.tallies.total[c]
	}
	return found, nil
}

// counted gives what a rule's counter has counted and what the rule does.
func counted(r nfnetlink.Rule) (packets uint64, verdict int32, masquerade bool) {
	for _, e := range r.Exprs {
		switch e.Name {
		case "counter":
			if b := e.Attr(unix.NFTA_COUNTER_PACKETS); len(b) == 8 {
				packets = binary.BigEndian.Uint64(b)
			}
		case "target":
			masquerade = masquerade || e.Str(unix.NFTA_TARGET_NAME) == "MASQUERADE"
		case "immediate":
			verdict, _, _ = e.Verdict()
		}
	}
	return packets, verdict, masquerade
}
