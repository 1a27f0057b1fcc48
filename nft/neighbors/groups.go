package neighbors

import (
	"net/netip"
	"slices"

	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/trace"
)

// alike returns a source and a destination that the rules treat like the given ones.
func alike(e trace.Ends, src, dst netip.Addr) (netip.Addr, netip.Addr) {
	from, to := first(e.Src, src), first(e.Dst, dst)
	if e.Exact || src == dst || from == to {
		return src, dst
	}
	return from, to
}

// first returns the first of the addresses that are alike.
func first(ends []netip.Addr, a netip.Addr) netip.Addr {
	i, found := slices.BinarySearchFunc(ends, a, netip.Addr.Compare)
	if !found { // the first address of each family is an end
		i--
	}
	return ends[i]
}

// destinations returns what returns one address of each group that the rules for a source treat
// alike, as far as it has any in a set. Of groups that are only for this source, and of the others,
// there are at most so many; those beyond are joined with others, and counted.
func destinations(e trace.Ends, of []iprange.Range, most int) func(src netip.Addr) (all []netip.Addr, joined int) {
	var common, thin []netip.Addr
	for _, r := range of {
		common = append(common, r.From) // for the ends before it
	}
	for _, a := range e.Common {
		if iprange.Contains(of, a) {
			common = append(common, a)
		}
	}
	slices.SortFunc(common, netip.Addr.Compare)
	common = slices.Compact(common)
	for every := (len(common) + most - 1) / most; len(common) > len(thin)*every; {
		thin = append(thin, common[len(thin)*every])
	}
	return func(src netip.Addr) ([]netip.Addr, int) {
		own := e.Of(src)
		n := min(len(own), most)
		return samples(trace.Sorted(slices.Concat(thin, own[:n])), of, nil, 2), len(common) - len(thin) + len(own) - n
	}
}

// samples takes one address of each group, as far as it has any in a set: a preferred one, or that
// at a place, so that sources and destinations differ. The first one, at 0, is that of a network.
func samples(ends []netip.Addr, of []iprange.Range, prefer []netip.Addr, place int) (all []netip.Addr) {
	preferred := map[netip.Addr]netip.Addr{} // by the first of their groups
	for _, a := range prefer {
		if iprange.Contains(of, a) {
			preferred[first(ends, a)] = a
		}
	}
	for i, end := range ends {
		part, _ := slices.BinarySearchFunc(of, end, func(r iprange.Range, a netip.Addr) int { return r.To.Compare(a) })
		if part == len(of) {
			break
		}
		in := func(a netip.Addr) bool { return i+1 == len(ends) || a.Less(ends[i+1]) }
		a := end
		if a.Less(of[part].From) {
			a = of[part].From
		}
		if !in(a) {
			continue
		}
		for n := 0; n < place && a != of[part].To && in(a.Next()); n++ {
			a = a.Next()
		}
		if one, ok := preferred[end]; ok {
			a = one
		}
		all = append(all, a)
	}
	return all
}
