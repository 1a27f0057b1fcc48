package neighbors

import (
	"context"
	"net/netip"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/foreign"
	"nft-masq-agent/nft/judge"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/routes"
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

// Out returns the name of the interface by which it leaves, for use in messages.
func (n Path) Out() string { return nfnetlink.Printable(n.Packet.Out.Name) }

// A Tracer follows connections through the rules that it has read.
type Tracer struct {
	rules *foreign.Tracer
	known nft.Ruleset
}

// Tracer reads the NAT rules of this node, including those of other programs. known is the
// ruleset that the kernel has, as far as it is known.
func (s *State) Tracer(ctx context.Context, known nft.Ruleset) (*Tracer, error) {
	t := &Tracer{known: known}
	return t, nfnetlink.Again(ctx, func() (err error) {
		t.rules, err = foreign.NewTracer(ctx, s.node.In(ctx), s.Owns)
		return err
	})
}

// Trace follows a new connection on each of its routes. src is the zero address for any pod.
func (t *Tracer) Trace(src, dst netip.Addr, routes routes.Routes) (paths []Path) {
	known := t.known
	for _, way := range routes.Ways {
		// A pod's address is not one of the node's.
		p := foreign.Packet{Src: src, Dst: dst, SrcType: unix.RTN_UNICAST, DstType: way.Type, Out: way.Interface}
		if src.IsValid() {
			p.SrcType, p.FromNode = routes.Back.Type, routes.Back.Type == unix.RTN_LOCAL
		}
		if !p.FromNode {
			p.In = routes.Back.Interface
		}
		for _, f := range known.Policy.Families {
			if f.IPv6 == dst.Is6() && !src.IsValid() {
				p.From = judge.Pods(f).Src
			}
		}
		if e := known.Policy.Enforce; e != nil {
			for _, m := range e.Marks {
				p.Unset |= m.Value
			}
		}
		n := Path{Packet: p, Masqueraded: way.Address, Depends: way.Depends}
		n.Wanted = judge.Decide(known.Policy, nft.Connection{
			Src: p.Src, Dst: p.Dst, FromNode: p.FromNode, ToNode: p.DstType == unix.RTN_LOCAL, In: p.In.Name, Out: p.Out.Name,
		}) == nft.Masqueraded
		n.Destination, n.Source = t.rules.Trace(p)
		if paths = append(paths, n); p.Out.Kind == "bridge" && p.In == p.Out {
			n.Depends = []string{"whether the bridge " + n.Out() + " passes it on without these rules"}
			n.Destination, n.Source = foreign.Trace{Through: true}, foreign.Trace{Through: true}
			paths = append(paths, n)
		}
	}
	return paths
}
