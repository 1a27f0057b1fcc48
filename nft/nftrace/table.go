package nftrace

import (
	"encoding/binary"
	"slices"

	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/kernel"
	"nft-masq-agent/nft/nfnetlink"
)

// The chains of the table. A packet passes the first two in prerouting or in output, the next two at the end of
// prerouting and at the beginning of forward or input, and endOf in postrouting or input unless it is dropped.
const (
	beforeTracking   = "before-tracking-"
	afterTracking    = "after-tracking-"
	afterTranslation = "after-translation-"
	afterRouting     = "after-routing-"
	endOf            = "end-of-"
)

// confirmed is the bit of the conntrack status that all packets of a connection have but those until the first one is
// at the end of its hooks: IPS_CONFIRMED of include/uapi/linux/netfilter/nf_conntrack_common.h. The state is no help,
// since it is new until there was an answer, and NAT chains do not see a packet that is sent again.
const confirmed = 1 << 3

// Packets of new connections that are traced in a second, and at once.
const (
	limitRate  = 5
	limitBurst = 5
)

// table returns the transaction that creates the table.
func (q Query) table() *nfnetlink.Batch {
	b := &nfnetlink.Batch{}
	b.AddTable(nfnetlink.Inet, kernel.TraceTable)
	// Priorities of include/uapi/linux/netfilter_ipv4.h: fragments are put together at -400, and connections
	// are tracked at -200 and confirmed at the largest number.
	const last = 1<<31 - 2
	for _, hook := range []uint32{unix.NF_INET_PRE_ROUTING, unix.NF_INET_LOCAL_OUT} {
		untracked := addChain(b, beforeTracking, hook, -399)
		tracked := addChain(b, afterTracking, hook, -199)
		q.addRules(b, fromOutside(hook), untracked, tracked)
	}
	addChain(b, afterTranslation, unix.NF_INET_PRE_ROUTING, last)
	for _, hook := range []uint32{unix.NF_INET_FORWARD, unix.NF_INET_LOCAL_IN} {
		addChain(b, afterRouting, hook, -last)
	}
	for _, hook := range []uint32{unix.NF_INET_POST_ROUTING, unix.NF_INET_LOCAL_IN} {
		addChain(b, endOf, hook, last)
	}
	return b
}

// addRules adds the rules for the packets of a query to the two chains of a hook.
func (q Query) addRules(b *nfnetlink.Batch, outside []expr.Any, untracked, tracked nfnetlink.ChainID) {
	for _, protocol := range q.protocols() {
		opening := slices.Concat(protocol, outside, limited())
		addRule(b, untracked, "new connections, as far as that is known here", q.match(opening), 1)
	}
	known := slices.Concat(outside, isConfirmed(expr.CmpOpNeq))
	addRule(b, tracked, "not packets of known connections", q.match(known), 0)
	unknown := slices.Concat(isConfirmed(expr.CmpOpEq), limited())
	addRule(b, tracked, "new connections", q.match(unknown), 1)
}

func addChain(b *nfnetlink.Batch, name string, hook uint32, priority int32) nfnetlink.ChainID {
	c := nfnetlink.Chain{
		Family: nfnetlink.Inet, Table: kernel.TraceTable, Name: name + hookName(nfnetlink.Inet, hook),
		Hook:   &nfnetlink.Hook{Type: "filter", Number: hook, Priority: priority},
		Policy: nfnetlink.Accept,
	}
	b.AddChain(c)
	return c.ID()
}

// addRule adds a rule that sets meta nftrace of packets that match.
func addRule(b *nfnetlink.Batch, chain nfnetlink.ChainID, comment string, match []expr.Any, value byte) {
	trace := append(match,
		&expr.Immediate{Register: 1, Data: []byte{value}},
		&expr.Meta{Key: expr.MetaKeyNFTRACE, SourceRegister: true, Register: 1})
	b.AddRule(nfnetlink.Rule{
		Family: chain.Family, Table: chain.Table, Chain: chain.Name, Exprs: nfnetlink.Marshal(chain.Family, trace...),
		UserData: userdata.AppendString(nil, userdata.TypeComment, comment),
	})
}

// match selects those packets of the query that a part selects, too.
func (q Query) match(part []expr.Any) []expr.Any {
	ipv6 := q.To.Addr().Is6()
	family := byte(unix.NFPROTO_IPV4)
	if ipv6 {
		family = unix.NFPROTO_IPV6
	}
	exprs := equals(&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1}, []byte{family})
	if q.From.IsValid() {
		exprs = append(exprs, equals(nfnetlink.AddressPayload(ipv6, true), q.From.AsSlice())...)
	}
	exprs = append(exprs, equals(nfnetlink.AddressPayload(ipv6, false), q.To.Addr().AsSlice())...)
	if q.Protocol != 0 {
		exprs = append(exprs, equals(&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, []byte{q.Protocol})...)
	}
	if q.To.Port() != 0 {
		port := &expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2}
		exprs = append(exprs, equals(port, binary.BigEndian.AppendUint16(nil, q.To.Port()))...)
	}
	return append(exprs, part...)
}

// protocols select the first packets of connections, one after another, before they are tracked: of TCP those
// with SYN alone, of other protocols any packet.
func (q Query) protocols() [][]expr.Any {
	protocol := &expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}
	tcp := []byte{unix.IPPROTO_TCP}
	const flags, synOnly, synAckRstFin = 13, 0x02, 0x17 // RFC 9293, section 3.1
	syn := append(equals(protocol, tcp),
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: flags, Len: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 1, Mask: []byte{synAckRstFin}, Xor: []byte{0}},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{synOnly}})
	others := []expr.Any{protocol, &expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: tcp}}
	switch q.Protocol {
	case unix.IPPROTO_TCP:
		return [][]expr.Any{syn}
	case 0:
		return [][]expr.Any{syn, others}
	}
	return [][]expr.Any{others}
}

func equals(load expr.Any, value []byte) []expr.Any {
	return []expr.Any{load, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: value}}
}

// fromOutside leaves out packets that come by the loopback interface: the hook output has judged them, and their
// connection is confirmed.
func fromOutside(hook uint32) []expr.Any {
	if hook != unix.NF_INET_PRE_ROUTING {
		return nil
	}
	loopback := binary.NativeEndian.AppendUint16(nil, unix.ARPHRD_LOOPBACK)
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyIIFTYPE, Register: 1}, &expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: loopback},
	}
}

// isConfirmed compares the bit confirmed with 0. Packets that are not tracked match no comparison.
func isConfirmed(op expr.CmpOp) []expr.Any {
	mask := binary.NativeEndian.AppendUint32(nil, confirmed)
	zero := make([]byte, 4)
	return []expr.Any{
		&expr.Ct{Key: expr.CtKeySTATUS, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: mask, Xor: zero},
		&expr.Cmp{Op: op, Register: 1, Data: zero},
	}
}

func limited() []expr.Any {
	return []expr.Any{
		&expr.Limit{Type: expr.LimitTypePkts, Rate: limitRate, Unit: expr.LimitTimeSecond, Burst: limitBurst},
	}
}
