package xtables

import (
	"encoding/binary"
	"fmt"
	"math"
	"net"
	"net/netip"
	"strconv"

	"github.com/google/nftables/expr"
	"github.com/google/nftables/xt"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
)

// node returns a node of mode iptables-nft: it has the bytes that iptables-nft 1.8.9 writes
// and the text that iptables-save prints. iptables-nft calls a table with anything else
// incompatible.
func (x xtCompiler) node(text string, exprs ...expr.Any) nft.Node {
	return nft.Node{Text: text, Exprs: nfnetlink.Marshal(x.family.Family(), exprs...)}
}

// ofPrefix matches packets whose source or destination is in a prefix. It compares whole
// bytes if the prefix ends on one, otherwise it masks. iptables omits a prefix of length 0.
func (x xtCompiler) ofPrefix(p netip.Prefix, source bool) nft.Node {
	bits, addr, text := p.Bits(), p.Masked().Addr().AsSlice(), "-d "+p.String()
	if bits == 0 {
		return x.node("")
	}
	if source {
		text = "-s " + p.String()
	}
	load := nfnetlink.AddressPayload(x.family.IPv6, source)
	compare := &expr.Cmp{Op: expr.CmpOpEq, Register: unix.NFT_REG_1, Data: addr}
	if bits%8 == 0 {
		load.Len = uint32(bits / 8)
		compare.Data = addr[:load.Len]
		return x.node(text, load, compare)
	}
	mask := &expr.Bitwise{
		SourceRegister: unix.NFT_REG_1, DestRegister: unix.NFT_REG_1, Len: load.Len,
		Mask: net.CIDRMask(bits, len(addr)*8), Xor: make([]byte, len(addr)),
	}
	return x.node(text, load, mask, compare)
}

func (x xtCompiler) comment(text string) nft.Node {
	info := xt.Comment(text)
	return x.node("-m comment --comment "+strconv.Quote(text), &expr.Match{Name: "comment", Info: &info})
}

// notLocal matches packets to addresses other than this node's.
func (x xtCompiler) notLocal() nft.Node {
	const invertDest = 2 // XT_ADDRTYPE_INVERT_DEST
	return x.node("-m addrtype ! --dst-type LOCAL", &expr.Match{
		Name: "addrtype", Rev: 1,
		Info: &xt.AddrTypeV1{Dest: uint16(xt.AddrTypeLocal), Flags: invertDest},
	})
}

// byChance matches with the probability of a choice, which iptables computes in units of
// 2^-31. It encodes struct xt_statistic_info: u16 mode, u16 flags, u32 probability, 8 bytes
// for the other mode, and a pointer of the kernel. iptables computes the other mode's count
// from the memory that they share, here the probability.
func (x xtCompiler) byChance(c nft.PortChoice) nft.Node {
	probability := math.Round(math.Exp2(31) * float64(c.Size()) / float64(c.Remaining))
	info := make(xt.Unknown, 24)
	binary.NativeEndian.PutUint32(info[4:], uint32(probability))
	binary.NativeEndian.PutUint32(info[12:], uint32(probability))
	return x.node(fmt.Sprintf("-m statistic --mode random --probability %.11f", probability/math.Exp2(31)),
		&expr.Match{Name: "statistic", Info: &info})
}

// masquerade masquerades to ports, or to any if they are nil.
func (x xtCompiler) masquerade(to *nft.PortRange) nft.Node {
	text, flags, ports := "-j MASQUERADE", uint(0), nft.PortRange{}
	if to != nil {
		text += " --to-ports " + to.String()
		flags |= uint(xt.NatRangeProtoSpecified)
		ports = *to
	}
	if x.policy.RandomFully {
		text += " --random-fully"
		flags |= uint(xt.NatRangeProtoRandomFully)
	}
	to6 := xt.NatRange{Flags: flags, MinIP: net.IPv6zero, MaxIP: net.IPv6zero, MinPort: ports.Min, MaxPort: ports.Max}
	target := &expr.Target{Name: "MASQUERADE", Info: &to6}
	if !x.family.IPv6 {
		target.Info = &xt.NatIPv4MultiRangeCompat{{
			Flags: flags, MinIP: net.IPv4zero, MaxIP: net.IPv4zero, MinPort: ports.Min, MaxPort: ports.Max,
		}}
	}
	return x.node(text, target)
}

// goTo continues in another chain and does not return.
func (x xtCompiler) goTo(chain string) nft.Node {
	return x.node("-g "+chain, &expr.Verdict{Kind: expr.VerdictGoto, Chain: chain})
}
