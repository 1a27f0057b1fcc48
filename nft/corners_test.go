package nft

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"nft-masq-agent/nft/nfttest"
)

// iptables does not use a POSTROUTING with another hook than its own, and we do
// not delete what somebody else made.
func TestPostroutingWithAnotherHookIsAnErrorThatNamesIt(t *testing.T) {
	nfttest.Require(t, "nft")
	want, nf := loadCase(t, "both-families").compile(ModeIPTables), loadCase(t, "both-families").compile(ModeNFTables)
	for _, family := range []string{"ip", "ip6"} {
		for hook, says := range map[string]string{
			"type nat hook postrouting priority 50;":     "has nat hook postrouting priority 50, not nat hook postrouting priority 100",
			"type nat hook output priority 100;":         "has nat hook output priority 100, not nat hook postrouting priority 100",
			"type filter hook postrouting priority 100;": "has filter hook postrouting priority 100, not nat hook postrouting priority 100",
			"": "has no hook, not nat hook postrouting priority 100",
		} {
			t.Run(family+" "+hook, func(t *testing.T) {
				t.Parallel()
				ns := nfttest.NewNS(t, "node")
				nfttest.NFT(t, ns, fmt.Sprintf("table %s nat { chain POSTROUTING { %s counter comment \"somebody else's\"; }; }", family, hook), "-f", "-")
				says := fmt.Sprintf("table %s nat: chain POSTROUTING %s", family, says)
				k := open(t, ns)
				apply(t, k, nf, everything) // the other mode has nothing to do with it
				before := nfttest.ListRuleset(t, ns)
				diffs, err := k.Diff(want, Look{})
				if err != nil || !slices.Contains(diffs, says) {
					t.Errorf("Diff says %q, %v, want %q", diffs, err, says)
				}
				for range 2 {
					a, err := k.Apply(want, Look{Others: true})
					if !errors.Is(err, ErrForeignPostrouting) || !strings.Contains(err.Error(), says) ||
						!strings.Contains(err.Error(), fmt.Sprintf("nft delete chain %s nat POSTROUTING", family)) {
						t.Errorf("Apply did %v, error %v", a, err)
					}
				}
				if diff := cmp.Diff(before, nfttest.ListRuleset(t, ns)); diff != "" {
					t.Errorf("the kernel (-before +after):\n%s", diff)
				}
				nfttest.NFT(t, ns, fmt.Sprintf("flush chain %s nat POSTROUTING; delete chain %[1]s nat POSTROUTING", family), "-f", "-")
				apply(t, k, want, everything)
				inStep(t, ns, want)
			})
		}
	}
}

func TestDormantTableWithoutPostroutingIsWokenAndUsed(t *testing.T) {
	nfttest.Require(t, "nft")
	for name, text := range map[string]string{
		"empty":           "table ip nat { flags dormant; }",
		"both families":   "table ip nat { flags dormant; }; table ip6 nat { flags dormant; }",
		"somebody else's": "table ip nat { flags dormant; chain PREROUTING { type nat hook prerouting priority -100; counter; }; chain other { return; }; }",
		"our chain":       "table ip nat { flags dormant; chain IP-MASQ-AGENT { }; }",
		"POSTROUTING too": "table ip nat { flags dormant; chain POSTROUTING { type nat hook postrouting priority 100; counter; }; }",
	} {
		for _, from := range modes {
			t.Run(name+" from "+string(from), func(t *testing.T) {
				t.Parallel()
				ns := nfttest.NewNS(t, "node")
				k, want := open(t, ns), loadCase(t, "all-policies").compile(ModeIPTables)
				if from == ModeNFTables {
					apply(t, k, loadCase(t, "all-policies").compile(from), everything)
				}
				nfttest.NFT(t, ns, text, "-f", "-")
				foreign := foreignRules(t, ns)
				diffs := apply(t, k, want, everything)
				if !slices.Contains(diffs, "table ip nat is dormant") {
					t.Errorf("found %q", diffs)
				}
				inStep(t, ns, want)
				if diff := cmp.Diff(foreign, foreignRules(t, ns)); diff != "" {
					t.Errorf("foreign rules (-before +after):\n%s", diff)
				}
			})
		}
	}
}
