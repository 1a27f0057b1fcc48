package trace

import (
	"bytes"
	"slices"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfnetlink"
)

// A set is a set or a map.
type set struct {
	nfnetlink.Set
	read, large bool      // whether it was read, or is too large for that
	elements    []element // sorted by from
	rest        []element // the catch-all element *, if there is one
}

// interval reports whether its elements have more than one key.
func (s *set) interval() bool { return s.Flags&unix.NFT_SET_INTERVAL != 0 }

// An element is for keys from one to another, of the same length: each component, which is padded to
// four bytes if there are several.
type element struct {
	from, to []byte
	nfnetlink.Element
}

// pair takes the elements that were read. Of the bounds of intervals an element begins one, and that with
// End is the key after it. An interval without end reaches to the last key.
func (s *set) pair(all []nfnetlink.Element) {
	slices.SortStableFunc(all, func(a, b nfnetlink.Element) int {
		if order := bytes.Compare(a.Key, b.Key); order != 0 || a.End == b.End {
			return order
		}
		if a.End {
			return -1
		}
		return 1
	})
	s.read = true
	for i, e := range all {
		switch {
		case e.End:
		case len(e.Key) == 0:
			s.rest = []element{{Element: e}}
		default:
			to := e.Last
			switch {
			case !s.interval():
				to = e.Key
			case to != nil:
			case i+1 < len(all):
				to = before(all[i+1].Key)
			default:
				to = bytes.Repeat([]byte{0xff}, len(e.Key))
			}
			s.elements = append(s.elements, element{e.Key, to, e})
		}
	}
}

// before returns the key before another.
func before(key []byte) []byte {
	key = bytes.Clone(key)
	for i := len(key) - 1; i >= 0; i-- {
		if key[i]--; key[i] != 0xff {
			break
		}
	}
	return key
}

// lookup returns the elements that a key may have, and whether it has one.
func (s *set) lookup(key []fact) (found []element, has Truth) {
	first, sure := 0, []byte(nil)
	if !s.interval() && key[0].whole() {
		sure = key[0].value[:key[0].size]
		first, _ = slices.BinarySearchFunc(s.elements, sure, func(e element, key []byte) int {
			return bytes.Compare(e.from, key)
		})
	}
	certain := uint32(0) // elements that a number has if it has their value
	for _, e := range s.elements[first:] {
		if !bytes.HasPrefix(e.from, sure) {
			break
		}
		is := e.has(key)
		if is == No {
			continue
		}
		if !e.Limited {
			certain++
		}
		found, has = append(found, e), max(has, is)
	}
	if !s.interval() && len(key) == 1 && certain > 0 && certain == key[0].values {
		has = Yes // there is one for each value that it may have
	}
	if has == Yes || len(s.rest) == 0 {
		return found, has
	}
	return append(found, s.rest...), s.rest[0].has(nil)
}

// has reports whether an element is for a key, also one that is only up to a limit or a quota.
func (e element) has(key []fact) Truth {
	is, at := Yes, 0
	if e.Limited {
		is = Maybe
	}
	for _, f := range key {
		size := f.size
		if len(key) == 1 {
			size = len(e.from)
		}
		if size == 0 || at+size > len(e.from) {
			return min(is, Maybe) // what comes after a component of unknown length is unknown
		}
		is = min(is, f.within(e.from[at:at+size], e.to[at:at+size]))
		at = (at + size + 3) &^ 3
	}
	return is
}
