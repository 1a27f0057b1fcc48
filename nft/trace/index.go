package trace

import (
	"iter"
	"net/netip"
	"slices"
	"strings"

	"nft-masq-agent/nft/rule"
)

// An index has the rules of a long chain by the one address that they begin by comparing: the
// others have no bearing on a packet with another address.
type index struct {
	by   map[end][]int
	rest []int
}

// An end is an address, as the source or the destination of a packet.
type end struct {
	netip.Addr
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
		c.index = &index{by: map[end][]int{}}
		for i, r := range c.Rules {
			if at, ok := begins(rule.Statements(r)); ok {
				c.index.by[at] = append(c.index.by[at], i)
			} else {
				c.index.rest = append(c.index.rest, i)
			}
		}
	}
	to, from := c.index.by[end{t.packet.Dst, false}], c.index.by[end{t.packet.Src, true}]
	if len(to)+len(from) == 0 {
		return slices.Values(c.index.rest)
	}
	all := slices.Concat(c.index.rest, to, from)
	slices.Sort(all)
	return slices.Values(all)
}

// begins returns the one address that a rule compares before it does anything.
func begins(all iter.Seq[rule.Statement]) (at end, ok bool) {
	for s := range all {
		if s.Field == "" {
			break
		}
		source := strings.HasSuffix(s.Field, " saddr")
		if r, is := s.Range(); is && s.Op == "==" && r.From == r.To && (source || isDestination(s.Field)) {
			return end{r.From, source}, true
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
	if t.decoded++; t.decoded < maxDecoded {
		c.statements[i] = all
	}
	return all
}
