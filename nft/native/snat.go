package native

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/google/nftables/expr"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
)

// snatChain is the name of the chain that selects the source address if the node
// has one of snatAddresses.
func snatChain(f nft.FamilyPolicy) string { return "snat" + f.Suffix() }

// snatSet is the name of the set with the CIDRs in the config, whether or not the
// node has such addresses. No rule refers to it.
func snatSet(f nft.FamilyPolicy) string { return config.SNATAddresses().Set + f.Suffix() }

// podMap is the name of the map with the address for each group of pods.
func podMap(f nft.FamilyPolicy) string { return "snat-by-pod" + f.Suffix() }

// masquerades reports whether any traffic of the family is masqueraded with the
// address of the interface.
func masquerades(f nft.FamilyPolicy) bool { return len(f.SNAT.Present) == 0 || !exemptsNode(f) }

// exemptsNode reports whether nothing that the node itself sends is masqueraded: it was
// received on no interface.
func exemptsNode(f nft.FamilyPolicy) bool {
	return slices.ContainsFunc(f.Questions, func(q nft.Question) bool {
		return q.Asks == config.SentByNode || q.Asks == config.ReceivedOn
	})
}

// snatSets returns the set with the CIDRs in the config and, if there are several
// addresses, the map.
func snatSets(f nft.FamilyPolicy) []nft.Set {
	if len(f.SNAT.CIDRs) == 0 {
		return nil
	}
	sets := []nft.Set{{Name: snatSet(f), IPv6: f.IPv6, Comment: config.SNATAddresses().Means, Prefixes: f.SNAT.Prefixes()}}
	if len(f.SNAT.Present) > 1 {
		sets = append(sets, nft.Set{
			Name: podMap(f), IPv6: f.IPv6, Mappings: f.SNAT.Mappings(), Comment: "which of them, by the last byte of the pod's address",
		})
	}
	return sets
}

// compileSNAT compiles the chain that selects the source address for connections
// of pods; those of the node are masqueraded.
func compileSNAT(p nft.Policy, f nft.FamilyPolicy, masq nft.Node) nft.Chain {
	c := nft.Chain{Name: snatChain(f)}
	if !exemptsNode(f) {
		c.Rules = append(c.Rules, nft.Rule{Nodes: []nft.Node{fromThisNode(), masq}, Comment: "from this node"})
	}
	to := sourceNAT{IPv6: f.IPv6, RandomFully: p.RandomFully, Map: podMap(f)}
	if len(f.SNAT.Present) == 1 {
		to.To = f.SNAT.Present[0]
	}
	c.Rules = append(c.Rules, portRules(p.Ports, func(ports *nft.PortRange) nft.Node {
		to := to
		to.Ports = ports
		return to
	})...)
	return c
}

// sourceNAT translates to an address of the node: a fixed one, or that of the
// pod's group.
type sourceNAT struct {
	IPv6        bool
	To          netip.Addr // the zero address: see Map
	Map         string
	RandomFully bool
	Ports       *nft.PortRange
}

func (s sourceNAT) String() string {
	ip, mask, to := "ip", "0.0.0.255", s.To.String()
	if s.IPv6 {
		ip, mask = "ip6", "::ff"
	}
	switch {
	case !s.To.IsValid():
		to = fmt.Sprintf("%s saddr & %s map @%s%s", ip, mask, s.Map, nft.SideA)
	case s.IPv6 && s.Ports != nil:
		to = "[" + to + "]"
	}
	if s.Ports != nil {
		to += ":" + s.Ports.String()
	}
	words := []string{"snat", ip, "to", to}
	if s.RandomFully {
		words = append(words, "fully-random")
	}
	return strings.Join(words, " ")
}

func (s sourceNAT) Bytecode(f nfnetlink.Family, sides nft.Sides) []nfnetlink.Expr {
	var es []nfnetlink.Expr
	if s.To.IsValid() {
		es = nfnetlink.Marshal(f, &expr.Immediate{Register: reg1, Data: s.To.AsSlice()})
	} else {
		source := nfnetlink.AddressPayload(s.IPv6, true)
		mask := make([]byte, source.Len)
		mask[len(mask)-1] = 0xff
		es = append(ofFamily(s.IPv6).Exprs, nfnetlink.Marshal(f, source,
			&expr.Bitwise{SourceRegister: reg1, DestRegister: reg1, Len: source.Len, Mask: mask, Xor: make([]byte, len(mask))},
			&expr.Lookup{SourceRegister: reg1, DestRegister: reg1, IsDestRegSet: true, SetName: sides.Of(s.Map)})...)
	}
	load, low, high := loadPorts(s.Ports, reg2)
	es = append(es, nfnetlink.Marshal(f, load...)...)
	return append(es, nfnetlink.SourceNAT(nft.FamilyPolicy{IPv6: s.IPv6}.Family(), s.RandomFully, reg1, low, high))
}
