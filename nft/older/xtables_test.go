package older_test

import (
	"slices"
	"strings"
	"testing"

	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/older"
)

func TestLegacyIPTablesRulesAreCountedAndAgentsFound(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "iptables-legacy", "ip6tables-legacy")
	for _, family := range []nfnetlink.Family{nfnetlink.IPv4, nfnetlink.IPv6} {
		ns := nfttest.NewNS(t, "node")
		const dir = "/proc/thread-self/net"
		check := func(when string, rules int, agent bool) {
			t.Helper()
			if err := ns.Do(func() error {
				for _, f := range []nfnetlink.Family{nfnetlink.IPv4, nfnetlink.IPv6} {
					n, err := older.LegacyRules(dir, f)
					if want := map[bool]int{true: rules}[f == family]; err != nil || n != want {
						t.Errorf("%s, %s: %d rules of %s, want %d, %v", family, when, n, f, want, err)
					}
				}
				found, err := older.XTables(dir)
				if err != nil || slices.Contains(found, older.XTable{Family: family}) != agent || len(found) > 1 {
					t.Errorf("%s, %s: found %v, %v", family, when, found, err)
				}
				return nil
			}); err != nil {
				t.Fatal(err)
			}
		}
		run := func(words string) {
			command := older.XTable{Family: family}.Command()
			program := strings.TrimSuffix(command, " -t nat -S")
			nfttest.Run(t, ns, "", program, append([]string{"-t", "nat"}, strings.Fields(words)...)...)
		}
		check("without a table", 0, false)
		run("-S")
		check("with an empty one", 0, false)
		run("-A POSTROUTING -j MASQUERADE")
		check("with a rule", 1, false)
		run("-N IP-MASQ")
		check("with an agent's chain", 3, true)
	}
}

// An empty table, which a program that only looks leaves behind, decides nothing. A policy does.
func TestLegacyTablesThatDecideAreFound(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "iptables-legacy", "ip6tables-legacy")
	for _, family := range []nfnetlink.Family{nfnetlink.IPv4, nfnetlink.IPv6} {
		for table, words := range map[string]string{
			"raw": "-A PREROUTING -p udp -j CT --notrack", "mangle": "-A FORWARD -j MARK --set-mark 1",
			"nat": "-A POSTROUTING -j MASQUERADE", "filter": "-A FORWARD -j DROP",
			"raw by policy": "-P OUTPUT DROP", "mangle by policy": "-P POSTROUTING DROP", "filter by policy": "-P FORWARD DROP",
			"filter with a chain": "-N MINE",
		} {
			ns := nfttest.NewNS(t, "node")
			of, _, _ := strings.Cut(table, " ")
			program := family.String() + "tables-legacy"
			check := func(when string, want ...older.LegacyTable) {
				t.Helper()
				if err := ns.Do(func() error {
					found, err := older.LegacyTables("/proc/thread-self/net")
					for i := range found {
						found[i].Rules = 0
					}
					if err != nil || !slices.Equal(found, want) {
						t.Errorf("%s, %s, %s: %v, %v, want %v", family, table, when, found, err, want)
					}
					return nil
				}); err != nil {
					t.Fatal(err)
				}
			}
			check("without it")
			nfttest.Run(t, ns, "", program, "-t", of, "-S")
			check("empty")
			nfttest.Run(t, ns, "", program, append([]string{"-t", of}, strings.Fields(words)...)...)
			check("in use", older.LegacyTable{Family: family, Table: of})
		}
	}
}
