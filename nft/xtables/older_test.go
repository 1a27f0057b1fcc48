package xtables_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/modes"
	"nft-masq-agent/nft/nfttest/script"
	"nft-masq-agent/nft/xtables"
)

// dialNS connects to a new namespace.
func dialNS(t *testing.T) (*nfttest.NS, *nfnetlink.Conn) {
	t.Helper()
	n := modes.New(t, nil)
	return n.NS, n.Conn
}

const testdata = "../../testdata/foreign"

// install loads the rules of a case into the namespace.
func install(t *testing.T, ns *nfttest.NS, name string) {
	t.Helper()
	nfttest.LoadForeign(t, ns, filepath.Join(testdata, name), nil)
}

// remove removes chains, if they have not changed since.
func remove(t *testing.T, c *nfnetlink.Conn, chains []xtables.OlderChain) {
	t.Helper()
	var b nfnetlink.Batch
	xtables.RemoveOlder(chains, &b)
	nfttest.NoError(t, c.Commit(&b))
}

// find returns what was found.
func find(t *testing.T, c *nfnetlink.Conn) []xtables.OlderChain {
	t.Helper()
	found, err := xtables.FindOlder(c, nft.Ruleset{})
	nfttest.NoError(t, err)
	return found
}

// ruleHandles returns the rules of both nat tables by handle: a rule that is
// deleted and recreated gets another handle.
func ruleHandles(t *testing.T, c *nfnetlink.Conn) map[uint64]string {
	t.Helper()
	handles := map[uint64]string{}
	for _, family := range []nfnetlink.Family{nfnetlink.IPv4, nfnetlink.IPv6} {
		rules, err := modes.Rules(c, family, "nat", "")
		nfttest.NoError(t, err)
		for _, r := range rules {
			handles[r.Handle<<1|uint64(family)&1] = family.String() + " " + r.Chain + " " + r.Name()
		}
	}
	return handles
}

func TestAgentsAreRemovedInOneTransaction(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "iptables-nft-restore", "ip6tables-nft-restore", "iptables-nft-save", "ip6tables-nft-save")
	all, err := filepath.Glob(testdata + "/ip-masq*")
	if err != nil || len(all) == 0 {
		t.Fatalf("no cases: %v", err)
	}
	for _, path := range all {
		name := filepath.Base(path)
		t.Run(name, func(t *testing.T) {
			ns, c := dialNS(t)
			for _, other := range []string{"kube-proxy-iptables", "flannel-iptables", "cni-bridge"} {
				install(t, ns, other)
			}
			// An agent may have added the first rule of its family.
			nfttest.Run(t, ns, "*nat\n-A POSTROUTING -m comment --comment last -j ACCEPT\nCOMMIT\n", "ip6tables-nft-restore",
				"--noflush")
			save := func() string {
				return nfttest.Save(t, ns, "iptables-nft-save", "nat") + nfttest.Save(t, ns, "ip6tables-nft-save", "nat")
			}
			before, handles := save(), ruleHandles(t, c)
			install(t, ns, name)
			found := find(t, c)
			remove(t, c, found)
			nfttest.Same(t, "rules (-before +after)", before, save())
			nfttest.Same(t, "handles (-before +after)", handles, ruleHandles(t, c))
			if left := find(t, c); len(left) > 0 {
				t.Errorf("left %v", left)
			}
		})
	}
}

// A chain to which others refer is emptied, and then no longer found.
func TestChainsInUseAreOnlyEmptied(t *testing.T) {
	nfttest.Require(t, "nft")
	ns, c := dialNS(t)
	nfttest.NFT(t, ns, `table ip nat {
		chain IP-MASQ { counter; counter; counter; }
		chain IP-MASQ-AGENT { masquerade fully-random; }
		map m { type ipv4_addr : verdict; elements = { 192.0.2.1 : jump IP-MASQ, 192.0.2.2 : jump NON-MASQUERADE-DAEMON }; }
		chain POSTROUTING { type nat hook postrouting priority 100; }
		chain NON-MASQUERADE-DAEMON { accept; }
	}`, "-f", "-")
	for _, want := range []string{
		"chain IP-MASQ in table ip nat: 3 rules; " +
			"chain IP-MASQ-AGENT in table ip nat: 1 rule, to which no other rule leads; " +
			"chain NON-MASQUERADE-DAEMON in table ip nat: 1 rule; ",
		"",
	} {
		found := find(t, c)
		got := ""
		for _, l := range found {
			got += l.String() + "; "
		}
		if got != want {
			t.Errorf("got %s\nwant %s", got, want)
		}
		remove(t, c, found)
	}
	left := nfttest.ListRuleset(t, ns)
	for chain, stays := range map[string]bool{"IP-MASQ": true, "IP-MASQ-AGENT": false, "NON-MASQUERADE-DAEMON": true} {
		if strings.Contains(left, "chain "+chain+" {\n\t}") != stays {
			t.Errorf("chain %s: left are\n%s", chain, left)
		}
	}
}

// testdata/older.txt has rules for iptables-restore, what is found of older agents, and as data what is left once that is
// removed. Agents comment all of their rules. In a chain with another name, a comment like theirs may be somebody else's.
func TestChainOfAnotherNameIsKeptUnlessAllRulesAreAnAgents(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "iptables-nft-restore", "ip6tables-nft-restore", "iptables-nft-save", "ip6tables-nft-save")
	six := strings.NewReplacer("192.0.2.0/24", "2001:db8:2::/64", "192.0.2.", "2001:db8:2::", "/32", "/128",
		"table ip nat", "table ip6 nat", "ip saddr", "ip6 saddr", "ip daddr", "ip6 daddr")
	for _, recorded := range script.Read(t, "testdata/older.txt") {
		for _, program := range []string{"iptables-nft", "ip6tables-nft"} {
			rules := recorded.Text()
			want := strings.Join(recorded.All('>'), "\n") + "\n" + recorded.Last().Data
			if program == "ip6tables-nft" {
				rules, want = six.Replace(rules), six.Replace(want)
			}
			t.Run(recorded.Name+", "+program, func(t *testing.T) {
				t.Parallel()
				ns, c := dialNS(t)
				nfttest.Run(t, ns, "*nat\n"+rules+"COMMIT\n", program+"-restore")
				found := find(t, c)
				var lines []string
				for _, l := range found {
					lines = append(lines, fmt.Sprintf("%s; %d jumps, decides %t", l, l.Jumps(), l.Decides()))
				}
				remove(t, c, xtables.Removable(found))
				_, left, _ := strings.Cut(nfttest.Save(t, ns, program+"-save", "nat"), ":POSTROUTING ACCEPT [0:0]\n")
				got := strings.Join(lines, "\n") + "\n" + strings.TrimSuffix(left, "COMMIT\n")
				got = regexp.MustCompile(`handle \d+`).ReplaceAllString(got, "handle N")
				nfttest.Same(t, "(-want +got)", want, got)
			})
		}
	}
}

// Chains with the names of agents are theirs in the tables nat of iptables, and in no other table.
func TestNamesCountOnlyInTheTablesOfIPTables(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft")
	const agents = `counter accept comment "ip-masq-agent: local traffic is not subject to MASQUERADE"`
	tables := []string{
		"ip nat", "ip6 nat", "inet nat", "inet firewall", "ip filter", "ip6 mangle", "arp filter", "bridge nat", "netdev nat",
	}
	ns, c := dialNS(t)
	for _, name := range []string{"IP-MASQ", "NON-MASQUERADE-DAEMON", "ip-masq"} {
		for _, rules := range []string{"counter drop", agents, agents + "; counter drop", ""} {
			text := "flush ruleset\n"
			for _, table := range tables {
				text += fmt.Sprintf("table %s { chain %s { %s; }; chain other { counter drop; }; }\n", table, name, rules)
			}
			nfttest.NFT(t, ns, text, "-f", "-")
			var want []string
			if name != "ip-masq" { // to which nothing of an agent's leads
				want = []string{"ip nat", "ip6 nat"}
			}
			found := find(t, c)
			var got []string
			for _, l := range found {
				got = append(got, l.Family.String()+" "+l.Table)
				if l.Name != name || l.Doubt != "" {
					t.Errorf("found %s", l)
				}
			}
			if !slices.Equal(got, want) {
				t.Errorf("chain %s { %s }: found in %q, want %q", name, rules, got, want)
			}
			remove(t, c, xtables.Removable(found))
			left := nfttest.ListRuleset(t, ns)
			if n := strings.Count(left, "chain other {\n\t\tcounter packets 0 bytes 0 drop\n"); n != len(tables) {
				t.Errorf("chain %s { %s }: of %d other chains, %d are left:\n%s", name, rules, len(tables), n, left)
			}
			if n := strings.Count(left, "chain "+name+" {"); n != len(tables)-len(want) {
				t.Errorf("chain %s { %s } is left in %d tables:\n%s", name, rules, n, left)
			}
		}
	}
}

// Nor is a base chain an agent's, whatever its name.
func TestBaseChainsAreNotOlder(t *testing.T) {
	nfttest.Require(t, "nft")
	ns, c := dialNS(t)
	for table, hook := range map[string]string{
		"ip nat": "nat hook postrouting priority 100", "ip6 nat": "nat hook postrouting priority 100",
		"ip filter": "filter hook forward priority 0", "inet firewall": "filter hook forward priority 0",
		"bridge nat": "filter hook forward priority 0",
	} {
		text := fmt.Sprintf("table %s { chain IP-MASQ { type %s; counter accept comment \"ip-masq: \"; }; }", table, hook)
		nfttest.NFT(t, ns, text, "-f", "-")
	}
	if found := find(t, c); len(found) > 0 {
		t.Errorf("found %v", found)
	}
}

// What has changed since it was found is not removed, nor anything else in its place: handles begin again in a table
// that is created again.
func TestWhatHasChangedSinceItWasFoundStays(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft", "iptables-nft-restore")
	for name, change := range map[string]string{
		"a rule of another program is added": "add rule ip nat MY-MASQ counter drop",
		"a jump":                             "add chain ip nat X; add rule ip nat X jump MY-MASQ",
		"a rule is gone":                     "flush chain ip nat MY-MASQ",
		"the jump is replaced":               "POSTROUTING",
		"the jump is gone":                   "flush chain ip nat POSTROUTING",
		"another table": "delete table ip nat; table ip nat { chain POSTROUTING { type nat hook postrouting priority 100; " +
			strings.Repeat("meta mark 7 accept; ", 40) + "}; chain MY-MASQ { " + strings.Repeat("drop; ", 40) + "}; }",
		"no table": "delete table ip nat",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ns, c := dialNS(t)
			install(t, ns, "ip-masq-agent-custom-chain")
			found := find(t, c)
			if len(found) != 1 {
				t.Fatalf("found %v", found)
			}
			if !strings.Contains(change, " ") { // its first rule; the handle stays
				rules, err := modes.Rules(c, nfnetlink.IPv4, "nat", change)
				nfttest.NoError(t, err)
				change = fmt.Sprintf("replace rule ip nat %s handle %d counter drop", change, rules[0].Handle)
			}
			nfttest.NFT(t, ns, change, "-f", "-")
			before := nfttest.ListRuleset(t, ns)
			var b nfnetlink.Batch
			xtables.RemoveOlder(found, &b)
			if err := c.Commit(&b); err == nil {
				t.Error("the kernel took it")
			}
			nfttest.Same(t, "ruleset (-before +after)", before, nfttest.ListRuleset(t, ns))
		})
	}
}

// The table goes with our chains if it has nothing of others.
func TestATableGoesOnlyIfAllOfItIsOurs(t *testing.T) {
	nfttest.Require(t, "nft")
	for _, others := range []string{
		"", "chain MINE { }", "set s { type ipv4_addr; }", "chain POSTROUTING { counter; }",
		"chain PREROUTING { type nat hook prerouting priority -100; }",
	} {
		n, want := modes.New(t, xtables.Read), wanted("A", nil)
		n.Apply(t, want, nft.Contents)
		n.Load(t, "table ip nat {\n"+others+"\n}")
		found := find(t, n.Conn)
		if len(found) != 2 || found[0].Hash != want.Hash() {
			t.Errorf("found %+v, want two chains of %s", found, want.Hash())
		}
		remove(t, n.Conn, found)
		list := nfttest.ListRuleset(t, n.NS)
		if gone := !strings.Contains(list, "table ip nat"); gone != (others == "") || strings.Contains(list, "chain A") {
			t.Errorf("next to %q, of %v is left:\n%s", others, found, list)
		}
	}
}

// A chain of the wanted ruleset is ours, whoever wrote its rules, and one that has a rule of ours.
func TestOurChainsAreNotOlder(t *testing.T) {
	nfttest.Require(t, "iptables-nft", "iptables-nft-restore")
	of := func(chain string) nft.Ruleset {
		return nft.Compile(config.Config{EnableIPv6: true}, nft.Options{Layout: xtables.Layout{ChainName: chain}})
	}
	n := modes.New(t, xtables.Read)
	n.Apply(t, of("IP-MASQ"), nft.Contents)
	nfttest.Run(t, n.NS, "", "iptables-nft", "-t", "nat", "-A", "IP-MASQ", "-j", "RETURN")
	install(t, n.NS, "ip-masq-agent-two-jumps")
	for ours, others := range map[string]string{"IP-MASQ": "IP-MASQ-AGENT", "IP-MASQ-AGENT": "IP-MASQ"} {
		found, err := xtables.FindOlder(n.Conn, of(ours))
		isOurs := func(c xtables.OlderChain) bool { return c.Name != others }
		if err != nil || len(found) == 0 || slices.ContainsFunc(found, isOurs) {
			t.Errorf("found %v, %v, want %s", found, err, others)
		}
	}
}

func TestTablesOfLegacyIPTablesThatCannotBeListedAreAnError(t *testing.T) {
	dir := t.TempDir()
	for name, prepare := range map[string]func(path string) error{
		"without the kernel's files": func(string) error { return nil },
		"without a nat table":        func(path string) error { return os.WriteFile(path, []byte("filter\n"), 0o600) },
	} {
		nfttest.NoError(t, prepare(filepath.Join(dir, "ip_tables_names")))
		if found, err := xtables.LegacyTables(dir); len(found) > 0 || err != nil {
			t.Errorf("%s: %v, %v", name, found, err)
		}
	}
	nfttest.NoError(t, os.Mkdir(filepath.Join(dir, "ip6_tables_names"), 0o700))
	if _, err := xtables.LegacyTables(dir); !errors.Is(err, unix.EISDIR) || strings.Contains(err.Error(), "table ip") {
		t.Errorf("%v, want an error about the list", err)
	}
	if _, err := xtables.OlderTables(dir); err == nil {
		t.Error("no error for unreadable files, when looking for agents")
	}
}

// An empty table, which a program that only looks leaves behind, decides nothing.
func TestLegacyTablesThatDecideAndAgentsThereAreFound(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "iptables-legacy", "ip6tables-legacy")
	const dir = "/proc/thread-self/net"
	for _, family := range []nfnetlink.Family{nfnetlink.IPv4, nfnetlink.IPv6} {
		for _, tt := range []struct {
			table, words string
			agent        bool
		}{
			{"raw", "-A PREROUTING -p udp -j CT --notrack", false},
			{"mangle", "-A FORWARD -j MARK --set-mark 1", false},
			{"filter", "-A FORWARD -j DROP", false},
			{"filter", "-N MINE", false},
			{"filter", "-N IP-MASQ", false},
			{"nat", "-A POSTROUTING -j MASQUERADE", false},
			{"nat", "-N IP-MASQ-AGENT2", false},
			{"nat", "-N IP-MASQ", true},
		} {
			t.Run(fmt.Sprintf("%s %s %s", family, tt.table, tt.words), func(t *testing.T) {
				t.Parallel()
				ns := nfttest.NewNS(t, "node")
				check := func(when string, want ...xtables.LegacyTable) {
					t.Helper()
					all := nfttest.In(t, ns, func() ([]xtables.LegacyTable, error) { return xtables.LegacyTables(dir) })
					if !slices.Equal(all, want) {
						t.Errorf("%s: %v, want %v", when, all, want)
					}
					found := nfttest.In(t, ns, func() ([]xtables.LegacyTable, error) { return xtables.OlderTables(dir) })
					if len(found) > 0 != (tt.agent && len(want) > 0) {
						t.Errorf("%s: of agents are %v", when, found)
					}
				}
				program := strings.Fields(xtables.LegacyTable{Family: family}.Command())[0]
				run := func(words string) {
					nfttest.Run(t, ns, "", program, append([]string{"-t", tt.table}, strings.Fields(words)...)...)
				}
				check("without it")
				run("-S")
				check("empty")
				run(tt.words)
				check("in use", xtables.LegacyTable{Family: family, Table: tt.table, Older: tt.agent})
			})
		}
	}
}
