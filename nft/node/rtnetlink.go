package node

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// A Dialer opens an rtnetlink socket that has joined groups (RTMGRP_…).
type Dialer func(groups uint32) (*netlink.Conn, error)

// Dial opens one in the network namespace of the calling thread.
func Dial(groups uint32) (*netlink.Conn, error) {
	return netlink.Dial(unix.NETLINK_ROUTE, &netlink.Config{Groups: groups, Strict: true})
}

// A Reader asks the kernel about the namespace of its socket. After an error it has no
// more replies.
type Reader struct {
	*netlink.Conn
	Err error
}

// Read opens a socket and calls fn.
func Read[T any](d Dialer, what string, fn func(*Reader) T) (out T, err error) {
	r := Reader{}
	if r.Conn, r.Err = d(0); r.Err == nil {
		out = fn(&r)
		_ = r.Close()
	}
	if r.Err != nil {
		err = fmt.Errorf("%s of this node: %w", what, r.Err)
	}
	return out, err
}

// A Message is a reply: its fixed part, such as struct rtmsg, and its attributes.
type Message struct {
	Head []byte
	Attributes
}

// Attributes are the attributes of a message by type.
type Attributes map[uint16][]byte

// errTorn reports that a list changed while the kernel sent it.
var errTorn = errors.New("it changed each time while it was read")

// Request sends a request. The fixed part of the replies is as long as its own.
func (r *Reader) Request(
	what netlink.HeaderType, flags netlink.HeaderFlags, head []byte, attrs ...netlink.Attribute,
) []Message {
	const attempts = 20
	var b []byte
	if r.Err == nil {
		b, r.Err = netlink.MarshalAttributes(attrs)
	}
	request := netlink.Message{
		Header: netlink.Header{Type: what, Flags: netlink.Request | flags}, Data: slices.Concat(head, b),
	}
	for try := 1; r.Err == nil; try++ {
		var replies []netlink.Message
		replies, r.Err = r.Execute(request)
		torn := slices.ContainsFunc(replies, func(m netlink.Message) bool {
			return m.Header.Flags&netlink.DumpInterrupted != 0
		})
		if torn && try == attempts {
			r.Err = errTorn
		}
		if torn {
			continue
		}
		all := make([]Message, len(replies))
		for i, m := range replies {
			all[i] = Message{m.Data[:len(head)], r.Parse(m.Data[len(head):])}
		}
		return all
	}
	return nil
}

// Parse decodes attributes.
func (r *Reader) Parse(b []byte) Attributes {
	list, err := netlink.UnmarshalAttributes(b)
	r.Err = cmp.Or(r.Err, err)
	out := make(Attributes, len(list))
	for _, a := range list {
		out[a.Type&^netlink.Nested] = a.Data
	}
	return out
}

// Number returns the number in an attribute, 0 if there is none.
func (a Attributes) Number(kind uint16) uint32 {
	if len(a[kind]) != 4 {
		return 0
	}
	return Number(a[kind])
}

// Address returns the address in an attribute, the zero address if there is none.
func (a Attributes) Address(kind uint16) netip.Addr {
	addr, _ := netip.AddrFromSlice(a[kind])
	return addr
}

// Number returns the number in four bytes.
func Number(b []byte) uint32 { return binary.NativeEndian.Uint32(b) }

// Numbered returns an attribute with a number.
func Numbered(kind uint16, n uint32) netlink.Attribute {
	return netlink.Attribute{Type: kind, Data: binary.NativeEndian.AppendUint32(nil, n)}
}
