package foreign

import (
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/rule"
)

// A Kind is the effect of another program's rule.
type Kind int

// The kinds of conflicts.
const (
	// Masquerades: the rule rewrites the source of connections that the config
	// exempts.
	Masquerades Kind = iota
	// Exempts: the rule accepts connections that the config masquerades. In mode
	// iptables-nft it is before our jump and takes effect; otherwise it does not
	// exempt them from us, as it did from an agent with a later jump.
	Exempts
	// Translates: before this agent, the rule translates connections that the
	// config masquerades, to another source address.
	Translates
)

// A Share is what a policy masquerades, and in which chain.
type Share struct {
	IPv4, IPv6 Masqueraded
	Shared     bool  // in iptables' POSTROUTING, after a jump
	Priority   int32 // of the base chain that decides
}

// Masqueraded are the connections of a family that a policy masquerades.
type Masqueraded struct {
	Src, Dst []iprange.Range // sorted, none overlaps another
}

// Except returns the addresses of a family that are in none of the prefixes,
// without the loopback ones.
func Except(ipv6 bool, prefixes []netip.Prefix) []iprange.Range {
	all, loopback := everyIPv4, netip.MustParsePrefix("127.0.0.0/8")
	if ipv6 {
		all, loopback = everyIPv6, netip.MustParsePrefix("::1/128")
	}
	without := []iprange.Range{iprange.Of(loopback)}
	for _, p := range prefixes {
		without = append(without, iprange.Of(p))
	}
	return iprange.Subtract([]iprange.Range{all}, iprange.Normal(without))
}

// And returns the union of a set and prefixes.
func And(set []iprange.Range, prefixes []netip.Prefix) []iprange.Range {
	out := slices.Clone(set)
	for _, p := range prefixes {
		out = append(out, iprange.Of(p))
	}
	return iprange.Normal(out)
}

// Within returns the part of a set that is in one of the prefixes.
func Within(set []iprange.Range, prefixes []netip.Prefix) []iprange.Range {
	return iprange.Intersect(set, And(nil, prefixes))
}

// Overruled finds the rules that override the policy for connections which it
// masquerades, or that did so while another agent's jump was in POSTROUTING. Of
// kind [Exempts] are those before the jump, or all if there is none; of kind
// [Translates] are those that act before this agent.
//
// The second result is that of [Conflicts].
func Overruled(s Snapshot, share Share) ([]Conflict, int) {
	w := newWalker(s)
	w.share = share
	for _, w.kind = range []Kind{Exempts, Translates} {
		w.restart()
		for i := range s.Chains {
			if c := &s.Chains[i]; c.Hook != nil && !c.Own && w.concerns(c) {
				w.overruledFrom(c)
			}
		}
	}
	return w.conflicts, w.rest(s)
}

// concerns reports whether rules of a base chain can be of the kind searched for.
func (w *walker) concerns(c *Chain) bool {
	if w.kind == Exempts {
		return c.Family != nfnetlink.Inet && c.Table == "nat" && c.Name == "POSTROUTING"
	}
	return c.Hook.Priority <= w.share.Priority
}

func (w *walker) overruledFrom(c *Chain) {
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
	w.begin(c.Chain)
	w.walk(c, w.anything)
}

// leadsToAgent reports whether a rule is a masquerade agent's jump, including ours.
func (w *walker) leadsToAgent(r nfnetlink.Rule) bool {
	to, ok := rule.Target(r)
	if !ok {
		return false
	}
	c := w.chains[id{r.Family, r.Table, to}]
	return c != nil && c.Own || agentChains[to] || agentJump.MatchString(comment(r))
}

// past reports whether the rules after r in the base chain are irrelevant.
func (w *walker) past(r nfnetlink.Rule) bool {
	switch w.kind {
	case Exempts:
		return w.leadsToAgent(r)
	case Translates:
		to, _ := rule.Target(r)
		c := w.chains[id{r.Family, r.Table, to}]
		return c != nil && c.Own
	}
	return false
}

// leaves reports whether packets that the rule matches do not reach the rules
// after it in the base chain.
func (a action) leaves(inBase bool) bool {
	return a.verdict == accept || inBase && a.verdict == unix.NFT_RETURN
}

const (
	drop   = 0 // NF_DROP
	accept = 1 // NF_ACCEPT
)

// everything reports whether dst contains all that the policy masquerades.
func (w *walker) everything(dst []iprange.Range) bool {
	if w.spent() {
		return slices.Equal(dst, anywhere(w.base.Family))
	}
	w.work += len(dst) + len(w.exempt)
	return covers(dst, w.exempt)
}

// outcome reports a rule that overrides the policy for what it masquerades.
func (w *walker) outcome(c *Chain, r nfnetlink.Rule, q path, a action, left []box) {
	q.dst = w.without(q, left)
	dst, everything := w.overlap(q.dst, maxNamed+1), w.everything(q.dst)
	if len(dst) == 0 || markedForIt(c, q.marks) || w.kind == Translates && needed(q) {
		return
	}
	if w.kind == Exempts && !w.jumped && everything && len(q.from) == 0 && len(q.words) == 0 {
		return // there was nothing after it to exempt from
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
