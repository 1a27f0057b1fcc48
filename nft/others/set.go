package others

import (
	"bytes"
	"net/netip"

	"nft-masq-agent/nft/nfnetlink"
)

// A setID names a set, and the field of the packet that its elements are compared with.
type setID struct {
	family      nfnetlink.Family
	table, name string
	field       string
}

// contains reports whether a set has an element that names the address, at an offset of its key. Each set is
// searched once.
func (s *search) contains(id setID, offset uint32, l loaded) (bool, error) {
	if found, ok := s.known[id]; ok {
		return found, nil
	}
	found, err := s.search(id, offset, l)
	if nfnetlink.IsNotExist(err) { // it was deleted meanwhile
		err = nil
	}
	if err == nil {
		s.known[id] = found
	}
	return found, err
}

func (s *search) search(id setID, offset uint32, l loaded) (bool, error) {
	if address, ok := netip.AddrFromSlice(l.address); ok && offset == 0 && l.mask == nil {
		// The kernel looks it up, unless the key is a concatenation or the set is no set of addresses.
		found, _, err := s.sets.HasElement(id.family, id.table, id.name, address)
		if err == nil && !found {
			return false, nil
		}
	}
	if s.elements >= maxElements {
		s.found.UnreadSets++
		return false, nil
	}
	return s.read(id, offset, l)
}

// read reads the elements. An interval set has the bounds of each interval as elements, in any order: the address is
// in one if the nearest bound at or before it begins an interval.
func (s *search) read(id setID, offset uint32, l loaded) (found bool, err error) {
	start := int(offset)
	end := start + len(l.address)
	var lower, upper []byte // the nearest bounds
	intervals := false
	ends := false
	err = s.sets.EachElement(id.family, id.table, id.name, func(e nfnetlink.Element) error {
		s.elements++
		if s.elements > maxElements {
			s.found.UnreadSets++
			return nfnetlink.ErrEnough
		}
		if len(e.Key) < end {
			return nil
		}
		key := e.Key[start:end]
		intervals = intervals || e.End
		switch last := e.Last; {
		case len(last) >= end && l.isBetween(key, last[start:end]), last == nil && !e.End && l.equals(key):
			found = true
			return nfnetlink.ErrEnough
		case last != nil || len(e.Key) != len(l.address):
		case bytes.Compare(key, l.address) <= 0 && (lower == nil || bytes.Compare(key, lower) >= 0):
			ends = e.End && (lower == nil || !bytes.Equal(key, lower) || ends)
			lower = bytes.Clone(key)
		case bytes.Compare(key, l.address) > 0 && e.End && (upper == nil || bytes.Compare(key, upper) < 0):
			upper = bytes.Clone(key)
		}
		return nil
	})
	if err != nil || found || lower == nil || ends || !intervals {
		return found, err
	}
	everything := bytes.Count(lower, []byte{0}) == len(lower) && upper == nil
	return !everything, nil
}
