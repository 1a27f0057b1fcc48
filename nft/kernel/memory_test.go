package kernel

import (
	"strings"
	"testing"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/xtables"
)

// Apply and Others share what they read until another program writes.
func TestForeignRulesAreReadAgainAfterAWrite(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "iptables-nft")
	ns := nfttest.NewNS(t, "node")
	nfttest.Run(t, ns, flatRules(xtables.Postrouting, manyRules), "iptables-nft-restore")
	k := open(t, ns)
	conflicts := func(want nft.Ruleset, n int) {
		t.Helper()
		others, err := k.Others(t.Context(), want)
		if err != nil {
			t.Fatal(err)
		}
		if len(others.Conflicts) != n {
			t.Errorf("%d conflicts, want %d: %v", len(others.Conflicts), n, others.Conflicts)
		}
	}
	rule := func(do, source string) {
		t.Helper()
		iptables(t, ns, nfnetlink.IPv4, do, xtables.Postrouting, "-s", source, "-j", "MASQUERADE")
	}
	for _, mode := range []nft.Mode{nft.ModeNFTables, nft.ModeIPTables, nft.ModeNFTables} {
		rule("-A", "10.1.0.0/16")
		want := cases.Load(t, "default").Compile(mode)
		apply(t, k, want, Look{Others: true})
		remembered := len(k.seen.rules) > 0
		conflicts(want, 2)
		if mode == nft.ModeNFTables && !remembered {
			t.Error("Apply has not kept what it read")
		}
		apply(t, k, want, Look{Others: true})
		rule("-A", "10.2.0.0/16")
		conflicts(want, 3)
		apply(t, k, want, Look{Others: true})
		rule("-D", "10.2.0.0/16")
		conflicts(want, 2)
		rule("-D", "10.1.0.0/16")
		conflicts(want, 1)
	}
}

func TestMemoryLastsUntilTheNextGeneration(t *testing.T) {
	nfttest.Require(t, "nft")
	ns := nfttest.NewNS(t, "node")
	nfttest.NFT(t, ns, "table ip nat { chain c {\n"+strings.Repeat("accept\n", manyRules)+"}\n}\n", "-f", "-")
	m := memory{Conn: connect(t, ns)}
	rules := func(n int) {
		t.Helper()
		found, err := m.Rules(nfnetlink.IPv4, xtables.NATTable, "c")
		if err != nil || len(found) != manyRules+n {
			t.Errorf("%d rules, error %v; want %d", len(found), err, manyRules+n)
		}
	}
	generation := func() uint32 {
		t.Helper()
		g, err := m.Generation()
		if err != nil {
			t.Fatal(err)
		}
		return g
	}
	g := generation()
	rules(0)
	nfttest.NFT(t, ns, "", "add", "rule", "ip", "nat", "c", "drop")
	rules(0)
	m.wrote(g, 1)
	generation()
	rules(0)
	nfttest.NFT(t, ns, "", "add", "rule", "ip", "nat", "c", "drop")
	generation()
	rules(2)
}
