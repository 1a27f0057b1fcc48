package nfnetlink

import (
	"fmt"
	"slices"

	"golang.org/x/sys/unix"
)

// Family is an NFPROTO_ value.
type Family uint8

// The families that this project uses.
const (
	Inet Family = unix.NFPROTO_INET
	IPv4 Family = unix.NFPROTO_IPV4
	IPv6 Family = unix.NFPROTO_IPV6
	// AnyFamily lists the objects of all families, in requests.
	AnyFamily Family = unix.NFPROTO_UNSPEC
)

var families = map[Family]string{
	Inet: "inet", IPv4: "ip", IPv6: "ip6",
	unix.NFPROTO_ARP: "arp", unix.NFPROTO_BRIDGE: "bridge", unix.NFPROTO_NETDEV: "netdev",
}

// String returns the family as nft names it.
func (f Family) String() string {
	if name, ok := families[f]; ok {
		return name
	}
	return fmt.Sprintf("family-%d", uint8(f))
}

// A Table is a table as the kernel lists it.
type Table struct {
	Family Family
	Name   string
	Flags  uint32 // NFT_TABLE_F_…
	// Handle is unique in the network namespace. Those of what the table contains begin
	// again in each table: without it they identify nothing.
	Handle uint64
	// Use counts its chains, its sets except those of single rules, its objects and its
	// flowtables.
	Use uint32
}

// Dormant reports whether the table's base chains are not registered with their
// hooks.
func (t Table) Dormant() bool { return t.Flags&unix.NFT_TABLE_F_DORMANT != 0 }

// A Hook is what makes a chain a base chain.
type Hook struct {
	Type     string // filter, nat or route
	Number   uint32 // NF_INET_…
	Priority int32
}

// Equal reports whether two hooks are the same, or both none.
func (h *Hook) Equal(o *Hook) bool {
	if h == nil || o == nil {
		return h == o
	}
	return *h == *o
}

// A ChainID names a chain of a table.
type ChainID struct {
	Family      Family
	Table, Name string
}

// ID returns the name of the chain.
func (c Chain) ID() ChainID { return ChainID{c.Family, c.Table, c.Name} }

// In returns the name of the chain that the rule is in.
func (r Rule) In() ChainID { return ChainID{r.Family, r.Table, r.Chain} }

// A Chain is a chain as the kernel lists it, or as it is to be created.
type Chain struct {
	Family Family
	Table  string
	Name   string
	Hook   *Hook  // nil: not a base chain
	Policy uint32 // of a base chain: Accept or 0, which is drop
	Bound  bool   // an anonymous chain, deleted with its rule: `jump { … }`
	Use    uint32 // the kernel's reference count: its rules, and the jumps to it
	Handle uint64 // unique in the table; 0 if it is to be created
}

// Accept is the policy NF_ACCEPT of a base chain.
const Accept = 1

// A Rule is a rule as the kernel lists it, or as it is to be created.
type Rule struct {
	Family   Family
	Table    string
	Chain    string
	Handle   uint64 // 0 if it is to be created
	Exprs    []Expr
	UserData []byte
}

// A Set is a set as the kernel lists it, or as it is to be created.
type Set struct {
	Family   Family
	Table    string
	Name     string
	Flags    uint32 // NFT_SET_…
	KeyType  uint32 // nft's number of the type
	KeyLen   uint32 // bytes
	DataType uint32 // of a map; like KeyType
	DataLen  uint32
	Size     uint32 // the most elements that it can have, 0: any number
	UserData []byte
	// Special lists the types of the attributes (NFTA_SET_…) that a plain set does not have: a timeout, another policy,
	// stateful expressions.
	Special []uint16
	Handle  uint64 // unique in the table; 0 if it is to be created
	Count   uint32 // the number of intervals
	Counted bool   // the kernel reports the number: since Linux 6.18
}

// HasStatements reports whether the set gives each of its elements a statement, such as a counter
// or a limit.
func (s Set) HasStatements() bool {
	return slices.ContainsFunc(s.Special, func(typ uint16) bool { return typ == setExpr || typ == setExpressions })
}

// An Object is a stateful object, such as a counter, quota or limit.
type Object struct {
	Family  Family
	Table   string
	Name    string
	Type    uint32 // NFT_OBJECT_…
	Packets uint64 // of a counter
}
