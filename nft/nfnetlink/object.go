package nfnetlink

import (
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"
)

// Family is an NFPROTO_ value.
type Family uint8

// The families in which this project works.
const (
	Inet Family = unix.NFPROTO_INET
	IPv4 Family = unix.NFPROTO_IPV4
	IPv6 Family = unix.NFPROTO_IPV6
)

// String is the word that nft uses.
func (f Family) String() string {
	switch f {
	case Inet:
		return "inet"
	case IPv4:
		return "ip"
	case IPv6:
		return "ip6"
	case unix.NFPROTO_ARP:
		return "arp"
	case unix.NFPROTO_BRIDGE:
		return "bridge"
	case unix.NFPROTO_NETDEV:
		return "netdev"
	}
	return fmt.Sprintf("family-%d", uint8(f))
}

// A Table as the kernel lists it.
type Table struct {
	Family Family
	Name   string
	Flags  uint32 // NFT_TABLE_F_…
}

// Dormant says that the table's base chains are not hooked in.
func (t Table) Dormant() bool { return t.Flags&unix.NFT_TABLE_F_DORMANT != 0 }

// A Hook is what makes a chain a base chain.
type Hook struct {
	Type     string // filter, nat or route
	Number   uint32 // NF_INET_…
	Priority int32
}

// A Chain as the kernel lists it, or as it is to be made.
type Chain struct {
	Family Family
	Table  string
	Name   string
	Hook   *Hook  // nil: no base chain
	Policy uint32 // of a base chain: Accept or 0, which is drop
	Bound  bool   // written inside a rule, with which it goes: `jump { … }`
}

// Accept is the policy NF_ACCEPT of a base chain.
const Accept = 1

// A Rule as the kernel lists it, or as it is to be made.
type Rule struct {
	Family   Family
	Table    string
	Chain    string
	Handle   uint64 // 0 where it is to be made
	Exprs    []Expr
	UserData []byte
}

// A Set as the kernel lists it, or as it is to be made.
type Set struct {
	Family   Family
	Table    string
	Name     string
	Flags    uint32 // NFT_SET_…
	KeyType  uint32 // nft's number of the type
	KeyLen   uint32 // bytes
	UserData []byte
	Handle   uint64 // unique in the table; 0 where it is to be made
	// Count is the number of intervals, where Counted says that this kernel
	// tells it.
	Count   uint32
	Counted bool
}

// An Object is a stateful object: a counter, quota, limit and so on.
type Object struct {
	Family  Family
	Table   string
	Name    string
	Type    uint32 // NFT_OBJECT_…
	Packets uint64 // of a counter
	Bytes   uint64 // of a counter
}

// A Flowtable as the kernel lists it.
type Flowtable struct {
	Family Family
	Table  string
	Name   string
}

// A Range is a run of addresses, both ends included. The zero Range is a set's
// element for whatever no other one holds, which nft writes *.
type Range struct{ From, To netip.Addr }

// String gives a prefix where the range is one.
func (r Range) String() string {
	if r == (Range{}) {
		return "*"
	}
	if p, ok := r.Prefix(); ok {
		if p.IsSingleIP() {
			return p.Addr().String()
		}
		return p.String()
	}
	return r.From.String() + "-" + r.To.String()
}

// Prefix gives the range as a prefix, if it is one.
func (r Range) Prefix() (netip.Prefix, bool) {
	if !r.From.IsValid() || r.From.BitLen() != r.To.BitLen() {
		return netip.Prefix{}, false
	}
	from, to := r.From.AsSlice(), r.To.AsSlice()
	bits, diverged := 0, false
	for i := range from {
		for bit := byte(0x80); bit != 0; bit >>= 1 {
			f, t := from[i]&bit, to[i]&bit
			switch {
			case f == t && !diverged:
				bits++
			case f == 0 && t != 0:
				diverged = true
			default:
				return netip.Prefix{}, false
			}
		}
	}
	return netip.PrefixFrom(r.From, bits), true
}

// PrefixRange gives the addresses of a prefix.
func PrefixRange(p netip.Prefix) Range {
	p = p.Masked()
	last := p.Addr().AsSlice()
	for i := p.Bits(); i < len(last)*8; i++ {
		last[i/8] |= 0x80 >> (i % 8)
	}
	to, _ := netip.AddrFromSlice(last)
	return Range{p.Addr(), to}
}

// A bound is one end of an interval as the kernel keeps it: the first address
// of a run, or the first address behind it; the zero bound is the element *.
type bound struct {
	addr netip.Addr
	end  bool
}

// ranges pairs the bounds of a set, whatever their order, and though a dump may
// give one twice. A run without an end goes on to the last address of the family.
func ranges(bounds []bound) []Range {
	slices.SortFunc(bounds, func(a, b bound) int {
		if c := a.addr.Compare(b.addr); c != 0 || a.end == b.end {
			return c
		}
		if a.end {
			return -1
		}
		return 1
	})
	bounds = slices.Compact(bounds)
	out := make([]Range, 0, len(bounds)/2+1)
	for i, b := range bounds {
		switch {
		case b.end:
		case !b.addr.IsValid():
			out = append(out, Range{})
		case i+1 < len(bounds):
			out = append(out, Range{b.addr, bounds[i+1].addr.Prev()})
		default:
			out = append(out, Range{b.addr, lastAddr(b.addr)})
		}
	}
	return out
}

func lastAddr(a netip.Addr) netip.Addr {
	return PrefixRange(netip.PrefixFrom(a, 0)).To
}
