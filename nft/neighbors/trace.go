package neighbors

import (
	"cmp"
	"context"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/judge"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/routes"
	"nft-masq-agent/nft/trace"
)

// A Path is what happens to a connection on one of its routes.
type Path struct {
	Packet      trace.Packet // as it is sent
	Destination trace.Result // what rules do to its destination address first
	Source      trace.Result // what rules do to its source address
	// Wanted is whether our policy masquerades it.
	Wanted bool
	// Masqueraded is the source address if a rule masquerades the connection, the
	// zero address if unknown; MasqueradedOf is the interface that has it.
	Masqueraded   netip.Addr
	MasqueradedOf string
	Depends       []string // what chooses this path among several ones
}

// AddressOf returns the name of the interface whose address masquerading takes, for use in
// messages.
func (n Path) AddressOf() string {
	return nfnetlink.Printable(cmp.Or(n.MasqueradedOf, n.Packet.Out.Name))
}

// Out returns the name of the interface by which it leaves, for use in messages.
func (n Path) Out() string { return nfnetlink.Printable(n.Packet.Out.Name) }

// A Tracer follows connections through the rules that it has read.
type Tracer struct {
	Protocol uint8  // of the connections, 0 if unknown
	Port     uint16 // of their destination, 0 if unknown
	rules    *trace.Tracer
	known    nft.Ruleset
}

// Tracer reads the NAT rules of this node, including those of other programs. known is the
// ruleset that the kernel has, as far as it is known.
func (s *State) Tracer(ctx context.Context, known nft.Ruleset) (*Tracer, error) {
	t, c := &Tracer{known: known}, s.node.In(ctx)
	return t, nfnetlink.Again(ctx, func() error {
		all := func(nfnetlink.Chain) bool { return true }
		r, err := trace.Read(c, trace.Scope{Own: s.Want.Owns, Ours: true, Reads: all})
		if err != nil {
			return err
		}
		t.rules = trace.New(r)
		t.rules.Has = c.HasElement
		return nil
	})
}

// Devices returns the chains at hooks of network devices, which are not read.
func (t *Tracer) Devices() []string { return names(t.rules.Devices) }

// names returns the chains as nft names them.
func names(chains []nfnetlink.ChainID) (all []string) {
	for _, c := range chains {
		all = append(all, c.Family.String()+" "+nfnetlink.Printable(c.Table)+" "+nfnetlink.Printable(c.Name))
	}
	return all
}

// Mark returns the mark that a packet has when it is routed, as far as rules set it, and the bits
// that are not certain. Where a packet of the node itself is routed again, by chains of type route
// alone, nothing is certain.
func (t *Tracer) Mark(src, dst netip.Addr, to routes.Routes) (mark, open uint32) {
	if !src.IsValid() {
		return 0, 0
	}
	p := t.packet(src, dst, to, routes.Route{Type: unix.RTN_UNICAST})
	if p.FromNode {
		m := t.rules.At(p, unix.NF_INET_LOCAL_OUT).Mark
		return 0, m.Open() | m.Value
	}
	m := t.rules.At(p, unix.NF_INET_PRE_ROUTING).Mark
	return m.Value, m.Open()
}

// packet returns the first packet of a connection, on one of its routes.
func (t *Tracer) packet(src, dst netip.Addr, to routes.Routes, way routes.Route) trace.Packet {
	p := trace.Packet{
		Src: src, Dst: dst, SrcType: to.Back.Type, DstType: way.Type, Out: way.Interface,
		FromNode: to.Back.Type == unix.RTN_LOCAL, Protocol: t.Protocol, Port: t.Port,
	}
	if !p.FromNode {
		p.In = to.Back.Interface
	}
	if e := t.known.Policy.Enforce; e != nil {
		for _, m := range e.Marks {
			p.Unset |= m.Value
		}
	}
	return p
}

// Endpoints returns the rules of which one certainly translates the destination, each to an address;
// none if it is not known to which.
func (n Path) Endpoints() (all []trace.Finding) {
	const most = 100
	if n.Destination.Keeps != trace.No || n.Destination.Untracked != trace.No {
		return nil
	}
	for _, f := range n.Destination.Findings {
		switch {
		case f.Code == trace.Rewrites, f.Code == trace.Unknown, len(all) == most,
			f.OfDestination && (len(f.To) != 1 || f.To[0].From != f.To[0].To):
			return nil
		case f.OfDestination && !slices.ContainsFunc(all, func(o trace.Finding) bool {
			return o.To[0] == f.To[0] && o.Port == f.Port && o.Mark == f.Mark
		}):
			all = append(all, f)
		}
	}
	return all
}

// Onward follows a connection of a path past a rule that translates its destination, on each of the
// routes to the endpoint.
func (t *Tracer) Onward(n Path, by trace.Finding, to routes.Routes) []Path {
	return t.each(n.Packet.Src, by.To[0].From, to, func(p trace.Packet) (trace.Result, trace.Result) {
		if by.Port != 0 {
			p.Port = by.Port
		}
		return trace.Result{Keeps: trace.Yes}, t.rules.Onward(n.Destination, by, p)
	})
}

// Trace follows a new connection on each of its routes.
func (t *Tracer) Trace(src, dst netip.Addr, to routes.Routes) []Path {
	return t.each(src, dst, to, t.rules.Trace)
}

func (t *Tracer) each(
	src, dst netip.Addr, to routes.Routes, follow func(trace.Packet) (destination, source trace.Result),
) (paths []Path) {
	for _, way := range to.Ways {
		p := t.packet(src, dst, to, way)
		p.Masqueraded = way.Address
		n := Path{Packet: p, Masqueraded: way.Address, MasqueradedOf: way.AddressOf, Depends: way.Depends}
		n.Wanted = judge.Decide(t.known.Policy, nft.Connection{
			Src: p.Src, Dst: p.Dst, FromNode: p.FromNode, ToNode: p.DstType == unix.RTN_LOCAL, In: p.In.Name, Out: p.Out.Name,
		}) == nft.Masqueraded
		n.Destination, n.Source = follow(p)
		if paths = append(paths, n); p.Out.Kind == "bridge" && p.In == p.Out {
			passes := "whether the bridge " + n.Out() + " passes it on "
			n.Depends, p.Bridged = []string{passes + "through these rules, which then see no iifname"}, true
			n.Destination, n.Source = follow(p)
			paths = append(paths, n)
			n.Depends = []string{passes + "without these rules"}
			n.Destination, n.Source = trace.Result{Keeps: trace.Yes}, trace.Result{Keeps: trace.Yes}
			paths = append(paths, n)
		}
	}
	return paths
}
