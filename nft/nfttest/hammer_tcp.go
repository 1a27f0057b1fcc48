package nfttest

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfttest/netns"
)

// hammerPort is the port of the first TCP target; the others follow.
const hammerPort = 20000

// startTCP starts a listener for each TCP target and one sender.
func (h *Hammer) startTCP() {
	targets := h.of(TCP)
	if len(targets) == 0 {
		return
	}
	ports := make([]netip.AddrPort, len(targets))
	for i, c := range targets {
		ports[i] = netip.AddrPortFrom(c.Dst, uint16(hammerPort+i))
		fd := Must(netns.In(h.top.Outside, func() (int, error) { return listen(ports[i], 100*time.Millisecond) }))
		h.read(func() error {
			defer unix.Close(fd)
			return h.acceptTCP(fd, c)
		})
	}
	h.send(func() error { return h.connectTCP(targets, ports) })
}

// acceptTCP counts connections until the Hammer drains and no more arrive.
func (h *Hammer) acceptTCP(listener int, c *counters) error {
	for {
		fd, from, err := accept(listener)
		switch {
		case err == nil:
			_ = unix.Close(fd)
			h.judge(c, from.Addr())
		case !errors.Is(err, unix.EAGAIN):
			return fmt.Errorf("hammer: accept: %w", err)
		case h.draining.Load():
			return nil
		}
	}
}

// beforeRetry is how long a connection may take: less than the kernel's first
// retransmission timeout (RFC 6298, 1 s).
const beforeRetry = 900 * time.Millisecond

// connectTCP opens connections to the targets in turn, and resets each one. The
// node may keep it for a second, and would then treat a connection with the same
// ports alike. So connectTCP does not reuse a port within a second, as the kernel
// would.
//
// It is not an error if a connection is not established: it counts as not seen.
// Connections are reset if all rules of the node vanish while the reply is on its
// way, and one that the far end has closed by then returns EPIPE.
func (h *Hammer) connectTCP(targets []*counters, ports []netip.AddrPort) error {
	notEstablished := []error{unix.EINPROGRESS, unix.ETIMEDOUT, unix.ECONNRESET, unix.EPIPE}
	for src := uint16(firstPort); !h.stopping.Load(); src = max(src+1, firstPort) {
		for i, c := range targets {
			f := Flow{Src: netip.AddrPortFrom(netip.Addr{}, src), Dst: ports[i], Timeout: beforeRetry}
			fd, err := connected(f, unix.SOCK_STREAM, 0)
			switch {
			case err == nil:
				_ = unix.Close(fd)
			case !slices.ContainsFunc(notEstablished, func(e error) bool { return errors.Is(err, e) }):
				return fmt.Errorf("hammer: %s: %w", ports[i], err)
			}
			c.sent.Add(1)
		}
		h.rest()
	}
	return nil
}
