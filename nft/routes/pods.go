package routes

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/node"
)

// A Pod is an address behind an interface that leads into the node, on which its packets are received.
type Pod struct {
	Address   netip.Addr
	Interface string
}

// Pods returns the addresses of a family behind interfaces that lead into the node, in order:
// those with a route of their own through a veth, and the neighbors on a veth or a bridge.
// Interfaces of default routes, in any table, lead away from it.
func Pods(ipv6 bool) ([]Pod, error) {
	return read("neighbors", func(r reader) []Pod { return r.pods(ipv6) })
}

func (r reader) pods(ipv6 bool) (pods []Pod) {
	const indexAt, stateAt = 4, 8 // struct ndmsg
	const known = unix.NUD_REACHABLE | unix.NUD_STALE | unix.NUD_DELAY | unix.NUD_PROBE | unix.NUD_PERMANENT
	inside := map[string]string{} // kinds by name
	links := r.byIndex()
	for _, i := range links {
		if i.Kind == "veth" || i.Kind == "bridge" {
			inside[i.Name] = i.Kind
		}
	}
	routes := slices.DeleteFunc(r.networks(links), func(n Network) bool { return n.Type != unix.RTN_UNICAST })
	for _, n := range routes {
		if n.Bits() == 0 {
			delete(inside, n.Interface)
		}
	}
	add := func(a netip.Addr, name string) {
		if inside[name] != "" && a.Is6() == ipv6 && !a.IsLinkLocalUnicast() && !a.IsMulticast() {
			pods = append(pods, Pod{a, name})
		}
	}
	for _, n := range routes {
		if n.IsSingleIP() && !n.Connected && inside[n.Interface] == "veth" {
			add(n.Addr(), n.Interface)
		}
	}
	for _, m := range r.Request(unix.RTM_GETNEIGH, netlink.Dump, make([]byte, unix.SizeofNdMsg)) {
		if binary.NativeEndian.Uint16(m.Head[stateAt:])&known != 0 {
			add(m.Address(unix.NDA_DST), links[node.Number(m.Head[indexAt:])].Name)
		}
	}
	slices.SortFunc(pods, func(a, b Pod) int { return a.Address.Compare(b.Address) })
	return slices.CompactFunc(pods, func(a, b Pod) bool { return a.Address == b.Address })
}
