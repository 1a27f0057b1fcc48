package kernel

import (
	"context"
	"net/netip"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/foreign"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/node"
)

// A Path is what happens to a connection on one of its routes.
type Path struct {
	Packet      foreign.Packet // as it is sent
	Destination foreign.Trace  // what rules do to its destination address first
	Source      foreign.Trace  // what rules do to its source address
	// Wanted is whether our policy masquerades it.
	Wanted bool
	// Masqueraded is the source address if a rule masquerades the connection, the
	// zero address if unknown.
	Masqueraded netip.Addr
	Depends     []string // what chooses this path among several ones
}

// Trace follows a new connection through the NAT rules of this node, including those of
// other programs, on each of its routes. src is the zero address for any pod, and known is
// the ruleset that the kernel has, as far as it is known.
func (k *Kernel) Trace(ctx context.Context, src, dst netip.Addr, routes node.Routes, known nft.Ruleset) ([]Path, error) {
	var own func(nfnetlink.Chain) bool
	err := again(ctx, func() error {
		s, err := k.read(ctx, known, layout.Everything, nil)
		if err == nil {
			own = s.owns
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	paths := make([]Path, len(routes.Ways))
	for i, way := range routes.Ways {
		// A pod's address is not one of the node's.
		p := foreign.Packet{Src: src, Dst: dst, SrcType: unix.RTN_UNICAST, DstType: way.Type, Out: device(way)}
		if src.IsValid() {
			p.SrcType, p.FromNode = routes.Back.Type, routes.Back.Type == unix.RTN_LOCAL
		}
		if !p.FromNode {
			p.In = device(routes.Back)
		}
		for _, f := range known.Policy.Families {
			if f.IPv6 == dst.Is6() && !src.IsValid() {
				p.From = f.Pods().Src
			}
		}
		if e := known.Policy.Enforce; e != nil {
			for _, m := range e.Marks {
				p.Unset |= m.Value
			}
		}
		paths[i] = Path{Packet: p, Masqueraded: way.Address, Depends: way.Depends}
		if err := k.trace(ctx, &paths[i], known, own); err != nil {
			return nil, err
		}
	}
	return paths, nil
}

func device(r node.Route) foreign.Device {
	return foreign.Device{Name: r.Interface.Name, Index: r.Interface.Index}
}

func (k *Kernel) trace(ctx context.Context, n *Path, known nft.Ruleset, own func(nfnetlink.Chain) bool) (err error) {
	n.Wanted = known.Policy.Decide(nft.Connection{
		Src: n.Packet.Src, Dst: n.Packet.Dst, FromNode: n.Packet.FromNode, ToNode: n.Packet.DstType == unix.RTN_LOCAL,
		In: n.Packet.In.Name, Out: n.Packet.Out.Name,
	}) == nft.Masqueraded
	before, after := n.hooks()
	p := n.Packet
	if !p.FromNode {
		p.Out = foreign.Device{}
	}
	if n.Destination, err = k.follow(ctx, p, own, before); err != nil {
		return err
	}
	p = n.Destination.Packet
	if p.Out = n.Packet.Out; after[0] == unix.NF_INET_LOCAL_IN {
		p.Out = foreign.Device{}
	}
	n.Source, err = k.follow(ctx, p, own, after...)
	return err
}

// hooks returns the hook at which the destination of the packet can be translated,
// and those that it passes later.
func (n Path) hooks() (before uint32, after []uint32) {
	switch {
	case n.Packet.FromNode:
		return unix.NF_INET_LOCAL_OUT, []uint32{unix.NF_INET_POST_ROUTING}
	case n.Packet.DstType == unix.RTN_LOCAL:
		return unix.NF_INET_PRE_ROUTING, []uint32{unix.NF_INET_LOCAL_IN}
	}
	return unix.NF_INET_PRE_ROUTING, []uint32{unix.NF_INET_FORWARD, unix.NF_INET_POST_ROUTING}
}

func (k *Kernel) follow(
	ctx context.Context, p foreign.Packet, own func(nfnetlink.Chain) bool, hooks ...uint32,
) (out foreign.Trace, err error) {
	err = again(ctx, func() error {
		t, err := foreign.NewTracer(ctx, k.conn.In(ctx), own, hooks...)
		if err == nil {
			out = t.Trace(p)
		}
		return err
	})
	return out, err
}
