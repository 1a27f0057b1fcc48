package trace

import (
	"slices"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfnetlink"
)

// A Listing lists all chains.
type Listing struct {
	Chains  []nfnetlink.Chain          // of ip, ip6, inet and netdev, in this order
	dormant map[nfnetlink.ChainID]bool // tables, which have no name of a chain
}

// List lists the chains that the kernel has.
func List(c *nfnetlink.Conn) (Listing, error) {
	l := Listing{dormant: map[nfnetlink.ChainID]bool{}}
	tables, err := c.Tables(nfnetlink.AnyFamily)
	if err != nil {
		return l, err
	}
	for _, t := range tables {
		l.dormant[nfnetlink.ChainID{Family: t.Family, Table: t.Name}] = t.Dormant()
	}
	families := []nfnetlink.Family{nfnetlink.IPv4, nfnetlink.IPv6, nfnetlink.Inet, unix.NFPROTO_NETDEV}
	place := func(c nfnetlink.Chain) int { return slices.Index(families, c.Family) }
	all, err := c.Chains(nfnetlink.AnyFamily)
	l.Chains = slices.DeleteFunc(all, func(c nfnetlink.Chain) bool { return place(c) < 0 })
	slices.SortStableFunc(l.Chains, func(a, b nfnetlink.Chain) int { return place(a) - place(b) })
	return l, err
}

// InForce reports whether a chain is a base chain of a table that is not dormant.
func (l Listing) InForce(c nfnetlink.Chain) bool {
	return c.Hook != nil && !l.dormant[nfnetlink.ChainID{Family: c.Family, Table: c.Table}]
}
