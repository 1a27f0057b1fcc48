package kernel

import (
	"fmt"
	"net/netip"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/nftables/expr"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/xtables"
)

// polled is how much later than a change the agent sees it.
const polled = 250 * time.Millisecond

// A bounded is a config of which each operation has a bound.
type bounded struct {
	mode  nft.Mode
	cidrs int
	kind  string
}

// of returns the config, with the first of its CIDRs or the second.
func (b bounded) of(second byte, addresses ...string) nft.Ruleset {
	var all []config.CIDR
	for i := range b.cidrs {
		a := netip.AddrFrom4([4]byte{byte(20 + i>>15), byte(i >> 7), byte(i<<1) | second, 0}) // not adjacent
		all = append(all, config.CIDR{Prefix: netip.PrefixFrom(a, 24)})
	}
	c := config.Config{NonMasqueradeCIDRs: all, MasqueradeSrcCIDRs: cases.CIDRs("10.244.0.0/16")}
	switch b.kind {
	case "portsPerPod 250":
		c.PortsPerPod = 250
		c.SNATAddresses = cases.CIDRs("198.51.100.0/24")
	case "64 snatRules":
		c.NonMasqueradeCIDRs = cases.CIDRs("10.0.0.0/8")
		for i := range 64 {
			to := all[i*len(all)/64 : (i+1)*len(all)/64]
			if len(to) == 0 {
				to = cases.CIDRs(fmt.Sprintf("203.0.113.%d/32", i))
			}
			c.SNATRules = append(c.SNATRules, config.SNATRule{To: to, Addresses: cases.CIDRs("198.51.100.0/24")})
		}
	case "plain":
		if b.mode == nft.ModeNFTables {
			c.SNATAddresses = cases.CIDRs("198.51.100.0/24")
		}
	}
	if b.mode == nft.ModeIPTables {
		c.MasqueradeSrcCIDRs = nil
		return xtOf(c)
	}
	return nft.Compile(c, nft.Options{Layout: native.Layout{}}).WithAddresses(cases.Addrs(addresses...))
}

// disturb commits every so often until the test ends.
func disturb(t *testing.T, ns *nfttest.NS, every time.Duration) {
	if every == 0 {
		return
	}
	commit, done := commits(t, ns), make(chan struct{})
	var running sync.WaitGroup
	running.Go(func() {
		for tick := time.NewTicker(every); ; {
			select {
			case <-tick.C:
				commit()
			case <-done:
				tick.Stop()
				return
			}
		}
	})
	t.Cleanup(func() {
		close(done)
		running.Wait()
	})
}

// pauses are those between two transactions of another program; 0: there is none.
func pauses() []time.Duration {
	return []time.Duration{0, 200 * time.Millisecond, 50 * time.Millisecond, 5 * time.Millisecond}
}

// What SPEC promises, less the time until the agent sees it. Only LONG=1 runs it, and prints a table with a row for
// each combination; -run 'Bound/nftables/3_CIDRs/plain/5ms' runs a part. Mode iptables-nft has at most 1,000 CIDRs.
func TestEachOperationIsWithinItsBound(t *testing.T) {
	table := newTable(t, "mode | CIDRs | config | a commit every", "start", "change", "heal a chain",
		"heal the base chain", "another address", "other addresses", "check of rules", "check of all")
	sizes := map[nft.Mode][]int{nft.ModeNFTables: {3, 10_000, 100_000}, nft.ModeIPTables: {3, 1_000}}
	kinds := map[nft.Mode][]string{
		nft.ModeNFTables: {"plain", "portsPerPod 250", "64 snatRules"}, nft.ModeIPTables: {"plain"},
	}
	for _, mode := range cases.Modes() {
		for _, n := range sizes[mode] {
			for _, kind := range kinds[mode] {
				for _, every := range pauses() {
					t.Run(fmt.Sprintf("%s/%d CIDRs/%s/%s", mode, n, kind, every), func(t *testing.T) {
						ns := nfttest.NewNS(t, "node")
						r := &row{T: t, kernel: open(t, ns), cells: []string{fmt.Sprintf("%s | %d | %s | %s", mode, n, kind, every)}}
						disturb(t, ns, every)
						measure(r, ns, bounded{mode, n, kind})
						table.rows = append(table.rows, r.cells)
					})
				}
			}
		}
	}
}

// So is a take-over next to a table of 48,000 rules.
func TestTakeOverNextToALargeTableIsWithinItsBound(t *testing.T) {
	table := newTable(t, "way | a commit every", "take-over")
	nfttest.Require(t, "iptables-nft-restore", "ip6tables-nft-restore")
	agent := loadOlder(t, "ip-masq-agent-v2.9")
	for _, way := range agent.takeOvers() {
		for _, every := range pauses() {
			t.Run(fmt.Sprintf("%s/%s", way.name, every), func(t *testing.T) {
				ns := nfttest.NewNS(t, "node")
				agent.install(t, ns, nil)
				b := &nfnetlink.Batch{}
				rule := nfnetlink.Rule{Family: nfnetlink.IPv4, Table: xtables.NATTable, Chain: xtables.Postrouting}
				rule.Exprs = nfnetlink.Marshal(rule.Family, &expr.Counter{})
				for range 48_000 {
					b.AddRule(rule)
				}
				nfttest.Check(connect(t, ns).Commit(b))
				r := &row{T: t, kernel: open(t, ns), cells: []string{fmt.Sprintf("%s | %s", way.name, every)}}
				disturb(t, ns, every)
				r.apply(30*time.Second, way.want, way.depth)
				table.rows = append(table.rows, r.cells)
			})
		}
	}
}

// A table is printed in Markdown when its test ends.
type table struct{ rows [][]string }

func newTable(t *testing.T, columns ...string) *table {
	if !nfttest.Long() {
		t.Skip("LONG=1 measures")
	}
	head := strings.Join(columns, " | ")
	rule := strings.Repeat("|---", strings.Count(head, "|")+1)
	printed := &table{}
	t.Cleanup(func() {
		fmt.Printf("\n| %s |\n%s|\n", head, rule)
		for _, cells := range printed.rows {
			fmt.Printf("| %s |\n", strings.Join(cells, " | "))
		}
	})
	return printed
}

// A row is that of a combination: what its operations took.
type row struct {
	*testing.T
	kernel *Kernel
	cells  []string
}

// apply applies what differs, and fails the test if that takes longer than its bound.
func (r *row) apply(bound time.Duration, want nft.Ruleset, depth nft.Depth) {
	slow := slowness()
	begun := time.Now()
	a, err := r.kernel.Apply(r.Context(), want, depth)
	took := time.Since(begun)
	slow = max(slow, slowness())
	r.cells = append(r.cells, took.Round(time.Millisecond/10).String())
	if err != nil || len(a.Differences) == 0 || took.Seconds() > slow*bound.Seconds() {
		r.Errorf("took %s, want %s on a machine that is idle, while this one is %.1f times as slow: %d differences, %v", took,
			bound, slow, len(a.Differences), err)
	}
}

func measure(r *row, ns *nfttest.NS, b bounded) {
	first := b.of(0, "198.51.100.1")
	second := b.of(1, "198.51.100.1")
	r.apply(30*time.Second, first, nft.WithLeftovers)
	r.apply(30*time.Second, second, nft.Contents)
	heal := time.Second - polled
	c := connect(r, ns)
	flush := func(family nfnetlink.Family, table, chain string) {
		batch := &nfnetlink.Batch{}
		batch.FlushChain(nfnetlink.ChainID{Family: family, Table: table, Name: chain})
		nfttest.Check(c.Commit(batch))
		r.apply(heal, second, nft.Frame)
	}
	if b.mode == nft.ModeIPTables {
		flush(nfnetlink.IPv4, xtables.NATTable, second.Chain())
		flush(nfnetlink.IPv4, xtables.NATTable, xtables.Postrouting)
		r.cells = append(r.cells, "", "", processor(r.T, r.kernel, second, nft.Frame).String(),
			processor(r.T, r.kernel, second, nft.Contents).String())
		return
	}
	flush(nfnetlink.Inet, nft.TableName, second.Tables[0].Chains[0].Name)
	flush(nfnetlink.Inet, nft.TableName, native.BaseChain)
	frame := processor(r.T, r.kernel, second, nft.Frame)
	contents := processor(r.T, r.kernel, second, nft.Contents)
	r.apply(heal, b.of(1, "198.51.100.1", "198.51.100.2"), nft.Frame)
	r.apply(heal, b.of(1, "198.51.100.3"), nft.Frame)
	r.cells = append(r.cells, frame.String(), contents.String())
}

// processor returns the processor time of a check that finds nothing.
func processor(t *testing.T, k *Kernel, want nft.Ruleset, depth nft.Depth) time.Duration {
	const times = 5
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	begun := nfttest.ThreadTime()
	for range times {
		apply(t, k, want, depth)
	}
	return ((nfttest.ThreadTime() - begun) / times).Round(time.Microsecond * 10)
}

// slowness returns how many times as long as on an idle machine something takes that only computes: other programs, and
// other machines on the same hardware, compute at the same time.
func slowness() float64 {
	const work = 10 * time.Millisecond
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	begun, used := time.Now(), nfttest.ThreadTime()
	for nfttest.ThreadTime()-used < work {
	}
	return max(1, time.Since(begun).Seconds()/work.Seconds())
}
