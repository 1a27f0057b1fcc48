package kernel

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
)

// Segments that are invalid to conntrack unless they belong to a connection.
const (
	fin    = 0x01
	rst    = 0x04
	rstAck = 0x14
	synAck = 0x12
	finAck = 0x11
)

// dropped returns how many packets of a family were dropped.
func dropped(t *testing.T, c *nfnetlink.Conn, ipv6 bool) uint64 {
	t.Helper()
	objects, err := c.Objects(nfnetlink.Inet, nft.TableName)
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range objects {
		if o.Name == (map[bool]string{false: "invalid-v4", true: "invalid-v6"})[ipv6] {
			return o.Packets
		}
	}
	return 0
}

// isDropped sends a segment, and reports whether it was dropped. If not, it must have
// arrived as it was sent.
func isDropped(t *testing.T, w *wire, c *nfnetlink.Conn, f nfttest.Flow) bool {
	t.Helper()
	w.port++
	f.Src, f.Dst = netip.AddrPortFrom(f.Src.Addr(), w.port), netip.AddrPortFrom(f.Dst.Addr(), destPort)
	seen, dropped := fate(t, w, c, f)
	if !dropped && seen.Seen != seen.Sent {
		t.Errorf("%s flags %#x: sent from %s, seen from %s", f.Dst, f.Flags, seen.Sent, seen.Seen)
	}
	return dropped
}

// fate sends a segment, and returns how it was seen, or that it was dropped.
func fate(t *testing.T, w *wire, c *nfnetlink.Conn, f nfttest.Flow) (seen nfttest.Sighting, isDropped bool) {
	t.Helper()
	ipv6 := f.Dst.Addr().Is6()
	before := dropped(t, c, ipv6)
	f.Timeout = time.Millisecond // how long to wait is known by the counter
	send := w.Send
	if f.To != nil {
		send = nfttest.Send
	}
	seen, err := send(f)
	for deadline := time.Now().Add(nfttest.Patient(5 * time.Second)); time.Now().Before(deadline); {
		switch {
		case dropped(t, c, ipv6) > before:
			if err == nil {
				t.Errorf("%s flags %#x: counted as dropped, and seen", f.Dst, f.Flags)
			}
			return seen, true
		case err == nil:
			return seen, false
		case !errors.Is(err, nfttest.ErrNotSeen):
			t.Fatal(err)
		}
		seen, err = send(f) // that one may have been late
	}
	t.Fatalf("%s flags %#x: neither dropped nor seen", f.Dst, f.Flags)
	return seen, false
}

// droppingInvalid is about the same pods, with dropInvalid or without.
func droppingInvalid(on bool) config.Config {
	c := enforcing()
	if c.Enforce = nil; on {
		c.DropInvalid = &config.Position{}
	}
	c.ForceMasqueradeCIDRs = cases.CIDRs("10.9.0.0/16", "fd00:9::/32")
	c.NonMasqueradeSrcCIDRs = cases.CIDRs("10.244.7.0/24", "fd00:10:244:7::/64")
	return c
}

func TestInvalidPacketsOfPodsLeaveOnlyWhereTheyWouldNotBeMasqueraded(t *testing.T) {
	t.Parallel()
	for _, on := range []bool{true, false} {
		t.Run(fmt.Sprint("dropInvalid ", on), func(t *testing.T) {
			t.Parallel()
			w := newWire(t)
			apply(t, open(t, w.Node), nft.Compile(droppingInvalid(on), enforcingOptions()), layout.Ours)
			c := connect(t, w.Node)
			nfttest.NFT(t, w.Node, `table inet untracked { chain pre { type filter hook prerouting priority raw;
				ip saddr 10.244.9.2 notrack; ip6 saddr fd00:10:244:9::2 notrack; }; }`, "-f", "-")
			for _, dev := range []string{"all", "pod0"} {
				if err := w.Node.Sysctl("net.ipv4.conf."+dev+".bc_forwarding", "1"); err != nil {
					t.Fatal(err)
				}
			}
			// Addresses of this node: one of another interface, a range (AnyIP), and one like those
			// that kube-proxy keeps for Services. A second network has a broadcast address, too.
			nfttest.IP(t, w.Node, "address add 198.18.5.1/24 brd + dev eth0", "address add 203.0.113.77/32 dev lo",
				"address add 2001:db8:78::7/128 dev lo nodad", "route add local 198.51.100.64/26 dev lo",
				"-6 route add local 2001:db8:79::/64 dev lo")
			for _, a := range []string{
				"10.244.7.2", "10.244.9.2", "172.17.0.2", "fd00:10:244:7::2", "fd00:10:244:9::2",
				"fd00:17::2",
			} {
				if err := w.AddAddr(w.Pod, netip.MustParseAddr(a)); err != nil {
					t.Fatal(err)
				}
			}
			for line := range strings.Lines(testdata(t, "invalid-packets.txt")) {
				words := strings.Fields(line)
				if words[0] == "#" {
					continue
				}
				from, src, dst, drop := w.Pod, words[1], words[2], words[3] == "dropped"
				name := strings.Join(words[4:], " ")
				if words[0] == "node" {
					from = w.Node
				}
				for _, flags := range []byte{fin, rst, rstAck, synAck, finAck} {
					f := nfttest.Flow{Proto: nfttest.TCP, From: from, Flags: flags, Foreign: from == w.Node}
					if strings.HasSuffix(name, "to the node") || strings.HasSuffix(name, "of the node") {
						f.To = w.Node
					}
					f.Src = netip.AddrPortFrom(netip.MustParseAddr(src), 0)
					f.Dst = netip.AddrPortFrom(netip.MustParseAddr(dst), 0)
					if strings.Contains(name, "multicast") || strings.Contains(name, "limited") {
						f.Dev = "eth0"
					}
					if f.Foreign && errors.Is(f.Emit(), unix.EADDRNOTAVAIL) {
						t.Logf("%s: this kernel has no raw sockets with an address of another host", name)
						break
					}
					if got := isDropped(t, w, c, f); got != (drop && on) {
						t.Errorf("%s: %s to %s, flags %#x: dropped %t", name, src, dst, flags, got)
					}
				}
			}
		})
	}
}

// The type of a route is not known without the source, the mark or the interface that the
// route depends on.
func TestInvalidPacketsAreDroppedWhateverTheirRouteDependsOn(t *testing.T) {
	t.Parallel()
	w := newWire(t)
	apply(t, open(t, w.Node), nft.Compile(droppingInvalid(true), enforcingOptions()), layout.Ours)
	c := connect(t, w.Node)
	nfttest.IP(t, w.Node, "rule add iif pod0 lookup 100", "-6 rule add iif pod0 lookup 100",
		"route add default via "+w.OutsideV4.String()+" dev eth0 table 100", "route delete default",
		"-6 route add default via "+w.OutsideV6.String()+" dev eth0 table 100", "-6 route delete default")
	for _, f := range []struct{ src, dst string }{
		{"10.244.1.2", "203.0.113.8"}, {"fd00:10:244:1::2", "2001:db8:77::8"},
	} {
		flow := nfttest.Flow{Proto: nfttest.TCP, From: w.Pod, Flags: rst}
		flow.Src = netip.AddrPortFrom(netip.MustParseAddr(f.src), 0)
		flow.Dst = netip.AddrPortFrom(netip.MustParseAddr(f.dst), 0)
		if !isDropped(t, w, c, flow) {
			t.Errorf("%s to %s is not dropped", f.src, f.dst)
		}
	}
}
