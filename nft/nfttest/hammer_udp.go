package nfttest

import (
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

// startUDP starts the sender and the receiver of the UDP targets.
func (h *Hammer) startUDP() error {
	targets := h.of(UDP)
	if len(targets) == 0 {
		return nil
	}
	fd, err := h.top.Outside.openTap(ofProtocol(unix.IPPROTO_UDP))
	if err != nil {
		return fmt.Errorf("hammer: %w", err)
	}
	// Tens of thousands of packets. In a user namespace the machine's limit holds.
	const buffer = 64 << 20
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, buffer) != nil {
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, buffer)
	}
	h.read(func() error {
		defer unix.Close(fd)
		return h.readUDP(fd, targets)
	})
	h.send(func() error { return h.sendUDP(targets) })
	return nil
}

// readUDP counts what comes out of the tap, until the Hammer drains and no more
// comes.
func (h *Hammer) readUDP(fd int, targets []*counters) error {
	byDst := map[netip.Addr]*counters{}
	for _, c := range targets {
		byDst[c.Dst] = c
	}
	buf := make([]byte, 64)
	for {
		packet, err := receive(fd, buf)
		switch {
		case errors.Is(err, unix.EAGAIN):
			if h.draining.Load() {
				return nil
			}
			continue
		case err != nil:
			return fmt.Errorf("hammer: receive: %w", err)
		}
		src, dst, ok := addresses(packet)
		if c := byDst[dst]; ok && c != nil {
			h.judge(c, src)
		}
	}
}

// sendUDP sends in turns to the targets. Every packet has a pair of ports that
// no packet to this target had before.
func (h *Hammer) sendUDP(targets []*counters) error {
	undo, err := ownProcessor()
	if err != nil {
		return err
	}
	defer undo()
	const first, last = 10000, 65535
	for src := uint16(first); ; src++ {
		if err := h.sendUDPFrom(src, targets); err != nil || h.stopping.Load() {
			return err
		}
		if src == last {
			return errors.New("hammer: out of ports")
		}
	}
}

// sendUDPFrom sends from one source port to all destination ports. The socket
// is an IPv6 one, which sends IPv4 to mapped addresses.
func (h *Hammer) sendUDPFrom(port uint16, targets []*counters) error {
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("hammer: socket: %w", err)
	}
	defer unix.Close(fd)
	if err := unix.Bind(fd, &unix.SockaddrInet6{Port: int(port)}); err != nil {
		return fmt.Errorf("hammer: bind to port %d: %w", port, err)
	}
	to := make([]unix.SockaddrInet6, len(targets))
	for i, c := range targets {
		to[i].Addr = c.Dst.As16()
	}
	for dst := 1; dst <= 65535 && !h.stopping.Load(); dst++ {
		for i, c := range targets {
			to[i].Port = dst
			err := unix.Sendto(fd, nil, 0, &to[i])
			for errors.Is(err, unix.EINTR) {
				err = unix.Sendto(fd, nil, 0, &to[i])
			}
			if err != nil {
				return fmt.Errorf("hammer: send to %s: %w", c.Dst, err)
			}
			c.sent.Add(1)
		}
	}
	return nil
}
