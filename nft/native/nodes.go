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
)

// ofFamily matches packets of one address family.
func ofFamily(ipv6 bool) nft.Plain {
	text, proto := "meta nfproto ipv4", nfnetlink.IPv4
	if ipv6 {
		text, proto = "meta nfproto ipv6", nfnetlink.IPv6
	}
	return plain(text,
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: reg1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg1, Data: []byte{byte(proto)}})
}

// toThisNode matches packets to an address of this node: route type LOCAL.
func toThisNode() nft.Node {
	return addrType(false, expr.CmpOpEq, "fib daddr type local", unix.RTN_LOCAL)
}

// fromThisNode matches packets from an address of this node.
func fromThisNode() nft.Node {
	return addrType(true, expr.CmpOpEq, "fib saddr type local", unix.RTN_LOCAL)
}

// addrType compares the type of the route to the source or the destination.
func addrType(source bool, op expr.CmpOp, text string, typ uint32) nft.Node {
	return plain(text,
		&expr.Fib{Register: reg1, FlagSADDR: source, FlagDADDR: !source, ResultADDRTYPE: true},
		&expr.Cmp{Op: op, Register: reg1, Data: binary.NativeEndian.AppendUint32(nil, typ)})
}

// inSet matches packets whose source or destination is, or is not, in a set.
type inSet struct {
	IPv6   bool
	Source bool
	Not    bool
	Known  bool // the rule compares an address of the family before
	Goto   bool // the set is a map, which has the chain to continue in
	Set    string
}

func (m inSet) String() string {
	ip, field, op := "ip", "daddr", ""
	if m.Goto {
		op = "vmap "
	}
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
	var es []nfnetlink.Expr
	if !m.Known {
		es = ofFamily(m.IPv6).Exprs
	}
	return append(es, nfnetlink.Marshal(f,
		nfnetlink.AddressPayload(m.IPv6, m.Source),
		&expr.Lookup{SourceRegister: reg1, SetName: s.Of(m.Set), Invert: m.Not, IsDestRegSet: m.Goto})...)
}

// plain returns a node that refers to no set or counter.
func plain(text string, exprs ...expr.Any) nft.Plain {
	return nft.Plain{Text: text, Exprs: nfnetlink.Marshal(nfnetlink.Inet, exprs...)}
}

// byInterface matches packets by their input or output interface, or by a prefix
// of its name, which ends in "*". The node's own traffic has no input interface. Since
// Linux 5.5 a postrouting chain can match the input interface.
func byInterface(name string, out, not bool) nft.Node {
	field, meta := "iifname", &expr.Meta{Key: expr.MetaKeyIIFNAME, Register: reg1}
	if out {
		field, meta.Key = "oifname", expr.MetaKeyOIFNAME
	}
	op, compare := "", &expr.Cmp{Op: expr.CmpOpEq, Register: reg1}
	if not {
		op, compare.Op = "!= ", expr.CmpOpNeq
	}
	if prefix, several := strings.CutSuffix(name, "*"); several {
		compare.Data = []byte(prefix)
	} else {
		compare.Data = append([]byte(name), make([]byte, unix.IFNAMSIZ-len(name))...)
	}
	return plain(fmt.Sprintf("%s %s\"%s\"", field, op, name), meta, compare)
}

// byChance matches packets at random, with the probability of a choice.
func byChance(c nft.PortChoice) nft.Node {
	return plain(fmt.Sprintf("numgen random mod %d < %d", c.Remaining, c.Size()),
		&expr.Numgen{Register: reg1, Modulus: c.Remaining, Type: unix.NFT_NG_RANDOM},
		&expr.Byteorder{SourceRegister: reg1, DestRegister: reg1, Op: expr.ByteorderHton, Len: 4, Size: 4},
		&expr.Cmp{Op: expr.CmpOpLt, Register: reg1, Data: binaryutil.BigEndian.PutUint32(c.Size())})
}

// count increments a named counter.
func count(counter string) nft.Node {
	return plain("counter name "+counter, &expr.Objref{Type: unix.NFT_OBJECT_COUNTER, Name: counter})
}

// masquerade translates the source to the address of the output interface, and to ports, or
// to any if they are nil.
func masquerade(randomFully bool, ports *nft.PortRange) nft.Node {
	text := "masquerade"
	if ports != nil {
		text += " to :" + ports.String()
	}
	if randomFully {
		text += " fully-random"
	}
	load, low, high := loadPorts(ports, reg1)
	n := plain(text, load...)
	n.Exprs = append(n.Exprs, nfnetlink.Masquerade(randomFully, low, high))
	return n
}

// loadPorts loads the ends of a range of ports into a register and the one after it, and
// returns which these are: one register for one port, 0 for none.
func loadPorts(r *nft.PortRange, reg uint32) (load []expr.Any, low, high uint32) {
	if r == nil {
		return nil, 0, 0
	}
	load = append(load, &expr.Immediate{Register: reg, Data: binaryutil.BigEndian.PutUint16(r.Min)})
	if r.Size() == 1 {
		return load, reg, reg
	}
	return append(load, &expr.Immediate{Register: reg + 1, Data: binaryutil.BigEndian.PutUint16(r.Max)}), reg, reg + 1
}

// stop returns to the calling chain.
func stop() nft.Node { return plain("return", &expr.Verdict{Kind: expr.VerdictReturn}) }

// continueIn continues in another chain and does not return.
func continueIn(chain string) nft.Node {
	return plain("goto "+chain, &expr.Verdict{Kind: expr.VerdictGoto, Chain: chain})
}
