package answer

import (
	"fmt"
	"slices"
	"strings"

	"nft-masq-agent/cmd/nft-masq-agent/internal/health"
	"nft-masq-agent/config"
)

// An Area is a part of a node's health.
type Area struct {
	// Name of the area.
	Name string `json:"name"`
	// OK means that nothing in it needs attention.
	OK bool `json:"ok"`
	// Text is what is there, or what is wrong first.
	Text string `json:"text"`
}

// areas are the IDs of the problems of each area, those of the files excepted.
var areas = []struct {
	name string
	ids  []string
}{
	{"agent", []string{"no-agent", "agent-stuck", "second-agent", "kernel-refusal", "rules-delayed", "flags"}},
	{"config", []string{
		"config-rejected", "config-vanished", "", health.OtherFile, health.SingleFile, health.Everything, "interface-list-unmatched",
		"pod-cidr-not-exempt", "pod-cidr-forced", "pod-cidr-no-source",
	}},
	{"rules", []string{"out-of-sync", "rules-restored"}},
	{"other programs", []string{
		"older-agent", health.LegacyTables, "conflict", "overruled", "rules-unread", "rules-unasked",
	}},
	{"connections", []string{"stale-connections", "stale-unknown", health.Conntrack, health.InsertFailed}},
	{"ports", []string{"source-ports"}},
	{"addresses", []string{"snat-missing", health.NoPods, health.IPv6Pods}},
	{"forwarding", []string{health.Forwarding, health.NotANode, health.RoutingRules, health.Unchecked}},
}

func (r *Status) setAreas() {
	r.Areas = []Area{}
	for _, a := range areas {
		area := Area{a.name, true, r.facts(a.name)}
		for _, p := range slices.Concat(r.Errors, r.Warnings) {
			of := slices.Contains(a.ids, p.ID) || p.Pos != nowhere && slices.Contains(a.ids, "")
			if of && area.OK {
				area.OK, area.Text = false, p.Msg
			}
		}
		if a.name == "rules" && !r.Kernel.InSync && r.Kernel.Hash == "" { // as if the config is rejected
			area.OK = false
		}
		r.Areas = append(r.Areas, area)
	}
}

// facts describes an area in which nothing is wrong.
func (r *Status) facts(area string) string {
	switch area {
	case "agent":
		return r.running()
	case "config":
		return r.Config.Hash + ", from " + r.source()
	case "rules":
		if !r.Kernel.InSync {
			return r.installed()
		}
		return "as the config says, mode " + r.Config.Mode
	case "other programs":
		return Plural(len(r.Others), "rule") + " found, none of which needs attention"
	case "connections":
		n := uint64(0)
		for _, c := range r.Counters {
			n += c.Count
		}
		return fmt.Sprintf("%d counted, %s", n, either(r.Stale != nil, "none stale", "which are stale is unknown"))
	case "ports":
		return "enough source ports for each destination"
	case "addresses":
		if len(r.SNAT) > 0 {
			return fmt.Sprintf("%s present", config.KeySNATAddresses)
		}
		return "those of the interfaces"
	}
	return r.forwards
}

func (r *Status) writeAreas(b *strings.Builder) {
	b.WriteString("\n")
	for _, a := range r.Areas {
		fmt.Fprintf(b, "%-15s %-6s %s\n", a.Name, either(a.OK, "ok", "wrong"), a.Text)
	}
}
