package neighbors

import (
	"net/netip"
	"slices"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/judge"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/older"
	"nft-masq-agent/nft/routes"
	"nft-masq-agent/nft/trace"
)

// Others are rules of other programs that concern masquerading on this node.
type Others struct {
	// Legacy are chains and jumps of iptables-based agents.
	Legacy []older.Chain
	// Conflicts are rules that masquerade what the policy exempts.
	Conflicts []Conflict
	// Overruled are rules that override the policy for what it masquerades, or
	// did so with an older agent.
	Overruled []Conflict
	// Overridden are rules that would masquerade what the policy exempts if it
	// did not enforce exemptions.
	Overridden []Conflict
	// Podless are rules that masquerade what the policy exempts, but not from
	// pods according to the policy.
	Podless []Conflict
	// Accepted are those of Conflicts and Overruled that [Others.Accept] has accepted.
	Accepted []Conflict
	// XTables are tables of legacy ip_tables with rules of such agents.
	XTables []older.LegacyTable
	// Unread counts rules that were not examined because there are too many, Unasked the packets
	// that they tell apart but that were not asked about.
	Unread, Unasked int
	// Devices are the chains at hooks of network devices, which are not read.
	Devices []string
}

// Of returns the rules of Overruled that are of a kind.
func (o Others) Of(kind Kind) []Conflict {
	return slices.DeleteFunc(slices.Clone(o.Overruled), func(c Conflict) bool { return c.Kind != kind })
}

// Accept moves rules in chains that the operator accepts, each written as FAMILY
// TABLE CHAIN, from Conflicts and Overruled to Accepted.
func (o *Others) Accept(chains []string) {
	accepted := func(c Conflict) bool {
		is := slices.Contains(chains, c.Table()+" "+c.Chain())
		if is {
			o.Accepted = append(o.Accepted, c)
		}
		return is
	}
	o.Conflicts = slices.DeleteFunc(o.Conflicts, accepted)
	o.Overruled = slices.DeleteFunc(o.Overruled, accepted)
}

// Others returns other programs' rules: of every chain that is reachable from a
// postrouting chain of type nat, and of no other.
func (s *State) Others() (o Others, err error) {
	n, want := s.node, s.Want
	o.Legacy, o.Devices = s.older, names(s.others.Devices)
	if o.XTables, err = n.XTables(); err != nil {
		return Others{}, err
	}
	if !slices.ContainsFunc(s.others.Chains, func(c *trace.Chain) bool { return !c.Own }) {
		return o, nil // what is on the node does not matter
	}
	pods, err := n.pods(want.Policy)
	if err != nil {
		return Others{}, err
	}
	local, err := n.local()
	if err != nil {
		return Others{}, err
	}
	var running []netip.Addr
	for _, f := range want.Policy.Families {
		of, err := n.running(f.IPv6)
		if err != nil {
			return Others{}, err
		}
		running = append(running, of...)
	}
	found, rest := conflicts(s.others, want, pods, local, running)
	links, err := n.interfaces()
	if err != nil {
		return Others{}, err
	}
	policy := want.Policy
	if receivesNothing(policy, links) {
		policy.Enforce = nil
	}
	for _, c := range found {
		late := comesLate(policy, c)
		switch {
		case c.Kind != Masquerades:
			o.Overruled = append(o.Overruled, c)
		case late && !c.elsewhere:
			o.Overridden = append(o.Overridden, c)
		case !c.elsewhere:
			o.Conflicts = append(o.Conflicts, c)
		case !late:
			o.Podless = append(o.Podless, c)
		}
	}
	o.Unread, o.Unasked = s.others.Unread, rest
	return o, nil
}

// pods returns what pods send according to a policy, of both families. If they are known by
// the interfaces on which they are received, that is nothing from a network that is
// connected to another interface, unless a route to a part of it leads to one of those. If
// they are not, it has no Origin.
func (n *Node) pods(p nft.Policy) (pods judge.Region, err error) {
	for _, f := range p.Families {
		r := judge.Pods(f)
		if _, limited := r.OnAnyInterface(); limited {
			pods.Origin = r.Origin
		}
		pods.Src = append(pods.Src, r.Src...)
	}
	if pods.Origin == nil {
		return pods, nil
	}
	networks, err := n.networks()
	if err != nil {
		return pods, err
	}
	var here, elsewhere []netip.Prefix
	for _, is := range networks {
		switch {
		case pods.Origin.Has(is.Interface):
			here = append(here, is.Prefix)
		case is.Connected:
			elsewhere = append(elsewhere, is.Prefix)
		}
	}
	others := iprange.Subtract(iprange.SetOf(elsewhere), iprange.SetOf(here))
	pods.Src = iprange.Subtract(iprange.Normal(pods.Src), others)
	return pods, nil
}

// comesLate reports whether a conflict comes too late, because the policy enforces its exemptions.
func comesLate(p nft.Policy, c Conflict) bool {
	return c.Base.Hook.Priority > nft.EnforcePriority && !slices.ContainsFunc(p.Families, func(f nft.FamilyPolicy) bool {
		return (c.Rule.Family == nfnetlink.Inet || c.Rule.Family == f.Family()) && !p.Enforces(f)
	})
}

func names(chains []nfnetlink.ChainID) (all []string) {
	for _, c := range chains {
		all = append(all, c.Family.String()+" "+nfnetlink.Printable(c.Table)+" "+nfnetlink.Printable(c.Name))
	}
	return all
}

// receivesNothing reports whether the policy is for packets received on certain interfaces,
// of which the node has none. Without interfaces, nothing is known.
func receivesNothing(p nft.Policy, all []routes.Interface) bool {
	if len(p.Families) == 0 || len(all) == 0 {
		return false
	}
	for _, q := range p.Families[0].Questions {
		if q.Asks == config.ReceivedOn && !slices.ContainsFunc(q.Interfaces, func(i config.Interface) bool {
			return slices.ContainsFunc(all, func(o routes.Interface) bool { return i.Matches(o.Name) && o.Receives() })
		}) {
			return true
		}
	}
	return false
}
