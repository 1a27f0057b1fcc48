package older_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/mdlayher/netlink"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/older"
	"nft-masq-agent/nft/rule"
	"nft-masq-agent/nft/xtables"
)

func TestMain(m *testing.M) {
	os.Exit(nfttest.Main(m))
}

// dialNS connects to a new namespace.
func dialNS(t *testing.T) (*nfttest.NS, *nfnetlink.Conn) {
	t.Helper()
	ns := nfttest.NewNS(t, "node")
	c := nfnetlink.New(func() (*netlink.Conn, error) { return nfttest.DialNetfilter(ns) })
	t.Cleanup(func() { c.Close() })
	return ns, c
}

const testdata = "../../testdata/foreign"

// install loads the rules of a case into the namespace.
func install(t *testing.T, ns *nfttest.NS, name string) {
	t.Helper()
	nfttest.LoadForeign(t, ns, filepath.Join(testdata, name), nil)
}

// remove removes chains, if the ruleset has not changed since.
func remove(t *testing.T, c *nfnetlink.Conn, generation uint32, chains []older.Chain) {
	t.Helper()
	var b nfnetlink.Batch
	older.Remove(chains, &b)
	if err := c.Commit(&b, generation); err != nil {
		t.Fatal(err)
	}
}

func search(c *nfnetlink.Conn, want nft.Ruleset) ([]older.Chain, error) {
	all, err := older.List(c)
	if err != nil {
		return nil, err
	}
	return older.Find(all, want, rule.String)
}

// find returns what was found, and the generation of the ruleset before.
func find(t *testing.T, c *nfnetlink.Conn) (generation uint32, found []older.Chain) {
	t.Helper()
	generation, err := c.Generation()
	if err == nil {
		found, err = search(c, nft.Ruleset{})
	}
	if err != nil {
		t.Fatal(err)
	}
	return generation, found
}

// ruleHandles returns the rules of both nat tables by handle: a rule that is
// deleted and recreated gets another handle.
func ruleHandles(t *testing.T, c *nfnetlink.Conn) map[uint64]string {
	t.Helper()
	handles := map[uint64]string{}
	for _, family := range []nfnetlink.Family{nfnetlink.IPv4, nfnetlink.IPv6} {
		rules, _, err := c.FirstRules(family, "nat", "", func(nfnetlink.Rule) bool { return false })
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range rules {
			handles[r.Handle<<1|uint64(family)&1] = family.String() + " " + r.Chain + " " + rule.String(r)
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
			generation, found := find(t, c)
			remove(t, c, generation, found)
			if diff := cmp.Diff(before, save()); diff != "" {
				t.Errorf("rules (-before +after):\n%s", diff)
			}
			if diff := cmp.Diff(handles, ruleHandles(t, c)); diff != "" {
				t.Errorf("handles (-before +after):\n%s", diff)
			}
			if _, left := find(t, c); len(left) > 0 {
				t.Errorf("left %v", left)
			}
		})
	}
}

func TestChainsOfOneAgentAreRemovedTogether(t *testing.T) {
	nfttest.Require(t, "iptables-nft-restore")
	for jumps, first := range map[int]string{2: "", 3: "-A POSTROUTING -j IP-MASQ-AGENT\n"} {
		ns, c := dialNS(t)
		nfttest.Run(t, ns, `*nat
:IP-MASQ - [0:0]
:IP-MASQ-AGENT - [0:0]
:IP-MASQ-AGENT-SRC - [0:0]
:OPERATOR - [0:0]
:WRAPPER - [0:0]
`+first+`-A POSTROUTING -j WRAPPER
-A POSTROUTING -j IP-MASQ
-A WRAPPER -j IP-MASQ-AGENT
-A IP-MASQ -j IP-MASQ-AGENT
-A IP-MASQ-AGENT -s 10.0.0.0/8 -m comment --comment "ip-masq-agent: only some" -g IP-MASQ-AGENT-SRC
-A IP-MASQ-AGENT -j OPERATOR
-A IP-MASQ-AGENT-SRC -m comment --comment "ip-masq-agent: outbound traffic is subject to MASQUERADE (must be last in chain)" -j MASQUERADE
-A OPERATOR -j RETURN
COMMIT
`, "iptables-nft-restore")
		generation, found := find(t, c)
		got := map[string]string{}
		for _, l := range found {
			got[l.Name] = fmt.Sprint(l.Rules, " ", len(l.Jumps))
		}
		want := map[string]string{"IP-MASQ": "1 1", "IP-MASQ-AGENT": fmt.Sprint("2 ", jumps), "IP-MASQ-AGENT-SRC": "1 1"}
		if diff := cmp.Diff(want, got); diff != "" || len(found) != len(got) {
			t.Errorf("rules and jumps (-want +got):\n%s", diff)
		}
		remove(t, c, generation, found)
		left := "*nat\n:PREROUTING ACCEPT [0:0]\n:INPUT ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]\n:POSTROUTING ACCEPT [0:0]\n" +
			":OPERATOR - [0:0]\n:WRAPPER - [0:0]\n-A POSTROUTING -j WRAPPER\n-A OPERATOR -j RETURN\nCOMMIT\n"
		if diff := cmp.Diff(left, nfttest.Save(t, ns, "iptables-nft-save", "nat")); diff != "" {
			t.Errorf("left (-want +got):\n%s", diff)
		}
	}
}

// A chain that a map of another program leads to is emptied, and then no longer found.
func TestChainsInUseAreOnlyEmptied(t *testing.T) {
	nfttest.Require(t, "nft")
	ns, c := dialNS(t)
	nfttest.NFT(t, ns, `table ip nat {
		chain IP-MASQ { counter; counter; jump IP-MASQ-AGENT; }
		chain IP-MASQ-AGENT { masquerade fully-random; }
		map m { type ipv4_addr : verdict; elements = { 192.0.2.1 : jump IP-MASQ, 192.0.2.2 : jump NON-MASQUERADE-DAEMON }; }
		chain POSTROUTING { type nat hook postrouting priority 100; }
		chain NON-MASQUERADE-DAEMON { accept; }
	}`, "-f", "-")
	for _, want := range []string{
		"chain IP-MASQ in table ip nat: 3 rules, to which no other rule leads, held true; " +
			"chain IP-MASQ-AGENT in table ip nat: 1 rule, random-fully, held false; " +
			"chain NON-MASQUERADE-DAEMON in table ip nat: 1 rule, to which no other rule leads, held true; ",
		"",
	} {
		generation, found := find(t, c)
		got := ""
		for _, l := range found {
			got += fmt.Sprintf("%s, held %t; ", l, l.Held)
			if l.Decides() {
				t.Errorf("%s decides", l)
			}
		}
		if got != want {
			t.Errorf("got %s\nwant %s", got, want)
		}
		remove(t, c, generation, found)
	}
	l := older.Chain{
		ChainID: nfnetlink.ChainID{Family: nfnetlink.IPv6, Table: "nat", Name: "A"},
		Rules:   1, Jumps: make([]nfnetlink.Rule, 1),
	}
	for _, base := range []*nfnetlink.Chain{nil, {}} {
		if l.Base = base; l.Decides() != (base != nil) || l.String() != "chain A in table ip6 nat: 1 rule" {
			t.Error(l)
		}
	}
}

// Agents comment all of their rules. In a chain with another name, a comment like theirs may
// be somebody else's.
func TestChainOfAnotherNameIsKeptUnlessAllRulesAreAnAgents(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "iptables-nft-restore", "ip6tables-nft-restore", "iptables-nft-save", "ip6tables-nft-save")
	const (
		local = `-m comment --comment "ip-masq: local traffic is not subject to MASQUERADE" -j RETURN`
		last  = `-m comment --comment "ip-masq-agent: outbound traffic is subject to MASQUERADE (must be last in chain)" ` +
			"-j MASQUERADE"
		jump = `-m comment --comment "ip-masq-agent: ensure nat POSTROUTING directs all non-LOCAL destination traffic ` +
			`to our custom SITE chain" -j SITE`
		rest = "its rule with handle "
	)
	for _, tt := range []struct {
		name, jump string
		rules      []string
		kept       string // "" if the chain is an agent's
	}{
		{"all", jump, []string{local, last}, ""},
		{"all, reached by another's jump", "-j SITE", []string{local, last}, ""},
		{"none yet", jump, nil, ""},
		{"another rule first", jump, []string{"-d 192.0.2.0/24 -j ACCEPT", local, last}, rest + "192.0.2.0"},
		{"another rule last", "-j SITE", []string{local, "-j MASQUERADE"}, rest + "MASQUERADE"},
		{
			"another's comment", "-j SITE",
			[]string{local, `-d 192.0.2.0/24 -m comment --comment "site: ip-masq: " -j RETURN`, last},
			rest + "192.0.2.0",
		},
		{"one of many", "-j SITE", []string{
			"-d 192.0.2.1 -j ACCEPT", `-d 192.0.2.2 -m comment --comment "ip-masq: see the wiki" -j ACCEPT`,
			"-d 192.0.2.3 -j DROP2",
		}, rest + "192.0.2.1"},
		{"only a jump's comment", jump, []string{"-j MASQUERADE"}, rest + "MASQUERADE"},
	} {
		for _, program := range []string{"iptables-nft", "ip6tables-nft"} {
			t.Run(tt.name+", "+program, func(t *testing.T) {
				ns, c := dialNS(t)
				text := "*nat\n:SITE - [0:0]\n:DROP2 - [0:0]\n-A POSTROUTING " + tt.jump + "\n"
				for _, r := range tt.rules {
					text += "-A SITE " + r + "\n"
				}
				if program == "ip6tables-nft" {
					six := strings.NewReplacer("192.0.2.0/24", "2001:db8:2::/64", "192.0.2.0", "2001:db8:2::/64",
						"192.0.2.", "2001:db8:2::")
					text, tt.kept = six.Replace(text), six.Replace(tt.kept)
				}
				nfttest.Run(t, ns, text+"COMMIT\n", program+"-restore")
				before := nfttest.Save(t, ns, program+"-save", "nat")
				generation, found := find(t, c)
				if len(found) != 1 || found[0].Name != "SITE" || (found[0].Kept == "") != (tt.kept == "") {
					t.Fatalf("found %v", found)
				}
				l := found[0]
				_, word, _ := strings.Cut(tt.kept, rest)
				if !strings.Contains(l.Kept, word) || !strings.HasSuffix(l.String(), l.Kept) ||
					l.Decides() != (tt.kept == "" && len(tt.rules) > 0) {
					t.Errorf("%s", l)
				}
				remove(t, c, generation, older.Removable(found))
				after := nfttest.Save(t, ns, program+"-save", "nat")
				if (after == before) != (tt.kept != "") || strings.Contains(after, "SITE") != (tt.kept != "") {
					t.Errorf("before:\n%s\nafter:\n%s", before, after)
				}
			})
		}
	}
}

// What an agent's chain and a chain that is kept refer to.
func TestAgentsChainsAreRemovedNextToAChainThatIsKept(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "iptables-nft-restore", "iptables-nft-save")
	ns, c := dialNS(t)
	nfttest.Run(t, ns, `*nat
:IP-MASQ-AGENT - [0:0]
:ABOVE - [0:0]
:BELOW - [0:0]
-A POSTROUTING -j ABOVE
-A ABOVE -m comment --comment "ip-masq: first" -j IP-MASQ-AGENT
-A ABOVE -d 192.0.2.1 -j RETURN
-A IP-MASQ-AGENT -j BELOW
-A BELOW -m comment --comment "ip-masq: second" -j RETURN
-A BELOW -d 192.0.2.2 -j RETURN
COMMIT
`, "iptables-nft-restore")
	generation, found := find(t, c)
	remove(t, c, generation, older.Removable(found))
	want := `*nat
:PREROUTING ACCEPT [0:0]
:INPUT ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:ABOVE - [0:0]
:BELOW - [0:0]
-A POSTROUTING -j ABOVE
-A ABOVE -d 192.0.2.1/32 -j RETURN
-A BELOW -m comment --comment "ip-masq: second" -j RETURN
-A BELOW -d 192.0.2.2/32 -j RETURN
COMMIT
`
	if diff := cmp.Diff(want, nfttest.Save(t, ns, "iptables-nft-save", "nat")); diff != "" {
		t.Errorf("left (-want +got):\n%s", diff)
	}
}

func TestOurChainsAreNotOlder(t *testing.T) {
	nfttest.Require(t, "iptables-nft-restore")
	ns, c := dialNS(t)
	install(t, ns, "ip-masq-agent-two-jumps")
	want := nft.Compile(config.Config{EnableIPv6: true}, nft.Options{Layout: xtables.Layout{Name: "IP-MASQ-AGENT"}})
	found, err := search(c, want)
	if err != nil || len(found) > 0 {
		t.Errorf("found %v, %v", found, err)
	}
}

func TestTablesOfLegacyIPTablesThatCannotBeListedAreAnError(t *testing.T) {
	dir := t.TempDir()
	for name, prepare := range map[string]func(path string) error{
		"without the kernel's files": func(string) error { return nil },
		"without a nat table":        func(path string) error { return os.WriteFile(path, []byte("filter\n"), 0o600) },
	} {
		if err := prepare(filepath.Join(dir, "ip_tables_names")); err != nil {
			t.Fatal(err)
		}
		if n, err := older.LegacyRules(dir, nfnetlink.IPv4); n != 0 || err != nil {
			t.Errorf("%s: %d rules, %v", name, n, err)
		}
	}
	if err := os.Mkdir(filepath.Join(dir, "ip6_tables_names"), 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := older.LegacyRules(dir, nfnetlink.IPv6); err == nil {
		t.Error("no error for unreadable files")
	}
	if _, err := older.XTables(dir); err == nil {
		t.Error("no error for unreadable files, when looking for agents")
	}
}
