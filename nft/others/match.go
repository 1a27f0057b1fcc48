package others

import (
	"bytes"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfnetlink"
)

// names reports whether a rule compares an address of the query, equal or not equal.
func (s *search) names(r nfnetlink.Rule) (bool, error) {
	if r.Family == nfnetlink.IPv4 && s.query.Destination.Is6() || r.Family == nfnetlink.IPv6 && s.query.Destination.Is4() {
		return false, nil
	}
	var registers map[int][]byte // what the packet has of an address; most rules load none
	for _, e := range r.Exprs {
		switch e.Name {
		case "payload":
			delete(registers, register(e.Uint32(unix.NFTA_PAYLOAD_DREG)))
			if address := s.load(e); address != nil {
				if registers == nil {
					registers = map[int][]byte{}
				}
				registers[register(e.Uint32(unix.NFTA_PAYLOAD_DREG))] = address
			}
		case "meta", "ct", "fib", "rt", "exthdr":
			delete(registers, register(e.Uint32(unix.NFTA_META_DREG))) // the same number in each
		case "bitwise":
			input := register(e.Uint32(unix.NFTA_BITWISE_SREG))
			address := masked(registers[input], e.Value(unix.NFTA_BITWISE_MASK))
			delete(registers, input)
			if address != nil {
				registers[register(e.Uint32(unix.NFTA_BITWISE_DREG))] = address
			}
		case "cmp":
			address := registers[register(e.Uint32(unix.NFTA_CMP_SREG))]
			if bytes.Equal(address, e.Value(unix.NFTA_CMP_DATA)) {
				return true, nil
			}
		case "lookup":
			for number, address := range registers {
				position := number - register(e.Uint32(unix.NFTA_LOOKUP_SREG))
				found, err := s.contains(lookup{r.Family, r.Table, e.Set(), 4 * position, string(address)})
				if err != nil || found {
					return found, err
				}
			}
		}
	}
	return false, nil
}

// register returns the number of a 32-bit register: those of 128 bits have numbers of their own. What has none, as
// whatever writes to a packet, is before the first one.
func register(number uint32) int {
	if number >= unix.NFT_REG32_00 {
		return int(number) - unix.NFT_REG32_00
	}
	return (int(number) - unix.NFT_REG_1) * 4
}

// load returns what an expression loads of an address of the query: RFC 791, section 3.1, and RFC 8200, section 3.
func (s *search) load(e nfnetlink.Expr) []byte {
	if e.Uint32(unix.NFTA_PAYLOAD_BASE) != unix.NFT_PAYLOAD_NETWORK_HEADER {
		return nil
	}
	source := uint32(12)
	destination := uint32(16)
	if s.query.Destination.Is6() {
		source = 8
		destination = 24
	}
	var address []byte
	switch e.Uint32(unix.NFTA_PAYLOAD_OFFSET) {
	case source:
		address = s.query.Source.AsSlice()
	case destination:
		address = s.query.Destination.AsSlice()
	}
	n := int(e.Uint32(unix.NFTA_PAYLOAD_LEN))
	if n > len(address) {
		return nil
	}
	return address[:n]
}

// masked returns the bits of an address that a mask leaves, nil if it leaves none.
func masked(address, mask []byte) []byte {
	if len(mask) != len(address) || bytes.Count(mask, []byte{0}) == len(mask) {
		return nil
	}
	result := make([]byte, len(mask))
	for i := range mask {
		result[i] = address[i] & mask[i]
	}
	return result
}
