package nft

import (
	"encoding/binary"
	"strings"

	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft/nfnetlink"
)

// bytecode is the rule as the kernel gets it.
func (r Rule) bytecode(t Table, chain string, s Sides) nfnetlink.Rule {
	out := nfnetlink.Rule{Family: t.Family, Table: t.Name, Chain: chain}
	for _, n := range r.Nodes {
		out.Exprs = append(out.Exprs, n.bytecode(t.Family, s)...)
	}
	if r.Comment != "" {
		out.UserData = userdata.AppendString(nil, userdata.TypeComment, r.Comment)
	}
	return out
}

// Bytecode gives the rules of the chain as the kernel gets them; the sides say
// under which names it holds the sets of the table.
func (c Chain) Bytecode(t Table, s Sides) []nfnetlink.Rule {
	out := make([]nfnetlink.Rule, len(c.Rules))
	for i, r := range c.Rules {
		out[i] = r.bytecode(t, c.Name, s)
	}
	return out
}

// Asks reports whether a rule of the base chain begins by asking for a condition
// without a list.
func (f FamilyPolicy) Asks(row config.Condition, r nfnetlink.Rule) bool {
	var want []nfnetlink.Expr
	for _, n := range (Question{Condition: row}).matches(f)[0] {
		want = append(want, n.bytecode(nfnetlink.Inet, nil)...)
	}
	return len(r.Exprs) >= len(want) && nfnetlink.EqualExprs(r.Exprs[:len(want)], want)
}

// Interfaces returns the interfaces for which a rule of the base chain asks, if it
// begins by asking for a condition on them.
func (f FamilyPolicy) Interfaces(row config.Condition, r nfnetlink.Rule) []config.Interface {
	var found []config.Interface
	for at := 3; at < len(r.Exprs) && r.Exprs[at].Name == "cmp"; at += 2 {
		name := string(r.Exprs[at].Value(unix.NFTA_CMP_DATA))
		if len(name) < unix.IFNAMSIZ {
			name += "*"
		}
		found = append(found, config.Interface{Name: strings.TrimRight(name, "\x00")})
	}
	var want []nfnetlink.Expr
	for _, match := range (Question{Condition: row, Interfaces: found}).matches(f) {
		for _, n := range match {
			want = append(want, n.bytecode(nfnetlink.Inet, nil)...)
		}
	}
	if len(found) == 0 || len(r.Exprs) < len(want) || !nfnetlink.EqualExprs(r.Exprs[:len(want)], want) {
		return nil
	}
	return found
}

// KernelChain is the chain as the kernel gets it.
func (c Chain) KernelChain(t Table) nfnetlink.Chain {
	return nfnetlink.Chain{Family: t.Family, Table: t.Name, Name: c.Name, Hook: c.Hook, Policy: nfnetlink.Accept}
}

// nft's numbers of the key types, from which it knows how to print a set
// (nftables, include/datatype.h: TYPE_IPADDR, TYPE_IP6ADDR).
const (
	typeIPv4Addr = 7
	typeIPv6Addr = 8
)

// nft reads of which byte order a set's keys are in the order of the host.
const networkOrder = 2

// KernelSet is the set as the kernel gets it, under one of its two names.
func (s Set) KernelSet(t Table, name string) nfnetlink.Set {
	out := nfnetlink.Set{
		Family: t.Family, Table: t.Name, Name: name,
		Flags: unix.NFT_SET_INTERVAL, KeyType: typeIPv4Addr, KeyLen: 4,
	}
	if s.IPv6 {
		out.KeyType, out.KeyLen = typeIPv6Addr, 16
	}
	order := binary.NativeEndian.AppendUint32(nil, networkOrder)
	out.UserData = userdata.Append(nil, userdata.NFTNL_UDATA_SET_KEYBYTEORDER, order)
	out.UserData = userdata.AppendString(out.UserData, userdata.NFTNL_UDATA_SET_COMMENT, s.Comment)
	return out
}
