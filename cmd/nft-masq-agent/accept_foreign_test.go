package main

import (
	"strings"
	"testing"

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
	"nft-masq-agent/nft/nfttest"
)

// otherMasquerades are another program's rules in two chains.
const otherMasquerades = `table inet other {
	chain one { type nat hook postrouting priority 99; ip saddr 10.244.1.0/24 masquerade; }
	chain two { type nat hook postrouting priority 98; ip saddr 10.245.0.0/16 masquerade; }
}`

func TestAcceptedAndPodlessRulesAreListedSeparately(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	for _, tt := range []struct {
		name, config string
		flags        []string
		counted      string
		conflicts    string // chains, as status lists them
		accepted     string
		podless      string
	}{
		{"all are counted", "", nil, "2", "two one", "", ""},
		{"one is accepted", "", []string{"--accept-foreign", "inet other one"}, "1", "two", "one", ""},
		{
			"both are", "",
			[]string{"--accept-foreign", "inet other one", "--accept-foreign", "inet  other two"},
			"0", "",
			"two one", "",
		},
		{"another family is not", "", []string{"--accept-foreign", "ip other one"}, "2", "two one", "", ""},
		{"one meets no pod", "masqueradeSrcCIDRs: [10.244.0.0/16]\n", nil, "1", "one", "", "two"},
		{"none does", "masqueradeSrcCIDRs: [10.9.0.0/16]\n", nil, "0", "", "", "two one"},
		{
			"the other is accepted", "masqueradeSrcCIDRs: [10.244.0.0/16]\n",
			[]string{"--accept-foreign", "inet other one"},
			"0", "", "one", "two",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			nfttest.NFT(t, n.NS, otherMasquerades, "-f", "-")
			n.swap(exempting("10.0.0.0/8") + tt.config)
			d := n.start(append(tt.flags, "--http-address", httpAddress)...)
			d.await("config_applied")
			d.until("the rules of others are counted", func() bool {
				return n.metric("nft_masq_agent_other_masquerading_rules") == tt.counted
			})
			r, _ := n.status()
			var conflicts, accepted, podless []string
			for _, c := range r.With(answer.Conflicting) {
				conflicts = append(conflicts, c.Chain)
			}
			for _, c := range r.With(answer.Accepted) {
				accepted = append(accepted, c.Chain)
			}
			for _, c := range r.With(answer.NotOfPods) {
				podless = append(podless, c.Chain)
			}
			if strings.Join(conflicts, " ") != tt.conflicts || strings.Join(accepted, " ") != tt.accepted ||
				strings.Join(podless, " ") != tt.podless {
				t.Errorf("conflicts %q, accepted %q, without pods %q", conflicts, accepted, podless)
			}
			if text := n.run("status").stdout; strings.Contains(text, "--accept-foreign accepts:") != (tt.accepted != "") {
				t.Errorf("status is\n%s", text)
			}
		})
	}
}

func TestAcceptForeignParsesFamilyTableAndChain(t *testing.T) {
	for _, bad := range []string{"", "nat POSTROUTING", "nat ip POSTROUTING", "ip nat A B"} {
		if got := runHere(t, "status", "--accept-foreign", bad); got.code != exitUsage ||
			!strings.Contains(got.stderr, "FAMILY TABLE CHAIN") {
			t.Errorf("%q: %+v", bad, got)
		}
	}
}
