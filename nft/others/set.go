package others

import (
	"strings"

	"nft-masq-agent/nft/nfnetlink"
)

// A lookup of an address in a set. The keys of the set have it, or a part of it, at a position.
type lookup struct {
	family      nfnetlink.Family
	table, name string
	position    int
	address     string // bytes
}

// contains reports whether a set has an element or an interval with the address. Each set is read once.
func (s *search) contains(l lookup) (bool, error) {
	if found, known := s.known[l]; known || s.elements >= maxElements || l.position < 0 {
		return found, nil
	}
	found, err := s.read(l)
	if nfnetlink.IsNotExist(err) { // it was deleted meanwhile
		err = nil
	}
	s.known[l] = found
	return found, err
}

// read reads the elements of a set. An interval set has the bounds of each interval as elements, in any order: the
// address is in one if the nearest bound at or before it begins an interval. The interval of all addresses, which names
// none, is alone and has no end.
func (s *search) read(l lookup) (found bool, err error) {
	lowest := strings.Repeat("\x00", len(l.address))
	highest := strings.Repeat("\xff", len(l.address))
	end := l.position + len(l.address)
	intervals := false
	nearest := ""
	begins := false
	err = s.sets.EachElement(l.family, l.table, l.name, func(e nfnetlink.Element) error {
		s.elements++
		if s.elements > maxElements {
			return nfnetlink.ErrEnough
		}
		if len(e.Key) < end {
			return nil
		}
		key := string(e.Key[l.position:end])
		intervals = intervals || e.End
		if len(e.Last) >= end {
			last := string(e.Last[l.position:end])
			everything := key == lowest && last == highest
			found = found || !everything && key <= l.address && l.address <= last
			return nil
		}
		found = found || key == l.address && !e.End
		if key <= l.address && (key > nearest || key == nearest && !e.End) {
			nearest = key
			begins = !e.End
		}
		return nil
	})
	return found || intervals && begins, err
}
