package nfnetlink

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// A Listener is notified of each transaction in the network namespace in which it
// was opened.
//
// While it is open, the kernel creates a notification for every rule and element
// of every transaction, in all network namespaces. This multiplies the time and
// memory of large transactions, so the listener also reports which ones were
// large.
type Listener struct {
	nl *netlink.Conn
	// gauge receives all notifications of a transaction and is drained after each
	// one. A large transaction overruns it.
	gauge *netlink.Conn
}

// A Change is one change of the ruleset, as reported by a listener.
type Change struct {
	Generation
	// Writer is the netlink port of the socket that sent the transaction.
	Writer uint32
	// Overrun means that notifications were lost: anything may have changed.
	Overrun bool
	// Large means that this transaction, or those since the last change, had more
	// than about 1,000 notifications.
	Large bool
}

// gaugeBuffer is the receive buffer of the gauge. The kernel doubles it, and
// charges about 4.4 kB for each datagram, which contains about 37 set elements or
// 12 rules.
const gaugeBuffer = 64 << 10

// Listen opens a listener. It needs CAP_NET_ADMIN.
func Listen() (*Listener, error) {
	// Without a buffer size, each notification is peeked at first to learn its
	// length.
	nl, err := netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{MessageBufferSize: newGenSize})
	if err != nil {
		return nil, fmt.Errorf("netlink socket: %w", err)
	}
	gauge, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		_ = nl.Close()
		return nil, fmt.Errorf("netlink socket: %w", err)
	}
	l := &Listener{nl, gauge}
	err = errors.Join(
		newGenOnly(nl), nl.SetReadBuffer(receiveBuffer), gauge.SetReadBuffer(gaugeBuffer),
		// The gauge joins first, so that it has seen whatever nl reports.
		gauge.JoinGroup(unix.NFNLGRP_NFTABLES), nl.JoinGroup(unix.NFNLGRP_NFTABLES),
	)
	if err != nil {
		_ = l.Close()
		return nil, fmt.Errorf("listen for changes of the ruleset: %w", err)
	}
	return l, nil
}

// DialGeneration returns a connection for [Conn.Generation] only, which uses
// little memory per call.
func DialGeneration() *Conn {
	return New(func() (*netlink.Conn, error) {
		return netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{MessageBufferSize: newGenSize})
	})
}

// newGenSize is ample for what passes the filter: less than 100 bytes.
const newGenSize = 1024

// newGenOnly attaches a filter that passes only the notification at the end of a
// transaction, which the kernel sends in a separate datagram, and none for the
// objects before it. The filter is a classic BPF program
// (Documentation/networking/filter.rst), which loads in network byte order what
// netlink writes in host byte order.
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

// Receive waits for the next change. After an error there are no further changes.
func (l *Listener) Receive() (Change, error) {
	for {
		msgs, err := l.nl.Receive()
		if errors.Is(err, unix.ENOBUFS) {
			return Change{Overrun: true, Large: l.large()}, nil
		}
		if err != nil {
			return Change{}, fmt.Errorf("listen for changes of the ruleset: %w", err)
		}
		for _, m := range msgs {
			if g, ok := parseGen(m); ok {
				return Change{Generation: g, Writer: m.Header.PID, Large: l.large()}, nil
			}
		}
	}
}

// large drains the gauge, and reports whether it had overrun.
func (l *Listener) large() (large bool) {
	raw, err := l.gauge.SyscallConn()
	if err != nil {
		return false
	}
	var none [1]byte
	_ = raw.Control(func(fd uintptr) {
		for {
			_, _, err := unix.Recvfrom(int(fd), none[:], unix.MSG_DONTWAIT)
			large = large || errors.Is(err, unix.ENOBUFS)
			if errors.Is(err, unix.EAGAIN) || err != nil && !errors.Is(err, unix.ENOBUFS) && !errors.Is(err, unix.EINTR) {
				return
			}
		}
	})
	return large
}

// Close ends the listener; a waiting Receive returns.
func (l *Listener) Close() error { return errors.Join(l.nl.Close(), l.gauge.Close()) }
