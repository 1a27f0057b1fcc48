package nfttest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// A capture sees the IP packets that arrive at a namespace, on every device,
// whether or not a socket waits for them. One stays open as long as its
// namespace, because closing a packet socket waits for the kernel's RCU.
type capture struct{ fd int }

// capturing returns the capture of the namespace.
func (n *NS) capturing() (*capture, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.capture != nil {
		return n.capture, nil
	}
	var c *capture
	err := n.Do(func() (err error) {
		c, err = openCapture()
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("%s: capture: %w", n.name, err)
	}
	n.capture = c
	return c, nil
}

func openCapture() (*capture, error) {
	// Protocol 0: nothing arrives before the filter is there and bind says what.
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("packet socket: %w", err)
	}
	c := &capture{fd}
	err = errors.Join(
		c.filter(nothing()),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 100_000}),
		unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: bigEndian16(unix.ETH_P_ALL)}))
	if err != nil {
		return nil, errors.Join(err, c.close())
	}
	return c, nil
}

func (c *capture) close() error { return unix.Close(c.fd) }

// watch forgets what was captured and captures packets of this protocol to this
// destination port from now on.
func (c *capture) watch(protocol int, port uint16) error {
	if err := c.filter(nothing()); err != nil {
		return err
	}
	var buf [1]byte
	for {
		_, _, err := unix.Recvfrom(c.fd, buf[:], unix.MSG_DONTWAIT)
		if errors.Is(err, unix.EAGAIN) {
			return c.filter(toPort(protocol, port))
		}
		if err != nil && !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// await returns the first captured packet that ends in cookie. The error is
// os.ErrDeadlineExceeded where none comes in time.
func (c *capture) await(cookie []byte, patience time.Duration) ([]byte, error) {
	buf := make([]byte, 65536)
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); {
		n, from, err := unix.Recvfrom(c.fd, buf, 0)
		switch {
		case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return nil, err
		}
		ll, ok := from.(*unix.SockaddrLinklayer)
		if ok && ll.Pkttype != unix.PACKET_OUTGOING && bytes.HasSuffix(buf[:n], cookie) {
			return buf[:n], nil
		}
	}
	return nil, os.ErrDeadlineExceeded
}

func (c *capture) filter(program []unix.SockFilter) error {
	return attachFilter(c.fd, program)
}

func attachFilter(fd int, program []unix.SockFilter) error {
	return unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER,
		&unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]})
}

// Instructions of classic BPF.
const (
	loadByte = unix.BPF_LD | unix.BPF_B | unix.BPF_ABS
	loadHalf = unix.BPF_LD | unix.BPF_H | unix.BPF_ABS
	loadHalX = unix.BPF_LD | unix.BPF_H | unix.BPF_IND
	loadIHL  = unix.BPF_LDX | unix.BPF_B | unix.BPF_MSH
	shift    = unix.BPF_ALU | unix.BPF_RSH | unix.BPF_K
	equal    = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
	result   = unix.BPF_RET | unix.BPF_K
)

// nothing is a classic BPF program that accepts no packet.
func nothing() []unix.SockFilter {
	return []unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K, K: 0}}
}

// toPort is a classic BPF program that accepts IPv4 and IPv6 packets of a
// protocol with ports to one of them. IPv6 extension headers are not looked
// through.
func toPort(protocol int, port uint16) []unix.SockFilter {
	return []unix.SockFilter{
		0:  {Code: loadByte, K: 0},
		1:  {Code: shift, K: 4},
		2:  {Code: equal, K: 6, Jt: 5}, // IPv6: to 8
		3:  {Code: loadByte, K: 9},
		4:  {Code: equal, K: uint32(protocol), Jf: 7}, // no: to 12
		5:  {Code: loadIHL, K: 0},
		6:  {Code: loadHalX, K: 2},
		7:  {Code: equal, K: uint32(port), Jt: 3, Jf: 4}, // to 11 or 12
		8:  {Code: loadByte, K: 6},
		9:  {Code: equal, K: uint32(protocol), Jf: 2}, // no: to 12
		10: {Code: loadHalf, K: 42},
		// The port of an IPv6 packet is judged by the same instruction.
		11: {Code: result, K: 65536},
		12: {Code: result, K: 0},
	}
}

// ofProtocol is a classic BPF program that accepts IPv4 and IPv6 packets of a
// protocol. IPv6 extension headers are not looked through.
func ofProtocol(protocol int) []unix.SockFilter {
	return []unix.SockFilter{
		0: {Code: loadByte, K: 0},
		1: {Code: shift, K: 4},
		2: {Code: equal, K: 6, Jt: 2}, // IPv6: to 5
		3: {Code: loadByte, K: 9},
		4: {Code: equal, K: uint32(protocol), Jt: 2, Jf: 3}, // to 7 or 8
		5: {Code: loadByte, K: 6},
		6: {Code: equal, K: uint32(protocol), Jf: 1}, // no: to 8
		7: {Code: result, K: 65536},
		8: {Code: result, K: 0},
	}
}

// sender returns source address and port of an IP packet of a protocol with
// ports.
func sender(packet []byte) (netip.AddrPort, bool) {
	src, _, ok := addresses(packet)
	if !ok {
		return netip.AddrPort{}, false
	}
	header := 40
	if src.Is4() {
		header = int(packet[0]&0xf) * 4
	}
	if len(packet) < header+2 {
		return netip.AddrPort{}, false
	}
	return netip.AddrPortFrom(src, binary.BigEndian.Uint16(packet[header:])), true
}

// addresses returns source and destination of an IP packet.
func addresses(packet []byte) (src, dst netip.Addr, ok bool) {
	switch {
	case len(packet) >= 20 && packet[0]>>4 == 4:
		return netip.AddrFrom4([4]byte(packet[12:])), netip.AddrFrom4([4]byte(packet[16:])), true
	case len(packet) >= 40 && packet[0]>>4 == 6:
		return netip.AddrFrom16([16]byte(packet[8:])), netip.AddrFrom16([16]byte(packet[24:])), true
	}
	return src, dst, false
}

func bigEndian16(v uint16) uint16 {
	return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, v))
}
