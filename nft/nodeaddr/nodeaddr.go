package nodeaddr

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// A Dial opens an rtnetlink socket that has joined groups (RTMGRP_…).
type Dial func(groups uint32) (*netlink.Conn, error)

func dial(groups uint32) (*netlink.Conn, error) {
	const receiveBuffer = 1 << 20 // for notifications while many pods start
	nl, err := netlink.Dial(unix.NETLINK_ROUTE, &netlink.Config{Groups: groups})
	if err == nil {
		_ = nl.SetReadBuffer(receiveBuffer) // a smaller one overruns more often
	}
	return nl, err
}

// List returns the addresses of the node in whose network namespace it is called, sorted.
func List() ([]netip.Addr, error) {
	s, err := list(dial)
	if err != nil {
		return nil, err
	}
	return s.usable(), nil
}

// A state is the kernel's interfaces and addresses.
type state struct {
	up    map[uint32]bool // by interface index
	ready map[held]bool   // false: duplicate address detection is not complete
}

// held is an address of an interface. Several interfaces can have the same address.
type held struct {
	index uint32
	addr  netip.Addr
}

// usable returns the addresses that count.
func (s state) usable() []netip.Addr {
	var found []netip.Addr
	for h, ready := range s.ready {
		if ready && s.up[h.index] && h.addr.IsGlobalUnicast() {
			found = append(found, h.addr)
		}
	}
	slices.SortFunc(found, netip.Addr.Compare)
	return slices.Compact(found)
}

// errTorn reports that the listing is inconsistent.
var errTorn = errors.New("addresses changed while they were listed")

func list(dial Dial) (state, error) {
	const attempts = 20
	nl, err := dial(0)
	if err != nil {
		return state{}, fmt.Errorf("netlink socket: %w", err)
	}
	defer func() { _ = nl.Close() }()
	for try := 1; ; try++ {
		s := state{up: map[uint32]bool{}, ready: map[held]bool{}}
		err := errors.Join(
			s.dump(nl, unix.RTM_GETLINK, linkRequest()),
			s.dump(nl, unix.RTM_GETADDR, make([]byte, unix.SizeofIfAddrmsg)))
		if err == nil {
			return s, nil
		}
		if try == attempts || !errors.Is(err, errTorn) {
			return state{}, fmt.Errorf("addresses of this node: %w", err)
		}
	}
}

// linkRequest requests interfaces without their counters.
func linkRequest() []byte {
	const skipStatistics = 1 << 3 // RTEXT_FILTER_SKIP_STATS
	b := binary.NativeEndian.AppendUint16(make([]byte, unix.SizeofIfInfomsg), unix.SizeofNlAttr+4)
	b = binary.NativeEndian.AppendUint16(b, unix.IFLA_EXT_MASK)
	return binary.NativeEndian.AppendUint32(b, skipStatistics)
}

func (s state) dump(nl *netlink.Conn, what netlink.HeaderType, body []byte) error {
	msgs, err := nl.Execute(netlink.Message{
		Header: netlink.Header{Type: what, Flags: netlink.Request | netlink.Dump}, Data: body,
	})
	if err != nil {
		return err
	}
	for _, m := range msgs {
		if m.Header.Flags&netlink.DumpInterrupted != 0 {
			return errTorn
		}
		if err := s.take(m); err != nil {
			return err
		}
	}
	return nil
}

// take applies a message of a dump or a notification: rtnetlink(7).
func (s state) take(m netlink.Message) error {
	switch m.Header.Type {
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		return s.link(m)
	case unix.RTM_NEWADDR, unix.RTM_DELADDR:
		return s.address(m)
	}
	return nil
}

func (s state) link(m netlink.Message) error {
	const indexAt, flagsAt = 4, 8 // struct ifinfomsg
	if len(m.Data) < unix.SizeofIfInfomsg {
		return fmt.Errorf("message about an interface of %d bytes", len(m.Data))
	}
	if m.Data[0] != unix.AF_UNSPEC {
		return nil // a bridge reports its ports in such messages, too
	}
	index := binary.NativeEndian.Uint32(m.Data[indexAt:])
	if m.Header.Type == unix.RTM_DELLINK {
		delete(s.up, index)
		maps.DeleteFunc(s.ready, func(h held, _ bool) bool { return h.index == index })
		return nil
	}
	s.up[index] = binary.NativeEndian.Uint32(m.Data[flagsAt:])&unix.IFF_UP != 0
	return nil
}

func (s state) address(m netlink.Message) error {
	const flagsAt, indexAt = 2, 4 // struct ifaddrmsg
	if len(m.Data) < unix.SizeofIfAddrmsg {
		return fmt.Errorf("message about an address of %d bytes", len(m.Data))
	}
	attrs, err := netlink.UnmarshalAttributes(m.Data[unix.SizeofIfAddrmsg:])
	if err != nil {
		return fmt.Errorf("message about an address: %w", err)
	}
	h := held{index: binary.NativeEndian.Uint32(m.Data[indexAt:])}
	flags := uint32(m.Data[flagsAt])
	for _, a := range attrs {
		switch addr, ok := netip.AddrFromSlice(a.Data); {
		case a.Type == unix.IFA_FLAGS && len(a.Data) == 4:
			flags = binary.NativeEndian.Uint32(a.Data)
		case ok && a.Type == unix.IFA_LOCAL: // the other end of a point-to-point link has IFA_ADDRESS
			h.addr = addr
		case ok && a.Type == unix.IFA_ADDRESS && !h.addr.IsValid():
			h.addr = addr
		}
	}
	if m.Header.Type == unix.RTM_DELADDR {
		delete(s.ready, h)
	} else {
		s.ready[h] = flags&(unix.IFA_F_TENTATIVE|unix.IFA_F_DADFAILED) == 0
	}
	return nil
}
