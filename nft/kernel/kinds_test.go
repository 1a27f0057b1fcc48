package kernel

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/netns"
)

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
	// untracked: dropInvalid drops it all the same if it was routed.
	untracked bool
	hops      byte // 0: 64
}

// kinds are packets that conntrack treats in other ways than new connections, and some of the
// others, for comparison. nft/README lists them.
func kinds() (all []packetKind) {
	add := func(name string, protocol int, fate string, checksum int, ipv4 bool, head ...byte) {
		payload := func(cookie []byte) []byte { return append(slices.Clone(head), cookie...) }
		all = append(all, packetKind{name, byte(protocol), payload, checksum, ipv4, fate, false, 0})
	}
	message := func(kind byte, ipv4 bool, fate, name string) {
		add(name, map[bool]int{true: unix.IPPROTO_ICMP, false: unix.IPPROTO_ICMPV6}[ipv4], fate, 2, ipv4,
			kind, 0, 0, 0, 0, 7, 0, 1)
	}
	for kind, name := range map[byte]string{
		130: "MLD query", 131: "MLD report", 132: "MLD done", 133: "router solicitation", 134: "router advertisement",
		135: "neighbor solicitation", 136: "neighbor advertisement", 143: "MLDv2 report",
	} {
		message(kind, false, isInvalid, name)
		all[len(all)-1].untracked = true
	}
	for kind, name := range map[byte]string{151: "advertisement", 152: "solicitation"} {
		message(kind, false, isInvalid, "multicast router "+name)
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
	hops := cmp.Or(k.hops, 64)
	return slices.Concat([]byte{0x60, 0, 0, 0}, length, []byte{k.protocol, hops}, src.AsSlice(), dst.AsSlice(), payload)
}

// sendRaw sends an IP packet from a namespace.
func sendRaw(ns *nfttest.NS, dst netip.Addr, packet []byte) error {
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
		return unix.Sendto(fd, packet, 0, to)
	})
}

func TestKindsOfPacketsThatDropInvalidDropsOrDoesNotSee(t *testing.T) {
	t.Parallel()
	w := newWire(t)
	apply(t, open(t, w.Node), nft.Compile(droppingInvalid(true), enforcingOptions()), layout.Ours)
	for _, k := range kinds() {
		src, dst := w.PodV6, netip.MustParseAddr("2001:db8:77::8")
		if k.ipv4 {
			src, dst = w.PodV4, netip.MustParseAddr("203.0.113.8")
		}
		if got := w.become(t, w.Pod, src, dst, k); !strings.Contains(k.fate, got) {
			t.Errorf("%s, IPv4 %t: %s, want %s", k.name, k.ipv4, got, k.fate)
		}
	}
}

// Only what was routed and would be masqueraded is beyond its link: neither what the node sends
// nor what leaves with the pod's IP anyway, nor any of it without dropInvalid.
func TestDiscoveryIsDroppedOnlyWhereConnectionsOfPodsAreMasqueraded(t *testing.T) {
	t.Parallel()
	w := newWire(t)
	k := open(t, w.Node)
	pod, node := w.PodV6, netip.MustParseAddr("2001:db8::1")
	for _, on := range []bool{true, false} {
		apply(t, k, nft.Compile(droppingInvalid(on), enforcingOptions()), layout.Ours)
		for _, tt := range []struct {
			name string
			from *nfttest.NS
			src  netip.Addr
			dst  string
			hops byte
			drop bool
		}{
			{"masqueraded", w.Pod, pod, "2001:db8:77::8", 64, true},
			{"masqueraded, as on a link", w.Pod, pod, "2001:db8:77::8", 255, true},
			{"forced", w.Pod, pod, "fd00:9::7", 64, true},
			{"exempt", w.Pod, pod, "fd00:8::1", 64, false},
			{"the node", w.Node, node, "2001:db8:77::8", 64, false},
			{"the node, as on a link", w.Node, node, "2001:db8:77::8", 255, false},
		} {
			for _, kind := range kinds() {
				if !kind.untracked {
					continue
				}
				kind.hops = tt.hops
				want := untracked
				if tt.drop && on {
					want = isInvalid
				}
				if got := w.become(t, tt.from, tt.src, netip.MustParseAddr(tt.dst), kind); got != want {
					t.Errorf("dropInvalid %t, %s, %s: %s, want %s", on, tt.name, kind.name, got, want)
				}
			}
		}
	}
}

// become returns what becomes of a packet.
func (w *wire) become(t *testing.T, from *nfttest.NS, src, dst netip.Addr, k packetKind) string {
	t.Helper()
	c := connect(t, w.Node)
	tap, done, err := w.Outside.BorrowTap()
	if err != nil {
		t.Fatal(err)
	}
	defer done()
	if err := tap.Watch(netns.OfProtocol(int(k.protocol))); err != nil {
		t.Fatal(err)
	}
	w.port++
	cookie := []byte{0xc0, 0x0c, byte(w.port >> 8), byte(w.port)}
	before := dropped(t, c, !k.ipv4)
	if err := sendRaw(from, dst, k.packetOf(src, dst, cookie)); err != nil {
		t.Fatalf("%s: %v", k.name, err)
	}
	buf := make([]byte, 2000)
	for end := time.Now().Add(nfttest.Patient(5 * time.Second)); time.Now().Before(end); {
		switch b, err := tap.Receive(buf); {
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
