package kernel

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"nft-masq-agent/nft"
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

// onANewSocket applies twice over sockets that have received nothing before.
func onANewSocket(ctx context.Context, ns *nfttest.NS, want nft.Ruleset) (first, second Applied, err error) {
	err = ns.Do(func() (err error) {
		k := New(nfnetlink.Dial(), rule.String)
		defer k.Close()
		if first, err = k.Apply(ctx, want, layout.Everything); err != nil {
			return err
		}
		k.conn.Close()
		second, err = k.Apply(ctx, want, layout.Everything)
		return err
	})
	return first, second, err
}

func TestLongRulesHideNothing(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "iptables-nft")
	ns := nfttest.NewNS(t, "node")
	insertLong(t, ns, xtables.Postrouting, longRule)
	err := ns.Do(func() error {
		c := nfnetlink.Dial()
		defer c.Close()
		rules, _, err := c.FirstRules(nfnetlink.IPv4, xtables.NATTable, xtables.Postrouting,
			func(nfnetlink.Rule) bool { return false })
		if len(rules) != 1 {
			t.Errorf("%d rules in the first dump of a socket", len(rules))
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	for _, matches := range []int{1, 8, longRule} {
		for _, mode := range []nft.Mode{nft.ModeNFTables, nft.ModeIPTables} {
			t.Run(fmt.Sprintf("%d matches, %s", matches, mode), func(t *testing.T) {
				ns := nfttest.NewNS(t, "node")
				insertLong(t, ns, xtables.Postrouting, matches)
				iptables(t, ns, nfnetlink.IPv4, "-A", xtables.Postrouting, "-j", "MASQUERADE")
				want := cases.Load(t, "default").Compile(mode)
				first, second, err := onANewSocket(t.Context(), ns, want)
				if err != nil || len(first.Differences) == 0 || len(second.Differences) > 0 {
					t.Errorf("changed %v, then %v, error %v", first.Differences, second.Differences, err)
				}
			})
		}
	}
}
