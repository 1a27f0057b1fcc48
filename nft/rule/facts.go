package rule

import (
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfnetlink"
)

// Target returns the chain that a rule jumps or goes to.
func Target(r nfnetlink.Rule) (chain string, ok bool) {
	for _, e := range r.Exprs {
		if _, chain, ok := e.Verdict(); ok && chain != "" {
			return chain, true
		}
	}
	return "", false
}

// ByMap reports whether a rule takes its verdict from a map.
func ByMap(r nfnetlink.Rule) bool { return slices.ContainsFunc(r.Exprs, nfnetlink.Expr.JumpsByMap) }

// Returns reports whether a rule returns to the calling chain.
func Returns(r nfnetlink.Rule) bool {
	for _, e := range r.Exprs {
		if code, _, ok := e.Verdict(); ok && code == unix.NFT_RETURN {
			return true
		}
	}
	return false
}

// Packets returns what the rule's own counter has counted; false if it has none.
func Packets(r nfnetlink.Rule) (uint64, bool) {
	for _, e := range r.Exprs {
		if e.Name == "counter" {
			return e.Uint64(unix.NFTA_COUNTER_PACKETS), true
		}
	}
	return 0, false
}

// Counter returns the name of the counter that a rule adds to, "" if there is none.
func Counter(r nfnetlink.Rule) string {
	for _, e := range r.Exprs {
		if e.Name == "objref" && e.Uint32(unix.NFTA_OBJREF_IMM_TYPE) == unix.NFT_OBJECT_COUNTER {
			return e.Str(unix.NFTA_OBJREF_IMM_NAME)
		}
	}
	return ""
}

// Sets names the sets that a rule refers to: whose elements it asks for, adds, or
// takes an object from.
func Sets(r nfnetlink.Rule) []string {
	var names []string
	for _, e := range r.Exprs {
		switch e.Name {
		case "lookup":
			names = append(names, e.Str(unix.NFTA_LOOKUP_SET))
		case "dynset":
			names = append(names, e.Str(unix.NFTA_DYNSET_SET_NAME))
		case "objref":
			if set := e.Str(unix.NFTA_OBJREF_SET_NAME); set != "" {
				names = append(names, set)
			}
		}
	}
	return names
}

// RandomFully reports whether a rule translates source addresses and takes any free
// port for it.
func RandomFully(r nfnetlink.Rule) bool {
	for _, e := range r.Exprs {
		flags := uint32(0)
		switch e.Name {
		case "masq":
			flags = e.Uint32(unix.NFTA_MASQ_FLAGS)
		case "nat":
			flags = e.Uint32(unix.NFTA_NAT_FLAGS)
		case "target":
			t, _ := xtNATRange(e.Attr(unix.NFTA_TARGET_INFO), nfnetlink.IPv4)
			flags = t.flags
		}
		if flags&nfnetlink.NATRandomFully != 0 {
			return true
		}
	}
	return false
}

// comparisons calls fn for each comparison before the first expression that neither
// loads nor compares, and returns that one with the registers at it. It returns the
// zero Expr if there is none, or if fn returns false.
func comparisons(r nfnetlink.Rule, fn func(Statement) bool) (nfnetlink.Expr, decoder) {
	d := decoder{family: r.Family}
	for _, e := range r.Exprs {
		if o := d.load(e); o.register != unix.NFT_REG_VERDICT {
			d.fill(o)
			continue
		}
		s, ok := d.compare(e)
		switch {
		case ok && !fn(s):
			return nfnetlink.Expr{}, d
		case !ok && e.Name != "match" && e.Name != "counter" && e.Name != "objref":
			return e, d
		}
		d.fresh = len(d.loads)
	}
	return nfnetlink.Expr{}, d
}

// Prefix returns the first prefix of which a rule asks whether it holds the source or
// the destination.
func Prefix(r nfnetlink.Rule) (p netip.Prefix, ok bool) {
	comparisons(r, func(s Statement) bool {
		if in, isRange := s.Range(); isRange && s.Op == "==" {
			p, ok = in.Prefix()
		}
		return !ok
	})
	return p, ok
}

// A Masquerade is what a rule masquerades, or translates with snat, and how.
type Masquerade struct {
	Protocol    byte // 0: any
	RandomFully bool
	MinPort     uint16 // 0: any port
	MaxPort     uint16
}

// Masquerades returns how a rule masquerades or translates with snat; false if it does
// neither.
func Masquerades(r nfnetlink.Rule) (m Masquerade, ok bool) {
	e, d := comparisons(r, func(s Statement) bool {
		if s.Field == "meta l4proto" && len(s.Value) == 1 {
			m.Protocol = s.Value[0]
		}
		return true
	})
	switch {
	case e.Name == "masq":
		m.RandomFully = e.Uint32(unix.NFTA_MASQ_FLAGS)&nfnetlink.NATRandomFully != 0
		m.MinPort, m.MaxPort = d.port(e, unix.NFTA_MASQ_REG_PROTO_MIN), d.port(e, unix.NFTA_MASQ_REG_PROTO_MAX)
	case e.Name == "nat" && e.Uint32(unix.NFTA_NAT_TYPE) == unix.NFT_NAT_SNAT:
		m.RandomFully = e.Uint32(unix.NFTA_NAT_FLAGS)&nfnetlink.NATRandomFully != 0
		m.MinPort, m.MaxPort = d.port(e, unix.NFTA_NAT_REG_PROTO_MIN), d.port(e, unix.NFTA_NAT_REG_PROTO_MAX)
	case e.Name == "target" && e.Str(unix.NFTA_TARGET_NAME) == "MASQUERADE":
		t, _ := xtNATRange(e.Attr(unix.NFTA_TARGET_INFO), r.Family)
		m.RandomFully = t.flags&nfnetlink.NATRandomFully != 0
		if t.flags&nfnetlink.NATPorts != 0 {
			m.MinPort, m.MaxPort = t.ports[0], t.ports[1]
		}
	default:
		return Masquerade{}, false
	}
	return m, true
}

// port returns the port in the register that an attribute names, 0 if there is none.
func (d *decoder) port(e nfnetlink.Expr, attr uint16) uint16 {
	b := d.register(e.Uint32(attr)).constant
	if e.Attr(attr) == nil || len(b) < 2 {
		return 0
	}
	return uint16(b[0])<<8 | uint16(b[1])
}
