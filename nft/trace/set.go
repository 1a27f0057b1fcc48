package trace

import (
	"bytes"
	"slices"
	"sort"

	"nft-masq-agent/nft/nfnetlink"
)

// A set is the content of a set or a map.
type set struct {
	elements []element // sorted by from
	rest     *element  // the catch-all element *
	single   bool      // each has one key
}

// An element is for keys from one to another: each component, which is padded to four bytes
// if there are several.
type element struct {
	from, to []byte
	nfnetlink.Element
}

// newSet pairs the bounds of intervals: an element begins one, and that with End is the key
// after it. An interval without end reaches to the last key.
func newSet(all []nfnetlink.Element, interval bool) *set {
	slices.SortStableFunc(all, func(a, b nfnetlink.Element) int {
		if order := bytes.Compare(a.Key, b.Key); order != 0 || a.End == b.End {
			return order
		}
		if a.End {
			return -1
		}
		return 1
	})
	s := &set{single: !interval}
	for i, e := range all {
		switch {
		case e.End:
		case len(e.Key) == 0:
			s.rest = &element{Element: e}
		case !interval:
			s.elements = append(s.elements, element{e.Key, e.Key, e})
		case e.Last != nil:
			s.elements = append(s.elements, element{e.Key, e.Last, e})
		default:
			to := bytes.Repeat([]byte{0xff}, len(e.Key))
			if i+1 < len(all) {
				to = before(all[i+1].Key)
			}
			s.elements = append(s.elements, element{e.Key, to, e})
		}
	}
	return s
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

// chains returns those that a map of verdicts leads to.
func (s *set) chains() (all []string) {
	for _, e := range s.elements {
		if e.Chain != "" {
			all = append(all, e.Chain)
		}
	}
	if s.rest != nil && s.rest.Chain != "" {
		all = append(all, s.rest.Chain)
	}
	return all
}

// lookup returns the elements that a key may have, and whether it has one.
func (s *set) lookup(key []fact) (found []element, has Truth) {
	var sure []byte // the beginning of the key that is known
	for _, f := range key {
		n := f.whole()
		if sure = append(sure, f.value[:n]...); n < f.size || f.size == 0 {
			break
		}
		for len(key) > 1 && len(sure)%4 != 0 {
			sure = append(sure, 0)
		}
	}
	values := uint64(1) // how many the key can have, 0: many
	for _, f := range key {
		values = min(values*uint64(f.count()), 1<<32)
	}
	from, to := 0, len(s.elements)
	if s.single {
		from = sort.Search(to, func(i int) bool { return bytes.Compare(s.elements[i].from, sure) >= 0 })
		to = from + sort.Search(to-from, func(i int) bool { return !bytes.HasPrefix(s.elements[from+i].from, sure) })
	}
	possible := uint64(0)
	for _, e := range s.elements[from:to] {
		is := e.has(key)
		if is == No {
			continue
		}
		found = append(found, e)
		switch {
		case e.Limited:
			has = max(has, Maybe)
		case is == Yes:
			has = Yes
		default:
			possible++
			has = max(has, Maybe)
		}
	}
	if s.single && values > 0 && possible >= values {
		has = Yes // there is one for each value that it may have
	}
	if s.rest != nil && has != Yes {
		found, has = append(found, *s.rest), Yes
		if s.rest.Limited {
			has = Maybe
		}
	}
	return found, has
}

// has reports whether an element is for a key.
func (e element) has(key []fact) Truth {
	is, at := Yes, 0
	for _, f := range key {
		size := f.size
		if len(key) == 1 {
			size = len(e.from)
		}
		if size == 0 || at+size > len(e.from) || at+size > len(e.to) {
			return min(is, Maybe) // what comes after a component of unknown length is unknown
		}
		is = min(is, f.within(e.from[at:at+size], e.to[at:at+size]))
		at = (at + size + 3) &^ 3
	}
	return is
}
