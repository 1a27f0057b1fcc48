package kernel

import (
	"context"
	"net/netip"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/foreign"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/nfnetlink"
)

// A Node is what the kernel knows about the path of a connection.
type Node struct {
	Route       Route
	Packet      foreign.Packet // as it is sent
	Destination foreign.Trace  // what rules do to its destination address first
	Source      foreign.Trace  // what rules do to its source address
	// Wanted is whether our policy masquerades it.
	Wanted bool
	// Masqueraded is the source address if a rule masquerades the connection, the
	// zero address if unknown.
	Masqueraded netip.Addr

	own func(nfnetlink.Chain) bool
}

// Own reports whether a rule is this agent's.
func (n Node) Own(w foreign.Way) bool {
	return w.Own || n.own != nil && n.own(nfnetlink.Chain{Family: w.Rule.Family, Table: w.Rule.Table, Name: w.Rule.Chain})
}

// A Question is the input of [Kernel.Trace].
type Question struct {
	Src   netip.Addr // the zero address: any pod
	Dst   netip.Addr
	Out   string      // output interface; "": that of the route
	Known nft.Ruleset // the one that the kernel has, as far as it is known
}

// Trace follows a new connection through the NAT rules of this node, including
// those of other programs.
func (k *Kernel) Trace(ctx context.Context, q Question) (Node, error) {
	n, err := followRoute(q.Src, q.Dst, q.Out)
	if err != nil {
		return n, err
	}
	err = again(ctx, func() error {
		s, err := k.read(ctx, q.Known, layout.Everything, nil)
		if err == nil {
			n.own = s.owns
		}
		return err
	})
	if err != nil {
		return n, err
	}
	n.Wanted = q.Known.Policy.Decide(nft.Connection{
		Src: q.Src, Dst: q.Dst, FromNode: n.Packet.FromNode, ToNode: n.Packet.DstType == unix.RTN_LOCAL,
		In: n.Packet.In.Name, Out: n.Packet.Out.Name,
	}) == nft.Masqueraded
	if e := q.Known.Policy.Enforce; e != nil {
		for _, m := range e.Marks {
			n.Packet.Unset |= m.Value
		}
	}
	before, after := n.hooks()
	p := n.Packet
	if !p.FromNode {
		p.Out = foreign.Device{}
	}
	if n.Destination, err = k.follow(ctx, p, before); err != nil {
		return n, err
	}
	p = n.Destination.Packet
	if p.Out = n.Packet.Out; after[0] == unix.NF_INET_LOCAL_IN {
		p.Out = foreign.Device{}
	}
	n.Source, err = k.follow(ctx, p, after...)
	return n, err
}

// hooks returns the hook at which the destination of the packet can be translated,
// and those that it passes later.
func (n Node) hooks() (before uint32, after []uint32) {
	switch {
	case n.Packet.FromNode:
		return unix.NF_INET_LOCAL_OUT, []uint32{unix.NF_INET_POST_ROUTING}
	case n.Packet.DstType == unix.RTN_LOCAL:
		return unix.NF_INET_PRE_ROUTING, []uint32{unix.NF_INET_LOCAL_IN}
	}
	return unix.NF_INET_PRE_ROUTING, []uint32{unix.NF_INET_FORWARD, unix.NF_INET_POST_ROUTING}
}

func (k *Kernel) follow(ctx context.Context, p foreign.Packet, hooks ...uint32) (out foreign.Trace, err error) {
	none := func(nfnetlink.Chain) bool { return false }
	err = again(ctx, func() error {
		t, err := foreign.NewTracer(ctx, k.conn.In(ctx), none, hooks...)
		if err == nil {
			out = t.Trace(p, false)
		}
		return err
	})
	return out, err
}

// followRoute finds the route that a connection would take.
func followRoute(src, dst netip.Addr, out string) (Node, error) {
	n := Node{Packet: foreign.Packet{Src: src, Dst: dst, SrcType: unix.RTN_UNICAST}} // a pod's address is not one of the node's
	question := routeTo{dst: dst}
	if src.IsValid() {
		back, err := question.with(src, "").ask()
		if err != nil {
			return n, err
		}
		n.Packet.SrcType, n.Packet.FromNode = back.Type, back.Type == unix.RTN_LOCAL
		if question.src = src; !n.Packet.FromNode {
			n.Packet.In, question.in = back.out(), back.index
		}
	}
	route, err := question.with(dst, out).ask()
	if err == nil && route.Type == unix.RTN_UNSPEC && question.src.IsValid() {
		route, err = routeTo{}.with(dst, out).ask() // the kernel does not accept it on that interface
	}
	if err != nil {
		return n, err
	}
	n.Route, n.Packet.Out, n.Packet.DstType = route, route.out(), route.Type
	if own, err := (routeTo{}).with(dst, route.Interface).ask(); err == nil {
		route.src = own.src // the kernel returns none for forwarded packets
	}
	n.Masqueraded, err = masqueradeAddress(route, dst)
	return n, err
}
