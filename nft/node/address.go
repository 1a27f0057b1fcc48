package node

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// Addresses returns the addresses that connections can use as their source and receive
// replies, sorted: global unicast addresses, with any prefix length, of an interface that
// is up. An IPv6 address counts once duplicate address detection has found no other
// owner, and also while it is deprecated. Temporary (privacy) ones, which expire, never do.
func Addresses() ([]netip.Addr, error) { return addressesOf(dial) }

func addressesOf(d dialer) ([]netip.Addr, error) { return read(d, "addresses", (*reader).usable) }

func (r *reader) usable() (found []netip.Addr) {
	links := r.byIndex()
	for _, a := range r.addresses(unix.AF_UNSPEC) {
		if a.local.IsGlobalUnicast() && links[a.index].Up && (a.local.Is4() || a.flags&unix.IFA_F_TEMPORARY == 0) {
			found = append(found, a.local)
		}
	}
	slices.SortFunc(found, netip.Addr.Compare)
	return slices.Compact(found)
}

// With returns the interfaces that have an address, by index: none if the node does not have it. It
// says whose address connections get by masquerading, because the kernel takes that of another
// interface if the one they leave by has none.
func With(a netip.Addr) ([]Interface, error) {
	return read(dial, "addresses", func(r *reader) []Interface { return r.with(a) })
}

func (r *reader) with(addr netip.Addr) (all []Interface) {
	own := r.addresses(familyOf(addr))
	for _, i := range r.interfaces() {
		if slices.ContainsFunc(own, func(a address) bool { return a.index == i.Index && a.local == addr }) {
			all = append(all, i)
		}
	}
	return all
}

// An address is an address of an interface. Several interfaces, and one of them several
// times, can have the same one.
type address struct {
	index   uint32 // of the interface
	local   netip.Addr
	network netip.Prefix // of the other end, if the link is point-to-point
	scope   byte
	flags   uint32 // IFA_F_…
}

// addresses returns the addresses of a family that can be used by now.
func (r *reader) addresses(family byte) (all []address) {
	const bitsAt, flagsAt, scopeAt, indexAt = 1, 2, 3, 4 // struct ifaddrmsg
	head := make([]byte, unix.SizeofIfAddrmsg)
	head[0] = family
	for _, m := range r.request(unix.RTM_GETADDR, netlink.Dump, head) {
		peer := m.address(unix.IFA_ADDRESS)
		a := address{
			index: number(m.head[indexAt:]), scope: m.head[scopeAt], flags: uint32(m.head[flagsAt]),
			local:   cmp.Or(m.address(unix.IFA_LOCAL), peer), // IPv6 has both only if the link is point-to-point
			network: netip.PrefixFrom(peer, int(m.head[bitsAt])).Masked(),
		}
		if flags := m.attributes[unix.IFA_FLAGS]; flags != nil {
			a.flags = number(flags)
		}
		if a.flags&(unix.IFA_F_TENTATIVE|unix.IFA_F_DADFAILED) == 0 {
			all = append(all, a)
		}
	}
	return all
}
