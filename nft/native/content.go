package native

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/nfnetlink"
)

// A content is how the elements of a set differ from the wanted ones.
type content struct {
	diffs []string // the first few
}

// fewDiffs is how many differences between elements are described.
const fewDiffs = 10

func (c *content) add(format string, args ...any) {
	c.diffs = append(c.diffs, fmt.Sprintf(format, args...))
}

// compare reads the elements of a set and returns how they differ from the wanted ones. Those
// that rules add are not compared.
func compare(c *nfnetlink.Conn, s nfnetlink.Set, w nft.Set) ([]string, error) {
	out := &content{}
	if w.Learned {
		return nil, nil
	}
	conditional, err := out.read(c, s, w)
	if conditional > 0 {
		out.add("set %s: %d elements have a limit, a timeout or another condition", s.Name, conditional)
	}
	return out.diffs, err
}

// read adds the differences, and counts the elements that do more than match.
func (c *content) read(conn *nfnetlink.Conn, s nfnetlink.Set, w nft.Set) (conditional int, err error) {
	most := w.Len() + slack
	if w.Mappings == nil {
		held, err := conn.Contents(s, most)
		if held.More {
			c.add("set %s has more than %d CIDRs instead of %d", s.Name, most, w.Len())
		} else {
			c.comparePrefixes(s.Name, w.Prefixes, held.Ranges)
		}
		return held.Conditional, err
	}
	elements, more, err := conn.Elements(s.Family, s.Table, s.Name, most)
	if more {
		c.add("set %s has more than %d elements", s.Name, most)
		return 0, err
	}
	return c.compareMap(s.Name, w.Mappings, elements), err
}

func (c *content) comparePrefixes(name string, want []netip.Prefix, held []iprange.Range) {
	i := 0
	for i < min(len(want), len(held)) && held[i] == iprange.Of(want[i]) {
		i++
	}
	for j := i; i < len(want) || j < len(held); {
		switch {
		case len(c.diffs) == fewDiffs:
			c.add("set %s has more differences: %d CIDRs instead of %d", name, len(held), len(want))
			return
		case j == len(held) || i < len(want) && want[i].Addr().Less(held[j].From):
			c.add("set %s lacks %s", name, want[i])
			i++
		case i == len(want) || held[j].From.Less(want[i].Addr()):
			c.add("set %s contains %s, which is not in the config", name, held[j])
			j++
		default:
			if held[j] != iprange.Of(want[i]) {
				c.add("set %s contains %s instead of %s", name, held[j], want[i])
			}
			i++
			j++
		}
	}
}

// compareMap compares a map, and counts the elements that do more than map.
func (c *content) compareMap(name string, want []nfnetlink.Mapping, elements []nfnetlink.Element) (conditional int) {
	held := make(map[netip.Addr]nfnetlink.Mapping, len(elements))
	for _, e := range elements {
		m := nfnetlink.Mapping{Chain: e.Chain}
		var isKey, isValue bool
		m.Key, isKey = netip.AddrFromSlice(e.Key)
		if m.Value, isValue = netip.AddrFromSlice(e.Value); e.Code == unix.NFT_JUMP {
			isValue = true
		}
		if e.Conditional || !isKey || !isValue {
			conditional++
			continue
		}
		held[m.Key] = m
	}
	for _, w := range want {
		switch value, ok := held[w.Key]; {
		case !ok:
			c.add("map %s lacks %s", name, w)
		case value != w:
			c.add("map %s has %s instead of %s", name, value, w.Data())
		}
		delete(held, w.Key)
	}
	for _, key := range slices.SortedFunc(maps.Keys(held), netip.Addr.Compare) {
		c.add("map %s has %s, which is not in the config", name, held[key])
	}
	if more := len(c.diffs) - fewDiffs; more > 0 {
		c.diffs = append(c.diffs[:fewDiffs], fmt.Sprintf("map %s: %d more elements are wrong", name, more))
	}
	return conditional
}
