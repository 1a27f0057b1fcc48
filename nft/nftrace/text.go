package nftrace

import (
	"cmp"
	"fmt"
	"strings"

	"nft-masq-agent/nft/nfnetlink"
)

// Headline says in a sentence what the destination sees, and which rule is the reason.
func (t Trace) Headline() string {
	destination := t.Destination
	if t.Endpoint != "" {
		destination += " (endpoint " + t.Endpoint + ")"
	}
	if t.Local {
		destination = "this node, at " + destination + ","
	}
	switch t.Outcome {
	case Translated:
		return fmt.Sprintf("%s sees %s, not the sender's %s: %s", destination, cmp.Or(t.SeenAs, "another address"), t.Source,
			t.reason("no rule of nf_tables translates the source"))
	case Kept, Untracked:
		return fmt.Sprintf("%s sees %s, the sender's address: %s", destination, t.SeenAs,
			t.reason("no rule of nf_tables translates the source"))
	case Dropped, Rejected:
		return fmt.Sprintf("%s does not see the packet from %s: %s", destination, t.Source, t.reason("it was dropped"))
	}
	return fmt.Sprintf("%s does not see the packet from %s: it ended on this node, and no rule of nf_tables dropped it; "+
		"the reason may be a missing route, forwarding that is off, a reverse path filter, a queue, or legacy ip_tables",
		destination, t.Source)
}

// reason says what the rule did that decided; otherwise is the text if no rule did.
func (t Trace) reason(otherwise string) string {
	if t.Rule == nil {
		return otherwise
	}
	owner := map[Owner]string{
		Agent: "this agent's", Older: "an older masquerade agent's", Other: "another program's",
	}[t.Rule.Owner]
	if t.Rule.Handle == 0 {
		return fmt.Sprintf("the policy of %s chain %s drops it", owner, t.Rule.chain())
	}
	verb, ok := verbs[t.Rule.Action]
	if !ok {
		verb = "decides: " + t.Rule.Action
	}
	return fmt.Sprintf("%s rule with handle %d in chain %s %s", owner, t.Rule.Handle, t.Rule.chain(), verb)
}

// verbs say what the actions that can decide do.
var verbs = map[string]string{
	"masquerade": "masquerades it", "snat": "translates the source", "drop": "drops it", "reject": "rejects it",
	"notrack": "keeps it from being tracked, so that nothing translates it",
	rewrite:   "writes another source into the packet, without connection tracking",
	"return":  "exempts it", "accept": "exempts it",
}

// chain returns the name of the rule's chain, quoted.
func (r Rule) chain() string {
	return fmt.Sprintf("%s %s %s", r.Family, nfnetlink.Quote(r.Table), nfnetlink.Quote(r.Chain))
}

// String returns the headline, the rule that decided, and each base chain that the packet met with the rules
// that matched.
func (t Trace) String() string {
	var b strings.Builder
	b.WriteString(t.Headline() + "\n")
	if t.Rule != nil {
		if t.Rule.Comment != "" {
			fmt.Fprintf(&b, "  comment: %s\n", nfnetlink.Quote(t.Rule.Comment))
		}
		fmt.Fprintf(&b, "  on the node: %s\n", t.Rule.Command)
		if t.Outcome == Translated && t.Rule.Owner == Other {
			b.WriteString("  if the destination should see the sender: turn this rule off, or set enforceNonMasquerade\n")
		}
	}
	fmt.Fprintf(&b, "\nThe first packet (%s, %s to %s) met these chains:\n", t.Protocol, t.Source, t.Destination)
	if len(t.Chains) == 0 {
		b.WriteString("  none\n")
	}
	for _, c := range t.Chains {
		fmt.Fprintf(&b, "  %-11s %4d  %s %s %s", c.Hook, c.Priority, c.Family, nfnetlink.Quote(c.Table),
			nfnetlink.Quote(c.Name))
		if c.Policy != "" {
			fmt.Fprintf(&b, ": %s (policy)", c.Policy)
		}
		b.WriteString("\n")
		for _, r := range c.Rules {
			b.WriteString(strings.Repeat("  ", r.Depth+10) + r.line() + "\n")
		}
	}
	return b.String()
}

func (r Rule) line() string {
	text := fmt.Sprintf("handle %d: %s", r.Handle, r.Action)
	if r.Target != "" {
		text += " " + nfnetlink.Quote(r.Target)
	}
	if r.Comment != "" {
		text += "  # " + nfnetlink.Quote(r.Comment)
	}
	return text
}
