package nfttest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfttest/netns"
)

// startUDP starts the sender and the receiver of the UDP targets.
func (h *Hammer) startUDP() {
	targets := h.of(UDP)
	if len(targets) == 0 {
		return
	}
	tap := Must(h.top.Outside.OpenTap(netns.OfProtocol(unix.IPPROTO_UDP)))
	Check(tap.SetBuffer(64 << 20)) // tens of thousands of packets
	h.read(func() error {
		err := h.readUDP(tap, targets)
		return errors.Join(err, tap.Close())
	})
	h.send(func() error { return h.sendUDP(targets) })
}

// readUDP counts packets from the tap until the Hammer drains and no more arrive.
func (h *Hammer) readUDP(tap *netns.Tap, targets []*counters) error {
	byDst := map[netip.Addr]*counters{}
	for _, c := range targets {
		byDst[c.Dst] = c
	}
	buf := make([]byte, 64)
	for {
		packet, err := tap.Receive(buf, 100*time.Millisecond)
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
		c := byDst[dst]
		switch {
		case !ok || c == nil:
		case len(h.pods.Addrs) == 0:
			h.judge(c, src)
		default:
			seen, _ := netns.Source(packet)
			if pod := int(binary.BigEndian.Uint16(packet[len(packet)-2:])); pod < len(h.pods.Addrs) {
				own := src == h.pods.Addrs[pod]
				c.count(own, !own && h.pods.Node(pod, seen))
			}
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
	senders := h.pods.Addrs
	if len(senders) == 0 {
		senders = []netip.Addr{netip.IPv6Unspecified()} // for IPv4 it sends to mapped addresses
	}
	for src := uint16(firstPort); ; src++ {
		if err := h.sendUDPFrom(senders, src, targets); err != nil || h.stopping.Load() {
			return err
		}
		if src == last {
			return errors.New("hammer: out of ports")
		}
	}
}

// A sending is what one sender sends to one target.
type sending struct {
	to   *counters
	fd   int
	at   unix.Sockaddr
	port *int // of at
	data []byte
}

// sendUDPFrom sends from one source port of each sender to many destination ports of the targets of its family. A
// packet has the index of its sender.
func (h *Hammer) sendUDPFrom(senders []netip.Addr, port uint16, targets []*counters) error {
	var all []sending
	for i, from := range senders {
		fd, err := unix.Socket(netns.Family(from), unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("hammer: socket: %w", err)
		}
		defer unix.Close(fd)
		if err := bind(fd, Flow{Src: netip.AddrPortFrom(from, port), Dst: netip.AddrPortFrom(from, 0)}); err != nil {
			return fmt.Errorf("hammer: %w", err)
		}
		data := binary.BigEndian.AppendUint16(nil, uint16(i))
		for _, c := range targets {
			v4, v6 := &unix.SockaddrInet4{}, &unix.SockaddrInet6{Addr: c.Dst.As16()}
			switch {
			case from.Is6() && (from.IsUnspecified() || c.Dst.Is6()):
				all = append(all, sending{c, fd, v6, &v6.Port, data})
			case from.Is4() && c.Dst.Is4():
				v4.Addr = c.Dst.As4()
				all = append(all, sending{c, fd, v4, &v4.Port, data})
			}
		}
	}
	for dst := 1; dst <= 65535/len(senders) && !h.stopping.Load(); dst++ {
		for _, s := range all {
			*s.port = dst
			err := unix.Sendto(s.fd, s.data, 0, s.at)
			for errors.Is(err, unix.EINTR) {
				err = unix.Sendto(s.fd, s.data, 0, s.at)
			}
			if err != nil {
				return fmt.Errorf("hammer: send to %s: %w", s.to.Dst, err)
			}
			s.to.sent.Add(1)
		}
		h.rest()
	}
	return nil
}
