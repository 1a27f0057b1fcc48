package answer

import (
	"cmp"
	"fmt"
	"strings"

	"nft-masq-agent/cmd/nft-masq-agent/internal/running"
	"nft-masq-agent/config"
)

// An Area is a part of a node's health.
type Area struct {
	// Name of the area.
	Name string `json:"name"`
	// OK means that it was looked at, and that nothing in it needs attention.
	OK bool `json:"ok"`
	// Unknown means that it was not looked at, or that there was nothing to see.
	Unknown bool `json:"unknown,omitempty"`
	// Text is what is there, or what is wrong first.
	Text string `json:"text"`
}

// areas returns the areas: each is wrong by the first of its problems.
func areas(f StatusFacts, errors config.Problems) []Area {
	all := []Area{
		f.agentArea(), known("config", f.Config.Hash+", from "+f.source()), f.rulesArea(), f.connectionsArea(),
		f.addressesArea(), f.forwardingArea(),
	}
	for i, area := range all {
		for _, p := range errors {
			if ranks[rank(p)].area == area.Name {
				all[i] = Area{Name: area.Name, Text: p.Msg}
				break
			}
		}
	}
	return all
}

func known(name, text string) Area { return Area{Name: name, OK: true, Text: text} }

func unknown(name, text string) Area { return Area{Name: name, Unknown: true, Text: text} }

func (f *StatusFacts) agentArea() Area {
	if f.Agent == nil { // which is a problem
		return unknown("agent", "")
	}
	return known("agent", "the agent runs, "+running.Process(f.Agent.PID))
}

func (f *StatusFacts) rulesArea() Area {
	if !f.Kernel.InSync { // the config is rejected
		return unknown("rules", f.installed())
	}
	return known("rules", "as the config says, mode "+f.Config.Mode)
}

func (f *StatusFacts) connectionsArea() Area {
	if f.Evidence == nil || f.PortsError != nil {
		return unknown("connections", "they were not compared with the policy")
	}
	open, agreeing := 0, 0
	for _, c := range f.Evidence.Counts {
		open += c.Open()
		agreeing += c.Agrees
	}
	if agreeing == 0 {
		return unknown("connections", "no open connection of a pod agrees with the policy, or contradicts it")
	}
	return known("connections", fmt.Sprintf("%d tracked; %d of %d that the policy concerns agree with it", f.Evidence.Tracked,
		agreeing, open))
}

func (f *StatusFacts) addressesArea() Area {
	for _, family := range f.Policy.Families {
		if len(family.SNAT.CIDRs)+len(family.SNATRules) > 0 {
			return known("addresses", cmp.Or(strings.Join(NodeSNAT(f.Policy), "; "), "those of snatRules"))
		}
	}
	return known("addresses", "those of the interfaces")
}

func (f *StatusFacts) forwardingArea() Area {
	if len(f.Health.Pods) == 0 {
		return unknown("forwarding", "no pods are known")
	}
	return known("forwarding", "on, for each of this node's pods")
}

func writeAreas(b *strings.Builder, all []Area) {
	b.WriteString("\n")
	for _, a := range all {
		state := "wrong"
		if a.OK {
			state = "ok"
		}
		if a.Unknown {
			state = "-"
		}
		fmt.Fprintf(b, "%-12s  %-5s  %s\n", a.Name, state, a.Text)
	}
}
