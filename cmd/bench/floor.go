package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/kernel"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
)

// The floor is the time that the kernel itself takes for a ruleset: the agent's
// messages, encoded beforehand and sent as one transaction by one system call.
type floor struct {
	fd    int
	bytes []byte
}

// record applies a ruleset in a new namespace and keeps the messages of all its
// transactions.
func record(want nft.Ruleset) (msgs []netlink.Message, err error) {
	scratch, err := openNode("scratch")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, scratch.close()) }()
	dial := func() (*netlink.Conn, error) { return nfttest.DialNetfilter(scratch.ns) }
	batch := false
	k := kernel.New(nfnetlink.New(nfttest.Through(dial, func(m *netlink.Message) error {
		switch m.Header.Type {
		case unix.NFNL_MSG_BATCH_BEGIN, unix.NFNL_MSG_BATCH_END:
			batch = m.Header.Type == unix.NFNL_MSG_BATCH_BEGIN
		default:
			if batch {
				msgs = append(msgs, *m)
			}
		}
		return nil
	}, nil)))
	_, err = k.Apply(context.Background(), want, nft.Contents)
	return msgs, errors.Join(err, k.Close())
}

// newFloor prepares to send recorded messages to a namespace.
func newFloor(ns *nfttest.NS, msgs []netlink.Message) (*floor, error) {
	f := &floor{fd: -1}
	mark := func(typ netlink.HeaderType) netlink.Message {
		return netlink.Message{
			Header: netlink.Header{Type: typ, Flags: netlink.Request},
			Data:   []byte{unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, unix.NFNL_SUBSYS_NFTABLES},
		}
	}
	all := slices.Concat([]netlink.Message{mark(unix.NFNL_MSG_BATCH_BEGIN)}, msgs,
		[]netlink.Message{mark(unix.NFNL_MSG_BATCH_END)})
	for i, m := range all {
		m.Header.Sequence, m.Header.PID = uint32(i+1), 0
		m.Header.Flags &^= netlink.Echo // so that only errors are answered
		m.Header.Length = uint32(unix.NLMSG_HDRLEN + len(m.Data))
		b, err := m.MarshalBinary()
		if err != nil {
			return nil, fmt.Errorf("floor: %w", err)
		}
		f.bytes = append(f.bytes, b...)
	}
	err := ns.Do(func() (err error) {
		f.fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
		if err != nil {
			return err
		}
		return errors.Join(
			unix.SetsockoptInt(f.fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, 2*len(f.bytes)+1<<20),
			unix.SetsockoptInt(f.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 1<<20))
	})
	if err != nil {
		return nil, fmt.Errorf("floor: %w", err)
	}
	return f, nil
}

// rename changes the name of the table to another one, which must be of the same
// length: it stands in attributes whose length does not change.
func (f *floor) rename(to string) error {
	if len(to) != len(nft.TableName) {
		return fmt.Errorf("floor: %q is not as long as %q", to, nft.TableName)
	}
	f.bytes = bytes.ReplaceAll(f.bytes, []byte(nft.TableName+"\x00"), []byte(to+"\x00"))
	return nil
}

// send sends the transaction: the kernel is done when the call returns.
func (f *floor) send() (time.Duration, error) {
	start := time.Now()
	err := unix.Sendto(f.fd, f.bytes, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
	took := time.Since(start)
	if err != nil {
		return 0, fmt.Errorf("floor: %w", err)
	}
	answer := make([]byte, 1<<12)
	n, _, err := unix.Recvfrom(f.fd, answer, unix.MSG_DONTWAIT)
	switch {
	case errors.Is(err, unix.EAGAIN):
		return took, nil
	case err != nil:
		return 0, fmt.Errorf("floor: %w", err)
	case n >= unix.NLMSG_HDRLEN+4:
		return 0, fmt.Errorf("floor: %w", unix.Errno(-int32(binary.NativeEndian.Uint32(answer[unix.NLMSG_HDRLEN:]))))
	}
	return 0, errors.New("floor: short reply")
}

func (f *floor) close() error { return unix.Close(f.fd) }
