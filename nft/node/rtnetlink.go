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

// A dialer opens an rtnetlink socket that has joined groups (RTMGRP_…).
type dialer func(groups uint32) (*netlink.Conn, error)

func dial(groups uint32) (*netlink.Conn, error) {
	return netlink.Dial(unix.NETLINK_ROUTE, &netlink.Config{Groups: groups, Strict: true})
}

// A reader asks the kernel about the namespace of its socket. After an error it has no
// more replies.
type reader struct {
	*netlink.Conn
	err error
}

// read opens a socket and calls fn.
func read[T any](d dialer, what string, fn func(*reader) T) (out T, err error) {
	r := reader{}
	if r.Conn, r.err = d(0); r.err == nil {
		out = fn(&r)
		_ = r.Close()
	}
	if r.err != nil {
		err = fmt.Errorf("%s of this node: %w", what, r.err)
	}
	return out, err
}

// A message is a reply: its fixed part, such as struct rtmsg, and its attributes.
type message struct {
	head []byte
	attributes
}

// attributes are the attributes of a message by type.
type attributes map[uint16][]byte

// errTorn reports that a list changed while the kernel sent it.
var errTorn = errors.New("it changed each time while it was read")

// request sends a request. The fixed part of the replies is as long as its own.
func (r *reader) request(
	what netlink.HeaderType, flags netlink.HeaderFlags, head []byte, attrs ...netlink.Attribute,
) []message {
	const attempts = 20
	var b []byte
	if r.err == nil {
		b, r.err = netlink.MarshalAttributes(attrs)
	}
	request := netlink.Message{
		Header: netlink.Header{Type: what, Flags: netlink.Request | flags}, Data: slices.Concat(head, b),
	}
	for try := 1; r.err == nil; try++ {
		var replies []netlink.Message
		replies, r.err = r.Execute(request)
		torn := slices.ContainsFunc(replies, func(m netlink.Message) bool {
			return m.Header.Flags&netlink.DumpInterrupted != 0
		})
		if torn && try == attempts {
			r.err = errTorn
		}
		if torn {
			continue
		}
		all := make([]message, len(replies))
		for i, m := range replies {
			all[i] = message{m.Data[:len(head)], r.parse(m.Data[len(head):])}
		}
		return all
	}
	return nil
}

// parse decodes attributes.
func (r *reader) parse(b []byte) attributes {
	list, err := netlink.UnmarshalAttributes(b)
	r.err = cmp.Or(r.err, err)
	out := make(attributes, len(list))
	for _, a := range list {
		out[a.Type&^netlink.Nested] = a.Data
	}
	return out
}

// number returns the number in an attribute, 0 if there is none.
func (a attributes) number(kind uint16) uint32 {
	if len(a[kind]) != 4 {
		return 0
	}
	return number(a[kind])
}

// address returns the address in an attribute, the zero address if there is none.
func (a attributes) address(kind uint16) netip.Addr {
	addr, _ := netip.AddrFromSlice(a[kind])
	return addr
}

func number(b []byte) uint32 { return binary.NativeEndian.Uint32(b) }

// numbered returns an attribute with a number.
func numbered(kind uint16, n uint32) netlink.Attribute {
	return netlink.Attribute{Type: kind, Data: binary.NativeEndian.AppendUint32(nil, n)}
}

// familyOf returns the family of an address as a request begins with it.
func familyOf(a netip.Addr) byte {
	if a.Is6() {
		return unix.AF_INET6
	}
	return unix.AF_INET
}
