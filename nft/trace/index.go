package trace

import (
	"iter"
	"net/netip"
	"slices"

	"nft-masq-agent/nft/rule"
)

// An index has the rules of a long chain by the one prefix with which they begin to compare an
// address: the others have no bearing on a packet with another address.
type index struct {
	by      map[end][]int
	lengths map[int]bool // of the prefixes
	rest    []int
}

// An end is a prefix of the source or the destination of a packet.
type end struct {
	netip.Prefix
	source bool
}

// indexed is how many rules a chain has that gets an index.
const indexed = 32

// meets returns the rules of a chain that have a bearing on the packet.
func (t *Tracer) meets(c *Chain) iter.Seq[int] {
	if len(c.Rules) < indexed || !t.packet.Src.IsValid() {
		return func(yield func(int) bool) {
			for i := range c.Rules {
				if !yield(i) {
					return
				}
			}
		}
	}
	if c.index == nil {
		c.index = &index{by: map[end][]int{}, lengths: map[int]bool{}}
		for i := range c.Rules {
			if at, ok := begins(t.statements(c, i)); ok {
				c.index.by[at], c.index.lengths[at.Bits()] = append(c.index.by[at], i), true
			} else {
				c.index.rest = append(c.index.rest, i)
			}
		}
	}
	var found []int
	for bits := range c.index.lengths {
		for source, a := range map[bool]netip.Addr{true: t.packet.Src, false: t.packet.Dst} {
			if p, err := a.Prefix(bits); err == nil {
				found = append(found, c.index.by[end{p, source}]...)
			}
		}
	}
	if len(found) == 0 {
		return slices.Values(c.index.rest)
	}
	found = append(found, c.index.rest...)
	slices.Sort(found)
	return slices.Values(found)
}

// begins returns the prefix that a rule compares before it does anything.
func begins(all []rule.Statement) (at end, ok bool) {
	for _, s := range all {
		if s.Field == "" {
			break
		}
		if r, is := s.Range(); is && s.Op == "==" && (isSource(s.Field) || isDestination(s.Field)) {
			if p, is := r.Prefix(); is {
				return end{p, isSource(s.Field)}, true
			}
		}
	}
	return end{}, false
}

// statements returns those of a rule.
func (t *Tracer) statements(c *Chain, i int) []rule.Statement {
	if all := c.statements[i]; all != nil {
		return all
	}
	all := slices.Collect(rule.Statements(c.Rules[i]))
	t.Visits += len(all)
	if t.decoded++; t.decoded < maxDecoded {
		c.statements[i] = all
	}
	return all
}
