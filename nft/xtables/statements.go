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

// statement returns a statement of mode iptables-nft, with the bytes that iptables-nft 1.8.9 writes and the text that
// iptables-save prints. iptables-nft calls a table with anything else incompatible.
func (c compiler) statement(text string, exprs ...expr.Any) nft.Statement {
	return nft.Statement{Text: text, Exprs: nfnetlink.Marshal(c.family.NetfilterFamily(), exprs...)}
}

// destination matches packets to a prefix. It compares whole bytes if the prefix ends on
// one, otherwise it masks. iptables omits a prefix of length 0.
func (c compiler) destination(p netip.Prefix) nft.Statement {
	bits := p.Bits()
	if bits == 0 {
		return c.statement("")
	}
	address := p.Masked().Addr().AsSlice()
	text := "-d " + p.String()
	load := nfnetlink.AddressPayload(c.family.IPv6, false)
	compare := &expr.Cmp{Op: expr.CmpOpEq, Register: unix.NFT_REG_1, Data: address}
	if bits%8 == 0 {
		load.Len = uint32(bits / 8)
		compare.Data = address[:load.Len]
		return c.statement(text, load, compare)
	}
	mask := &expr.Bitwise{
		SourceRegister: unix.NFT_REG_1, DestRegister: unix.NFT_REG_1, Len: load.Len,
		Mask: net.CIDRMask(bits, len(address)*8), Xor: make([]byte, len(address)),
	}
	return c.statement(text, load, mask, compare)
}

// comment matches every packet. It carries a text.
func (c compiler) comment(text string) nft.Statement {
	info := xt.Comment(text)
	return c.statement("-m comment --comment "+strconv.Quote(text), &expr.Match{Name: "comment", Info: &info})
}

// notLocal matches packets to addresses other than this node's.
func (c compiler) notLocal() nft.Statement {
	const invertDest = 2 // XT_ADDRTYPE_INVERT_DEST
	return c.statement("-m addrtype ! --dst-type LOCAL", &expr.Match{
		Name: "addrtype", Rev: 1,
		Info: &xt.AddrTypeV1{Dest: uint16(xt.AddrTypeLocal), Flags: invertDest},
	})
}

// byChance matches with the probability of a choice, which iptables computes in units of 2^-31. It encodes struct
// xt_statistic_info: u16 mode, u16 flags, u32 probability, two more u32 of the mode nth, and a pointer of the kernel.
// The last u32 is nth's count, which iptables computes from nth's first value, also in this mode: that is the
// probability.
func (c compiler) byChance(choice nft.PortChoice) nft.Statement {
	probability := math.Round(math.Exp2(31) * float64(choice.Size()) / float64(choice.Remaining))
	info := make(xt.Unknown, 24)
	binary.NativeEndian.PutUint32(info[4:], uint32(probability))
	binary.NativeEndian.PutUint32(info[12:], uint32(probability))
	return c.statement(fmt.Sprintf("-m statistic --mode random --probability %.11f", probability/math.Exp2(31)),
		&expr.Match{Name: "statistic", Info: &info})
}

// masquerade masquerades to a range of ports, or to any port if that is nil.
func (c compiler) masquerade(ports *nft.PortRange) nft.Statement {
	text := "-j MASQUERADE"
	info := xt.NatRange{MinIP: net.IPv6zero, MaxIP: net.IPv6zero}
	if ports != nil {
		text += " --to-ports " + ports.String()
		info.Flags |= uint(xt.NatRangeProtoSpecified)
		info.MinPort = ports.Min
		info.MaxPort = ports.Max
	}
	if c.policy.RandomFully {
		text += " --random-fully"
		info.Flags |= uint(xt.NatRangeProtoRandomFully)
	}
	if c.family.IPv6 {
		return c.statement(text, &expr.Target{Name: "MASQUERADE", Info: &info})
	}
	info.MinIP = net.IPv4zero
	info.MaxIP = net.IPv4zero
	return c.statement(text, &expr.Target{Name: "MASQUERADE", Info: &xt.NatIPv4MultiRangeCompat{xt.NatIPv4Range(info)}})
}
