package kernel

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/older"
	"nft-masq-agent/nft/xtables"
)

// What others may do to the shared table, as commands of iptables-nft; RULES is our chain. Those that
// the state of the table does not allow fail.
var meddling = []string{
	"-E RULES FOO", "-E RULES IP-MASQ", "-E RULES-SRC FOO", "-E RULES-MASQ FOO-SRC", "-E FOO RULES", "-E FOO BAR",
	"-F POSTROUTING", "-F RULES", "-F RULES-SRC", "-F FOO", "-X", "-X FOO", "-X IP-MASQ",
	"-D POSTROUTING 1", "-D POSTROUTING 2", "-D RULES 1", "-D RULES-SRC 1", "-D FOO 1",
	"-A POSTROUTING -j RULES", "-I POSTROUTING -j RULES-SRC", "-A POSTROUTING -j FOO", "-A POSTROUTING -g RULES",
	"-N FOO", "-N IP-MASQ", "-A POSTROUTING -j IP-MASQ", "-A IP-MASQ -j RULES-SRC",
	"-A IP-MASQ -j MASQUERADE -m comment --comment ip-masq:_outbound", "-A RULES -d 192.0.2.98 -j RETURN",
	"-A RULES-SRC -d 192.0.2.98 -j RETURN", "-A FOO -d 192.0.2.98 -j RETURN", "-A FOO -j RULES-SRC",
	"-A FOO -j RULES-MASQ", "-N OTHER", "-A OTHER -d 192.0.2.99 -j RULES-SRC", "-A OTHER -d 192.0.2.99 -j RETURN",
	"-A POSTROUTING -d 192.0.2.99 -j OTHER",
	"-A POSTROUTING -d 192.0.2.99 -j ACCEPT", "-I POSTROUTING -d 192.0.2.99 -j RETURN",
}

// Whatever others do to the shared table, and whatever the config is then, Apply writes our rules, and a
// further one, which looks at everything, removes what is left. Rules of others stay, in their order. Then Cleanup
// removes our chain once, although rules of others in it make it an older agent's, too.
func TestRulesAreRestoredWhateverOthersDoToTheSharedTable(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "iptables-nft")
	wants := []nft.Ruleset{
		cases.Load(t, "to-ports-force").Compile(nft.ModeIPTables), cases.Load(t, "sources-only").Compile(nft.ModeIPTables),
		cases.Load(t, "default").Compile(nft.ModeIPTables), cases.Load(t, "default").Compile(nft.ModeNFTables),
	}
	for seed := range uint64(nfttest.Rounds(3, 20, 1000)) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			ns := nfttest.NewNS(t, "node")
			m := meddler{rand.New(rand.NewPCG(seed, 46)), ns, nil}
			defer func() {
				if t.Failed() {
					t.Logf("after\n%s\n%s", strings.Join(m.done, "\n"), nfttest.ListRuleset(t, ns))
				}
			}()
			k := open(t, ns)
			apply(t, k, wants[m.IntN(3)], layout.Ours)
			for range 4 {
				m.meddle()
				before := othersRules(t, ns)
				want, depth := wants[m.IntN(len(wants))], layout.Ours+layout.Depth(m.IntN(3))
				m.done = append(m.done, fmt.Sprintf("mode %s, depth %d", want.Mode(), depth))
				_, err := k.Apply(t.Context(), want, depth)
				if errors.Is(err, nft.ErrForeignChain) {
					return
				} else if err != nil {
					t.Fatal(err)
				}
				apply(t, k, want, max(depth, layout.Everything))
				inSync(t, ns, want)
				if diff := cmp.Diff(before, othersRules(t, ns)); diff != "" {
					t.Fatalf("rules of others (-before +after):\n%s", diff)
				}
				left, err := k.Older(t.Context(), want)
				if err != nil || depth == layout.TakeOver && len(older.Removable(left)) > 0 {
					t.Fatalf("chains of older agents that are left: %v, %v", left, err)
				}
			}
			apply(t, k, wants[2], layout.Ours)
			iptables(t, ns, nfnetlink.IPv4, "-A", cases.DefaultChain, "-d", "192.0.2.98", "-j", "RETURN")
			if _, err := k.Cleanup(t.Context(), WithLegacy); err != nil {
				t.Error(err)
			}
			if left, err := k.Removable(t.Context(), WithLegacy); err != nil || len(left) > 0 {
				t.Errorf("cleanup left %q, %v", left, err)
			}
		})
	}
}

// A meddler changes the shared table.
type meddler struct {
	*rand.Rand
	ns   *nfttest.NS
	done []string
}

// meddle does some of what others may do.
func (m *meddler) meddle() {
	for range 1 + m.IntN(6) {
		do := strings.ReplaceAll(meddling[m.IntN(len(meddling))], "RULES", cases.DefaultChain)
		args := append([]string{"-t", "nat"}, strings.Fields(do)...)
		for i := range args {
			args[i] = strings.ReplaceAll(args[i], "_", " ")
		}
		if _, err := m.ns.Output("", "iptables-nft", args...); err == nil {
			m.done = append(m.done, do)
		}
	}
}

// othersRules returns the rules of others in POSTROUTING.
func othersRules(t *testing.T, ns *nfttest.NS) []string {
	t.Helper()
	all := strings.Split(iptables(t, ns, nfnetlink.IPv4, "-S", xtables.Postrouting), "\n")
	return slices.DeleteFunc(all, func(rule string) bool { return !strings.Contains(rule, "192.0.2.99") })
}
