package kernel

import (
	"context"
	"fmt"
	"io"
	"math"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/layouts"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
)

// The choice between ranges is the kernel's: a share that is off by five standard deviations is wrong.
func TestPortRangesAreUsedInProportionToTheirSize(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t) // sends hundreds of packets
	ranges, err := config.ParsePorts("10000-15999,32768-36767")
	if err != nil {
		t.Fatal(err)
	}
	packets := nfttest.Rounds(100, 400, 4000)
	for _, mode := range cases.Modes() {
		for _, proto := range []nfttest.Proto{nfttest.TCP, nfttest.UDP, nfttest.SCTP} {
			t.Run(fmt.Sprint(mode, " ", proto), func(t *testing.T) {
				t.Parallel()
				w := newWire(t)
				o := nft.Options{Layout: layouts.Of(mode, cases.DefaultChain), Ports: ranges}
				apply(t, open(t, w.Node), nft.Compile(config.Default(config.Defaults{}), o), layout.Ours)
				first := 0.0
				for range packets {
					p := cases.Packet{Src: w.PodV4, Dst: netip.MustParseAddr("198.51.100.8"), Proto: proto}
					port := w.send(t, p).Seen.Port()
					at := slices.IndexFunc(ranges, func(r nft.PortRange) bool { return r.Min <= port && port <= r.Max })
					if at < 0 {
						t.Fatalf("port %d is in no range", port)
					}
					if at == 0 {
						first++
					}
				}
				const share = 0.6
				n := float64(packets)
				if off := math.Abs(first-share*n) / math.Sqrt(n*share*(1-share)); off > 5 {
					t.Errorf("%.0f of %d ports are in %s, %.1f standard deviations from its share of %.1f", first, packets,
						ranges[0], off, share)
				}
			})
		}
	}
}

// A closed connection keeps its port to the destination for two minutes. Linux 6.5 and newer give
// the ports of closed connections to new ones if no other is free (nf_nat_used_tuple_harder):
// the table in config/README.md is what this test logs.
func TestPodOpensMoreConnectionsThanItHasPortsFromLinux65On(t *testing.T) {
	t.Parallel()
	evicts := !nfttest.KernelBefore(t, 6, 5)
	for _, size := range []int{250, 500, 1000}[:nfttest.Rounds(1, 1, 3)] {
		for _, to := range []string{"203.0.113.9", "2001:db8:1::1"} {
			t.Run(fmt.Sprintf("%d to %s", size, to), func(t *testing.T) {
				t.Parallel()
				top := nfttest.NewTopology(t)
				apply(t, open(t, top.Node), nft.Compile(config.Config{
					EnableIPv6: true, MasqueradeSrcCIDRs: cases.CIDRs("10.244.0.0/16", "fd00:10:244::/48"),
					PortsPerPod: config.PodPorts{Size: size},
				}, nft.Options{Layout: native.Layout{}, RandomFully: true}), layout.Ours)
				for _, state := range []string{"time_wait", "last_ack", "close", "close_wait", "fin_wait"} {
					// For slow machines: none expires meanwhile.
					_ = top.Node.Sysctl("net.netfilter.nf_conntrack_tcp_timeout_"+state, "3600")
				}
				began := time.Now()
				opened := openAndClose(t, top, netip.AddrPortFrom(netip.MustParseAddr(to), destPort), 3*size)
				failed, err := nfttest.ConntrackStat(top.Node, "insert_failed")
				if err != nil {
					t.Fatal(err)
				}
				t.Logf("block of %d: %d of %d connections in %s, %d packets lost", size, opened, 3*size,
					time.Since(began).Round(time.Second/10), failed)
				// On a slow machine, the pod uses some of its own ports again, and with them those of the block.
				if evicts && opened != 3*size || !evicts && (opened > size*11/10 || opened < size*9/10) {
					t.Errorf("%d connections; closed ones give up their ports: %t", opened, evicts)
				}
			})
		}
	}
}

// openAndClose opens connections one after the other, each of which the pod closes, until one
// fails, and returns how many there were.
func openAndClose(t *testing.T, top *nfttest.Topology, to netip.AddrPort, most int) (opened int) {
	t.Helper()
	var l net.Listener
	if err := top.Outside.Do(func() (err error) {
		l, err = new(net.ListenConfig).Listen(t.Context(), "tcp", to.String())
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var served sync.WaitGroup
	served.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = io.Copy(io.Discard, c) // until the pod closes it
			_ = c.Close()
		}
	})
	defer served.Wait()
	defer l.Close()
	for opened < most {
		// A lost SYN is sent again after 1 s and after 3 s.
		ctx, cancel := context.WithTimeout(t.Context(), nfttest.Patient(5*time.Second))
		c, err := top.Pod.DialContext(ctx, "tcp", to.String())
		cancel()
		if err != nil {
			return opened
		}
		opened++
		_ = c.(*net.TCPConn).CloseWrite()
		_, _ = io.Copy(io.Discard, c) // until the other end has closed it, too
		_ = c.Close()
	}
	return opened
}

func TestChangeOfACIDRDoesNotWriteTheChainsOfBlocksAgain(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNS(t, "node")
	k, c := open(t, ns), connect(t, ns)
	c1 := config.Config{
		NonMasqueradeCIDRs: cases.CIDRs("10.0.0.0/8"), MasqueradeSrcCIDRs: cases.CIDRs("10.244.0.0/16"),
		PortsPerPod: config.PodPorts{Size: 2000},
	}
	c2, c3 := c1, c1
	c2.NonMasqueradeCIDRs = cases.CIDRs("10.0.0.0/9")
	c3.PortsPerPod.Size = 1999
	var handles [3]uint64 // of the first rule of a block
	for i, file := range []config.Config{c1, c2, c3} {
		apply(t, k, nft.Compile(file, nft.Options{Layout: native.Layout{}}), layout.Ours)
		rules, _, err := c.FirstRules(nfnetlink.Inet, nft.TableName, "ports-7", func(nfnetlink.Rule) bool { return false })
		if err != nil {
			t.Fatal(err)
		}
		handles[i] = rules[0].Handle
	}
	if handles[0] != handles[1] || handles[1] == handles[2] {
		t.Errorf("handles %v", handles)
	}
}

// A change reads the rules of blocks only if somebody has committed since they were right: what others then
// did to them goes with the change, and without others they are as they were.
func TestBlocksAreRightAfterEachChange(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft")
	ns := nfttest.NewNS(t, "node")
	k := open(t, ns)
	of := func(size int, exempt ...string) nft.Ruleset {
		return nft.Compile(config.Config{
			NonMasqueradeCIDRs: cases.CIDRs(exempt...), MasqueradeSrcCIDRs: cases.CIDRs("10.244.0.0/16"),
			PortsPerPod: config.PodPorts{Size: size},
		}, nft.Options{Layout: native.Layout{}})
	}
	apply(t, k, of(1000, "10.0.0.0/8"), layout.Ours)
	for i, tamper := range []string{
		"", "flush chain inet nft-masq-agent ports-3", "add rule inet nft-masq-agent ports-3 drop",
		"delete element inet nft-masq-agent ports-by-pod-v4-a { 0.0.0.3 }", "",
	} {
		if tamper != "" {
			nfttest.NFT(t, ns, tamper, "-f", "-")
		}
		want := of(1000, "10.0.0.0/8", fmt.Sprintf("172.16.%d.0/24", i))
		apply(t, k, want, layout.Ours)
		inSync(t, ns, want)
	}
	for _, want := range []nft.Ruleset{of(1000, "10.0.0.0/8"), of(500, "10.0.0.0/8"), of(0, "10.0.0.0/8"), of(500)} {
		apply(t, k, want, layout.Ours)
		inSync(t, ns, want)
	}
}
