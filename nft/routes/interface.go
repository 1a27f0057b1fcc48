package routes

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/node"
)

// A reader asks about what only those need who look at the node.
type reader struct{ *node.Reader }

func read[T any](subject string, fn func(reader) T) (T, error) {
	return node.Read(node.Dial, subject, func(r *node.Reader) T { return fn(reader{r}) })
}

// An Interface is a network interface of the node.
type Interface struct {
	Index uint32
	Name  string
	Kind  string // such as veth or bridge; "" for hardware
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
func Interfaces() ([]Interface, error) { return read("interfaces", reader.interfaces) }

// Toward returns the name of the interface by which packets from a source, or if it is not valid those of the node,
// leave to a destination: "" if there is no route. A packet with a mark may take another one.
func Toward(src, dst netip.Addr) (string, error) {
	return read("route", func(r reader) string {
		q := query{src: src, dst: dst, iif: hopOf(r.route(query{dst: src})).index}
		index := hopOf(r.route(q)).index
		if index == 0 {
			return ""
		}
		const indexAt = 4 // struct ifinfomsg
		head := make([]byte, unix.SizeofIfInfomsg)
		binary.NativeEndian.PutUint32(head[indexAt:], index)
		links := r.Request(unix.RTM_GETLINK, 0, head)
		if len(links) == 0 {
			return ""
		}
		return links[0].Str(unix.IFLA_IFNAME)
	})
}

func (r reader) byIndex() map[uint32]Interface {
	interfaces := map[uint32]Interface{}
	for _, i := range r.interfaces() {
		interfaces[i.Index] = i
	}
	return interfaces
}

func (r reader) interfaces() []Interface {
	links := r.Links()
	names := map[uint32]string{}
	for _, l := range links {
		index, _ := l.Link()
		names[index] = l.Str(unix.IFLA_IFNAME)
	}
	interfaces := make([]Interface, len(links))
	for i, l := range links {
		index, _ := l.Link()
		info := l.Attr(unix.IFLA_LINKINFO)
		interfaces[i] = Interface{
			Index: index, Name: names[index], Kind: info.Str(unix.IFLA_INFO_KIND), Master: names[l.Number(unix.IFLA_MASTER)],
			MasterKind: info.Str(unix.IFLA_INFO_SLAVE_KIND),
		}
	}
	return interfaces
}
