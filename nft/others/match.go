package others

import (
	"bytes"
	"strings"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfnetlink"
)

// A match is the comparison of a rule that names an address; without a field there is none.
type match struct{ field, set string }

// A loaded is an address of the packet, or its beginning, in a register.
type loaded struct {
	field   string
	address []byte // what the packet of the query has there
	mask    []byte // what a bitwise expression leaves; nil: all of it
	lower   []byte // the lower bound, if one was compared
}

// Attributes of the expression range (enum nft_range_attributes).
const (
	rangeRegister = 1
	rangeFrom     = 3
	rangeTo       = 4
)

// match returns the first comparison of a rule with an address of the query.
func (s *search) match(r nfnetlink.Rule) (match, error) {
	if r.Family == nfnetlink.IPv4 && s.query.Destination.Is6() || r.Family == nfnetlink.IPv6 && s.query.Destination.Is4() {
		return match{}, nil
	}
	var registers map[uint32]loaded // most rules load no address
	for _, e := range r.Exprs {
		switch e.Name {
		case "payload":
			if l, ok := s.load(e); ok {
				if registers == nil {
					registers = map[uint32]loaded{}
				}
				registers[register(e.Uint32(unix.NFTA_PAYLOAD_DREG))] = l
			}
		case "bitwise":
			input := register(e.Uint32(unix.NFTA_BITWISE_SREG))
			if l, ok := registers[input]; ok {
				l.mask = e.Value(unix.NFTA_BITWISE_MASK)
				delete(registers, input)
				registers[register(e.Uint32(unix.NFTA_BITWISE_DREG))] = l
			}
		case "cmp":
			input := register(e.Uint32(unix.NFTA_CMP_SREG))
			if l, ok := registers[input]; ok {
				if l.compare(e) {
					return match{field: l.field}, nil
				}
				registers[input] = l
			}
		case "range":
			l, ok := registers[register(e.Uint32(rangeRegister))]
			if ok && l.isBetween(e.Value(rangeFrom), e.Value(rangeTo)) {
				return match{field: l.field}, nil
			}
		case "lookup":
			for number, l := range registers {
				key := number - register(e.Uint32(unix.NFTA_LOOKUP_SREG))
				found, err := s.contains(setID{r.Family, r.Table, e.Set(), l.field}, key*4, l)
				if err != nil {
					return match{}, err
				}
				if found {
					return match{l.field, named(e.Set())}, nil
				}
			}
		}
	}
	return match{}, nil
}

// named returns the name of a set, "" if it has none: those in a rule are numbered by the kernel.
func named(set string) string {
	if strings.HasPrefix(set, "__set") || strings.HasPrefix(set, "__map") {
		return ""
	}
	return set
}

// register returns the number of a 32-bit register: those of 128 bits have numbers of their own.
func register(number uint32) uint32 {
	if number >= unix.NFT_REG32_00 {
		return number - unix.NFT_REG32_00
	}
	return (number - unix.NFT_REG_1) * 4
}

// load returns what an expression loads, if that is an address: RFC 791, section 3.1, and RFC 8200, section 3.
func (s *search) load(e nfnetlink.Expr) (loaded, bool) {
	if e.Attr(unix.NFTA_PAYLOAD_DREG) == nil || e.Uint32(unix.NFTA_PAYLOAD_BASE) != unix.NFT_PAYLOAD_NETWORK_HEADER {
		return loaded{}, false
	}
	source := uint32(12)
	destination := uint32(16)
	if s.query.Destination.Is6() {
		source = 8
		destination = 24
	}
	var l loaded
	switch e.Uint32(unix.NFTA_PAYLOAD_OFFSET) {
	case source:
		l = loaded{field: "source", address: s.query.Source.AsSlice()}
	case destination:
		l = loaded{field: "destination", address: s.query.Destination.AsSlice()}
	}
	n := int(e.Uint32(unix.NFTA_PAYLOAD_LEN))
	if len(l.address) == 0 || n > len(l.address) {
		return loaded{}, false
	}
	l.address = l.address[:n]
	return l, true
}

// compare reports whether a comparison names the address. A range may be two comparisons, of which the first has
// the lower bound.
func (l *loaded) compare(e nfnetlink.Expr) bool {
	value := e.Value(unix.NFTA_CMP_DATA)
	switch e.Uint32(unix.NFTA_CMP_OP) {
	case unix.NFT_CMP_EQ, unix.NFT_CMP_NEQ:
		return l.equals(value)
	case unix.NFT_CMP_GTE:
		l.lower = value
	case unix.NFT_CMP_LTE:
		return l.isBetween(l.lower, value)
	}
	return false
}

// equals reports whether a comparison with a value names the address, equal or not equal.
func (l loaded) equals(value []byte) bool {
	if len(value) != len(l.address) {
		return false
	}
	compared := l.mask == nil
	for i, b := range l.address {
		if l.mask != nil && i < len(l.mask) {
			b &= l.mask[i]
			compared = compared || l.mask[i] != 0
		}
		if b != value[i] {
			return false
		}
	}
	return compared
}

// isBetween reports whether an interval has the address, and is not all addresses.
func (l loaded) isBetween(first, last []byte) bool {
	n := len(l.address)
	if len(first) < n || len(last) < n || l.mask != nil {
		return false
	}
	first = first[:n]
	last = last[:n]
	everything := bytes.Count(first, []byte{0}) == n && bytes.Count(last, []byte{0xff}) == n
	return !everything && bytes.Compare(first, l.address) <= 0 && bytes.Compare(l.address, last) <= 0
}
