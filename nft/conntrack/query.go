package conntrack

import "net/netip"

// A Query asks for the connections from a source, if it is valid, to a destination, after or before
// DNAT. Protocol and port are not asked if they are 0.
type Query struct {
	From     netip.Addr
	To       netip.AddrPort
	Protocol uint8
}

func (q Query) matches(e *Entry) bool {
	if q.From.IsValid() && e.Original.Src.Addr() != q.From || q.Protocol != 0 && e.Original.Protocol != q.Protocol {
		return false
	}
	return q.isTo(e.Destination()) || q.isTo(e.Original.Dst)
}

func (q Query) isTo(dst netip.AddrPort) bool {
	return dst.Addr() == q.To.Addr() && (q.To.Port() == 0 || dst.Port() == q.To.Port())
}
