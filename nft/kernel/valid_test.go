package kernel

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/nfttest/netns"
)

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
	apply(t, k, nft.Compile(c, enforcingOptions()), layout.Ours)
	at := port(later)
	earlier := w.talk(t, w.Pod, w.Outside, port(pod), at, at)
	apply(t, k, nft.Compile(droppingInvalid(true), enforcingOptions()), layout.Ours)
	earlier.works(t, "with the address that an earlier policy gave it")
	at = port(later)
	masqueraded := w.talk(t, w.Pod, w.Outside, port(pod), at, at)
	masqueraded.works(t, "masqueraded")

	// Also with rules that fix the address.
	fixed := droppingInvalid(true)
	fixed.SNATAddresses = cases.CIDRs("198.51.100.211/32", "2001:db8:5::1/128")
	fixed.SNATRules = []config.SNATRule{{From: cases.CIDRs("10.244.1.0/24"), Addresses: cases.CIDRs("198.51.100.212/32")}}
	apply(t, k, nft.Compile(fixed, enforcingOptions()).
		On(cases.Addrs("198.51.100.211", "198.51.100.212", "2001:db8:5::1")), layout.Ours)
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
		t.Errorf("%d packets were dropped", got-counted)
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
	apply(t, open(t, w.Node), nft.Compile(droppingInvalid(true), enforcingOptions()), layout.Ours)
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
			if err := w.Node.Sysctl("net.netfilter.nf_conntrack_tcp_be_liberal", liberal); err != nil {
				t.Fatal(err)
			}
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
				if err := w.Node.Sysctl("net.netfilter.nf_conntrack_tcp_loose", "0"); err != nil {
					t.Fatal(err)
				}
				apply(t, open(t, w.Node), nft.Compile(droppingInvalid(tt.drops), enforcingOptions()), layout.Ours)
				if tt.tracked || !tt.drops {
					d.works(t, "with the rules")
					return
				}
				_ = d.SetDeadline(time.Now().Add(within))
				if _, err := d.Write([]byte("x")); err != nil {
					t.Fatal(err)
				}
				conn := connect(t, w.Node)
				for end := time.Now().Add(within); dropped(t, conn, ipv6) == 0; {
					if time.Now().After(end) {
						t.Fatal("nothing is dropped")
					}
				}
				_ = d.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
				if n, err := d.Read(make([]byte, 1)); err == nil {
					t.Errorf("%d bytes come back", n)
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
		if err != nil {
			t.Fatal(err)
		}
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
		apply(t, k, nft.Compile(c, enforcingOptions()), layout.Ours)
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
