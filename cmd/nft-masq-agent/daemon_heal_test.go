package main

import (
	"fmt"
	"net/netip"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
)

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

// slash24s returns a config that exempts n networks, starting with 10.0.0.0/24, and one of IPv6.
func slash24s(n int) string {
	var b strings.Builder
	b.WriteString("nonMasqueradeCIDRs:\n- fd00::/8\n")
	for i := range n {
		fmt.Fprintf(&b, "- 10.%d.%d.0/24\n", i>>7, i<<1&0xff)
	}
	return b.String()
}

func TestConflictingAgentsBackOff(t *testing.T) {
	nfttest.SkipIfShort(t)
	t.Parallel()
	n := newNode(t)
	n.swap(exempting("10.1.0.0/16"))
	start := time.Now()
	var agents []*daemon
	for _, value := range []string{"true", "false"} {
		other := &testNode{n.NS, t, n.path, n.socket + value}
		agents = append(agents, other.start("--random-fully="+value))
	}
	// The other one may never have more to do than one repair a second, which is no more than its share.
	agents[0].until("a slowed agent", func() bool {
		return agents[0].Count("repairs_slowed")+agents[1].Count("repairs_slowed") > 0
	})
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
	// Each makes thirty at once, and then one a second, until the other is slowed, too.
	most := 100 + 2*int(time.Since(start).Seconds())
	if n := agents[0].Count("rules_restored") + agents[1].Count("rules_restored"); n > most {
		t.Errorf("%d repairs, at most %d", n, most)
	}
	for _, d := range agents {
		d.stop()
	}
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
			n.check(c.Commit(b))
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

func TestBusyNeighborCausesNoWritesAndHidesNothing(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	inEachMode(t, func(t *testing.T, _ nft.Mode, flag string) {
		n := newNode(t)
		n.swap(slash24s(100))
		d := n.start(flag, "--enable-ipv6", "--resync-interval=3600", "--http-address", httpAddress)
		want := wants(t, slash24s(100), flag, "--enable-ipv6")
		d.began(want)
		c := n.connect()
		defer c.Close()
		const commits = 200
		before := n.generation()
		for i := range commits {
			b := &nfnetlink.Batch{}
			b.AddTable(nfnetlink.IPv4, "neighbour")
			b.AddCounter(nfnetlink.IPv4, "neighbour", fmt.Sprintf("c%d", i))
			n.check(c.Commit(b))
		}
		looks := n.checks("sighup")
		d.signal(unix.SIGHUP)
		d.until("a full check", func() bool { return n.checks("sighup") != looks })
		if total := n.generation() - before; total != commits {
			t.Errorf("%d transactions, want %d", total, commits)
		}
		d.silent()
		n.flush()
		d.await("rules_restored")
		n.holds(want)
		d.stop()
	})
}
