package neighbors

import (
	"fmt"
	"hash/maphash"
	"net/netip"
	"strings"

	"nft-masq-agent/nft/facts"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/rule"
	"nft-masq-agent/nft/trace"
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
	// another source address into the packets, whatever they are but for their addresses and
	// interfaces.
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

// A Conflict is a rule of another program that can override the configuration: what it does to
// one packet is not the policy's verdict.
type Conflict struct {
	Kind Kind
	trace.Finding
	Src, Dst netip.Addr // of the packet
	Shared   bool       // the rule comes before the jump to our chain, in the same chain

	elsewhere bool // the packet is no pod's
}

// Packets returns the rule's packet counter, or nil if it has none.
func (c Conflict) Packets() *uint64 {
	if n, counts := facts.Packets(c.Rule); counts {
		return &n
	}
	return nil
}

// ViaText returns the rules that lead to it as text.
func (c Conflict) ViaText() []string {
	words := make([]string, len(c.Via))
	for i, r := range c.Via {
		words[i] = rule.String(r)
	}
	return words
}

// Hash distinguishes conflicts by what is reported about them. It ignores the packet, counters
// and the rule's handle, which changes when the rule is recreated.
func (c Conflict) Hash(seed maphash.Seed) uint64 {
	var h maphash.Hash
	h.SetSeed(seed)
	_, _ = fmt.Fprintf(&h, "%d %s %q %q %q %q %q", c.Kind, c.Rule.Family, c.Rule.Table, c.Rule.Chain, c.Base.Name,
		nfnetlink.Key(c.Rule.Exprs), c.Open)
	return h.Sum64()
}

// Why describes what the rule does to the packet, and on which conditions.
func (c Conflict) Why() string {
	packet, where := c.Src.String()+" → "+c.Dst.String(), ""
	if len(c.Open) > 0 {
		where = " where " + strings.Join(c.Open, ", ")
	}
	switch c.Kind {
	case Exempts:
		if c.Shared {
			return packet + " is accepted" + where + " before the jump to this agent's chain, so it is not masqueraded"
		}
		return packet + " is accepted" + where + ", which no longer exempts it: see nonMasqueradeCIDRs"
	case Translates:
		return packet + " is translated" + c.newAddress() + where + ", so this agent does not masquerade it"
	case Untracks:
		return packet + " is not tracked" + where + ", so there is no NAT"
	case Writes:
		return packet + " gets another source address" + where + ", without NAT"
	case Drops:
		return "everything is dropped"
	case Masquerades:
	}
	if c.Code == trace.Masquerades {
		return packet + " is masqueraded" + where
	}
	return packet + " is translated" + c.newAddress() + where
}

func (c Conflict) newAddress() string {
	if len(c.To) != 1 {
		return ""
	}
	return " to " + c.To[0].String()
}
