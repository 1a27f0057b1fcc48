package main

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"

	"golang.org/x/sys/unix"
)

// A tampering is another program's change of our rules, in one transaction.
type tampering struct {
	name  string
	do    func(*testNode)
	finds string // part of the text in log and status
}

// nftScript returns a tampering that runs a transaction. TABLE stands for our
// table, SET for the set of IPv4 destinations, FIRST and LAST for handles of our
// rules.
func nftScript(text string) func(*testNode) {
	return func(n *testNode) {
		n.t.Helper()
		words := []string{"TABLE", "inet " + nft.TableName}
		if strings.Contains(text, "SET") {
			words = append(words, "SET", n.set())
		}
		if strings.Contains(text, "FIRST") || strings.Contains(text, "LAST") {
			c := n.connect()
			defer c.Close()
			rules, _, err := c.FirstRules(nfnetlink.Inet, nft.TableName, "postrouting",
				func(nfnetlink.Rule) bool { return false })
			n.check(err)
			words = append(words, "FIRST", fmt.Sprint(rules[1].Handle), "LAST", fmt.Sprint(rules[len(rules)-1].Handle))
		}
		nfttest.NFT(n.t, n.NS, strings.NewReplacer(words...).Replace(text), "-f", "-")
	}
}

// set returns the name of the set of IPv4 destinations in the kernel.
func (n *testNode) set() string {
	n.t.Helper()
	c := n.connect()
	defer c.Close()
	sets, err := c.Sets(nfnetlink.Inet, nft.TableName)
	n.check(err)
	for _, s := range sets {
		if strings.HasPrefix(s.Name, "non-masq-v4") {
			return s.Name
		}
	}
	n.t.Fatal("no set of IPv4 destinations")
	return ""
}

func iptables(args string) func(*testNode) {
	return func(n *testNode) {
		n.t.Helper()
		nfttest.Run(n.t, n.NS, "", "iptables-nft", append([]string{"-t", "nat"}, strings.Fields(args)...)...)
	}
}

// firewalldReload does what firewalld up to version 0.9 does on reload, in one
// transaction.
const firewalldReload = `flush ruleset
table inet firewalld {
	chain filter_INPUT { type filter hook input priority 10; ct state established,related accept; iifname "lo" accept; reject with icmpx admin-prohibited; }
	chain nat_POSTROUTING { type nat hook postrouting priority 110; jump nat_POST_public; }
	chain nat_POST_public { }
}
`

// tamperings returns all ways to change the rules of a mode.
func tamperings(mode nft.Mode) []tampering {
	if mode == nft.ModeIPTables {
		return []tampering{
			{"flush ruleset", nftScript("flush ruleset"), "has no chain POSTROUTING"},
			{"firewalld reload", nftScript(firewalldReload), "has no chain POSTROUTING"},
			{"iptables -F", iptables("-F"), "has no jump to IP-MASQ-AGENT"},
			{"iptables -D of a rule", iptables("-D IP-MASQ-AGENT 2"), "missing rule"},
			{"iptables -D of the jump", iptables("-D POSTROUTING 1"), "has no jump to IP-MASQ-AGENT"},
			{"iptables -A", iptables("-A IP-MASQ-AGENT -d 198.51.100.8 -j RETURN"), "unexpected rule"},
			{"iptables -I", iptables("-I IP-MASQ-AGENT -j ACCEPT"), "unexpected rule"},
			{"dormant", nftScript("add table ip nat { flags dormant; }"), "is dormant"},
		}
	}
	const chain = "flush chain TABLE postrouting; delete chain TABLE postrouting; add chain TABLE postrouting "
	return []tampering{
		{"flush ruleset", nftScript("flush ruleset"), "is missing"},
		{"firewalld reload", nftScript(firewalldReload), "is missing"},
		{"flush chain", nftScript("flush chain TABLE postrouting"), "missing rule"},
		{
			"delete chain", nftScript("flush chain TABLE postrouting; delete chain TABLE postrouting"),
			"chain postrouting is missing",
		},
		{"delete element", nftScript("delete element TABLE SET { 10.0.0.0/24 }"), "lacks 10.0.0.0/24"},
		{
			"exchange element", nftScript("delete element TABLE SET { 10.0.0.0/24 }; add element TABLE SET { 8.8.8.0/24 }"),
			"contains 8.8.8.0/24",
		},
		{"add rule", nftScript("insert rule TABLE postrouting accept"), "unexpected rule: accept"},
		{"delete rule", nftScript("delete rule TABLE postrouting handle LAST"), "missing rule"},
		{
			"move rule", nftScript("delete rule TABLE postrouting handle FIRST; add rule TABLE postrouting ip daddr @SET " +
				"counter name exempt-v4 return"),
			"in another order",
		},
		{
			"add set", nftScript("add set TABLE foreign { type ipv4_addr; elements = { 1.1.1.1 }; }"),
			"set foreign is not in the config",
		},
		{"policy", nftScript("add chain TABLE postrouting { policy drop; }"), "another policy than accept"},
		{"priority", nftScript(chain + "{ type nat hook postrouting priority 50; }"), "priority 50"},
		{"dormant", nftScript("add table TABLE { flags dormant; }"), "is dormant"},
	}
}

// slash24s returns a config that exempts n networks, starting with 10.0.0.0/24.
func slash24s(n int) string {
	var b strings.Builder
	b.WriteString("enableIPv6: true\nnonMasqueradeCIDRs:\n- fd00::/8\n")
	for i := range n {
		fmt.Fprintf(&b, "- 10.%d.%d.0/24\n", i>>7, i<<1&0xff)
	}
	return b.String()
}

func TestTamperingIsReverted(t *testing.T) {
	t.Parallel()
	for _, cidrs := range []int{10, 990}[:nfttest.Rounds(1, 2, 2)] {
		for _, mode := range modes {
			t.Run(fmt.Sprintf("%d CIDRs, %s", cidrs, mode), func(t *testing.T) {
				t.Parallel()
				n, flag := newNode(t), "--mode="+string(mode)
				n.swap(slash24s(cidrs))
				// No timer may help.
				d := n.start(flag, "--resync-interval=3600", "--http-address", httpAddress)
				want := wants(t, slash24s(cidrs), flag)
				d.began(want)
				all := tamperings(mode)
				if cidrs == 10 { // from the thirtieth repair on one a second
					all = slices.Concat(all, slices.Repeat(all[:1], nfttest.Rounds(0, 25, 200)))
				}
				all = all[:nfttest.Rounds(4, len(all), len(all))]
				for _, a := range all {
					t.Run(a.name, func(t *testing.T) {
						a.do(n)
						line := d.await("rules_restored")
						if mode == nft.ModeNFTables && (a.name == "dormant" || a.name == "add set") {
							d.await("table_recreated")
						}
						n.holds(want)
						if line["level"] != "warn" || !strings.Contains(line.Texts("what"), a.finds) || line["duration_ms"] == nil {
							t.Errorf("logged: %v, want %q", line, a.finds)
						}
						d.forgive("repairs_slowed")
						d.silent()
					})
				}
				if got := n.metric("nft_masq_agent_drift_repairs_total"); got != fmt.Sprint(len(all)) {
					t.Errorf("%s repairs counted, want %d", got, len(all))
				}
				d.stop()
				d.forgive("repairs_slowed") // which follows the log line of the repair
				d.silent()                  // one line each
			})
		}
	}
}

func TestConflictingAgentsBackOff(t *testing.T) {
	nfttest.SkipIfShort(t)
	t.Parallel()
	n := newNode(t)
	n.swap(exempting("10.1.0.0/16"))
	var agents []*daemon
	for _, value := range []string{"true", "false"} {
		other := &testNode{n.NS, t, n.path, n.socket + value}
		agents = append(agents, other.start("--random-fully="+value))
	}
	for _, d := range agents {
		d.await("repairs_slowed")
	}
	generation := n.generation()
	before := agents[0].Count("rules_restored") + agents[1].Count("rules_restored")
	// Each waits before the next repair, and in the meantime there are only the
	// transactions of these repairs.
	const repairs = 4
	agents[0].until("further repairs", func() bool {
		return agents[0].Count("rules_restored")+agents[1].Count("rules_restored") >= before+repairs
	})
	// One fills a set, one activates it; some may be in progress.
	if total := n.generation() - generation; total > 2*(repairs+4) {
		t.Errorf("%d transactions for %d repairs", total, repairs)
	}
	if n := agents[0].Count("rules_restored") + agents[1].Count("rules_restored"); n > 100 {
		t.Errorf("%d repairs", n)
	}
	for _, d := range agents {
		d.stop()
	}
}

func TestBusyNeighborCausesNoWritesAndHidesNothing(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	inEachMode(t, func(t *testing.T, _ nft.Mode, flag string) {
		n := newNode(t)
		n.swap(slash24s(100))
		d := n.start(flag, "--resync-interval=3600", "--http-address", httpAddress)
		want := wants(t, slash24s(100), flag)
		d.began(want)
		c := n.connect()
		defer c.Close()
		const commits = 200
		before := n.generation()
		for i := range commits {
			b := &nfnetlink.Batch{}
			b.AddTable(nfnetlink.IPv4, "neighbour")
			b.AddCounter(nfnetlink.IPv4, "neighbour", fmt.Sprintf("c%d", i))
			n.check(c.Commit(b, 0))
		}
		looks := n.checks("sighup")
		d.signal(unix.SIGHUP)
		d.until("a full check", func() bool { return n.checks("sighup") != looks })
		if total := n.generation() - before; total != commits {
			t.Errorf("%d transactions, want %d", total, commits)
		}
		d.silent()
		tamperings(nft.ModeNFTables)[0].do(n)
		d.await("rules_restored")
		n.holds(want)
		d.stop()
	})
}

// The kernel may turn off connection tracking when elements with a limit of
// connections are created. The same rules in the same table then translate nothing.
func TestConnectionLimitsInOurSetsDoNotEndMasquerading(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft")
	n := newTrafficNode(t)
	for _, config := range []string{
		"nonMasqueradeCIDRs: [10.0.0.0/8, 172.16.0.0/12, 192.168.0.0/16, 198.18.0.0/15]",
		"nonMasqueradeCIDRs: [10.0.0.0/8]\nsnatAddresses: [192.0.2.1, 10.244.1.1]",
	} {
		n.enforce(config)
		table := nfttest.NFT(t, n.top.Node, "", "list", "table", "inet", nft.TableName)
		limited := regexp.MustCompile(`(?m)^\s*(set|map) \S+ \{$`).ReplaceAllString(table, "${0}\nct count over 1")
		_, err := n.top.Node.Output("delete table inet "+nft.TableName+"\n"+limited, "nft", "-f", "-")
		if err != nil && !strings.Contains(err.Error(), "Operation not supported") { // in sets of intervals, Linux 6.1
			t.Fatal(err)
		}
		n.enforce(config)
		sighting := nfttest.MustSend(t, n.top, nfttest.Flow{
			Proto: nfttest.UDP, From: n.top.Pod, To: n.top.Outside, Dst: netip.MustParseAddrPort("203.0.113.9:5000"),
		})
		if !sighting.Masqueraded() {
			t.Errorf("%s: %v is seen", config, sighting.Seen)
		}
	}
}

// neighbor commits to its own table every so often until the test ends. What it adds, it deletes:
// what is there already would be no transaction.
func (n *testNode) neighbor(every time.Duration) {
	n.t.Helper()
	c, ticker, done := n.connect(), time.NewTicker(every), make(chan struct{})
	var ended sync.WaitGroup
	ended.Go(func() {
		defer c.Close()
		for {
			b := &nfnetlink.Batch{}
			b.AddTable(nfnetlink.IPv4, "neighbor")
			b.DelTable(nfnetlink.IPv4, "neighbor")
			n.check(c.Commit(b, 0))
			select {
			case <-ticker.C:
			case <-done:
				return
			}
		}
	})
	n.t.Cleanup(func() {
		ticker.Stop()
		close(done)
		ended.Wait()
	})
}
