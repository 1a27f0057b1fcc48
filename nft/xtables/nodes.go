package xtables

import (
	"encoding/binary"
	"fmt"
	"math"
	"net"
	"net/netip"
	"strconv"
	"strings"

	"github.com/google/nftables/expr"
	"github.com/google/nftables/xt"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
)

// The nodes of mode iptables-nft have the bytes that iptables-nft 1.8.9 writes
// and the text that iptables-save prints. iptables-nft calls a table with
// anything else incompatible.

// ofPrefix matches packets whose source or destination is in a prefix.
type ofPrefix struct {
	Prefix netip.Prefix
	Source bool
}

// String omits a prefix of length 0, like iptables-save.
func (m ofPrefix) String() string {
	switch {
	case m.Prefix.Bits() == 0:
		return ""
	case m.Source:
		return "-s " + m.Prefix.String()
	}
	return "-d " + m.Prefix.String()
}

// Bytecode compares whole bytes if the prefix ends on one, otherwise it masks. It
// omits a prefix of length 0.
func (m ofPrefix) Bytecode(f nfnetlink.Family, _ nft.Sides) []nfnetlink.Expr {
	bits, addr := m.Prefix.Bits(), m.Prefix.Masked().Addr().AsSlice()
	if bits == 0 {
		return nil
	}
	load := nfnetlink.AddressPayload(f == nfnetlink.IPv6, m.Source)
	if bits%8 == 0 {
		load.Len = uint32(bits / 8)
		return nfnetlink.Marshal(f, load, &expr.Cmp{Op: expr.CmpOpEq, Register: unix.NFT_REG_1, Data: addr[:load.Len]})
	}
	return nfnetlink.Marshal(f, load,
		&expr.Bitwise{
			SourceRegister: unix.NFT_REG_1, DestRegister: unix.NFT_REG_1, Len: load.Len,
			Mask: net.CIDRMask(bits, len(addr)*8), Xor: make([]byte, len(addr)),
		},
		&expr.Cmp{Op: expr.CmpOpEq, Register: unix.NFT_REG_1, Data: addr})
}

// xtProtocol is -p.
type xtProtocol nft.Protocol

func (p xtProtocol) String() string { return "-p " + nft.Protocol(p).String() }

func (p xtProtocol) Bytecode(f nfnetlink.Family, _ nft.Sides) []nfnetlink.Expr {
	return nft.Protocol(p).Match(f)
}

// xtComment is -m comment.
type xtComment string

func (c xtComment) String() string { return "-m comment --comment " + strconv.Quote(string(c)) }

func (c xtComment) Bytecode(f nfnetlink.Family, _ nft.Sides) []nfnetlink.Expr {
	info := xt.Comment(c)
	return nfnetlink.Marshal(f, &expr.Match{Name: "comment", Info: &info})
}

// xtNotLocal matches packets to addresses other than this node's.
type xtNotLocal struct{}

func (xtNotLocal) String() string { return "-m addrtype ! --dst-type LOCAL" }

func (xtNotLocal) Bytecode(f nfnetlink.Family, _ nft.Sides) []nfnetlink.Expr {
	const invertDest = 2 // XT_ADDRTYPE_INVERT_DEST
	return nfnetlink.Marshal(f, &expr.Match{
		Name: "addrtype", Rev: 1,
		Info: &xt.AddrTypeV1{Dest: uint16(xt.AddrTypeLocal), Flags: invertDest},
	})
}

// xtByChance is -m statistic --mode random.
type xtByChance struct{ Of, Total uint32 }

// probability returns the quotient as iptables computes it, in units of 2^-31.
func (m xtByChance) probability() uint32 {
	return uint32(math.Round(math.Exp2(31) * float64(m.Of) / float64(m.Total)))
}

func (m xtByChance) String() string {
	return fmt.Sprintf("-m statistic --mode random --probability %.11f", float64(m.probability())/math.Exp2(31))
}

// Bytecode encodes struct xt_statistic_info: u16 mode, u16 flags, u32
// probability, 8 bytes for the other mode, and a pointer of the kernel. iptables
// computes the other mode's count from the memory that they share, here the
// probability.
func (m xtByChance) Bytecode(f nfnetlink.Family, _ nft.Sides) []nfnetlink.Expr {
	info := make(xt.Unknown, 24)
	binary.NativeEndian.PutUint32(info[4:], m.probability())
	binary.NativeEndian.PutUint32(info[12:], m.probability())
	return nfnetlink.Marshal(f, &expr.Match{Name: "statistic", Info: &info})
}

// xtCounter is the counter that iptables adds to every rule. It is not printed.
type xtCounter struct{}

func (xtCounter) String() string { return "" }

func (xtCounter) Bytecode(f nfnetlink.Family, _ nft.Sides) []nfnetlink.Expr {
	return nfnetlink.Marshal(f, &expr.Counter{})
}

// xtMasquerade is -j MASQUERADE.
type xtMasquerade struct {
	RandomFully bool
	Ports       *nft.PortRange
}

func (m xtMasquerade) String() string {
	words := []string{"-j MASQUERADE"}
	if m.Ports != nil {
		words = append(words, "--to-ports "+m.Ports.String())
	}
	if m.RandomFully {
		words = append(words, "--random-fully")
	}
	return strings.Join(words, " ")
}

func (m xtMasquerade) Bytecode(f nfnetlink.Family, _ nft.Sides) []nfnetlink.Expr {
	var flags uint
	var ports nft.PortRange
	if m.Ports != nil {
		flags |= uint(xt.NatRangeProtoSpecified)
		ports = *m.Ports
	}
	if m.RandomFully {
		flags |= uint(xt.NatRangeProtoRandomFully)
	}
	target := &expr.Target{Name: "MASQUERADE"}
	if f == nfnetlink.IPv6 {
		target.Info = &xt.NatRange{
			Flags: flags, MinIP: net.IPv6zero, MaxIP: net.IPv6zero, MinPort: ports.Min, MaxPort: ports.Max,
		}
	} else {
		target.Info = &xt.NatIPv4MultiRangeCompat{{
			Flags: flags, MinIP: net.IPv4zero, MaxIP: net.IPv4zero, MinPort: ports.Min, MaxPort: ports.Max,
		}}
	}
	return nfnetlink.Marshal(f, target)
}

// xtStop is -j RETURN.
type xtStop struct{}

func (xtStop) String() string { return "-j RETURN" }

func (xtStop) Bytecode(f nfnetlink.Family, _ nft.Sides) []nfnetlink.Expr {
	return nfnetlink.Marshal(f, &expr.Verdict{Kind: expr.VerdictReturn})
}

// xtGoto is -g.
type xtGoto struct{ Chain string }

func (g xtGoto) String() string { return "-g " + g.Chain }

func (g xtGoto) Bytecode(f nfnetlink.Family, _ nft.Sides) []nfnetlink.Expr {
	return nfnetlink.Marshal(f, &expr.Verdict{Kind: expr.VerdictGoto, Chain: g.Chain})
}

// xtJump is -j to a chain.
type xtJump struct{ Chain string }

func (j xtJump) String() string { return "-j " + j.Chain }

func (j xtJump) Bytecode(f nfnetlink.Family, _ nft.Sides) []nfnetlink.Expr {
	return nfnetlink.Marshal(f, &expr.Verdict{Kind: expr.VerdictJump, Chain: j.Chain})
}
