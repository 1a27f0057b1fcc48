package kernel

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
)

// fixed is a ruleset with fixed source addresses on a node with some of them.
func fixed(node ...string) nft.Ruleset {
	c := config.Default(config.Defaults{EnableIPv6: true})
	c.SNATAddresses = cases.CIDRs("198.51.100.208/29", "2001:db8:5::/64")
	return nft.Compile(c, nft.Options{Layout: native.Layout{}, RandomFully: true}).WithAddresses(cases.Addrs(node...))
}

// A closed connection keeps its port to the destination for two minutes. Linux 6.5 and newer give
// the ports of closed connections to new ones if no other is free (nf_nat_used_tuple_harder).
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
					PortsPerPod: config.PodPorts(size),
				}, nft.Options{Layout: native.Layout{}, RandomFully: true}), nft.Contents)
				for _, state := range []string{"time_wait", "last_ack", "close", "close_wait", "fin_wait"} {
					// For slow machines: none expires meanwhile.
					_ = top.Node.Sysctl("net.netfilter.nf_conntrack_tcp_timeout_"+state, "3600")
				}
				began := time.Now()
				opened := openAndClose(t, top, netip.AddrPortFrom(netip.MustParseAddr(to), destPort), 3*size)
				failed, err := nfttest.ConntrackStat(top.Node, "insert_failed")
				nfttest.NoError(t, err)
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
	l := nfttest.In(t, top.Outside, func() (net.Listener, error) { return net.Listen("tcp", to.String()) })
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

// A change reads the rules of blocks only if somebody has committed since they were right: what others then
// did to them goes with the change, and without others they are as they were, unless their size is another.
func TestBlocksAreRightAfterEachChange(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft")
	ns := nfttest.NewNS(t, "node")
	k, c := open(t, ns), connect(t, ns)
	handle := uint64(0) // of the first rule of a block
	for i, step := range []struct {
		tamper string
		size   int
		exempt []string
		kept   bool
	}{
		{"", 1000, []string{"10.0.0.0/8"}, false},
		{"", 1000, []string{"10.0.0.0/9"}, true},
		{"flush chain inet nft-masq-agent ports-3", 1000, []string{"10.0.0.0/8"}, true},
		{"add rule inet nft-masq-agent ports-3 drop", 1000, []string{"10.0.0.0/9"}, true},
		{"delete element inet nft-masq-agent ports-by-pod-v4-a { 0.0.0.3 }", 1000, []string{"10.0.0.0/8"}, true},
		{"", 1000, []string{"10.0.0.0/9"}, true},
		{"", 500, []string{"10.0.0.0/9"}, false},
		{"", 0, []string{"10.0.0.0/9"}, false},
		{"", 500, nil, false},
	} {
		if step.tamper != "" {
			nfttest.NFT(t, ns, step.tamper, "-f", "-")
		}
		want := nft.Compile(config.Config{
			NonMasqueradeCIDRs: cases.CIDRs(step.exempt...), MasqueradeSrcCIDRs: cases.CIDRs("10.244.0.0/16"),
			PortsPerPod: config.PodPorts(step.size),
		}, nft.Options{Layout: native.Layout{}})
		apply(t, k, want, nft.Contents)
		inSync(t, ns, want)
		before := handle
		for _, r := range rulesOf(t, c, nfnetlink.Inet, nft.TableName, "ports-7") {
			handle = r.Handle
		}
		if step.size > 0 && (handle == before) != step.kept {
			t.Errorf("step %d: the handle of a rule is %d, and was %d", i, handle, before)
		}
	}
}

// The most entries with port ranges are more rules than are read of another program's.
func TestMostEntriesAreInSyncOnceApplied(t *testing.T) {
	nfttest.SkipIfShort(t)
	t.Parallel()
	ns := nfttest.NewNS(t, "node")
	c := config.Default(config.Defaults{EnableIPv6: true})
	for i := range 64 {
		r := config.SNATRule{
			From:      cases.CIDRs(fmt.Sprintf("10.%d.0.0/16", i), fmt.Sprintf("fd00:%x::/32", i+1)),
			Addresses: cases.CIDRs("198.51.100.211/32", "2001:db8:5::/64"),
		}
		r.Out = []config.Interface{{Name: "eth1"}, {Name: "wan*"}}
		c.SNATRules = append(c.SNATRules, r)
	}
	o := nft.Options{Layout: native.Layout{}, RandomFully: true}
	for i := range uint16(4) {
		o.Ports = append(o.Ports, nft.PortRange{Min: 10_000 * (i + 1), Max: 10_000*(i+1) + 999})
	}
	k := open(t, ns)
	want := nft.Compile(c, o).WithAddresses(cases.Addrs("198.51.100.211", "2001:db8:5::2"))
	apply(t, k, want, everything)
	inSync(t, ns, want)
	want = want.WithAddresses(nil)
	apply(t, k, want, everything)
	inSync(t, ns, want)
}
