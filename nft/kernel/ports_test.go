package kernel

import (
	"context"
	"fmt"
	"io"
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

func TestPortRangesAreUsedInProportionToTheirSize(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t) // opens thousands of connections
	ranges, err := config.ParsePorts("1024-29999,32768-65535")
	if err != nil {
		t.Fatal(err)
	}
	connections, tolerance := 2500, 0.12 // of the share, more than five standard deviations
	if nfttest.Long() {
		connections, tolerance = 20_000, 0.05
	}
	for _, mode := range cases.Modes() {
		for _, random := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s random-fully %t", mode, random), func(t *testing.T) {
				t.Parallel()
				top := nfttest.NewTopology(t)
				o := nft.Options{Layout: layouts.Of(mode, cases.DefaultChain), RandomFully: random, Ports: ranges}
				apply(t, open(t, top.Node), nft.Compile(config.Default(config.Defaults{}), o), layout.Ours)
				for _, proto := range []nfttest.Proto{nfttest.TCP, nfttest.UDP, nfttest.SCTP} {
					n, off := connections, tolerance
					if proto != nfttest.TCP { // which the kernel translates alike
						n, off = 100, 1 // they are sent one by one, too few for shares
					}
					checkShares(t, proto, ranges, connectOften(t, top, proto, n), off)
				}
			})
		}
	}
}

// checkShares checks that all ports are in the ranges, and that each range has
// its share of them.
func checkShares(t *testing.T, proto nfttest.Proto, ranges []nft.PortRange, ports []uint16, tolerance float64) {
	t.Helper()
	counts := make([]int, len(ranges))
	for _, p := range ports {
		i := slices.IndexFunc(ranges, func(r nft.PortRange) bool { return r.Min <= p && p <= r.Max })
		if i < 0 {
			t.Errorf("%s: port %d is in no range", proto, p)
			continue
		}
		counts[i]++
	}
	var all float64
	for _, r := range ranges {
		all += float64(r.Size())
	}
	for i, r := range ranges {
		want := float64(r.Size()) / all
		got := float64(counts[i]) / float64(len(ports))
		t.Logf("%s: %.4f of %d ports are in %s, which has %.4f of all", proto, got, len(ports), r, want)
		if got < want*(1-tolerance) || got > want*(1+tolerance) {
			t.Errorf("%s: %.4f of the ports are in %s, want %.4f", proto, got, r, want)
		}
	}
}

// connectOften opens connections from ports between the ranges, each from a
// different one or to a different address, and returns the ports that the other
// end sees.
func connectOften(t *testing.T, top *nfttest.Topology, proto nfttest.Proto, n int) []uint16 {
	t.Helper()
	const firstFree, free = 30000, 2768
	var flows []nfttest.Flow
	for i := range n {
		dst := netip.AddrFrom4([4]byte{198, 51, 100, byte(10 + i/free)})
		if err := top.AddAddr(top.Outside, dst); err != nil {
			t.Fatal(err)
		}
		flows = append(flows, nfttest.Flow{
			Proto: proto, From: top.Pod,
			Src: netip.AddrPortFrom(top.PodV4, uint16(firstFree+i%free)), Dst: netip.AddrPortFrom(dst, destPort),
		})
	}
	if proto == nfttest.TCP {
		return connectTCP(t, top, flows)
	}
	var ports []uint16
	for _, f := range flows {
		ports = append(ports, nfttest.MustSend(t, top, f).Seen.Port())
	}
	return ports
}

func connectTCP(t *testing.T, top *nfttest.Topology, flows []nfttest.Flow) []uint16 {
	t.Helper()
	var listener *net.TCPListener
	if err := top.Outside.Do(func() (err error) {
		listener, err = net.ListenTCP("tcp4", &net.TCPAddr{Port: destPort})
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	var ports []uint16
	if err := top.Pod.Do(func() error {
		for _, f := range flows {
			sent, err := net.DialTCP("tcp4", net.TCPAddrFromAddrPort(f.Src), net.TCPAddrFromAddrPort(f.Dst))
			if err != nil {
				return err
			}
			// Dialed connections are complete: only a lost event of the kernel would make this one wait.
			_ = listener.SetDeadline(time.Now().Add(nfttest.Patient(time.Minute)))
			seen, err := listener.AcceptTCP()
			if err != nil {
				return err
			}
			ports = append(ports, seen.RemoteAddr().(*net.TCPAddr).AddrPort().Port())
			for _, c := range []*net.TCPConn{sent, seen} {
				_ = c.SetLinger(0) // the port is free again at once
				_ = c.Close()
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return ports
}

// A closed connection keeps its port to the destination for two minutes. Linux 6.5 and newer give
// the ports of closed connections to new ones if no other is free (nf_nat_used_tuple_harder):
// the table in config/README.md is what this test logs.
func TestPodOpensMoreConnectionsThanItHasPortsFromLinux65On(t *testing.T) {
	t.Parallel()
	evicts := !nfttest.KernelBefore(t, 6, 5)
	sizes := []int{250, 500, 1000}
	if testing.Short() {
		sizes = sizes[:1]
	}
	for _, size := range sizes {
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
