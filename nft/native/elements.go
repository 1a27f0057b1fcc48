package native

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
)

// fewDiffs is how many differences between elements are described.
const fewDiffs = 10

// compare reads the elements of a set and returns how they differ from the wanted ones. Those
// that rules add are not compared.
func compare(c *nfnetlink.Conn, s nfnetlink.Set, w nft.Set) (diffs []string, err error) {
	if w.Learned {
		return nil, nil
	}
	limit := w.Len() + slack
	bounds := make([]nfnetlink.Bound, 0, 2*w.Len()+1)
	var mappings []nfnetlink.Mapping
	conditional := 0
	exceeded := false
	err = c.EachElement(s.Family, s.Table, s.Name, func(e nfnetlink.Element) error {
		key, isKey := netip.AddrFromSlice(e.Key) // the catch-all element * has none
		value, isValue := netip.AddrFromSlice(e.Value)
		switch {
		case e.Conditional, w.Mappings != nil && (!isKey || !isValue && e.Code != unix.NFT_JUMP):
			conditional++
		case w.Mappings != nil:
			mappings = append(mappings, nfnetlink.Mapping{Key: key, Value: value, Chain: e.Chain})
		case !e.End || !key.IsUnspecified(): // nft adds an extra bound before the first interval
			bounds = append(bounds, nfnetlink.Bound{Addr: key, End: e.End})
		}
		exceeded = len(bounds) > 2*limit || len(mappings) > limit
		if exceeded {
			return nfnetlink.ErrEnough
		}
		return nil
	})
	if w.Mappings == nil {
		diffs = differences(s.Name, w.Prefixes, nfnetlink.Ranges(bounds), func(p netip.Prefix, r nfnetlink.Range) int {
			return cmp.Or(p.Addr().Compare(r.First), nfnetlink.PrefixRange(p).Last.Compare(r.Last))
		})
	} else {
		order := func(a, b nfnetlink.Mapping) int {
			return cmp.Or(a.Key.Compare(b.Key), a.Value.Compare(b.Value), strings.Compare(a.Chain, b.Chain))
		}
		slices.SortFunc(mappings, order)
		mappings = slices.Compact(mappings) // while a map grows, the kernel lists some twice
		diffs = differences(s.Name, w.Mappings, mappings, order)
	}
	if exceeded {
		diffs = []string{fmt.Sprintf("set %s has more than %d elements instead of %d", s.Name, limit, w.Len())}
	}
	if conditional > 0 {
		diffs = append(diffs, fmt.Sprintf("set %s: %d elements have a limit, a timeout or another condition", s.Name,
			conditional))
	}
	return diffs, err
}

// differences describes the first few differences between two lists, which are in order.
func differences[W, H fmt.Stringer](set string, want []W, existing []H, order func(W, H) int) (diffs []string) {
	for i, j := 0, 0; i < len(want) || j < len(existing); {
		o := -1
		switch {
		case i == len(want):
			o = 1
		case j < len(existing):
			o = order(want[i], existing[j])
		}
		switch {
		case o == 0:
			i++
			j++
		case len(diffs) == fewDiffs:
			return append(diffs, fmt.Sprintf("set %s has more differences: %d elements instead of %d", set, len(existing),
				len(want)))
		case o < 0:
			diffs = append(diffs, fmt.Sprintf("set %s lacks %s", set, want[i]))
			i++
		default:
			diffs = append(diffs, fmt.Sprintf("set %s contains %s, which is not in the config", set, existing[j]))
			j++
		}
	}
	return diffs
}
