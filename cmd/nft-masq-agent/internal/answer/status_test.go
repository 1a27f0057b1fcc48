package answer

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"nft-masq-agent/cmd/nft-masq-agent/internal/options"
	"nft-masq-agent/nft/neighbors"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/older"
	"nft-masq-agent/nft/trace"
)

func TestStatusNamesOtherProgramsRulesByKindWithWhatToDo(t *testing.T) {
	of := func(kind neighbors.Kind, handles ...uint64) (all []neighbors.Conflict) {
		for _, h := range handles {
			rule := nfnetlink.Rule{Family: nfnetlink.IPv4, Table: "cni", Chain: "post", Handle: h}
			f := trace.Finding{Code: trace.Drops, Rule: rule, Base: postrouting}
			all = append(all, neighbors.Conflict{Kind: kind, Finding: f})
		}
		return all
	}
	r := Status{Agent: &Agent{PID: 9}}
	r.Config.Accepted, r.Kernel.InSync = true, true
	r.SetOthers(neighbors.Others{
		Conflicts: of(neighbors.Masquerades, 2),
		Overruled: append(append(of(neighbors.Untracks, 3, 4), of(neighbors.Exempts, 5)...), of(neighbors.Drops, 0)...),
	}, false)
	want := []string{
		"1 rule of other programs masquerades traffic that the config exempts; such as ip cni post handle 2; " +
			"Turn off masquerading in that program, or set enforceNonMasquerade",
		"1 rule of other programs accepts traffic that the config masquerades; such as ip cni post handle 5; " +
			"Remove the rules, or add their destinations to nonMasqueradeCIDRs",
		"2 rules of other programs turn off connection tracking for traffic that the config masquerades; such as " +
			"ip cni post handle 3; Without connection tracking there is no NAT: remove the rules, or exempt their traffic here",
		"1 rule of other programs drops traffic that the config masquerades; such as ip cni post; " +
			"Accept pod traffic in that chain, or set its policy to accept",
	}
	r.Conclude(options.Options{}, nil, "")
	var got []string
	for _, p := range r.Problems() {
		got = append(got, p.Error())
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if text := r.String(); !strings.Contains(text, "policy drop") {
		t.Errorf("%s", text)
	}
}

func TestStatusSaysHowTheRulesOfAnOlderAgentAreRemoved(t *testing.T) {
	id := nfnetlink.ChainID{Family: nfnetlink.IPv4, Table: "nat", Name: "IP-MASQ"}
	for takeOver, want := range map[bool]string{
		true:  "stop that agent: this one then removes its rules (--takeover), once the config is accepted",
		false: "stop that agent, and run this one with --takeover, or nft-masq-agent cleanup --legacy-only",
	} {
		r := Status{Agent: &Agent{PID: 9}}
		r.Config.Accepted, r.Kernel.InSync = true, true
		r.SetOthers(neighbors.Others{Legacy: []older.Chain{{ChainID: id, Rules: 2}}}, takeOver)
		r.Conclude(options.Options{}, nil, "")
		if text := r.String(); !strings.Contains(text, "rules of an iptables-based agent are also active") ||
			!strings.Contains(text, want) {
			t.Errorf("want %q in\n%s", want, text)
		}
	}
}
