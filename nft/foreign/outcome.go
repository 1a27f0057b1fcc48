package foreign

import (
	"slices"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
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

// A Share is what a policy masquerades, and in which chain.
type Share struct {
	Src, Dst []iprange.Range // sets, of both families
	Origin   nft.Names       // as in a [nft.Region]
	Shared   bool            // in iptables' POSTROUTING, after a jump
	Priority int32           // of the base chain that decides
}

// Overruled finds the rules that override the policy for connections which it
// masquerades, or that did so while another agent's jump was in POSTROUTING. Of
// kind [Exempts] are those before the jump, or all if there is none; of kind
// [Translates] are those that act before this agent.
//
// The second result is that of [Conflicts].
func Overruled(s Snapshot, share Share) ([]Conflict, int) {
	w := newFinder(s, share.Origin)
	for _, c := range w.bases() {
		if c.dropsAll() && len(iprange.Intersect(share.Dst, anywhere(c.Family))) > 0 {
			w.base = c.Chain
			w.add(step{chain: c, rule: nfnetlink.Rule{Family: c.Family, Table: c.Table, Chain: c.Name}}, Conflict{Kind: Drops})
		}
	}
	for _, kind := range []Kind{Exempts, Translates, Writes} {
		w.restart()
		for _, c := range w.bases() {
			if share.concerns(kind, c) {
				w.overruledFrom(*c, kind, share)
			}
		}
	}
	return w.conflicts, w.rest()
}

// concerns reports whether rules of a base chain can be of a kind.
func (s Share) concerns(kind Kind, c *Chain) bool {
	nat := c.Hook.Type == "nat"
	switch kind {
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

// overruledFrom finds the rules of a kind that are reached from a base chain, before
// the jump to this agent or, for the kind Exempts, to any masquerade agent.
func (w *finder) overruledFrom(c Chain, kind Kind, share Share) {
	jump := w.jump(&c, kind == Exempts)
	if jump >= 0 {
		c.Rules = c.Rules[:jump]
	}
	w.dst = iprange.Intersect(share.Dst, anywhere(c.Family))
	w.visit = func(s step) {
		kind := kind
		overrules := s.leaves(len(s.via) == 0)
		switch {
		case kind == Translates:
			overrules = w.translates(s.action) && !s.Masquerade && !needed(s.packets)
		case kind == Writes:
			if s.untracks {
				kind = Untracks
			}
			overrules = w.overrides(s) && !slices.ContainsFunc(s.conditions, func(c condition) bool { return c.of == other })
		}
		if !overrules {
			return
		}
		_, dst := s.addresses()
		everything := covers(dst, w.dst)
		always := !slices.ContainsFunc(s.conditions, func(c condition) bool { return c.of != destination })
		if kind == Exempts && jump < 0 && everything && always {
			return // there was nothing after it to exempt from
		}
		conflict := Conflict{Kind: kind, Shared: share.Shared, Returns: s.verdict == unix.NFT_RETURN}
		if !everything {
			conflict.Destinations, conflict.More = w.hits(dst, true)
		}
		w.add(s, conflict)
	}
	w.begin(&c, allPackets(c.Family).in(share.Src, nil))
}

// overrides reports whether the source of packets is not what this agent makes it.
func (w *finder) overrides(s step) bool {
	return s.untracks && w.base.Hook.Priority < conntrackPriority ||
		slices.ContainsFunc(s.writes, func(w rule.Write) bool { return fieldOf(w.Field) == source })
}
