package nft

import (
	"encoding/binary"
	"strings"

	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfnetlink"
)

// Bytecode returns the rules of the chain in the kernel's form, in which sets have the names of sides.
func (c Chain) Bytecode(t Table, sides Sides) []nfnetlink.Rule {
	rules := make([]nfnetlink.Rule, len(c.Rules))
	for i, r := range c.Rules {
		size := 0
		for _, n := range r.Statements {
			size += len(n.Exprs)
		}
		rules[i] = nfnetlink.Rule{Family: t.Family, Table: t.Name, Chain: c.Name, Exprs: make([]nfnetlink.Expr, 0, size)}
		for _, n := range r.Statements {
			for _, e := range n.Exprs {
				if name, ok := sides[strings.TrimSuffix(e.Set(), SideA)]; ok {
					e = e.WithSet(name)
				}
				rules[i].Exprs = append(rules[i].Exprs, e)
			}
		}
		if r.Comment != "" {
			rules[i].UserData = userdata.AppendString(nil, userdata.TypeComment, r.Comment)
		}
	}
	return rules
}

// KernelChain returns the chain in the kernel's form.
func (c Chain) KernelChain(t Table) nfnetlink.Chain {
	return nfnetlink.Chain{Family: t.Family, Table: t.Name, Name: c.Name, Hook: c.Hook, Policy: nfnetlink.Accept}
}

// nft's numbers of the key types, by which it decides how to print a set
// (nftables, include/datatype.h: TYPE_IPADDR, TYPE_IP6ADDR).
const (
	typeIPv4Addr = 7
	typeIPv6Addr = 8
	bitsOfType   = 6 // of each type of a concatenation
)

// networkOrder is nft's number of network byte order (BYTEORDER_BIG_ENDIAN), which the user data of a set has in host
// byte order.
const networkOrder = 2

// KernelSet returns the set in the kernel's form, with one of its two names there.
func (s Set) KernelSet(t Table, name string) nfnetlink.Set {
	set := nfnetlink.Set{
		Family: t.Family, Table: t.Name, Name: name,
		Flags: unix.NFT_SET_INTERVAL, KeyType: typeIPv4Addr, KeyLen: 4,
	}
	if s.IPv6 {
		set.KeyType = typeIPv6Addr
		set.KeyLen = 16
	}
	order := binary.NativeEndian.AppendUint32(nil, networkOrder)
	if !s.Learned {
		set.UserData = userdata.Append(nil, userdata.NFTNL_UDATA_SET_KEYBYTEORDER, order)
	}
	switch {
	case s.Learned:
		set.Flags = unix.NFT_SET_EVAL | unix.NFT_SET_TIMEOUT
		set.Size = LearnedSize
		set.KeyType = set.KeyType<<bitsOfType | set.KeyType
		set.KeyLen *= 2
	case s.Mappings != nil:
		set.Flags = unix.NFT_SET_MAP
		set.DataType = set.KeyType
		set.DataLen = set.KeyLen
		if s.Verdicts {
			set.DataType = unix.NFT_DATA_VERDICT
			set.DataLen = 16 // struct nft_verdict
		} else {
			set.UserData = userdata.Append(set.UserData, userdata.NFTNL_UDATA_SET_DATABYTEORDER, order)
		}
	}
	set.UserData = userdata.AppendString(set.UserData, userdata.NFTNL_UDATA_SET_COMMENT, s.Comment)
	return set
}

// SrcNAT is the priority of iptables' POSTROUTING: NF_IP_PRI_NAT_SRC.
const SrcNAT = 100

// NATHook returns the hook of a chain for source NAT.
func NATHook(priority int32) *nfnetlink.Hook {
	return &nfnetlink.Hook{Type: "nat", Number: unix.NF_INET_POST_ROUTING, Priority: priority}
}
