package node

import (
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// An Interface is a network interface of the node.
type Interface struct {
	Index uint32
	Name  string
	Kind  string // such as veth or bridge; "" for hardware
	Up    bool   // it is set up; it may lack a carrier
	// Elsewhere means that its other end is in another network namespace, as that of a veth.
	Elsewhere bool
	// Master is the name of the interface that this one is a part of, "" if there is
	// none, and MasterKind its kind, such as bridge, bond or vrf.
	Master, MasterKind string
}

// Receives reports whether packets are received on the interface itself (iifname): those
// of a part belong to its master.
func (i Interface) Receives() bool { return i.Master == "" }

// Sends reports whether packets leave by the interface itself (oifname). The routes of a
// VRF are those of its parts.
func (i Interface) Sends() bool { return i.Master == "" || i.MasterKind == "vrf" }

// Interfaces returns the interfaces, by index.
func Interfaces() ([]Interface, error) { return read(dial, "interfaces", (*reader).interfaces) }

// byIndex returns the interfaces by index.
func (r *reader) byIndex() map[uint32]Interface {
	all := map[uint32]Interface{}
	for _, i := range r.interfaces() {
		all[i.Index] = i
	}
	return all
}

func (r *reader) interfaces() []Interface {
	const (
		skipStatistics   = 1 << 3 // RTEXT_FILTER_SKIP_STATS
		indexAt, flagsAt = 4, 8   // struct ifinfomsg
	)
	head := make([]byte, unix.SizeofIfInfomsg)
	links := r.request(unix.RTM_GETLINK, netlink.Dump, head, numbered(unix.IFLA_EXT_MASK, skipStatistics))
	names := map[uint32]string{}
	for _, l := range links {
		names[number(l.head[indexAt:])] = unix.ByteSliceToString(l.attributes[unix.IFLA_IFNAME])
	}
	all := make([]Interface, len(links))
	for i, l := range links {
		index := number(l.head[indexAt:])
		info := r.parse(l.attributes[unix.IFLA_LINKINFO])
		all[i] = Interface{
			Index: index, Name: names[index], Up: number(l.head[flagsAt:])&unix.IFF_UP != 0,
			Elsewhere: l.attributes[unix.IFLA_LINK_NETNSID] != nil,
			Kind:      unix.ByteSliceToString(info[unix.IFLA_INFO_KIND]), Master: names[l.number(unix.IFLA_MASTER)],
			MasterKind: unix.ByteSliceToString(info[unix.IFLA_INFO_SLAVE_KIND]),
		}
	}
	return all
}
