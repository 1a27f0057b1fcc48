package nfttest

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfttest/netns"
)

// Proto is a transport protocol.
type Proto string

// The protocols that Send supports. An SCTP flow is its first packet, INIT; the
// kernel does not need support for SCTP sockets.
const (
	TCP  Proto = "tcp"
	UDP  Proto = "udp"
	SCTP Proto = "sctp"
	ICMP Proto = "icmp" // an echo request, of ICMPv6 for IPv6; it has no ports
)

// arrivalTimeout bounds the time that a packet takes to cross two namespaces, on
// a busy machine.
var arrivalTimeout = Patient(5 * time.Second)

// ErrNotSeen reports that a packet did not arrive, or a connection was not
// established, in time.
var ErrNotSeen = errors.New("not seen")

// Flow is a first packet to send, or a connection to open.
type Flow struct {
	Proto Proto
	From  *NS
	To    *NS            // the namespace that receives it; Topology.Send derives it from Dst
	Src   netip.AddrPort // an invalid address or port 0: the kernel's choice
	Dst   netip.AddrPort // an IPv6 link-local address needs a zone, or Dev
	Dev   string         // the device to leave by, for multicast, broadcast and link-local
	// Flags are those of a TCP segment to send by itself, as in RFC 9293, section 3.1,
	// without a connection. 0: a connection is established.
	Flags byte
	// Foreign: From need not have the source address, as for a transparent proxy.
	Foreign bool
	// Answered: the receiver answers a packet of UDP, and Send waits for that, but no longer than for the packet. It is
	// no error if the answer is lost.
	Answered bool
	// Timeout bounds the time that the packet takes to arrive. 0: five seconds.
	Timeout time.Duration
}

func (f Flow) timeout() time.Duration { return cmp.Or(f.Timeout, arrivalTimeout) }

// Sighting is a flow's source as the sender sent it and as the receiver saw it. The port of
// an ICMP flow is its identifier.
type Sighting struct {
	Sent, Seen netip.AddrPort
}

// Masqueraded reports whether the receiver saw an address other than the
// sender's. This does not detect masquerading of a host's own traffic that
// already has that address; there the port may differ.
func (s Sighting) Masqueraded() bool { return s.Sent.Addr() != s.Seen.Addr() }

// Send is like the function [Send]. If flow.To is nil, it is the host that has
// the destination, and the outside host for multicast and broadcast. An address
// that no host has is first assigned to the outside host.
func (t *Topology) Send(flow Flow) (Sighting, error) {
	owner, err := t.owner(flow.From, flow.Dst.Addr())
	if err != nil {
		return Sighting{}, err
	}
	if flow.To == nil {
		flow.To = owner
	}
	return Send(flow)
}

// Send sends one flow and returns its source as seen by flow.To. A TCP connection
// is actually established, which proves that the reverse path works; of other
// protocols one packet is sent. The error is ErrNotSeen if nothing arrived. Send
// may be called concurrently, but not for two TCP flows to the same port of a
// namespace.
func Send(flow Flow) (s Sighting, err error) {
	toPort := func(protocol int) netns.Filter { return netns.ToPort(protocol, flow.Dst.Port()) }
	err = Part(func() {
		switch {
		case flow.Proto == TCP && flow.Flags != 0:
			s = sendPacket(flow, toPort(unix.IPPROTO_TCP), sendSegment)
		case flow.Proto == TCP:
			s = sendTCP(flow)
		case flow.Proto == UDP:
			s = sendPacket(flow, toPort(unix.IPPROTO_UDP), sendUDP)
		case flow.Proto == SCTP:
			s = sendPacket(flow, toPort(unix.IPPROTO_SCTP), sendSCTP)
		case flow.Proto == ICMP:
			s = sendPacket(flow, netns.OfProtocol(icmpOf(flow)), sendICMP)
		default:
			Check(errors.New("protocol unknown"))
		}
	})
	timeout := net.Error(nil)
	if errors.As(err, &timeout) && timeout.Timeout() || errors.Is(err, unix.EINPROGRESS) {
		err = ErrNotSeen
	}
	if err != nil {
		return Sighting{}, fmt.Errorf("%s from %s to %s: %w", flow.Proto, flow.From, flow.Dst, err)
	}
	return s, nil
}

// sendTCP opens a connection to its own listener, and resets it, so that neither end keeps it.
func sendTCP(f Flow) Sighting {
	at := netip.AddrPortFrom(unspecified(f.Dst.Addr()), f.Dst.Port())
	listener := Must(netns.In(f.To, func() (int, error) { return listen(at, f.timeout()) }))
	defer unix.Close(listener)
	fd := Must(netns.In(f.From, func() (int, error) { return connected(f, unix.SOCK_STREAM, 0) }))
	defer unix.Close(fd)
	seen, from, err := accept(listener)
	Check(err)
	defer unix.Close(seen)
	Check(reset(seen))
	return Sighting{Sent: Must(sourceOf(fd)), Seen: from}
}

// listen returns a socket that listens at an address, once what had the port has released it, such as a child process
// that is just being started. Accepting waits so long.
func listen(at netip.AddrPort, wait time.Duration) (fd int, err error) {
	limit := unix.NsecToTimeval(wait.Nanoseconds())
	for deadline := time.Now().Add(arrivalTimeout); ; runtime.Gosched() {
		if fd, err = unix.Socket(netns.Family(at.Addr()), unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil {
			return -1, fmt.Errorf("socket: %w", err)
		}
		err = errors.Join(
			bind(fd, Flow{Src: at, Dst: at}),
			unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit),
			unix.Listen(fd, 4096))
		if err == nil {
			return fd, nil
		}
		_ = unix.Close(fd)
		if !errors.Is(err, unix.EADDRINUSE) || time.Now().After(deadline) {
			return -1, fmt.Errorf("listen at %s: %w", at, err)
		}
	}
}

// accept returns a connection and its source. The error is EAGAIN if there is none in time.
func accept(listener int) (fd int, from netip.AddrPort, err error) {
	fd, peer, err := unix.Accept4(listener, unix.SOCK_CLOEXEC)
	for errors.Is(err, unix.EINTR) {
		fd, peer, err = unix.Accept4(listener, unix.SOCK_CLOEXEC)
	}
	return fd, fromSockaddr(peer), err
}

// reset has a connection reset when it is closed.
func reset(fd int) error {
	return unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
}

// sendPacket sends one packet and waits for it at the other end, and for an answer, if there is one.
func sendPacket(f Flow, watch netns.Filter, send func(Flow, []byte) (netip.AddrPort, error)) Sighting {
	packet, s := arrive(f, watch, send)
	if f.Answered && f.Proto == UDP {
		answer(f, packet, s.Seen)
	}
	return s
}

// arrive sends one packet and waits for it at the other end.
func arrive(f Flow, watch netns.Filter, send func(Flow, []byte) (netip.AddrPort, error)) ([]byte, Sighting) {
	tap, done, err := f.To.BorrowTap()
	Check(err)
	defer done()
	Check(tap.Watch(watch))
	cookie := binary.BigEndian.AppendUint32(nil, rand.Uint32())
	sent := Must(netns.In(f.From, func() (netip.AddrPort, error) { return send(f, cookie) }))
	packet := Must(await(tap, cookie, f.timeout()))
	seen, ok := netns.Source(packet)
	if !ok {
		Check(fmt.Errorf("packet of %d bytes is too short", len(packet)))
	}
	if f.Proto == ICMP { // the identifier, before the sequence number
		seen = netip.AddrPortFrom(seen.Addr(), binary.BigEndian.Uint16(packet[len(packet)-len(cookie)-4:]))
	}
	return packet, Sighting{Sent: sent, Seen: seen}
}

// answer sends a packet back, from the destination that a packet of UDP arrived at.
func answer(f Flow, packet []byte, seen netip.AddrPort) {
	tap, done, err := f.From.BorrowTap()
	Check(err)
	defer done()
	Check(tap.Watch(netns.OfProtocol(unix.IPPROTO_UDP)))
	_, at, _ := netns.Addresses(packet) // as for the source
	cookie := binary.BigEndian.AppendUint32(nil, rand.Uint32())
	back := Flow{Proto: UDP, From: f.To, Src: netip.AddrPortFrom(at, f.Dst.Port()), Dst: seen, Foreign: true}
	Must(netns.In(f.To, func() (netip.AddrPort, error) { return sendUDP(back, cookie) }))
	_, err = await(tap, cookie, f.timeout())
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		Check(err)
	}
}

// await returns the first packet that ends in cookie. The error is
// os.ErrDeadlineExceeded if none arrives in time.
func await(tap *netns.Tap, cookie []byte, timeout time.Duration) ([]byte, error) {
	buf := make([]byte, 65536)
	for deadline := time.Now().Add(timeout); ; {
		packet, err := tap.Receive(buf, time.Until(deadline))
		if err != nil || bytes.HasSuffix(packet, cookie) {
			return packet, err
		}
	}
}

func sendUDP(f Flow, cookie []byte) (netip.AddrPort, error) {
	fd, err := connected(f, unix.SOCK_DGRAM, unix.IPPROTO_UDP)
	if err != nil {
		return netip.AddrPort{}, err
	}
	defer unix.Close(fd)
	sent, err := sourceOf(fd)
	return sent, errors.Join(err, unix.Send(fd, cookie, 0))
}

// sendSCTP sends the INIT chunk of RFC 9260, section 3.3.2, with the cookie as
// initiate tag and initial TSN.
func sendSCTP(f Flow, cookie []byte) (netip.AddrPort, error) {
	return raw(f, unix.IPPROTO_SCTP, func(sent netip.AddrPort) []byte {
		b := binary.BigEndian.AppendUint16(nil, sent.Port())
		b = binary.BigEndian.AppendUint16(b, f.Dst.Port())
		b = append(b, 0, 0, 0, 0) // verification tag: 0 in INIT
		b = append(b, 0, 0, 0, 0) // checksum
		b = append(b, 1, 0, 0, 20)
		b = append(b, cookie...)
		b = append(b, 0, 0, 255, 255, 0, 1, 0, 1)
		b = append(b, cookie...)
		// The one little-endian field in IP, section 6.8 and appendix A.
		binary.LittleEndian.PutUint32(b[8:], crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)))
		return b
	})
}

func icmpOf(f Flow) int {
	if f.Dst.Addr().Is4() {
		return unix.IPPROTO_ICMP
	}
	return unix.IPPROTO_ICMPV6
}

// sendICMP sends an echo request with the cookie as its data: RFC 792 and RFC 4443,
// section 4.1. The kernel adds the checksum of ICMPv6.
func sendICMP(f Flow, cookie []byte) (netip.AddrPort, error) {
	return raw(f, icmpOf(f), func(sent netip.AddrPort) []byte {
		kind := byte(128)
		if f.Dst.Addr().Is4() {
			kind = 8
		}
		b := binary.BigEndian.AppendUint16([]byte{kind, 0, 0, 0}, sent.Port()) // the identifier
		b = append(append(b, 0, 1), cookie...)
		binary.BigEndian.PutUint16(b[2:], Checksum(b))
		return b
	})
}

// Emit sends the TCP segment of a flow and waits for nothing.
func (f Flow) Emit() error {
	return f.From.Do(func() error {
		_, err := sendSegment(f, binary.BigEndian.AppendUint32(nil, rand.Uint32()))
		return err
	})
}

// sendSegment sends a TCP segment with the cookie as its data.
func sendSegment(f Flow, cookie []byte) (netip.AddrPort, error) {
	return raw(f, unix.IPPROTO_TCP, func(sent netip.AddrPort) []byte {
		b := binary.BigEndian.AppendUint16(nil, sent.Port())
		b = binary.BigEndian.AppendUint16(b, f.Dst.Port())
		b = append(append(b, cookie...), cookie...) // sequence and acknowledgment numbers
		b = append(b, 5<<4, f.Flags, 255, 255, 0, 0, 0, 0)
		b = append(b, cookie...)
		// The pseudo-headers of IPv4 and IPv6 have the same sum.
		pseudo := slices.Concat(sent.Addr().AsSlice(), f.Dst.Addr().AsSlice(), []byte{0, unix.IPPROTO_TCP, 0, byte(len(b))})
		binary.BigEndian.PutUint16(b[16:], Checksum(append(pseudo, b...)))
		return b
	})
}

// Checksum is that of RFC 1071 of an even number of bytes.
func Checksum(b []byte) uint16 {
	sum := uint32(0)
	for ; len(b) > 0; b = b[2:] {
		sum += uint32(binary.BigEndian.Uint16(b))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

// raw sends a packet over a raw socket, and returns its source, with a port at random if the flow has none.
func raw(f Flow, protocol int, packet func(sent netip.AddrPort) []byte) (netip.AddrPort, error) {
	port := cmp.Or(f.Src.Port(), uint16(32768+rand.IntN(28232)))
	f.Src = netip.AddrPortFrom(f.Src.Addr(), 0) // a raw socket has no ports
	f.Dst = netip.AddrPortFrom(f.Dst.Addr(), 0)
	fd, err := connected(f, unix.SOCK_RAW, protocol)
	if err != nil {
		return netip.AddrPort{}, err
	}
	defer unix.Close(fd)
	source, err := sourceOf(fd)
	sent := netip.AddrPortFrom(source.Addr(), port)
	return sent, errors.Join(err, unix.Send(fd, packet(sent), 0))
}

// connected returns a socket that is bound as the flow requires and connected to
// its destination. A connection is reset when it is closed. The error is
// EINPROGRESS if it is not established in time.
func connected(f Flow, kind, protocol int) (int, error) {
	dst, err := sockaddr(f.Dst)
	if err != nil {
		return -1, err
	}
	fd, err := unix.Socket(netns.Family(f.Dst.Addr()), kind|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return -1, fmt.Errorf("socket: %w", err)
	}
	limit := unix.NsecToTimeval(f.timeout().Nanoseconds())
	err = errors.Join(bind(fd, f), reset(fd), unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &limit))
	if err == nil {
		err = unix.Connect(fd, dst)
	}
	for errors.Is(err, unix.EINTR) { // connecting continues in the meantime
		err = unix.Connect(fd, dst)
	}
	if err != nil && !errors.Is(err, unix.EISCONN) {
		_ = unix.Close(fd)
		return -1, fmt.Errorf("connect: %w", err)
	}
	return fd, nil
}

// sourceOf returns the address of a socket's own end.
func sourceOf(fd int) (netip.AddrPort, error) {
	local, err := unix.Getsockname(fd)
	return fromSockaddr(local), err
}

// unspecified returns the address of the same family that stands for any.
func unspecified(a netip.Addr) netip.Addr {
	if a.Is4() {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

// bind binds a socket to the device and the source of the flow, and allows it to
// send to a broadcast address, and to have the port of one that a child process
// that is just being started keeps open.
func bind(fd int, f Flow) error {
	for _, option := range []int{unix.SO_BROADCAST, unix.SO_REUSEADDR} {
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, option, 1); err != nil {
			return fmt.Errorf("option %d: %w", option, err)
		}
	}
	if f.Foreign {
		err := unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_TRANSPARENT, 1)
		if f.Dst.Addr().Is6() {
			err = unix.SetsockoptInt(fd, unix.SOL_IPV6, unix.IPV6_TRANSPARENT, 1)
		}
		if err != nil {
			return fmt.Errorf("allow another's address: %w", err)
		}
	}
	if f.Dev != "" {
		if err := unix.BindToDevice(fd, f.Dev); err != nil {
			return fmt.Errorf("bind to device %s: %w", f.Dev, err)
		}
	}
	src := f.Src
	if !src.Addr().IsValid() {
		if src.Port() == 0 {
			return nil
		}
		src = netip.AddrPortFrom(unspecified(f.Dst.Addr()), src.Port())
	}
	sa, err := sockaddr(src)
	if err != nil {
		return err
	}
	if err := unix.Bind(fd, sa); err != nil {
		return fmt.Errorf("bind to %s: %w", src, err)
	}
	return nil
}

func sockaddr(ap netip.AddrPort) (unix.Sockaddr, error) {
	if ap.Addr().Is4() {
		return &unix.SockaddrInet4{Addr: ap.Addr().As4(), Port: int(ap.Port())}, nil
	}
	sa := &unix.SockaddrInet6{Addr: ap.Addr().As16(), Port: int(ap.Port())}
	if zone := ap.Addr().Zone(); zone != "" {
		dev, err := net.InterfaceByName(zone)
		if err != nil {
			return nil, fmt.Errorf("zone of %s: %w", ap.Addr(), err)
		}
		sa.ZoneId = uint32(dev.Index)
	}
	return sa, nil
}

func fromSockaddr(sa unix.Sockaddr) netip.AddrPort {
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(sa.Addr), uint16(sa.Port))
	}
	return netip.AddrPort{}
}
