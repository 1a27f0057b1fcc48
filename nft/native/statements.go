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
func ofFamily(ipv6 bool) nft.Statement {
	return statement("meta nfproto "+choose(ipv6, "ipv6", "ipv4"),
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: reg1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg1, Data: []byte{byte(nft.FamilyPolicy{IPv6: ipv6}.NetfilterFamily())}})
}

// withFamilyCheck puts a check of the family before a statement that loads an address of the family. nft does not print
// the check, because the address implies it.
func withFamilyCheck(ipv6 bool, n nft.Statement) nft.Statement {
	n.Exprs = append(ofFamily(ipv6).Exprs, n.Exprs...)
	return n
}

// toThisNode matches packets to an address of this node: route type LOCAL.
func toThisNode() nft.Statement {
	return addrType("fib daddr type local", false, expr.CmpOpEq, unix.RTN_LOCAL)
}

// fromThisNode matches packets from an address of this node.
func fromThisNode() nft.Statement {
	return addrType("fib saddr type local", true, expr.CmpOpEq, unix.RTN_LOCAL)
}

// addrType compares the type of the route to the source or the destination.
func addrType(text string, source bool, op expr.CmpOp, typ uint32) nft.Statement {
	return statement(text,
		&expr.Fib{Register: reg1, FlagSADDR: source, FlagDADDR: !source, ResultADDRTYPE: true},
		&expr.Cmp{Op: op, Register: reg1, Data: binary.NativeEndian.AppendUint32(nil, typ)})
}

// inSet matches packets whose source or destination is, or is not, in a set.
func inSet(ipv6, source, not bool, set string) nft.Statement {
	return statement(addressText(ipv6, source)+choose(not, " != @", " @")+set+nft.SideA,
		nfnetlink.AddressPayload(ipv6, source),
		&expr.Lookup{SourceRegister: reg1, SetName: set + nft.SideA, Invert: not})
}

// addressText names the source or the destination as nft does.
func addressText(ipv6, source bool) string {
	return choose(ipv6, "ip6 ", "ip ") + choose(source, "saddr", "daddr")
}

// choose returns a or, if first is not set, b.
func choose(first bool, a, b string) string {
	if first {
		return a
	}
	return b
}

// statement returns a statement with the text that nft prints.
func statement(text string, exprs ...expr.Any) nft.Statement {
	return nft.Statement{Text: text, Exprs: nfnetlink.Marshal(nfnetlink.Inet, exprs...)}
}

func ofProtocol(p nft.Protocol) nft.Statement {
	return statement("meta l4proto "+p.String(), p.Match()...)
}

// byInterface matches packets by their input or output interface, or by a prefix
// of its name, which ends in "*". The node's own traffic has no input interface. Since
// Linux 5.5 a postrouting chain can match the input interface.
func byInterface(name string, output, not bool) nft.Statement {
	meta := &expr.Meta{Key: expr.MetaKeyIIFNAME, Register: reg1}
	if output {
		meta.Key = expr.MetaKeyOIFNAME
	}
	compare := &expr.Cmp{Op: expr.CmpOpEq, Register: reg1}
	if not {
		compare.Op = expr.CmpOpNeq
	}
	if prefix, several := strings.CutSuffix(name, "*"); several {
		compare.Data = []byte(prefix)
	} else {
		compare.Data = append([]byte(name), make([]byte, unix.IFNAMSIZ-len(name))...)
	}
	text := fmt.Sprintf("%s %s%q", choose(output, "oifname", "iifname"), choose(not, "!= ", ""), name)
	return statement(text, meta, compare)
}

// byChance matches packets at random, with the probability of a choice.
func byChance(c nft.PortChoice) nft.Statement {
	return statement(fmt.Sprintf("numgen random mod %d < %d", c.Remaining, c.Size()),
		&expr.Numgen{Register: reg1, Modulus: c.Remaining, Type: unix.NFT_NG_RANDOM},
		&expr.Byteorder{SourceRegister: reg1, DestRegister: reg1, Op: expr.ByteorderHton, Len: 4, Size: 4},
		&expr.Cmp{Op: expr.CmpOpLt, Register: reg1, Data: binaryutil.BigEndian.PutUint32(c.Size())})
}

func count(counter string) nft.Statement {
	return statement("counter name "+counter, &expr.Objref{Type: unix.NFT_OBJECT_COUNTER, Name: counter})
}

// masquerade translates the source to the address of the output interface, and to ports, or
// to any if they are nil.
func masquerade(randomFully bool, ports *nft.PortRange) nft.Statement {
	load, low, high := loadPorts(ports, reg1)
	n := statement("masquerade"+portsText(" to :", ports)+randomText(randomFully), load...)
	n.Exprs = append(n.Exprs, nfnetlink.Masquerade(randomFully, low, high))
	return n
}

func portsText(prefix string, r *nft.PortRange) string {
	if r == nil {
		return ""
	}
	return prefix + r.String()
}

func randomText(fully bool) string { return choose(fully, " fully-random", "") }

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

// stop ends this chain for the packet: we do nothing, and other programs' chains go on.
func stop() nft.Statement { return statement("return", &expr.Verdict{Kind: expr.VerdictReturn}) }

// continueIn continues in another chain and does not return.
func continueIn(chain string) nft.Statement {
	return statement("goto "+chain, &expr.Verdict{Kind: expr.VerdictGoto, Chain: chain})
}
