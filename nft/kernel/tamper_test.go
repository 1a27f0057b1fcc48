package kernel

import (
	"context"
	"net/netip"
	"strings"
	"testing"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
)

// attack runs a transaction of nft. TABLE is our table, and NAME-? the name that a set has now.
func attack(t testing.TB, ns *nfttest.NS, script string) {
	t.Helper()
	sets, err := connect(t, ns).Sets(nfnetlink.Inet, nft.TableName)
	if err != nil && !nfnetlink.IsNotExist(err) {
		t.Fatal(err)
	}
	for _, s := range sets {
		script = strings.ReplaceAll(script, s.Name[:len(s.Name)-1]+"?", s.Name)
	}
	nfttest.NFT(t, ns, strings.ReplaceAll(script, "TABLE", "inet "+nft.TableName), "-f", "-")
}

// rulesOf returns the rules of a chain, or of all that a name left out can be.
func rulesOf(t testing.TB, c *nfnetlink.Conn, f nfnetlink.Family, table, chain string) []nfnetlink.Rule {
	t.Helper()
	rules, _, err := c.FirstRules(f, table, chain, func(nfnetlink.Rule) bool { return false })
	if err != nil {
		t.Fatal(err)
	}
	return rules
}

func tamperConfig(n int) config.Config {
	c := config.Config{MasqLinkLocal: true, EnableIPv6: true}
	for i := range n {
		p := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 7), byte(i << 1), 0}), 24)
		c.NonMasqueradeCIDRs = append(c.NonMasqueradeCIDRs, config.CIDR{Prefix: p})
	}
	c.NonMasqueradeCIDRs = append(c.NonMasqueradeCIDRs, cases.CIDRs("fd00::/8", "2001:db8:1::/48")...)
	return c
}

// A Frame is everything but the elements of sets.
func TestFrameLeavesOutOnlyTheElements(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft", "iptables-nft-restore")
	ns := nfttest.NewNS(t, "node")
	c := tamperConfig(10)
	c.SNATAddresses = cases.CIDRs("198.51.100.208/29")
	want := nft.Compile(c, nft.Options{Layout: native.Layout{}})
	want = want.On(cases.Addrs("198.51.100.211", "198.51.100.212"))
	k := open(t, ns)
	apply(t, k, want, layout.Ours)
	for _, tt := range []struct{ do, finds string }{
		{do: "flush chain TABLE postrouting", finds: "missing rule"},
		{do: "delete table TABLE", finds: "is missing"},
		{do: "flush ruleset", finds: "is missing"},
		{do: "add set TABLE theirs { type ipv4_addr; }", finds: "set theirs"},
		{do: "add element TABLE non-masq-v4-? { 198.51.100.0/24 }"},
		{do: "flush set TABLE non-masq-v4-?"},
		{do: "delete element TABLE non-masq-v4-? { 10.0.0.0/24 }; add element TABLE non-masq-v4-? { 198.51.100.0/24 }"},
	} {
		if diffs := apply(t, k, want, layout.Ours); len(diffs) > 0 { // counts what was written
			t.Fatalf("before %q: %q", tt.do, diffs)
		}
		attack(t, ns, tt.do)
		seen := tt.finds != ""
		diffs := strings.Join(apply(t, k, want, layout.Frame), "\n")
		if seen != (diffs != "") || seen && !strings.Contains(diffs, tt.finds) {
			t.Errorf("after %q a Frame has %q, want %q: %t", tt.do, diffs, tt.finds, seen)
		}
		if !seen {
			apply(t, k, want, layout.Ours)
		}
		inSync(t, ns, want)
	}
	// What was right for another policy, or before an error, is not trusted.
	other := nft.Compile(tamperConfig(11), nft.Options{Layout: native.Layout{}})
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := k.Apply(ended, other, layout.Ours); err == nil {
		t.Error("applied although the context has ended")
	}
	apply(t, k, other, layout.Frame)
	inSync(t, ns, other)
}
