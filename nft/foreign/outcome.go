package foreign

import (
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/judge"
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
	// Untracks, Writes: the rule turns off connection tracking, and with it NAT, or writes
	// another source address into the packets, for all connections that the config
	// masquerades of some sources, destinations and interfaces.
	Untracks
	Writes
	// Drops: the base chain drops everything by its policy.
	Drops
)

// String returns the kind as a word that is stable.
func (k Kind) String() string {
	return [...]string{"masquerades", "accepts", "translates", "untracks", "writes", "drops"}[k]
}

// Does returns what such rules do, for one and for several rules.
func (k Kind) Does() (one, several string) {
	words := [...][2]string{
		Masquerades: {"masquerades", "masquerade"}, Exempts: {"accepts", "accept"}, Translates: {"translates", "translate"},
		Untracks: {"turns off connection tracking for", "turn off connection tracking for"},
		Writes:   {"writes a source address into", "write source addresses into"}, Drops: {"drops", "drop"},
	}[k]
	return words[0], words[1]
}

// Remedy returns what to do about such rules.
func (k Kind) Remedy() string {
	return [...]string{
		Masquerades: "Turn off masquerading in that program, or set enforceNonMasquerade",
		Exempts:     "Remove the rules, or add their destinations to nonMasqueradeCIDRs",
		Translates:  "Turn off that translation in the program, or exempt its traffic here",
		Untracks:    "Without connection tracking there is no NAT: remove the rules, or exempt their traffic here",
		Writes:      "Remove the rules, or exempt their traffic here",
		Drops:       "Accept pod traffic in that chain, or set its policy to accept",
	}[k]
}

// A Share is what a policy exempts and what it masquerades, and in which chain.
type Share struct {
	Exempt   []netip.Prefix  // destinations
	Src, Dst []iprange.Range // of what it masquerades: sets, of both families
	Origin   judge.Names     // of pods, as in a [judge.Region]
	Pods     bool            // the policy is for pods alone, not for what the node sends
	Shared   bool            // in iptables' POSTROUTING, after a jump
	Priority int32           // of the base chain that decides
}

// Conflicts finds the rules, other than ours, that can rewrite the source address of
// connections to the exempt destinations, and those that override the policy for connections
// which it masquerades, or that did so while another agent's jump was in POSTROUTING: of
// kind [Exempts] are those before the jump, or all if there is none; of kind [Translates]
// are those that act before this agent. It omits masquerading known to be harmless: by
// kube-proxy and the CNI plugin portmap, for packets that they have marked, and of
// connections from an address to itself.
//
// The order is that in which packets traverse the rules, kind by kind and family by family.
//
// The search ends after a few thousand conflicts. The second result is then the
// number of rules that it did not examine.
func Conflicts(s Snapshot, share Share) ([]Conflict, int) {
	w := newFinder(s, nil)
	if w.search(Masquerades, share); (share.Pods || share.Origin != nil) && !w.full {
		pods := newFinder(s, share.Origin)
		pods.facts.ofPod = true
		if share.Pods { // a pod's address is not one of the node's
			pods.facts.SrcType = unix.RTN_UNICAST
		}
		pods.search(Masquerades, share)
		for at, i := range w.found {
			_, meets := pods.found[at]
			w.conflicts[i].elsewhere = !meets
		}
	}
	w.facts.origin = share.Origin
	for _, c := range w.bases() {
		if c.dropsAll() && len(iprange.Intersect(share.Dst, anywhere(c.Family))) > 0 {
			w.base = c.Chain
			w.add(step{chain: c, rule: nfnetlink.Rule{Family: c.Family, Table: c.Table, Chain: c.Name}}, Conflict{Kind: Drops})
		}
	}
	for _, kind := range []Kind{Exempts, Translates, Writes} {
		w.search(kind, share)
	}
	return w.conflicts, w.rest()
}

// search finds the rules of a kind.
func (w *finder) search(kind Kind, share Share) {
	w.restart()
	for _, c := range w.bases() {
		if share.concerns(kind, c) {
			w.searchFrom(*c, kind, share)
		}
	}
}

// concerns reports whether rules of a base chain can be of a kind.
func (s Share) concerns(kind Kind, c *Chain) bool {
	nat := c.Hook.Type == "nat"
	switch kind {
	case Masquerades:
		return nat
	case Exempts:
		return nat && c.Family != nfnetlink.Inet && c.Table == "nat" && c.Name == "POSTROUTING"
	case Translates:
		return nat && c.Hook.Priority <= s.Priority
	}
	return !nat && c.Hook.Number != unix.NF_INET_FORWARD
}

// dropsAll reports whether a base chain drops everything by its policy.
func (c *Chain) dropsAll() bool {
	maySpare := func(e nfnetlink.Expr) bool {
		code, _, ends := e.Verdict()
		return e.JumpsByMap() || ends && code != drop && code != unix.NFT_RETURN && code != unix.NFT_CONTINUE
	}
	return c.Hook.Type != "nat" && c.Policy == drop && !c.Unread &&
		!slices.ContainsFunc(c.Rules, func(r nfnetlink.Rule) bool { return slices.ContainsFunc(r.Exprs, maySpare) })
}

// searchFrom finds the rules of a kind that are reached from a base chain: those that
// override the policy, before the jump to this agent or, for the kind Exempts, to any
// masquerade agent.
func (w *finder) searchFrom(c Chain, kind Kind, share Share) {
	p, jump := allPackets(c.Family), -1
	if w.dst = exemptions(share.Exempt); kind != Masquerades {
		w.dst, p = iprange.Intersect(share.Dst, anywhere(c.Family)), p.in(share.Src, nil)
		if jump = w.jump(&c, kind == Exempts); jump >= 0 {
			c.Rules = c.Rules[:jump]
		}
	}
	w.visit = func(s step) {
		kind := kind
		overrules := s.leaves(len(s.via) == 0)
		switch kind {
		case Masquerades, Translates:
			overrules = w.translates(s.action) && !needed(s.packets) && (kind == Masquerades || !s.Masquerade)
		case Writes:
			if s.untracks {
				kind = Untracks
			}
			overrules = w.overrides(s) && !slices.ContainsFunc(s.conditions, func(c condition) bool { return c.of == other })
		}
		if !overrules {
			return
		}
		src, dst := s.addresses()
		everything := kind != Masquerades && covers(dst, w.dst)
		always := !slices.ContainsFunc(s.conditions, func(c condition) bool { return c.of != destination })
		if kind == Exempts && jump < 0 && everything && always {
			return // there was nothing after it to exempt from
		}
		conflict := Conflict{Kind: kind, Shared: share.Shared, Returns: s.verdict == unix.NFT_RETURN, src: src}
		if !everything {
			conflict.Destinations, conflict.More = w.hits(dst, kind != Masquerades)
		}
		w.add(s, conflict)
	}
	w.begin(&c, p)
}

// overrides reports whether the source of packets is not what this agent makes it.
func (w *finder) overrides(s step) bool {
	return s.untracks && w.base.Hook.Priority < conntrackPriority ||
		slices.ContainsFunc(s.writes, func(w rule.Write) bool { return fieldOf(w.Field) == source })
}
