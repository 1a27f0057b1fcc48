package foreign

import (
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/nfnetlink"
)

// A Kind says what a rule of somebody else does to the outcome.
type Kind int

// The kinds of conflicts.
const (
	// Masquerades rewrites the source of what the config exempts.
	Masquerades Kind = iota
	// Exempts accepts what the config masquerades. In mode iptables-nft it stands
	// before our jump and decides; otherwise it exempts nothing from us, as it did
	// from an agent with a jump behind it.
	Exempts
	// Translates gives what the config masquerades another source address than this
	// agent does, and before it.
	Translates
)

// A Share is what a policy masquerades, and where.
type Share struct {
	IPv4, IPv6 Masqueraded
	Shared     bool  // in POSTROUTING of iptables, from a jump on
	Priority   int32 // of the base chain that decides
}

// Masqueraded are the connections of a family that a policy masquerades.
type Masqueraded struct {
	Src, Dst []iprange.Range // sorted, none overlaps another
}

// Except returns the addresses of a family that are in none of the prefixes, but for
// the loopback ones.
func Except(ipv6 bool, prefixes []netip.Prefix) []iprange.Range {
	all, loopback := everyIPv4, netip.MustParsePrefix("127.0.0.0/8")
	if ipv6 {
		all, loopback = everyIPv6, netip.MustParsePrefix("::1/128")
	}
	without := []iprange.Range{iprange.Of(loopback)}
	for _, p := range prefixes {
		without = append(without, iprange.Of(p))
	}
	return subtract([]iprange.Range{all}, normal(without))
}

// And returns the addresses of a set and of prefixes.
func And(set []iprange.Range, prefixes []netip.Prefix) []iprange.Range {
	out := slices.Clone(set)
	for _, p := range prefixes {
		out = append(out, iprange.Of(p))
	}
	return normal(out)
}

// Within returns what of a set is in one of the prefixes.
func Within(set []iprange.Range, prefixes []netip.Prefix) []iprange.Range {
	return intersect(set, And(nil, prefixes))
}

// Overruled finds the rules that decide about connections which the policy
// masquerades, or that decided while another agent's jump stood in POSTROUTING: by
// kind [Exempts] those before the jump, or all if there is none, and by kind
// [Translates] those that act before this agent does.
func Overruled(s Snapshot, share Share) []Conflict {
	w := walker{sets: map[id][]iprange.Range{}, found: map[ruleID]int{}, share: share}
	w.index(s)
	for _, w.kind = range []Kind{Exempts, Translates} {
		for i := range s.Chains {
			if c := &s.Chains[i]; c.Hook != nil && !c.Own && w.concerns(c) {
				w.overruledFrom(c)
			}
		}
	}
	return w.conflicts
}

// concerns reports whether rules of a base chain can be of the kind that is looked for.
func (w *walker) concerns(c *Chain) bool {
	if w.kind == Exempts {
		return c.Family != nfnetlink.Inet && c.Table == "nat" && c.Name == "POSTROUTING"
	}
	return c.Hook.Priority <= w.share.Priority
}

func (w *walker) overruledFrom(c *Chain) {
	w.base, w.visits = c.Chain, map[id]int{}
	w.jumped = slices.ContainsFunc(c.Rules, w.leadsToAgent)
	w.exempt = nil
	w.sources = []iprange.Range{}
	for _, f := range []struct {
		family nfnetlink.Family
		Masqueraded
	}{{nfnetlink.IPv4, w.share.IPv4}, {nfnetlink.IPv6, w.share.IPv6}} {
		if (c.Family == f.family || c.Family == nfnetlink.Inet) && len(f.Dst) > 0 {
			w.exempt = append(w.exempt, f.Dst...)
			w.sources = append(w.sources, f.Src...)
		}
	}
	w.prefixes = make([]netip.Prefix, len(w.exempt))
	w.walk(c, w.anything())
}

// leadsToAgent reports whether a rule is the jump of a masquerade agent, ours included.
func (w *walker) leadsToAgent(r nfnetlink.Rule) bool {
	to, ok := jump(r)
	if !ok {
		return false
	}
	c := w.chains[id{r.Family, r.Table, to}]
	return c != nil && c.Own || agentChains[to] || agentJump.MatchString(comment(r))
}

// past reports whether what follows a rule of the base chain is of no concern.
func (w *walker) past(r nfnetlink.Rule) bool {
	switch w.kind {
	case Exempts:
		return w.leadsToAgent(r)
	case Translates:
		to, _ := jump(r)
		c := w.chains[id{r.Family, r.Table, to}]
		return c != nil && c.Own
	}
	return false
}

// leaves reports whether packets that a rule matches do not come to the rules behind
// it in the base chain.
func (a action) leaves(inBase bool) bool {
	return a.verdict == accept || inBase && a.verdict == unix.NFT_RETURN
}

const accept = 1 // NF_ACCEPT

// outcome reports a rule that decides about what the policy masquerades.
func (w *walker) outcome(c *Chain, r nfnetlink.Rule, q path, a action, left []box) {
	for _, b := range left {
		if covers(b.src, q.src) {
			q.dst = subtract(q.dst, b.dst)
		}
	}
	dst := intersect(q.dst, w.exempt)
	everything := slices.Equal(dst, w.exempt)
	if len(dst) == 0 || markedForIt(c, q.marks) || w.kind == Translates && needed(q) {
		return
	}
	if w.kind == Exempts && !w.jumped && everything && len(q.from) == 0 && len(q.words) == 0 {
		return // nothing was behind it to exempt from
	}
	conflict := Conflict{Kind: w.kind, Shared: w.share.Shared, Returns: a.verdict == unix.NFT_RETURN}
	if !everything {
		conflict.More = len(dst) > maxNamed
		for _, d := range dst[:min(len(dst), maxNamed)] {
			conflict.Destinations = append(conflict.Destinations, d.String())
		}
	}
	w.add(c, r, q, conflict)
}
