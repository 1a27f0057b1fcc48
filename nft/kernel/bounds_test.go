package kernel

import (
	"fmt"
	"net/netip"
	"runtime"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
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
		c.PortsPerPod = config.PodPorts{Size: 250}
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

// What SPEC promises, less the time until the agent sees it. Only LONG=1 runs it, and prints a line for each
// combination; -run '/nftables/3_CIDRs/plain/5ms' runs a part.
func TestEachOperationIsWithinItsBound(t *testing.T) {
	if !nfttest.Long() {
		t.Skip("LONG=1 measures")
	}
	for _, mode := range cases.Modes() {
		for _, n := range []int{3, 10_000, 100_000} {
			for _, kind := range []string{"plain", "portsPerPod 250", "64 snatRules"} {
				for _, every := range []time.Duration{0, 200 * time.Millisecond, 50 * time.Millisecond, 5 * time.Millisecond} {
					if mode == nft.ModeIPTables && (n > 1_000 || kind != "plain") {
						continue
					}
					t.Run(fmt.Sprintf("%s/%d CIDRs/%s/%s", mode, n, kind, every), func(t *testing.T) {
						measure(t, bounded{mode, n, kind}, every)
					})
				}
			}
		}
	}
}

func measure(t *testing.T, b bounded, every time.Duration) {
	ns := nfttest.NewNS(t, "node")
	k := open(t, ns)
	first, second := b.of(0, "198.51.100.1"), b.of(1, "198.51.100.1")
	disturb(t, ns, every)
	line := ""
	operation := func(name string, bound time.Duration, want nft.Ruleset, depth nft.Depth) {
		slow := slowness()
		begun := time.Now()
		a, err := k.Apply(t.Context(), want, depth)
		took := time.Since(begun)
		slow = max(slow, slowness())
		line += fmt.Sprintf("  %s %s", name, took.Round(time.Millisecond/10))
		if err != nil || len(a.Differences) == 0 || took.Seconds() > slow*bound.Seconds() {
			t.Errorf("%s took %s, want %s on a machine that is idle, while this one is %.1f times as slow: %d differences, %v",
				name, took, bound, slow, len(a.Differences), err)
		}
	}
	operation("start", 30*time.Second, first, nft.Everything)
	operation("change", 30*time.Second, second, nft.Contents)
	heal := time.Second - polled
	c := connect(t, ns)
	flush := func(family nfnetlink.Family, table, chain string) {
		batch := &nfnetlink.Batch{}
		batch.FlushChain(nfnetlink.ChainID{Family: family, Table: table, Name: chain})
		nfttest.Check(c.Commit(batch))
	}
	if b.mode == nft.ModeIPTables {
		flush(nfnetlink.IPv4, "nat", second.Chain())
		operation("heal", heal, second, nft.Frame)
		t.Log(line)
		return
	}
	for _, chain := range second.Tables[0].Chains[:1] {
		flush(nfnetlink.Inet, nft.TableName, chain.Name)
		operation("heal "+chain.Name, heal, second, nft.Frame)
	}
	flush(nfnetlink.Inet, nft.TableName, "postrouting")
	operation("heal postrouting", heal, second, nft.Frame)
	line += fmt.Sprintf("  check of rules %s, of everything %s", processor(t, k, second, nft.Frame),
		processor(t, k, second, nft.Contents))
	operation("address", heal, b.of(1, "198.51.100.1", "198.51.100.2"), nft.Frame)
	operation("address", heal, b.of(1, "198.51.100.3"), nft.Frame)
	t.Log(line)
}

// processor returns the processor time of a check that finds nothing.
func processor(t *testing.T, k *Kernel, want nft.Ruleset, depth nft.Depth) time.Duration {
	const times = 5
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	begun := threadTime()
	for range times {
		apply(t, k, want, depth)
	}
	return ((threadTime() - begun) / times).Round(time.Microsecond * 10)
}

// slowness returns how many times as long as on an idle machine something takes that only computes: other programs, and
// other machines on the same hardware, compute at the same time.
func slowness() float64 {
	const work = 10 * time.Millisecond
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	begun, used := time.Now(), threadTime()
	for threadTime()-used < work {
	}
	return max(1, time.Since(begun).Seconds()/work.Seconds())
}

func threadTime() time.Duration {
	var ts unix.Timespec
	nfttest.Check(unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts))
	return time.Duration(ts.Nano())
}
