package native

import (
	"net/netip"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/rule"
)

// OwnOf returns a table as read from the kernel.
func OwnOf(table nft.Table) *Own {
	own := &Own{rules: map[string][]nfnetlink.Rule{}, Sets: map[string]*heldSet{}}
	own.Family, own.Name = table.Family, table.Name
	for _, c := range table.Chains {
		own.chains = append(own.chains, c.KernelChain(table))
		own.rules[c.Name] = c.Bytecode(table, nil)
	}
	for _, s := range table.Sets {
		held := &heldSet{Set: s.KernelSet(table, s.Name+nft.SideA), Read: true, Mappings: s.Mappings}
		for _, p := range s.Prefixes {
			held.Holds = append(held.Holds, iprange.Of(p))
		}
		own.Sets[held.Name] = held
	}
	for _, c := range table.Counters {
		own.objects = append(own.objects, nfnetlink.Object{Family: table.Family, Table: table.Name, Name: c, Type: unix.NFT_OBJECT_COUNTER})
	}
	return own
}

// OwnWith returns a table whose base chain has these rules.
func OwnWith(rules []nfnetlink.Rule) *Own {
	own := &Own{rules: map[string][]nfnetlink.Rule{BaseChain: rules}, Sets: map[string]*heldSet{}}
	for _, r := range rules {
		for _, name := range rule.Sets(r) {
			own.Sets[name] = &heldSet{Read: true, Holds: []iprange.Range{iprange.Of(netip.MustParsePrefix("169.254.0.0/16")), {}}}
		}
	}
	return own
}

// OwnWithSecond returns a table as read from the kernel after an update staged a
// set of another one at a side.
func OwnWithSecond(table, staged nft.Table, set, side string) *Own {
	own, second := OwnOf(table), OwnOf(staged)
	if side == nft.SideA {
		own.Sets[set+nft.SideB] = own.Sets[set+nft.SideA]
		own.Sets[set+nft.SideB].Name = set + nft.SideB
	}
	second.Sets[set+nft.SideA].Name = set + side
	own.Sets[set+side] = second.Sets[set+nft.SideA]
	return own
}
