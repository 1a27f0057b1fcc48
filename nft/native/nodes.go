package native

import (
	"encoding/binary"
	"fmt"
	"strings"

	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
)

// Register 1 carries every value that a rule compares, or an address; registers 2
// and 3 are the ports after it. nft uses the same ones.
const (
	reg1 = unix.NFT_REG_1
	reg2 = unix.NFT_REG_2
	reg3 = unix.NFT_REG_3
)

// ofFamilyMatch matches packets of one address family.
type ofFamilyMatch struct{ IPv6 bool }

func (m ofFamilyMatch) String() string {
	if m.IPv6 {
		return "meta nfproto ipv6"
	}
	return "meta nfproto ipv4"
}

func (m ofFamilyMatch) Bytecode(f nfnetlink.Family, _ nft.Sides) []nfnetlink.Expr {
	proto := byte(nfnetlink.IPv4)
	if m.IPv6 {
		proto = byte(nfnetlink.IPv6)
	}
	return nfnetlink.Marshal(f,
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: reg1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg1, Data: []byte{proto}})
}

// ofThisNode matches packets to, or from, an address of this node: route type LOCAL.
type ofThisNode struct{ Source bool }

func (m ofThisNode) String() string {
	if m.Source {
		return "fib saddr type local"
	}
	return "fib daddr type local"
}

func (m ofThisNode) Bytecode(f nfnetlink.Family, _ nft.Sides) []nfnetlink.Expr {
	return nfnetlink.Marshal(f,
		&expr.Fib{Register: reg1, FlagSADDR: m.Source, FlagDADDR: !m.Source, ResultADDRTYPE: true},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg1, Data: binary.NativeEndian.AppendUint32(nil, unix.RTN_LOCAL)})
}

// inSet matches packets whose source or destination is, or is not, in a set.
type inSet struct {
	IPv6   bool
	Source bool
	Not    bool
	Set    string
}

func (m inSet) String() string {
	ip, field, op := "ip", "daddr", ""
	if m.IPv6 {
		ip = "ip6"
	}
	if m.Source {
		field = "saddr"
	}
	if m.Not {
		op = "!= "
	}
	return fmt.Sprintf("%s %s %s@%s%s", ip, field, op, m.Set, nft.SideA)
}

func (m inSet) Bytecode(f nfnetlink.Family, s nft.Sides) []nfnetlink.Expr {
	es := ofFamilyMatch{m.IPv6}.Bytecode(f, s)
	return append(es, nfnetlink.Marshal(f,
		nfnetlink.AddressPayload(m.IPv6, m.Source),
		&expr.Lookup{SourceRegister: reg1, SetName: s.Of(m.Set), Invert: m.Not})...)
}

// byInterface matches packets by their input or output interface, or by a prefix
// of its name. The node's own traffic has no input interface. Since Linux 5.5 a
// postrouting chain can match the input interface.
type byInterface struct {
	Out       bool
	Not       bool
	Interface string // ends in "*" for a prefix
}

func (m byInterface) String() string {
	field, op := "iifname", ""
	if m.Out {
		field = "oifname"
	}
	if m.Not {
		op = "!= "
	}
	return fmt.Sprintf("%s %s\"%s\"", field, op, m.Interface)
}

func (m byInterface) Bytecode(f nfnetlink.Family, _ nft.Sides) []nfnetlink.Expr {
	meta, compare := &expr.Meta{Key: expr.MetaKeyIIFNAME, Register: reg1}, &expr.Cmp{Op: expr.CmpOpEq, Register: reg1}
	if m.Out {
		meta.Key = expr.MetaKeyOIFNAME
	}
	if m.Not {
		compare.Op = expr.CmpOpNeq
	}
	if prefix, several := strings.CutSuffix(m.Interface, "*"); several {
		compare.Data = []byte(prefix)
	} else {
		compare.Data = append([]byte(m.Interface), make([]byte, unix.IFNAMSIZ-len(m.Interface))...)
	}
	return nfnetlink.Marshal(f, meta, compare)
}

// ofProtocol matches packets of one transport protocol.
type ofProtocol nft.Protocol

func (p ofProtocol) String() string { return "meta l4proto " + nft.Protocol(p).String() }

func (p ofProtocol) Bytecode(f nfnetlink.Family, _ nft.Sides) []nfnetlink.Expr {
	return nfnetlink.Marshal(f, nft.Protocol(p).Match()...)
}

// byChance matches Of out of Total packets at random.
type byChance struct{ Of, Total uint32 }

func (m byChance) String() string {
	return fmt.Sprintf("numgen random mod %d < %d", m.Total, m.Of)
}

func (m byChance) Bytecode(f nfnetlink.Family, _ nft.Sides) []nfnetlink.Expr {
	return nfnetlink.Marshal(f,
		&expr.Numgen{Register: reg1, Modulus: m.Total, Type: unix.NFT_NG_RANDOM},
		&expr.Byteorder{SourceRegister: reg1, DestRegister: reg1, Op: expr.ByteorderHton, Len: 4, Size: 4},
		&expr.Cmp{Op: expr.CmpOpLt, Register: reg1, Data: binaryutil.BigEndian.PutUint32(m.Of)})
}

// count increments a named counter.
type count struct{ Counter string }

func (c count) String() string { return "counter name " + c.Counter }

func (c count) Bytecode(f nfnetlink.Family, _ nft.Sides) []nfnetlink.Expr {
	return nfnetlink.Marshal(f, &expr.Objref{Type: unix.NFT_OBJECT_COUNTER, Name: c.Counter})
}

// masquerade translates the source to the address of the output interface.
type masquerade struct {
	RandomFully bool
	Ports       *nft.PortRange
}

func (m masquerade) String() string {
	words := []string{"masquerade"}
	if m.Ports != nil {
		words = append(words, "to :"+m.Ports.String())
	}
	if m.RandomFully {
		words = append(words, "fully-random")
	}
	return strings.Join(words, " ")
}

func (m masquerade) Bytecode(f nfnetlink.Family, _ nft.Sides) []nfnetlink.Expr {
	if m.Ports == nil {
		return nfnetlink.Marshal(f, &expr.Masq{FullyRandom: m.RandomFully})
	}
	es := nfnetlink.Marshal(f, &expr.Immediate{Register: reg1, Data: binaryutil.BigEndian.PutUint16(m.Ports.Min)})
	if m.Ports.Size() == 1 {
		return append(es, nfnetlink.MasqueradeTo(m.RandomFully, reg1, reg1))
	}
	es = append(es, nfnetlink.Marshal(f, &expr.Immediate{Register: reg2, Data: binaryutil.BigEndian.PutUint16(m.Ports.Max)})...)
	return append(es, nfnetlink.MasqueradeTo(m.RandomFully, reg1, reg2))
}

// stop returns to the calling chain.
type stop struct{}

func (stop) String() string { return "return" }

func (stop) Bytecode(f nfnetlink.Family, _ nft.Sides) []nfnetlink.Expr {
	return nfnetlink.Marshal(f, &expr.Verdict{Kind: expr.VerdictReturn})
}

// continueIn continues in another chain and does not return.
type continueIn struct{ Chain string }

func (g continueIn) String() string { return "goto " + g.Chain }

func (g continueIn) Bytecode(f nfnetlink.Family, _ nft.Sides) []nfnetlink.Expr {
	return nfnetlink.Marshal(f, &expr.Verdict{Kind: expr.VerdictGoto, Chain: g.Chain})
}
