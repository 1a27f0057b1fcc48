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
	fd, err := n.openTap(nothing())
	if err != nil {
		return nil, err
	}
	n.capture = &capture{fd}
	return n.capture, nil
}

// openTap opens a packet socket for what the filter accepts. Reading from it
// gives EAGAIN after a tenth of a second without a packet.
func (n *NS) openTap(filter []unix.SockFilter) (fd int, err error) {
	err = n.Do(func() (err error) {
		// Protocol 0: nothing arrives before the filter is there and bind says what.
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		err = errors.Join(
			attachFilter(fd, filter),
			unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 100_000}),
			unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: bigEndian16(unix.ETH_P_ALL)}))
		if err != nil {
			err = errors.Join(err, unix.Close(fd))
		}
		return err
	})
	if err != nil {
		return -1, fmt.Errorf("%s: packet socket: %w", n, err)
	}
	return fd, nil
}

func (c *capture) close() error { return unix.Close(c.fd) }

// watch forgets what was captured and captures packets of this protocol to this
// destination port from now on.
func (c *capture) watch(protocol int, port uint16) error {
	if err := attachFilter(c.fd, nothing()); err != nil {
		return err
	}
	var buf [1]byte
	for {
		_, _, err := unix.Recvfrom(c.fd, buf[:], unix.MSG_DONTWAIT)
		if errors.Is(err, unix.EAGAIN) {
			return attachFilter(c.fd, toPort(protocol, port))
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
		packet, err := receive(c.fd, buf)
		if errors.Is(err, unix.EAGAIN) {
			continue
		}
		if err != nil || bytes.HasSuffix(packet, cookie) {
			return packet, err
		}
	}
	return nil, os.ErrDeadlineExceeded
}

// receive reads one packet that did not leave but arrive.
func receive(fd int, buf []byte) ([]byte, error) {
	for {
		n, from, err := unix.Recvfrom(fd, buf, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if ll, ok := from.(*unix.SockaddrLinklayer); ok && ll.Pkttype != unix.PACKET_OUTGOING {
			return buf[:n], nil
		}
	}
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
	jump     = unix.BPF_JMP | unix.BPF_JA
	result   = unix.BPF_RET | unix.BPF_K
)

// nothing is a classic BPF program that accepts no packet.
func nothing() []unix.SockFilter {
	return []unix.SockFilter{{Code: result, K: 0}}
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
		4:  {Code: equal, K: uint32(protocol), Jf: 8}, // no: to 13
		5:  {Code: loadIHL, K: 0},
		6:  {Code: loadHalX, K: 2},
		7:  {Code: jump, K: 3}, // to 11
		8:  {Code: loadByte, K: 6},
		9:  {Code: equal, K: uint32(protocol), Jf: 3}, // no: to 13
		10: {Code: loadHalf, K: 42},
		11: {Code: equal, K: uint32(port), Jf: 1}, // no: to 13
		12: {Code: result, K: 65536},
		13: {Code: result, K: 0},
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
