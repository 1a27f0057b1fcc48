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
	limit := w.Len() + slack
	var conditional int
	var exceeded bool
	switch {
	case w.Learned:
		return nil, nil
	case w.Mappings == nil:
		bounds := make([]nfnetlink.Bound, 0, 2*w.Len()+1)
		err = c.EachElement(s.Family, s.Table, s.Name, func(e nfnetlink.Element) error {
			addr, _ := netip.AddrFromSlice(e.Key) // the catch-all element * has none
			if !e.End || !addr.IsUnspecified() {  // nft adds an extra bound before the first interval
				bounds = append(bounds, nfnetlink.Bound{Addr: addr, End: e.End})
			}
			if e.Conditional {
				conditional++
			}
			exceeded = len(bounds) > 2*limit
			if exceeded {
				return nfnetlink.ErrEnough
			}
			return nil
		})
		diffs = differences(s.Name, w.Prefixes, nfnetlink.Ranges(bounds), func(p netip.Prefix, r nfnetlink.Range) int {
			return cmp.Or(p.Addr().Compare(r.First), nfnetlink.PrefixRange(p).Last.Compare(r.Last))
		})
	default:
		var elements []nfnetlink.Element
		elements, exceeded, err = c.Elements(s.Family, s.Table, s.Name, limit)
		order := func(a, b nfnetlink.Mapping) int {
			return cmp.Or(a.Key.Compare(b.Key), a.Value.Compare(b.Value), strings.Compare(a.Chain, b.Chain))
		}
		var existing []nfnetlink.Mapping
		for _, e := range elements {
			key, isKey := netip.AddrFromSlice(e.Key)
			value, isValue := netip.AddrFromSlice(e.Value)
			if e.Conditional || !isKey || !isValue && e.Code != unix.NFT_JUMP {
				conditional++
			} else {
				existing = append(existing, nfnetlink.Mapping{Key: key, Value: value, Chain: e.Chain})
			}
		}
		slices.SortFunc(existing, order)
		existing = slices.Compact(existing) // while a map grows, the kernel lists some twice
		diffs = differences(s.Name, w.Mappings, existing, order)
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
