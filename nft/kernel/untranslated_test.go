package kernel

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/nfttest/netns"
	"nft-masq-agent/nft/nfttest/script"
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
	nfttest.NoError(t, err)
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
	if c.Enforce = false; on {
		c.DropInvalid = true
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
			apply(t, open(t, w.Node), nft.Compile(droppingInvalid(on), enforcingOptions()), nft.Contents)
			c := connect(t, w.Node)
			nfttest.NFT(t, w.Node, `table inet untracked { chain pre { type filter hook prerouting priority raw;
				ip saddr 10.244.9.2 notrack; ip6 saddr fd00:10:244:9::2 notrack; }; }`, "-f", "-")
			for _, dev := range []string{"all", "pod0"} {
				nfttest.NoError(t, w.Node.Sysctl("net.ipv4.conf."+dev+".bc_forwarding", "1"))
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
				nfttest.NoError(t, w.AddAddr(w.Pod, netip.MustParseAddr(a)))
			}
			for _, s := range script.Read(t, "testdata/invalid-packets.txt")[0].Steps {
				words := strings.Fields(s.Line)
				from, src, dst, drop := w.Pod, words[1], words[2], words[3] == "dropped"
				name := strings.Join(words[4:], " ")
				if words[0] == "node" {
					from = w.Node
				}
				for _, flags := range []byte{fin, rst, rstAck, synAck, finAck}[:nfttest.Rounds(2, 5, 5)] {
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
	apply(t, open(t, w.Node), nft.Compile(droppingInvalid(true), enforcingOptions()), nft.Contents)
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

// within bounds a wait in these tests.
var within = nfttest.Patient(10 * time.Second)

// A dialog is a connection between two hosts of a wire, and its other end.
type dialog struct{ net.Conn }

// talk opens a TCP connection that sends back what it receives. At is where the other end
// listens, if that is not the destination.
func (w *wire) talk(t *testing.T, from, to *nfttest.NS, src, dst, at netip.AddrPort) dialog {
	t.Helper()
	l := nfttest.In(t, to, func() (net.Listener, error) { return net.Listen("tcp", at.String()) })
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		c, err := l.Accept()
		if err == nil {
			_, _ = io.Copy(c, c)
			_ = c.Close()
		}
	}()
	c := nfttest.In(t, from, func() (net.Conn, error) {
		return (&net.Dialer{Timeout: within, LocalAddr: net.TCPAddrFromAddrPort(src)}).Dial("tcp", dst.String())
	})
	t.Cleanup(func() { _ = c.Close() })
	return dialog{c}
}

// works sends something and expects it back.
func (d dialog) works(t *testing.T, why string) {
	t.Helper()
	_ = d.SetDeadline(time.Now().Add(within))
	sent := strings.Repeat(why, 1000)
	back := make([]byte, len(sent))
	if _, err := io.WriteString(d, sent); err != nil {
		t.Errorf("%s: %v", why, err)
	} else if _, err := io.ReadFull(d, back); err != nil || string(back) != sent {
		t.Errorf("%s: %v", why, err)
	}
}

func TestNothingOfAValidConnectionIsDropped(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft")
	for _, ipv6 := range []bool{false, true} {
		t.Run(map[bool]string{false: "IPv4", true: "IPv6"}[ipv6], func(t *testing.T) {
			t.Parallel()
			testValidConnections(t, ipv6)
		})
	}
}

func testValidConnections(t *testing.T, ipv6 bool) {
	w := newWire(t)
	pod, outside, later, self := w.PodV4, w.OutsideV4, netip.MustParseAddr("203.0.113.9"), "203.0.113.50"
	if ipv6 {
		pod, outside, later, self = w.PodV6, w.OutsideV6, netip.MustParseAddr("2001:db8:1::1"), "2001:db8:77::50"
	}
	port := func(a netip.Addr) netip.AddrPort {
		w.port++
		return netip.AddrPortFrom(a, w.port)
	}
	// What kube-proxy does: a hairpin, and connections that are rejected.
	const reject = 9
	nfttest.NFT(t, w.Node, strings.NewReplacer("FAMILY", map[bool]string{false: "ip", true: "ip6"}[ipv6],
		"SELF", self, "POD", pod.String(), "REJECT", fmt.Sprint(reject)).Replace(`table FAMILY services {
		chain pre { type nat hook prerouting priority dstnat; FAMILY daddr SELF dnat to POD; }
		chain post { type nat hook postrouting priority srcnat; ct status dnat FAMILY saddr POD FAMILY daddr POD masquerade; }
		chain filter { type filter hook forward priority filter; tcp dport REJECT reject with tcp reset; }
	}`), "-f", "-")

	k, conn := open(t, w.Node), connect(t, w.Node)
	c := droppingInvalid(true)
	c.NonMasqueradeCIDRs = append(c.NonMasqueradeCIDRs, config.CIDR{Prefix: netip.PrefixFrom(later, later.BitLen())})
	apply(t, k, nft.Compile(c, enforcingOptions()), nft.Contents)
	at := port(later)
	earlier := w.talk(t, w.Pod, w.Outside, port(pod), at, at)
	apply(t, k, nft.Compile(droppingInvalid(true), enforcingOptions()), nft.Contents)
	earlier.works(t, "with the address that an earlier policy gave it")
	at = port(later)
	masqueraded := w.talk(t, w.Pod, w.Outside, port(pod), at, at)
	masqueraded.works(t, "masqueraded")

	// Also with rules that fix the address.
	fixed := droppingInvalid(true)
	fixed.SNATAddresses = cases.CIDRs("198.51.100.211/32", "2001:db8:5::1/128")
	fixed.SNATRules = []config.SNATRule{{From: cases.CIDRs("10.244.1.0/24"), Addresses: cases.CIDRs("198.51.100.212/32")}}
	apply(t, k, nft.Compile(fixed, enforcingOptions()).
		WithAddresses(cases.Addrs("198.51.100.211", "198.51.100.212", "2001:db8:5::1")), nft.Contents)
	masqueraded.works(t, "with the address from before snatAddresses")
	at = port(later)
	translated := w.talk(t, w.Pod, w.Outside, port(pod), at, at)
	translated.works(t, "from one of snatAddresses")
	flow := nfttest.Flow{Proto: nfttest.TCP, From: w.Pod, Flags: rst}
	flow.Src, flow.Dst = netip.AddrPortFrom(pod, 0), netip.AddrPortFrom(later, 0)
	if !isDropped(t, w, conn, flow) {
		t.Error("with snatAddresses nothing is dropped")
	}
	counted := dropped(t, conn, ipv6)

	// A connection from outside keeps the pod's address in its replies.
	inbound := port(pod)
	w.talk(t, w.Outside, w.Pod, port(outside), inbound, inbound).works(t, "from outside to the pod")
	w.talk(t, w.Pod, w.Pod, port(pod), netip.AddrPortFrom(netip.MustParseAddr(self), inbound.Port()+100),
		netip.AddrPortFrom(pod, inbound.Port()+100)).works(t, "hairpin")

	for from, to := range map[*nfttest.NS]netip.Addr{w.Pod: later, w.Outside: pod} {
		if err := exchange(t, from, "tcp", netip.AddrPortFrom(to, reject), 0); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("%s to %s, rejected by the node: %v", from, to, err)
		}
		// Errors of ICMP belong to the connection that they are about.
		if err := exchange(t, from, "udp", port(to), 1); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("from %s to a closed port of %s: %v", from, to, err)
		}
	}
	at = port(later)
	w.echoes(t, at)
	if err := exchange(t, w.Pod, "udp", at, 5000); err != nil {
		t.Errorf("a datagram in fragments: %v", err)
	}
	for _, d := range []dialog{earlier, masqueraded, translated} {
		d.works(t, "at the end")
		_ = d.Close()
	}
	if got := dropped(t, conn, ipv6); got != counted {
		t.Errorf("%d packets of connections that are known were dropped, want none", got-counted)
	}
}

// exchange sends so many bytes and expects as many back.
func exchange(t *testing.T, from *nfttest.NS, network string, to netip.AddrPort, size int) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	c, err := from.DialContext(ctx, network, to.String())
	if err != nil {
		return err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(within))
	b := make([]byte, size)
	if _, err := c.Write(b); err != nil {
		return err
	}
	_, err = io.ReadFull(c, b)
	return err
}

// echoes lets the outside host send the next datagram back.
func (w *wire) echoes(t *testing.T, at netip.AddrPort) {
	t.Helper()
	there := nfttest.In(t, w.Outside, func() (net.PacketConn, error) { return net.ListenPacket("udp", at.String()) })
	t.Cleanup(func() { _ = there.Close() })
	go func() {
		b := make([]byte, 1<<16)
		if n, from, err := there.ReadFrom(b); err == nil {
			_, _ = there.WriteTo(b[:n], from)
		}
	}()
}

// A segment outside of the window is invalid to connection tracking, unless it is told to
// tolerate these.
func TestSegmentOutsideOfTheWindowIsDroppedUnlessTolerated(t *testing.T) {
	t.Parallel()
	w := newWire(t)
	c := connect(t, w.Node)
	apply(t, open(t, w.Node), nft.Compile(droppingInvalid(true), enforcingOptions()), nft.Contents)
	for i, a := range []struct{ pod, node, dst netip.Addr }{
		{w.PodV4, w.NodeV4, netip.MustParseAddr("203.0.113.9")},
		{w.PodV6, w.NodeV6, netip.MustParseAddr("2001:db8:1::1")},
	} {
		const pshAck = 0x18
		f := nfttest.Flow{Proto: nfttest.TCP, From: w.Pod, Flags: pshAck}
		f.Src, f.Dst = netip.AddrPortFrom(a.pod, 3000), netip.AddrPortFrom(a.dst, 3001)
		d := w.talk(t, w.Pod, w.Outside, f.Src, f.Dst, f.Dst)
		for _, liberal := range []string{"0", "1"} {
			tolerated := liberal == "1"
			nfttest.NoError(t, w.Node.Sysctl("net.netfilter.nf_conntrack_tcp_be_liberal", liberal))
			// Their sequence numbers are random. Some kernels tolerate a number above the window, too.
			anyDropped := false
			for range 40 {
				seen, isDropped := fate(t, w, c, f)
				if anyDropped = anyDropped || isDropped; !isDropped && seen.Seen.Addr() != a.node {
					t.Errorf("%d: tolerated %t: seen from %s", i, tolerated, seen.Seen)
				}
				if anyDropped {
					break
				}
			}
			if anyDropped == tolerated {
				t.Errorf("%d: tolerated %t: dropped %t", i, tolerated, anyDropped)
			}
			if !tolerated {
				d.works(t, "next to a segment outside of its window")
			}
		}
	}
}

// With tcp_loose=0, conntrack begins no connection in the middle. A connection that it did not
// track before there were rules stays invalid, and works only as long as nothing drops that.
func TestConnectionsFromBeforeTheRulesAreInvalidWithoutTCPLoose(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft")
	for _, tt := range []struct{ tracked, drops bool }{{false, true}, {false, false}, {true, true}, {true, false}} {
		for _, ipv6 := range []bool{false, true} {
			t.Run(fmt.Sprintf("%+v, IPv6 %t", tt, ipv6), func(t *testing.T) {
				t.Parallel()
				w := newWire(t)
				src, dst := w.PodV4, netip.AddrPortFrom(netip.MustParseAddr("203.0.113.9"), destPort)
				if ipv6 {
					src, dst = w.PodV6, netip.AddrPortFrom(netip.MustParseAddr("2001:db8:1::1"), destPort)
				}
				if tt.tracked {
					nfttest.NFT(t, w.Node, "table inet t { chain c { type filter hook forward priority 0; ct state new accept; }; }",
						"-f", "-")
				}
				d := w.talk(t, w.Pod, w.Outside, netip.AddrPortFrom(src, firstPort), dst, dst)
				d.works(t, "before the rules")
				nfttest.NoError(t, w.Node.Sysctl("net.netfilter.nf_conntrack_tcp_loose", "0"))
				apply(t, open(t, w.Node), nft.Compile(droppingInvalid(tt.drops), enforcingOptions()), nft.Contents)
				if tt.tracked || !tt.drops {
					d.works(t, "with the rules")
					return
				}
				_ = d.SetDeadline(time.Now().Add(within))
				if _, err := d.Write([]byte("x")); err != nil {
					t.Fatal(err)
				}
				conn := connect(t, w.Node)
				nfttest.Until(t, "a dropped packet", func() bool { return dropped(t, conn, ipv6) > 0 })
				_ = d.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
				if n, err := d.Read(make([]byte, 1)); err == nil {
					t.Errorf("%d bytes come back through a connection whose packets are dropped, want none", n)
				}
			})
		}
	}
}

// With br_netfilter packets between pods on a bridge pass the chain, too, and it decides
// like the chain that masquerades.
func TestPacketsBetweenPodsOnABridgeAreDroppedWhereTheyWouldBeMasqueraded(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft", "ip")
	w := wire{Topology: &nfttest.Topology{Node: nfttest.NewNS(t, "node")}, port: firstPort}
	nfttest.IP(t, w.Node, "link add cni0 type bridge\nlink set cni0 up")
	var pods []*nfttest.NS
	addresses := [][]string{{"10.244.1.2", "fd00:10:244:1::2"}, {"10.244.1.3", "fd00:10:244:1::3"}}
	for i, of := range addresses {
		pod, port := nfttest.NewNS(t, fmt.Sprint("pod", i)), fmt.Sprint("port", i)
		err := netns.AddVeth(netns.End{NS: pod, Dev: "eth0", MAC: net.HardwareAddr{2, 0, 0, 0, 3, byte(i)}},
			netns.End{NS: w.Node, Dev: port, MAC: net.HardwareAddr{2, 0, 0, 0, 4, byte(i)}})
		nfttest.NoError(t, err)
		nfttest.IP(t, pod, "address add "+of[0]+"/24 dev eth0", "address add "+of[1]+"/64 dev eth0 nodad",
			"link set eth0 up")
		nfttest.IP(t, w.Node, "link set "+port+" master cni0 up")
		pods = append(pods, pod)
	}
	passes := true
	for _, name := range []string{"iptables", "ip6tables"} {
		if err := w.Node.Sysctl("net.bridge.bridge-nf-call-"+name, "1"); err != nil {
			t.Logf("without br_netfilter nothing of a bridge passes the rules: %v", err)
			passes = false
		}
	}
	k, conn := open(t, w.Node), connect(t, w.Node)
	for _, exempt := range []bool{true, false} {
		c := droppingInvalid(true)
		if !exempt {
			c.NonMasqueradeCIDRs = nil
		}
		apply(t, k, nft.Compile(c, enforcingOptions()), nft.Contents)
		for f := range 2 {
			src, dst := netip.MustParseAddr(addresses[0][f]), netip.MustParseAddr(addresses[1][f])
			before := dropped(t, conn, dst.Is6())
			// A bridge without an address cannot masquerade.
			if exempt || !passes {
				w.port++
				at := netip.AddrPortFrom(dst, w.port)
				w.talk(t, pods[0], pods[1], netip.AddrPortFrom(src, w.port), at, at).works(t, "on the bridge")
			}
			if got := dropped(t, conn, dst.Is6()); got != before {
				t.Errorf("%s to %s: %d packets of a valid connection were dropped", src, dst, got-before)
			}
			if dst.Is6() { // discovery comes first again, also where it would be masqueraded
				nfttest.Run(t, pods[0], "", "ip", "-6", "neighbor", "flush", "dev", "eth0")
			}
			flow := nfttest.Flow{Proto: nfttest.TCP, From: pods[0], To: pods[1], Flags: rst}
			w.port++
			flow.Src, flow.Dst = netip.AddrPortFrom(src, w.port), netip.AddrPortFrom(dst, destPort)
			if _, isDropped := fate(t, &w, conn, flow); isDropped != (passes && !exempt) {
				t.Errorf("%s to %s, exempt %t: dropped %t", src, dst, exempt, isDropped)
			}
			if !dst.Is6() {
				continue
			}
			found := nfttest.Run(t, pods[0], "", "ip", "-6", "neighbor", "show", dst.String())
			if !strings.Contains(found, "lladdr") {
				t.Errorf("exempt %t: %s is not discovered: %s", exempt, dst, found)
			}
		}
	}
}

// What becomes of a pod's packet to a destination that the policy masquerades.
const (
	translated = "translated"
	isInvalid  = "dropped by dropInvalid"
	untracked  = "not translated"
)

// A packetKind is a first packet that a pod may send.
type packetKind struct {
	name     string
	protocol byte                       // of IP
	payload  func(cookie []byte) []byte // ends in the cookie
	checksum int                        // offset of the Internet checksum; 0: none
	ipv4     bool                       // otherwise IPv6
	fate     string                     // or several, of several kernels
}

// kinds are packets that conntrack treats in other ways than new connections, and some of the
// others, for comparison.
func kinds() (all []packetKind) {
	add := func(name string, protocol int, fate string, checksum int, ipv4 bool, head ...byte) {
		payload := func(cookie []byte) []byte { return append(slices.Clone(head), cookie...) }
		all = append(all, packetKind{name, byte(protocol), payload, checksum, ipv4, fate})
	}
	message := func(kind byte, ipv4 bool, fate, name string) {
		add(name, map[bool]int{true: unix.IPPROTO_ICMP, false: unix.IPPROTO_ICMPV6}[ipv4], fate, 2, ipv4,
			kind, 0, 0, 0, 0, 7, 0, 1)
	}
	for kind, name := range map[byte]string{
		130: "MLD query", 131: "MLD report", 132: "MLD done", 133: "router solicitation", 134: "router advertisement",
		135: "neighbor solicitation", 136: "neighbor advertisement", 143: "MLDv2 report",
	} {
		message(kind, false, untracked, name)
	}
	for kind, name := range map[byte]string{
		151: "multicast router advertisement", 152: "multicast router solicitation",
	} {
		message(kind, false, isInvalid+" or "+untracked, name) // invalid to Linux 5.10
	}
	for _, kind := range []byte{1, 2, 3, 4, 137, 144, 145, 146, 147, 160, 200} {
		message(kind, false, isInvalid, fmt.Sprint("ICMPv6 type ", kind))
	}
	for _, kind := range []byte{3, 5, 9, 10, 18, 42} {
		message(kind, true, isInvalid, fmt.Sprint("ICMP type ", kind))
	}
	message(128, false, translated, "ICMPv6 echo request")
	for kind, name := range map[byte]string{8: "echo", 13: "timestamp", 15: "information", 17: "address mask"} {
		message(kind, true, translated, "ICMP request, "+name)
	}
	for _, ipv4 := range []bool{true, false} {
		add("UDP", unix.IPPROTO_UDP, translated, 6, ipv4, 0x88, 0xb8, 0, 7, 0, 12, 0, 0)
		add("UDP-Lite", unix.IPPROTO_UDPLITE, isInvalid+" or "+translated, 6, ipv4, 0x88, 0xb8, 0, 7, 0, 12, 0, 0)
		add("ESP", unix.IPPROTO_ESP, translated, 0, ipv4, 1, 2, 3, 4, 0, 0, 0, 1)
		add("GRE", unix.IPPROTO_GRE, translated, 0, ipv4, 0, 0, 8, 0)
		add("a protocol for experiments", 253, translated, 0, ipv4)
		sctp := func(fate, name string, head ...byte) {
			add(name, unix.IPPROTO_SCTP, fate, 0, ipv4)
			all[len(all)-1].payload = func(cookie []byte) []byte {
				b := append(append([]byte{0x88, 0xb8, 0, 7, 0, 0, 0, 0, 0, 0, 0, 0}, head...), cookie...)
				if head[0] == 0 { // INIT alone has no verification tag
					copy(b[4:], cookie)
				}
				binary.LittleEndian.PutUint32(b[8:], crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)))
				return b
			}
		}
		sctp(isInvalid, "SCTP DATA without INIT", 0, 3, 0, 20, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0)
		sctp(translated, "SCTP INIT", 1, 0, 0, 20, 1, 2, 3, 4, 0, 0, 255, 255, 0, 1, 0, 1)
	}
	add("no next header", unix.IPPROTO_NONE, isInvalid, 0, false)
	for name, routing := range map[string][]byte{"mobile": {2, 1}, "segments": {4, 1}} {
		header := append([]byte{unix.IPPROTO_UDP, 2, routing[0], routing[1], 0, 0, 0, 0}, lastSegment.AsSlice()...)
		add("routing header with a segment left, "+name, unix.IPPROTO_ROUTING, isInvalid, len(header)+6, false,
			slices.Concat(header, []byte{0x88, 0xb8, 0, 7, 0, 12, 0, 0})...)
	}
	return all
}

// lastSegment is the last destination of a packet with a routing header. The checksum covers
// it, and not the next one, with which conntrack compares it (RFC 8200, section 8.1).
var lastSegment = netip.MustParseAddr("2001:db8:77::9")

// packetOf returns an IP packet.
func (k packetKind) packetOf(src, dst netip.Addr, cookie []byte) []byte {
	payload := k.payload(cookie)
	length := binary.BigEndian.AppendUint16(nil, uint16(len(payload)))
	if k.checksum > 0 {
		covered, protocol, last := payload, k.protocol, dst
		if protocol == unix.IPPROTO_ROUTING {
			covered, protocol, last = payload[k.checksum-6:], unix.IPPROTO_UDP, lastSegment
		}
		if protocol != unix.IPPROTO_ICMP {
			covered = slices.Concat(src.AsSlice(), last.AsSlice(), []byte{0, protocol, 0, byte(len(covered))}, covered)
		}
		binary.BigEndian.PutUint16(payload[k.checksum:], nfttest.Checksum(covered))
	}
	if k.ipv4 { // the kernel sets the length and the checksum
		return slices.Concat([]byte{0x45, 0, 0, 0, 0, 0, 0, 0, 64, k.protocol, 0, 0}, src.AsSlice(), dst.AsSlice(), payload)
	}
	return slices.Concat([]byte{0x60, 0, 0, 0}, length, []byte{k.protocol, 64}, src.AsSlice(), dst.AsSlice(), payload)
}

// sendRaw sends IP packets from a namespace.
func sendRaw(ns *nfttest.NS, dst netip.Addr, packets ...[]byte) error {
	return ns.Do(func() error {
		fd, err := unix.Socket(netns.Family(dst), unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		var to unix.Sockaddr = &unix.SockaddrInet6{Addr: dst.As16()}
		if dst.Is4() {
			to = &unix.SockaddrInet4{Addr: dst.As4()}
		}
		for _, packet := range packets {
			if err := unix.Sendto(fd, packet, 0, to); err != nil {
				return err
			}
		}
		return nil
	})
}

func TestKindsOfPacketsThatDropInvalidDropsOrDoesNotSee(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t) // it waits for packets that never arrive
	w := newWire(t)
	apply(t, open(t, w.Node), nft.Compile(droppingInvalid(true), enforcingOptions()), nft.Contents)
	for _, k := range kinds() {
		src, dst := w.PodV6, netip.MustParseAddr("2001:db8:77::8")
		if k.ipv4 {
			src, dst = w.PodV4, netip.MustParseAddr("203.0.113.8")
		}
		if got := w.become(t, w.Pod, src, dst, k); !slices.Contains(strings.Split(k.fate, " or "), got) {
			t.Errorf("%s, IPv4 %t: %s, want %s", k.name, k.ipv4, got, k.fate)
		}
	}
}

// become returns what becomes of a packet.
func (w *wire) become(t *testing.T, from *nfttest.NS, src, dst netip.Addr, k packetKind) string {
	t.Helper()
	c := connect(t, w.Node)
	tap, done, err := w.Outside.BorrowTap()
	nfttest.NoError(t, err)
	defer done()
	nfttest.NoError(t, tap.Watch(netns.OfProtocol(int(k.protocol))))
	w.port++
	cookie := []byte{0xc0, 0x0c, byte(w.port >> 8), byte(w.port)}
	before := dropped(t, c, !k.ipv4)
	if err := sendRaw(from, dst, k.packetOf(src, dst, cookie)); err != nil {
		t.Fatalf("%s: %v", k.name, err)
	}
	buf := make([]byte, 2000)
	for end := time.Now().Add(nfttest.Patient(5 * time.Second)); time.Now().Before(end); {
		switch b, err := tap.Receive(buf, time.Millisecond); {
		case dropped(t, c, !k.ipv4) > before:
			return isInvalid
		case errors.Is(err, os.ErrDeadlineExceeded):
		case err != nil:
			t.Fatal(err)
		case bytes.HasSuffix(b, cookie):
			if seen, _, _ := netns.Addresses(b); seen == src {
				return untracked
			}
			return translated
		}
	}
	return "neither dropped nor seen"
}
