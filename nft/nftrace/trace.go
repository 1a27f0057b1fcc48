package nftrace

import (
	"slices"
	"strings"

	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/kernel"
	"nft-masq-agent/nft/nfnetlink"
)

// A Trace is the way of one packet, the first of a new connection, through the base chains of nf_tables.
type Trace struct {
	// Protocol is tcp, udp, icmp, …, or a number.
	Protocol string `json:"protocol"`
	// Source and port as the packet was sent; for ICMP the identifier is the port.
	Source string `json:"source"`
	// Destination and port as the packet was sent.
	Destination string `json:"destination"`
	// Endpoint is the destination after DNAT, if that changed it.
	Endpoint string `json:"endpoint,omitempty"`
	// SeenAs is the source and port with which the packet left the node, or was received by it. It is absent
	// if the packet did not get there.
	SeenAs string `json:"seenAs,omitempty"`
	// Outcome is what happened to the packet.
	Outcome Outcome `json:"outcome"`
	// Local means that this node received the packet.
	Local bool `json:"local"`
	// Rule decided the outcome. It is absent if no rule of nf_tables did.
	Rule *Rule `json:"decidedBy,omitempty"`
	// Chains are the base chains that the packet met, in this order.
	Chains []Chain `json:"chains"`
}

// An Outcome is what happened to a packet.
type Outcome string

// The outcomes.
const (
	// Translated means that the source was translated: masquerade, SNAT or NETMAP.
	Translated Outcome = "translated"
	// Kept means that the packet has the source with which it was sent.
	Kept Outcome = "kept"
	// Untracked means Kept, because a rule kept the packet from being tracked.
	Untracked Outcome = "untracked"
	// Dropped means that a rule or the policy of a chain dropped the packet.
	Dropped Outcome = "dropped"
	// Rejected means that a rule dropped the packet and answered the sender.
	Rejected Outcome = "rejected"
	// Lost means that the packet ended on this node, and that no rule of nf_tables was the reason.
	Lost Outcome = "lost"
)

// A Chain is a base chain that the packet met.
type Chain struct {
	// Hook is the name of the hook, such as postrouting.
	Hook string `json:"hook"`
	// Priority within the hook; the chains with the lowest are first.
	Priority int `json:"priority"`
	// Type is filter, nat or route.
	Type string `json:"type"`
	// Family of the table.
	Family string `json:"tableFamily"`
	// Table is the name of the table.
	Table string `json:"table"`
	// Name of the chain.
	Name string `json:"name"`
	// Rules are those with a verdict, or another effect on the packet, in the order in which they matched.
	Rules []Rule `json:"rules"`
	// Policy is the verdict of the chain's policy, if no rule ended the chain: accept or drop.
	Policy string `json:"chainPolicy,omitempty"`
}

// A Rule is one that matched the packet.
type Rule struct {
	// Family of the table.
	Family string `json:"tableFamily"`
	// Table is the name of the table.
	Table string `json:"table"`
	// Chain is the name of the chain.
	Chain string `json:"chain"`
	// Handle of the rule, 0 for the policy of the chain.
	Handle uint64 `json:"handle"`
	// Comment of the rule.
	Comment string `json:"comment,omitempty"`
	// Action is what the rule did, as nft names it: accept, drop, reject, return, jump, goto, masquerade, snat,
	// dnat, redirect, tproxy, notrack, mark, queue, saddr set.
	Action string `json:"action"`
	// Target is the chain of a jump or goto.
	Target string `json:"target,omitempty"`
	// Depth counts the jumps that led to the chain.
	Depth int `json:"depth"`
	// Owner is whose rule it is.
	Owner Owner `json:"owner"`
	// Command shows the rule.
	Command string `json:"command"`
}

// An Owner is the program that a rule belongs to.
type Owner string

// The owners.
const (
	// Agent is nft-masq-agent.
	Agent Owner = "agent"
	// Older is an iptables-based masquerade agent.
	Older Owner = "older-agent"
	// Other is any other program.
	Other Owner = "other"
)

// describe turns the events of a packet into a trace, and reads the rules that they name.
func describe(c *nfnetlink.Conn, events []event) Trace {
	first := events[0].head
	if first == nil {
		first = &head{}
	}
	t := Trace{
		Protocol: conntrack.ProtocolName(first.protocol), Source: conntrack.HostPort(first.src),
		Destination: conntrack.HostPort(first.dst),
		Outcome:     Lost, Chains: []Chain{},
	}
	r := reader{conn: c, ipv6: first.src.Addr().Is6()}
	var base *Chain
	var calls []string // the chains that jumps led to
	for _, e := range events {
		if e.chain.Family == nfnetlink.Inet && e.chain.Table == kernel.TraceTable {
			t.arrive(e, first)
			continue
		}
		if e.head != nil {
			t.Chains = append(t.Chains, r.base(e.chain))
			base = &t.Chains[len(t.Chains)-1]
			calls = nil
		}
		if base == nil {
			continue // the events before were lost
		}
		if e.kind == endsWithPolicy {
			base.Policy = verdictName(e.code)
			if e.drops() {
				t.Outcome = Dropped
				t.Rule = &Rule{
					Family: base.Family, Table: base.Table, Chain: base.Name, Action: base.Policy,
					Owner: ownerOf(e.chain), Command: Command(e.chain),
				}
			}
			continue
		}
		if e.handle == 0 { // it is the end of the chain
			continue
		}
		depth := slices.Index(calls, e.chain.Name)
		if depth < 0 {
			depth = len(calls)
		}
		calls = append(calls[:depth], e.chain.Name)
		if rule := r.rule(e); rule.Action != "" {
			rule.Depth = depth
			base.Rules = append(base.Rules, rule)
		}
	}
	t.decide()
	return t
}

// arrive notes that the packet got to the end of a hook.
func (t *Trace) arrive(e event, sent *head) {
	hook, ok := strings.CutPrefix(e.chain.Name, endOf)
	if !ok || e.head == nil {
		return
	}
	t.Local = hook == "input"
	t.SeenAs = conntrack.HostPort(e.head.src)
	t.Outcome = Kept
	if e.head.src != sent.src {
		t.Outcome = Translated
	}
	if e.head.dst != sent.dst {
		t.Endpoint = conntrack.HostPort(e.head.dst)
	}
}

// decide finds the rule that decided the outcome.
func (t *Trace) decide() {
	var drops, source, untracks, own *Rule
	for i := range t.Chains {
		for j := range t.Chains[i].Rules {
			r := &t.Chains[i].Rules[j]
			switch r.Action {
			case "drop", "reject":
				drops = r
			case "masquerade", "snat", rewrite:
				source = r
			case "notrack":
				untracks = r
			case "return", "accept":
				if r.Owner == Agent {
					own = r
				}
			}
		}
	}
	switch {
	case t.Outcome == Dropped: // by a policy
	case drops != nil && drops.Action == "reject":
		t.Outcome = Rejected
		t.Rule = drops
	case drops != nil:
		t.Outcome = Dropped
		t.Rule = drops
	case t.Outcome == Translated, t.Outcome == Kept && source != nil:
		t.Rule = source // even if the source happens to be the same
	case t.Outcome == Kept && untracks != nil:
		t.Outcome = Untracked
		t.Rule = untracks
	case t.Outcome == Kept:
		t.Rule = own
	}
	if t.Outcome == Dropped || t.Outcome == Rejected {
		t.SeenAs = ""
	}
}
