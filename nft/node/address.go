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
func Addresses() ([]netip.Addr, error) { return addressesOf(Dial) }

func addressesOf(d Dialer) ([]netip.Addr, error) { return Read(d, "addresses", (*Reader).usable) }

func (r *Reader) usable() (found []netip.Addr) {
	active := map[uint32]bool{}
	for _, l := range r.Links() {
		index, set := l.Link()
		active[index] = set
	}
	for _, a := range r.Addresses(unix.AF_UNSPEC) {
		if a.Local.IsGlobalUnicast() && active[a.Index] && (a.Local.Is4() || a.Flags&unix.IFA_F_TEMPORARY == 0) {
			found = append(found, a.Local)
		}
	}
	slices.SortFunc(found, netip.Addr.Compare)
	return slices.Compact(found)
}

// Links lists the interfaces, as messages that begin with struct ifinfomsg; see [Message.Link].
func (r *Reader) Links() []Message {
	const skipStatistics = 1 << 3 // RTEXT_FILTER_SKIP_STATS
	head := make([]byte, unix.SizeofIfInfomsg)
	return r.Request(unix.RTM_GETLINK, netlink.Dump, head, Numbered(unix.IFLA_EXT_MASK, skipStatistics))
}

// Link returns the index of the interface that [Reader.Links] lists, and whether it is set up.
func (m Message) Link() (index uint32, set bool) {
	const indexAt, flagsAt = 4, 8 // struct ifinfomsg
	return Number(m.Head[indexAt:]), Number(m.Head[flagsAt:])&unix.IFF_UP != 0
}

// An Address is an address of an interface. Several interfaces, and one of them several
// times, can have the same one.
type Address struct {
	Index   uint32 // of the interface
	Local   netip.Addr
	Network netip.Prefix // the network on the link; that of the other end, if the link is point-to-point
	Scope   byte
	Flags   byte // IFA_F_…, those of the header
}

// Addresses returns the addresses of a family, without those whose duplicate address detection has not succeeded.
func (r *Reader) Addresses(family byte) (addresses []Address) {
	const bitsAt, flagsAt, scopeAt, indexAt = 1, 2, 3, 4 // struct ifaddrmsg
	head := make([]byte, unix.SizeofIfAddrmsg)
	head[0] = family
	for _, m := range r.Request(unix.RTM_GETADDR, netlink.Dump, head) {
		peer := m.Address(unix.IFA_ADDRESS)
		a := Address{
			Index: Number(m.Head[indexAt:]), Scope: m.Head[scopeAt], Flags: m.Head[flagsAt],
			Local:   cmp.Or(m.Address(unix.IFA_LOCAL), peer), // IPv6 has both only if the link is point-to-point
			Network: netip.PrefixFrom(peer, int(m.Head[bitsAt])).Masked(),
		}
		if a.Flags&(unix.IFA_F_TENTATIVE|unix.IFA_F_DADFAILED) == 0 {
			addresses = append(addresses, a)
		}
	}
	return addresses
}
