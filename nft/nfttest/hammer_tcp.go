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
func (h *Hammer) startTCP() error {
	targets := h.of(TCP)
	if len(targets) == 0 {
		return nil
	}
	ports := make([]netip.AddrPort, len(targets))
	for i, c := range targets {
		ports[i] = netip.AddrPortFrom(c.Dst, uint16(hammerPort+i))
		var fd int
		err := h.top.Outside.Do(func() (err error) {
			fd, err = listen(ports[i])
			return err
		})
		if err != nil {
			return err
		}
		h.read(func() error {
			defer unix.Close(fd)
			return h.acceptTCP(fd, c)
		})
	}
	h.send(func() error { return h.connectTCP(targets, ports) })
	return nil
}

func listen(at netip.AddrPort) (int, error) {
	fd, err := unix.Socket(netns.Family(at.Addr()), unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("hammer: socket: %w", err)
	}
	err = errors.Join(
		// A connection of the previous Hammer may still exist.
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1),
		bind(fd, Flow{Src: at, Dst: at}),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 100_000}),
		unix.Listen(fd, 4096))
	if err != nil {
		_ = unix.Close(fd)
		return -1, fmt.Errorf("hammer: listen at %s: %w", at, err)
	}
	return fd, nil
}

// acceptTCP counts connections until the Hammer drains and no more arrive.
func (h *Hammer) acceptTCP(listener int, c *counters) error {
	for {
		fd, from, err := unix.Accept4(listener, unix.SOCK_CLOEXEC)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EAGAIN):
			if h.draining.Load() {
				return nil
			}
			continue
		case err != nil:
			return fmt.Errorf("hammer: accept: %w", err)
		}
		_ = unix.Close(fd)
		h.judge(c, fromSockaddr(from).Addr())
	}
}

// connectTCP opens connections to the targets in turn, and resets each one, so
// that neither end keeps it. The node may keep it for a second, and would then
// treat a connection with the same ports alike. So connectTCP does not reuse a
// port within a second, as the kernel would.
func (h *Hammer) connectTCP(targets []*counters, ports []netip.AddrPort) error {
	for src := uint16(firstPort); !h.stopping.Load(); src = max(src+1, firstPort) {
		for i, c := range targets {
			err := connectOnce(src, ports[i])
			if err != nil && !mayFail(err) {
				return fmt.Errorf("hammer: connect to %s: %w", ports[i], err)
			}
			c.sent.Add(1)
		}
	}
	return nil
}

// mayFail reports whether a connection was not established, which is not an error
// of the Hammer: it counts as not seen. Connections are reset if all rules of the
// node vanish while the reply is on its way, and one that the far end has closed
// by then returns EPIPE.
func mayFail(err error) bool {
	return slices.ContainsFunc([]error{unix.EINPROGRESS, unix.ETIMEDOUT, unix.ECONNRESET, unix.EPIPE}, func(e error) bool {
		return errors.Is(err, e)
	})
}

// beforeRetry is how long a connection may take: less than the kernel's first
// retransmission timeout (RFC 6298, 1 s).
const beforeRetry = 900 * time.Millisecond

// connectOnce opens one connection from a port and resets it. The error is
// EINPROGRESS if it is not established in time.
func connectOnce(src uint16, dst netip.AddrPort) error {
	to, err := sockaddr(dst)
	if err != nil {
		return err
	}
	fd, err := unix.Socket(netns.Family(dst.Addr()), unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	most := unix.NsecToTimeval(beforeRetry.Nanoseconds())
	if err := errors.Join(
		// A child process that is just being started may keep the previous socket
		// open.
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1),
		bind(fd, Flow{Src: netip.AddrPortFrom(netip.Addr{}, src), Dst: dst}),
		unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &most),
	); err != nil {
		return err
	}
	err = unix.Connect(fd, to)
	for errors.Is(err, unix.EINTR) { // connecting continues in the meantime
		err = unix.Connect(fd, to)
	}
	if errors.Is(err, unix.EISCONN) {
		return nil
	}
	return err
}
