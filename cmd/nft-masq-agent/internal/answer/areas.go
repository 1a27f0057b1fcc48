package answer

import (
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
		f.agentArea(), f.configArea(), f.rulesArea(), f.othersArea(), f.connectionsArea(), f.portsArea(), f.addressesArea(),
		f.forwardingArea(),
	}
	for i := range all {
		all[i].OK = !all[i].Unknown
		for _, p := range errors {
			if ranks[rank(p)].area == all[i].Name {
				all[i] = Area{Name: all[i].Name, Text: p.Msg}
				break
			}
		}
	}
	return all
}

func (f *StatusFacts) agentArea() Area {
	if f.Agent == nil { // a problem says so
		return Area{Name: "agent"}
	}
	return Area{Name: "agent", Text: "the agent runs, " + running.Process(f.Agent.PID)}
}

func (f *StatusFacts) configArea() Area {
	return Area{Name: "config", Text: f.Config.Hash + ", from " + f.source()}
}

func (f *StatusFacts) rulesArea() Area {
	if !f.Kernel.InSync { // the config is rejected
		return Area{Name: "rules", Unknown: true, Text: f.installed()}
	}
	return Area{Name: "rules", Text: "as the config says, mode " + f.Config.Mode}
}

// judged is how many open connections were compared with the policy, and how many of them agree.
func (f *StatusFacts) judged() (all, agreeing int) {
	if f.Evidence == nil {
		return 0, 0
	}
	for _, c := range f.Evidence.Counts {
		all += c.Open()
		agreeing += c.Agrees
	}
	return all, agreeing
}

func (f *StatusFacts) othersArea() Area {
	all, agreeing := f.judged()
	if all == 0 {
		return Area{Name: "other programs", Unknown: true, Text: "no open connection of a pod shows what they do"}
	}
	text := fmt.Sprintf("%s with the policy", Plural(agreeing, "open connection")+either(agreeing == 1, " agrees",
		" agree"))
	if all > agreeing {
		text += fmt.Sprintf(", %d may be older than that", all-agreeing)
	}
	return Area{Name: "other programs", Unknown: agreeing == 0, Text: text}
}

func (f *StatusFacts) connectionsArea() Area {
	switch {
	case f.EvidenceError != nil:
		return Area{Name: "connections", Unknown: true, Text: "they cannot be read"}
	case f.Evidence == nil:
		return Area{Name: "connections", Unknown: true, Text: "not compared: no known policy is in force"}
	}
	all, _ := f.judged()
	return Area{Name: "connections", Text: fmt.Sprintf("%d tracked, %d compared with the policy", f.Evidence.Tracked, all)}
}

func (f *StatusFacts) portsArea() Area {
	if f.PortsError != nil || f.Evidence == nil {
		return Area{Name: "ports", Unknown: true, Text: "the source ports in use are not known"}
	}
	return Area{Name: "ports", Text: "enough source ports for each destination"}
}

func (f *StatusFacts) addressesArea() Area {
	for _, family := range f.Policy.Families {
		if len(family.SNAT.CIDRs)+len(family.SNATRules) > 0 {
			return Area{Name: "addresses", Text: fmt.Sprintf("those of %s and %s", config.KeySNATAddresses, config.KeySNATRules)}
		}
	}
	return Area{Name: "addresses", Text: "those of the interfaces"}
}

func (f *StatusFacts) forwardingArea() Area {
	if len(f.Health.Pods) == 0 {
		return Area{Name: "forwarding", Unknown: true, Text: "no pods are known"}
	}
	return Area{Name: "forwarding", Text: "on, for each of this node's pods"}
}

func writeAreas(b *strings.Builder, all []Area) {
	b.WriteString("\n")
	for _, a := range all {
		state := "wrong"
		switch {
		case a.OK:
			state = "ok"
		case a.Unknown:
			state = "-"
		}
		fmt.Fprintf(b, "%-15s %-6s %s\n", a.Name, state, a.Text)
	}
}
