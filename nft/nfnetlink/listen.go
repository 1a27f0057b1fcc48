package nfnetlink

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// A Listener hears of each transaction in the network namespace in which it was
// opened.
type Listener struct {
	nl *netlink.Conn
}

// A Change is what a listener hears.
type Change struct {
	Generation
	// Writer is the netlink port of the socket that sent the transaction.
	Writer uint32
	// Overrun says that notifications were lost: anything may have changed.
	Overrun bool
}

// Listen opens a listener. It needs CAP_NET_ADMIN. The kernel makes the
// notifications of a transaction for every listener of the group, whatever its
// filter, which makes large transactions of all programs slower.
func Listen() (*Listener, error) {
	// Without a size each notification is looked at first, to learn its length.
	nl, err := netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{MessageBufferSize: newGenSize})
	if err != nil {
		return nil, fmt.Errorf("netlink socket: %w", err)
	}
	err = errors.Join(newGenOnly(nl), nl.SetReadBuffer(receiveBuffer), nl.JoinGroup(unix.NFNLGRP_NFTABLES))
	if err != nil {
		_ = nl.Close()
		return nil, fmt.Errorf("listen for changes of the ruleset: %w", err)
	}
	return &Listener{nl}, nil
}

// newGenSize is ample for what the socket is let hear: less than 100 bytes.
const newGenSize = 1024

// newGenOnly lets the socket hear the notification that ends a transaction,
// which the kernel sends in a datagram of its own, and none of the objects
// before it. The filter is a classic BPF program (Documentation/networking/
// filter.rst); it loads in network order what netlink writes in the order of
// the host.
func newGenOnly(nl *netlink.Conn) error {
	const typeAt = 4 // struct nlmsghdr, nlmsg_type
	newGen := binary.NativeEndian.AppendUint16(nil, unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWGEN)
	program := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_H | unix.BPF_ABS, K: typeAt},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: uint32(binary.BigEndian.Uint16(newGen)), Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: 1 << 16},
		{Code: unix.BPF_RET | unix.BPF_K, K: 0},
	}
	raw, err := nl.SyscallConn()
	if err != nil {
		return err
	}
	var attach error
	err = raw.Control(func(fd uintptr) {
		attach = unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER,
			&unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]})
	})
	return errors.Join(err, attach)
}

// Receive waits for the next change. An error other than that of [Listener.Close]
// leaves it open whether changes were missed.
func (l *Listener) Receive() (Change, error) {
	for {
		msgs, err := l.nl.Receive()
		if errors.Is(err, unix.ENOBUFS) {
			return Change{Overrun: true}, nil
		}
		if err != nil {
			return Change{}, fmt.Errorf("listen for changes of the ruleset: %w", err)
		}
		for _, m := range msgs {
			if g, ok := parseGen(m); ok {
				return Change{Generation: g, Writer: m.Header.PID}, nil
			}
		}
	}
}

// Pending says whether Receive would return at once.
func (l *Listener) Pending() bool {
	raw, err := l.nl.SyscallConn()
	if err != nil {
		return true
	}
	pending := true
	err = raw.Control(func(fd uintptr) {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		pending = n > 0 || err != nil
	})
	return pending || err != nil
}

// Pause stops the notifications: while nobody listens, the kernel
// does not make them, which makes a large transaction faster. What changes until Resume is not heard of.
func (l *Listener) Pause() error { return l.nl.LeaveGroup(unix.NFNLGRP_NFTABLES) }

// Resume lets a paused listener hear again.
func (l *Listener) Resume() error { return l.nl.JoinGroup(unix.NFNLGRP_NFTABLES) }

// Close ends the listener; a waiting Receive returns.
func (l *Listener) Close() error { return l.nl.Close() }
