package node

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfnetlink"
)

// A Dialer opens an rtnetlink socket that receives the events of groups (RTMGRP_…), or none.
type Dialer func(groups uint32) (*netlink.Conn, error)

// Dial opens an rtnetlink socket in the network namespace of the calling thread.
func Dial(groups uint32) (*netlink.Conn, error) {
	return netlink.Dial(unix.NETLINK_ROUTE, &netlink.Config{Groups: groups, Strict: true})
}

// A Reader asks the kernel about the network namespace of its socket. After an error, which Err has, it asks no more,
// and returns nothing.
type Reader struct {
	conn *nfnetlink.Conn
	Err  error
}

// Read calls fn with a reader, and returns its result, or the reader's error about a subject.
func Read[T any](d Dialer, subject string, fn func(*Reader) T) (T, error) {
	r := Reader{conn: nfnetlink.New(func() (*netlink.Conn, error) { return d(0) })}
	defer func() { _ = r.conn.Close() }()
	answer := fn(&r)
	if r.Err != nil {
		return answer, fmt.Errorf("%s of this node: %w", subject, r.Err)
	}
	return answer, nil
}

// A Message is a reply: its fixed part, such as struct rtmsg, and its attributes, whose numbers
// are in the byte order of the machine.
type Message struct {
	Head []byte
	nfnetlink.Attrs
}

// Request sends a request and returns the replies. Their fixed part is as long as head.
func (r *Reader) Request(
	kind netlink.HeaderType, flags netlink.HeaderFlags, head []byte, attrs ...netlink.Attribute,
) (replies []Message) {
	if r.Err != nil {
		return nil
	}
	b, err := netlink.MarshalAttributes(attrs)
	if err != nil {
		r.Err = err
		return nil
	}
	request := netlink.Message{
		Header: netlink.Header{Type: kind, Flags: netlink.Request | flags}, Data: slices.Concat(head, b),
	}
	r.Err = nfnetlink.Again(context.Background(), func() error {
		replies = nil
		return r.conn.Exchange(request, func(m netlink.Message) error {
			replies = append(replies, Message{m.Data[:len(head)], m.Data[len(head):]})
			return nil
		})
	})
	return replies
}

// Number returns the number in an attribute, 0 if there is none.
func (m Message) Number(typ uint16) uint32 {
	if b := m.Attr(typ); len(b) == 4 {
		return Number(b)
	}
	return 0
}

// Address returns the address in an attribute, the zero address if there is none.
func (m Message) Address(typ uint16) netip.Addr {
	addr, _ := netip.AddrFromSlice(m.Attr(typ))
	return addr
}

// Number returns the number in four bytes.
func Number(b []byte) uint32 { return binary.NativeEndian.Uint32(b) }

// Numbered returns an attribute with a number.
func Numbered(kind uint16, n uint32) netlink.Attribute {
	return netlink.Attribute{Type: kind, Data: binary.NativeEndian.AppendUint32(nil, n)}
}
