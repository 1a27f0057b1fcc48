package native

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
)

// The chains of portsPerPod: that of connections that are masqueraded with the address of the
// interface, and that of the node's own.
const (
	podPortsChain  = "pod-ports"
	nodePortsChain = "node-ports"
)

// A blockUse is a translation of pods' connections, which needs a chain for each block: nf_tables takes a range of
// ports from a rule, but not from a map that all versions of nft can list.
type blockUse struct {
	name        string // the beginning of the names of its chains and maps
	suffix      string // the end of the names of its chains
	masquerades bool   // it translates to the address of the interface, in podPortsChain
	blocks      nft.PortBlocks
	families    []nft.FamilyPolicy
	translate   func(*nft.PortRange) nft.Statement // to a block, or for protocols without ports if that is nil
}

func (u blockUse) chain(number int) string { return fmt.Sprintf("%s-%d%s", u.name, number, u.suffix) }

func (u blockUse) blockMap(f nft.FamilyPolicy) string { return u.name + "-by-pod" + f.Suffix() }

func (u blockUse) sets() (sets []nft.Set) {
	for _, f := range u.families {
		s := nft.Set{
			Name: u.blockMap(f), IPv6: f.IPv6, Verdicts: true,
			Comment: fmt.Sprintf("blocks of %d ports, by the low bits of the pod's IP", u.blocks.Size),
		}
		for number := range u.blocks.Count() {
			s.Mappings = append(s.Mappings, nfnetlink.Mapping{Key: lastByte(f.IPv6, number), Chain: u.chain(number)})
		}
		sets = append(sets, s)
	}
	return sets
}

// lastByte returns an address of which all other bytes are zero.
func lastByte(ipv6 bool, b int) netip.Addr {
	if ipv6 {
		return netip.AddrFrom16([16]byte{15: byte(b)})
	}
	return netip.AddrFrom4([4]byte{3: byte(b)})
}

func (u blockUse) chains() (chains []nft.Chain) {
	var protocols []nft.Statement // encoded once: there are up to 256 chains
	for _, p := range portProtocols(u.families) {
		protocols = append(protocols, ofProtocol(p))
	}
	for number := range u.blocks.Count() {
		ports := u.blocks.Block(number)
		c := nft.Chain{Name: u.chain(number), Elements: len(u.families)}
		translate := u.translate(&ports)
		for _, ofProtocol := range protocols {
			c.Rules = append(c.Rules, nft.Rule{Statements: []nft.Statement{ofProtocol, translate}})
		}
		c.Rules[0].Comment = fmt.Sprintf("last byte of the pod's IP modulo %d: %d", u.blocks.Count(), number)
		chains = append(chains, c)
	}
	return chains
}

// portProtocols are the protocols with ports, or with an identifier that NAT treats as one.
func portProtocols(families []nft.FamilyPolicy) []nft.Protocol {
	protocols := nft.PortProtocols()
	for _, f := range families {
		if f.IPv6 {
			protocols = append(protocols, unix.IPPROTO_ICMPV6)
		} else {
			protocols = append(protocols, unix.IPPROTO_ICMP)
		}
	}
	return protocols
}

// rules returns the rules that continue in the chain of the pod's block, which translates protocols with ports, and the
// one that translates the others.
func (u blockUse) rules() (rules []nft.Rule) {
	for _, f := range u.families {
		text, bits := lowBits(f.IPv6, u.blocks.Count()-1)
		set := u.blockMap(f) + nft.SideA
		lookup := append(bits, &expr.Lookup{SourceRegister: reg1, SetName: set, IsDestRegSet: true})
		verdict := withFamilyCheck(f.IPv6, statement(text+" vmap @"+set, lookup...))
		rules = append(rules, nft.Rule{Statements: []nft.Statement{verdict}})
	}
	return append(rules, nft.Rule{Statements: []nft.Statement{u.translate(nil)}, Comment: "other protocols"})
}

// lowBits loads the source address without all bits but some of its last byte.
func lowBits(ipv6 bool, bits int) (text string, load []expr.Any) {
	source := nfnetlink.AddressPayload(ipv6, true)
	mask := make([]byte, source.Len)
	mask[len(mask)-1] = byte(bits)
	text = fmt.Sprintf("%s & %s", addressText(ipv6, true), lastByte(ipv6, bits))
	return text, []expr.Any{source, &expr.Bitwise{
		SourceRegister: reg1, DestRegister: reg1, Len: source.Len, Mask: mask, Xor: make([]byte, len(mask)),
	}}
}

// blockUses returns the translations of a policy that use blocks: for each family that to snatAddresses, if the node
// has one of them, and masquerading, with all other families in the same chains.
func blockUses(p nft.Policy) (uses []blockUse) {
	masq := blockUse{
		name: "ports", masquerades: true,
		translate: func(ports *nft.PortRange) nft.Statement { return masquerade(p.RandomFully, ports) },
	}
	for _, f := range p.Families {
		blocks := p.PortBlocks(f.IPv6)
		switch {
		case blocks.Count() == 0:
		case f.HasPresentAddress():
			uses = append(uses, snatBlocks(p, f, f.SNATAddresses()))
		default:
			masq.blocks = blocks
			masq.families = append(masq.families, f)
		}
	}
	if len(masq.families) > 0 {
		uses = append(uses, masq)
	}
	return uses
}

// snatBlocks is the translation of a family to addresses of an entry.
func snatBlocks(p nft.Policy, f nft.FamilyPolicy, r nft.SNATRule) blockUse {
	return blockUse{
		name: "snat-ports", suffix: f.Suffix(), blocks: p.PortBlocks(f.IPv6), families: []nft.FamilyPolicy{f},
		translate: toAddress(p, f, r),
	}
}

// compileBlocks returns the chains of portsPerPod.
func compileBlocks(p nft.Policy) (chains []nft.Chain) {
	var own []nft.FamilyPolicy // the families of which the node's own connections are masqueraded
	var blocks nft.PortBlocks  // of these: the node's ports are the same in all families
	for _, f := range p.Families {
		if b := p.PortBlocks(f.IPv6); b.Count() > 0 && !exemptsNode(f) {
			own = append(own, f)
			blocks = b
		}
	}
	if len(own) > 0 {
		chains = append(chains, nft.Chain{
			Name: nodePortsChain,
			Rules: portRules(portProtocols(own), blocks.NodePorts, func(ports *nft.PortRange) nft.Statement {
				return masquerade(p.RandomFully, ports)
			}),
		})
	}
	for _, u := range blockUses(p) {
		chains = append(chains, u.chains()...)
		if u.masquerades {
			c := nft.Chain{Name: podPortsChain}
			if slices.ContainsFunc(u.families, func(f nft.FamilyPolicy) bool { return !exemptsNode(f) }) {
				c.Rules = append(c.Rules, ownRule(continueIn(nodePortsChain)))
			}
			c.Rules = append(c.Rules, u.rules()...)
			chains = append(chains, c)
		}
	}
	return chains
}

// ownRule masquerades connections of the node itself.
func ownRule(masq nft.Statement) nft.Rule {
	return nft.Rule{Statements: []nft.Statement{fromThisNode(), masq}, Comment: "from this node"}
}
