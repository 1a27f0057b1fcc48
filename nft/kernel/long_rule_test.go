package kernel

import (
	"fmt"
	"strings"
	"testing"

	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/rule"
	"nft-masq-agent/nft/xtables"
)

// A dump has parts of 32 KiB at most. A rule of so many matches, of half a kilobyte each, just fits.
const longRule = 50

// insertLong inserts a rule with a number of matches.
func insertLong(t *testing.T, ns *nfttest.NS, chain string, matches int) {
	t.Helper()
	args := []string{"-I", chain}
	for range matches {
		args = append(args, "-m", "bpf", "--bytecode", "64,"+strings.Repeat("0 0 0 0,", 63)+"6 0 0 1")
	}
	iptables(t, ns, nfnetlink.IPv4, append(args, "-j", "ACCEPT")...)
}

func TestLongRulesHideNothing(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "iptables-nft")
	ns := nfttest.NewNS(t, "node")
	insertLong(t, ns, xtables.Postrouting, longRule)
	if rules := nfttest.In(t, ns, func() ([]nfnetlink.Rule, error) {
		c := nfnetlink.Dial()
		defer c.Close()
		return rulesOf(t, c, nfnetlink.IPv4, xtables.NATTable, xtables.Postrouting), nil
	}); len(rules) != 1 {
		t.Errorf("%d rules in the first dump of a socket", len(rules))
	}
	for _, matches := range []int{1, 8, longRule} {
		for _, mode := range cases.Modes() {
			t.Run(fmt.Sprintf("%d matches, %s", matches, mode), func(t *testing.T) {
				ns := nfttest.NewNS(t, "node")
				insertLong(t, ns, xtables.Postrouting, matches)
				iptables(t, ns, nfnetlink.IPv4, "-A", xtables.Postrouting, "-j", "MASQUERADE")
				nfttest.In(t, ns, func() (struct{}, error) {
					k := New(nfnetlink.Dial(), rule.String)
					for _, differs := range []bool{true, false} { // over sockets that have received nothing before
						diffs := apply(t, k, cases.Load(t, "default").Compile(mode), layout.Everything)
						if (len(diffs) > 0) != differs {
							t.Errorf("changed %v", diffs)
						}
						_ = k.Close()
					}
					return struct{}{}, nil
				})
			})
		}
	}
}
