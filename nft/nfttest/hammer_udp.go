package nfttest

import (
	"errors"
	"fmt"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfttest/netns"
)

// startUDP starts the sender and the receiver of the UDP targets.
func (h *Hammer) startUDP() error {
	targets := h.of(UDP)
	if len(targets) == 0 {
		return nil
	}
	tap, err := h.top.Outside.OpenTap(netns.OfProtocol(unix.IPPROTO_UDP))
	if err != nil {
		return fmt.Errorf("hammer: %w", err)
	}
	if err := tap.SetBuffer(64 << 20); err != nil { // tens of thousands of packets
		return fmt.Errorf("hammer: receive buffer: %w", errors.Join(err, tap.Close()))
	}
	h.read(func() error {
		err := h.readUDP(tap, targets)
		return errors.Join(err, tap.Close())
	})
	h.send(func() error { return h.sendUDP(targets) })
	return nil
}

// readUDP counts packets from the tap until the Hammer drains and no more arrive.
func (h *Hammer) readUDP(tap *netns.Tap, targets []*counters) error {
	byDst := map[netip.Addr]*counters{}
	for _, c := range targets {
		byDst[c.Dst] = c
	}
	buf := make([]byte, 64)
	for {
		packet, err := tap.Receive(buf)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			if h.draining.Load() {
				return nil
			}
			continue
		case err != nil:
			return fmt.Errorf("hammer: receive: %w", err)
		}
		src, dst, ok := netns.Addresses(packet)
		if c := byDst[dst]; ok && c != nil {
			h.judge(c, src)
		}
	}
}

// sendUDP sends to the targets in turn. Every packet has a pair of ports that no
// earlier packet to this target had.
func (h *Hammer) sendUDP(targets []*counters) error {
	undo, err := OneProcessor()
	if err != nil {
		return err
	}
	defer undo()
	const last = 65535
	for src := uint16(firstPort); ; src++ {
		if err := h.sendUDPFrom(src, targets); err != nil || h.stopping.Load() {
			return err
		}
		if src == last {
			return errors.New("hammer: out of ports")
		}
	}
}

// sendUDPFrom sends from one source port to all destination ports. The socket is
// an IPv6 socket; for IPv4 it sends to mapped addresses.
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
