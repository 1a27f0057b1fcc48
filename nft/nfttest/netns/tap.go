package netns

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// A Tap captures the IP packets that arrive in a namespace, on every device,
// whether or not a socket receives them.
type Tap struct{ fd int }

// A Filter is a classic BPF program that selects the packets a Tap captures.
type Filter []unix.SockFilter

// BorrowTap returns a Tap that stays open as long as the namespace, because
// closing one waits for an RCU grace period. It blocks until the previous
// borrower has called done.
func (n *NS) BorrowTap() (t *Tap, done func(), err error) {
	n.borrowed.Lock()
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.tap == nil {
		if n.tap, err = n.OpenTap(Nothing()); err != nil {
			n.borrowed.Unlock()
			return nil, nil, err
		}
	}
	return n.tap, n.borrowed.Unlock, nil
}

// OpenTap opens a Tap for the packets that the filter accepts.
func (n *NS) OpenTap(filter Filter) (*Tap, error) {
	// Protocol 0: nothing arrives before the filter is attached and bind sets the protocol.
	fd, err := In(n, func() (int, error) { return unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0) })
	if err != nil {
		return nil, fmt.Errorf("%s: packet socket: %w", n, err)
	}
	t := &Tap{fd}
	err = errors.Join(
		t.filter(filter),
		unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: bigEndian16(unix.ETH_P_ALL)}))
	if err != nil {
		return nil, fmt.Errorf("%s: packet socket: %w", n, errors.Join(err, t.Close()))
	}
	return t, nil
}

// Close closes the Tap.
func (t *Tap) Close() error { return unix.Close(t.fd) }

// SetBuffer sets the size of the receive buffer in bytes. Without privileges
// outside its user namespace, the caller gets no more than the machine's limit.
func (t *Tap) SetBuffer(size int) error {
	if unix.SetsockoptInt(t.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, size) == nil {
		return nil
	}
	return unix.SetsockoptInt(t.fd, unix.SOL_SOCKET, unix.SO_RCVBUF, size)
}

// Watch discards what has arrived, and captures what the filter accepts from now on.
func (t *Tap) Watch(filter Filter) error {
	if err := t.filter(Nothing()); err != nil {
		return err
	}
	var buf [1]byte
	for {
		_, _, err := unix.Recvfrom(t.fd, buf[:], unix.MSG_DONTWAIT)
		if errors.Is(err, unix.EAGAIN) {
			return t.filter(filter)
		}
		if err != nil && !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// Receive reads one packet, starting at its IP header, as far as it fits into
// buf. The error is os.ErrDeadlineExceeded if none arrives in time.
func (t *Tap) Receive(buf []byte, timeout time.Duration) ([]byte, error) {
	deadline := time.Now().Add(timeout)
	for {
		n, from, err := unix.Recvfrom(t.fd, buf, unix.MSG_DONTWAIT)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EAGAIN):
			remaining := time.Until(deadline)
			if remaining <= 0 {
				return nil, os.ErrDeadlineExceeded
			}
			// An error is a signal, as above.
			_, _ = unix.Poll([]unix.PollFd{{Fd: int32(t.fd), Events: unix.POLLIN}}, int(remaining.Milliseconds())+1)
			continue
		case err != nil:
			return nil, err
		}
		if ll, ok := from.(*unix.SockaddrLinklayer); ok && ll.Pkttype != unix.PACKET_OUTGOING {
			return buf[:n], nil
		}
	}
}

func (t *Tap) filter(f Filter) error {
	return unix.SetsockoptSockFprog(t.fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER,
		&unix.SockFprog{Len: uint16(len(f)), Filter: &f[0]})
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

// Nothing rejects all packets.
func Nothing() Filter {
	return Filter{{Code: result, K: 0}}
}

// ToPort accepts IPv4 and IPv6 packets of a protocol with ports, to one of them.
// It does not skip IPv6 extension headers.
func ToPort(protocol int, port uint16) Filter {
	return Filter{
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

// OfProtocol accepts IPv4 and IPv6 packets of a protocol. It does not skip IPv6
// extension headers.
func OfProtocol(protocol int) Filter {
	f := ToPort(protocol, 0)
	f[11] = unix.SockFilter{Code: jump, K: 0} // whatever the port is
	return f
}

// Between accepts packets from one address to another of the same family.
func Between(src, dst netip.Addr) Filter {
	const loadWord = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
	version, at := uint32(4), uint32(12) // of the addresses: RFC 791, section 3.1
	if src.Is6() {
		version, at = 6, 8 // RFC 8200, section 3
	}
	f := Filter{{Code: loadByte, K: 0}, {Code: shift, K: 4}, {Code: equal, K: version}}
	for b := slices.Concat(src.AsSlice(), dst.AsSlice()); len(b) > 0; b, at = b[4:], at+4 {
		f = append(f, unix.SockFilter{Code: loadWord, K: at}, unix.SockFilter{Code: equal, K: binary.BigEndian.Uint32(b)})
	}
	f = append(f, unix.SockFilter{Code: result, K: 65536}, unix.SockFilter{Code: result, K: 0})
	for i := range f {
		if f[i].Code == equal {
			f[i].Jf = uint8(len(f) - 2 - i)
		}
	}
	return f
}

// Source returns the source of an IP packet of a protocol with ports.
func Source(packet []byte) (netip.AddrPort, bool) {
	src, _, ok := Addresses(packet)
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

// Addresses returns the source and destination of an IP packet.
func Addresses(packet []byte) (src, dst netip.Addr, ok bool) {
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
