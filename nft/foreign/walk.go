package foreign

import (
	"net/netip"
	"slices"
	"sort"
	"strings"

	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/nfnetlink"
)

// A path is what is known about the packets that reach a rule.
type path struct {
	src, dst []iprange.Range
	marks    []mark
	from     []string         // the source, as text
	words    []string         // the other conditions, as text
	via      []nfnetlink.Rule // the jumps
}

// begin prepares a search from a base chain.
func (w *walker) begin(base nfnetlink.Chain) {
	all := anywhere(base.Family)
	w.base, w.anything = base, path{src: all, dst: all}
	if w.sources != nil {
		w.anything.src = iprange.Intersect(all, w.sources)
	}
}

func (p path) narrow(m match) path {
	if m.src != nil {
		p.src = iprange.Intersect(p.src, m.src)
	}
	if m.dst != nil {
		p.dst = iprange.Intersect(p.dst, m.dst)
	}
	for _, f := range []nfnetlink.Family{nfnetlink.IPv4, nfnetlink.IPv6} {
		if only(f, p.src) != only(f, p.dst) {
			p.src, p.dst = iprange.Intersect(p.src, anywhere(f)), iprange.Intersect(p.dst, anywhere(f))
		}
	}
	p.marks = slices.Concat(p.marks, m.marks)
	p.from = firstWords(p.from, m.from)
	p.words = firstWords(p.words, m.words)
	return p
}

// firstWords returns the first of a path's conditions, as text.
func firstWords(of, more []string) []string {
	if len(of) > maxWords {
		return of
	}
	all := slices.Concat(of, more)
	if len(all) > maxWords {
		all = append(all[:maxWords:maxWords], "other conditions")
	}
	return all
}

// A box is the packets from a set of addresses to another set.
type box struct{ src, dst []iprange.Range }

// A frame is the state of a walk through one chain. Each rule can take packets
// out of it.
type frame struct {
	path
	left  []iprange.Range // destinations of packets that have left the chain; not yet subtracted from dst
	boxes []box           // packets that have left the chain, by source and destination
	empty bool
	// partial means that packets have left that are not in left: a rule that
	// takes the rest does not take all.
	partial bool
}

// Limits that real rulesets do not approach. Beyond them less is ruled out and
// more is reported.
const (
	maxDepth  = 16      // the kernel's NFT_JUMP_STACK_SIZE
	maxVisits = 16      // of one chain, from different rules
	maxSteps  = 100_000 // rules visited on all paths
	maxWork   = 500_000 // ranges compared
	maxBoxes  = 64
	maxRanges = 4096
	maxWords  = 32     // conditions of a path that are kept as text
	maxSource = 1024   // bytes of the sources of a conflict, as text
	maxFound  = 5_000  // conflicts; with the last one, the search ends
	maxKept   = 50_000 // ranges of all rewrites together
)

// walk traverses a chain and reports what it finds. It returns destinations to
// which no packet returns from the chain.
func (w *walker) walk(c *Chain, p path) (taken []iprange.Range) {
	if c == nil || c.Own || len(p.via) > maxDepth {
		return nil
	}
	at := chainID(c.Chain)
	w.visits[at]++
	switch {
	case w.finished[at]:
		return nil
	case w.visits[at] == maxVisits, w.steps > maxSteps: // one last time, for all other paths
		w.finished[at] = true
		via := p.via
		p = w.anything
		p.via = via
	}
	f := &frame{path: p}
	for i, r := range c.Rules {
		if w.full() {
			break
		}
		w.examined[at] = max(w.examined[at], i+1)
		w.steps++
		if len(f.via) == 0 && w.past(r) {
			break
		}
		m, a := w.parse(r)
		if m.never {
			continue
		}
		w.spend(f, &m)
		if covers(m.src, f.src) {
			m.src = nil
		}
		if a.target != "" || a.byMap || a.rewrites {
			if w.settle(f); f.empty {
				break
			}
			if t := w.enter(f, c, r, m, a); !f.partial {
				taken = append(taken, t...)
			}
		}
		if w.kind == Exempts && a.leaves(len(f.via) == 0) {
			if w.settle(f); f.empty {
				break
			}
			if q := f.narrow(m); len(q.src) > 0 && w.reaches(q.dst) {
				w.outcome(c, r, q, a, f.boxes)
			}
		}
		if a.ends || a.rewrites && m.always() {
			if !a.returns && m.src == nil && m.plain() && !f.partial {
				taken = append(taken, iprange.Subtract(f.narrow(m).dst, iprange.Normal(f.left))...)
			}
			f.leave(m)
		}
		if f.empty {
			break
		}
	}
	return taken
}

func (m match) always() bool { return m.plain() && m.src == nil && m.dst == nil }

// enter follows a rule to its target, or reports the rule.
func (w *walker) enter(f *frame, c *Chain, r nfnetlink.Rule, m match, a action) (taken []iprange.Range) {
	q := f.narrow(m)
	if len(q.src) == 0 || !w.reaches(q.dst) {
		return nil
	}
	switch {
	case a.rewrites && w.kind == Masquerades:
		w.report(c, r, q, f.boxes)
	case a.fixed && w.kind == Translates:
		w.outcome(c, r, q, a, f.boxes)
	}
	if a.rewrites {
		return nil
	}
	q.via = append(slices.Clip(q.via), r)
	if a.byMap {
		w.walkUnreferenced(id{c.Family, c.Table, ""}, q)
		return nil
	}
	taken = w.walk(w.chains[id{c.Family, c.Table, a.target}], q)
	if !m.plain() || m.src != nil {
		return nil
	}
	f.left = append(f.left, taken...)
	return taken
}

// walkUnreferenced follows a verdict map of a table to all chains to which it may
// lead.
func (w *walker) walkUnreferenced(table id, q path) {
	if w.mapped[table] {
		return
	}
	chains := w.unreferenced[table]
	w.steps += len(chains)
	w.mapped[table] = w.steps > maxSteps // this time for all other paths
	for _, to := range chains {
		w.walk(to, q)
	}
}

// leave removes the matching packets from the chain.
func (f *frame) leave(m match) {
	f.partial = f.partial || m.src != nil || !m.plain()
	switch {
	case m.always():
		f.empty = true
	case !m.plain():
		// If the rule checks only the mark, the remaining packets do not have it.
		if len(m.marks) == 1 && !m.other && m.src == nil && m.dst == nil {
			rest := m.marks[0]
			rest.not = !rest.not
			f.marks = append(slices.Clip(f.marks), rest)
		}
	case m.src == nil:
		f.left = append(f.left, m.dst...)
	case m.dst == nil:
		f.src = iprange.Subtract(f.src, m.src)
		f.empty = len(f.src) == 0
	case len(f.boxes) < maxBoxes:
		f.boxes = append(f.boxes, box{m.src, m.dst})
	}
}

// spend counts the ranges that have to be compared for a rule. If there were too
// many, conditions with long lists of ranges count as unknown.
func (w *walker) spend(f *frame, m *match) {
	w.work += len(f.src) + len(f.dst) + len(f.left) + len(m.src) + len(m.dst)
	if !w.spent() {
		return
	}
	if len(m.src) > maxNamed {
		m.src, m.other = nil, true
	}
	if len(m.dst) > maxNamed {
		m.dst, m.other = nil, true
	}
	if len(f.src) > maxNamed {
		f.src = anywhere(w.base.Family)
	}
	if len(f.dst)+len(f.left) > maxNamed {
		f.dst, f.left, f.partial = anywhere(w.base.Family), nil, true
	}
	f.boxes = nil
}

// spent reports whether too many ranges have been compared.
func (w *walker) spent() bool { return w.work > maxWork }

// settle subtracts the destinations in left from dst.
func (w *walker) settle(f *frame) {
	if len(f.left) == 0 || len(f.dst) > maxRanges && len(f.left) < len(f.dst)/8 {
		return
	}
	f.dst = iprange.Subtract(f.dst, iprange.Normal(f.left))
	f.left = nil
	f.empty = !w.reaches(f.dst)
}

func (w *walker) reaches(dst []iprange.Range) bool { return len(w.overlap(dst, 1)) > 0 }

// overlap returns the first ranges of exempt that overlap with dst, cut to the
// overlap.
func (w *walker) overlap(dst []iprange.Range, most int) (out []iprange.Range) {
	for i := range dst {
		for j := w.firstExempt(dst[i]); j < len(w.exempt) && !dst[i].To.Less(w.exempt[j].From); j++ {
			if out = append(out, iprange.Intersect(dst[i:i+1], w.exempt[j:j+1])...); len(out) == most {
				return out
			}
		}
	}
	return out
}

// firstExempt returns the index of the first exempt range that does not end before r.
func (w *walker) firstExempt(r iprange.Range) int {
	return sort.Search(len(w.exempt), func(i int) bool { return !w.exempt[i].To.Less(r.From) })
}

// hits returns the first exempt prefixes that overlap with dst.
func (w *walker) hits(dst []iprange.Range, limit int) (prefixes []netip.Prefix, more bool) {
	for _, r := range dst {
		for i := w.firstExempt(r); i < len(w.exempt) && !r.To.Less(w.exempt[i].From); i++ {
			switch n := len(prefixes); {
			case n > 0 && prefixes[n-1] == w.prefixes[i]:
			case n == limit:
				return prefixes, true
			default:
				prefixes = append(prefixes, w.prefixes[i])
			}
		}
	}
	return prefixes, false
}

// report adds a rule that rewrites source addresses to the conflicts.
func (w *walker) report(c *Chain, r nfnetlink.Rule, q path, left []box) {
	q.dst = w.without(q, left)
	if w.rewrites != nil {
		w.keep(Rewrite{Src: q.src, Dst: q.dst, Marked: markedForIt(c, q.marks)})
		return
	}
	exempt, more := w.hits(q.dst, maxNamed)
	if len(exempt) == 0 || markedForIt(c, q.marks) || needed(q) || !more && q.allLeft(exempt, left) {
		return
	}
	conflict := Conflict{Exempt: exempt, More: more}
	if len(q.src) <= maxNamed {
		conflict.src = q.src
	}
	w.add(c, r, q, conflict)
}

// without returns the destinations of a path without those to which no packet of
// its sources is left.
func (w *walker) without(p path, left []box) []iprange.Range {
	dst := p.dst
	for _, b := range left {
		w.work += len(b.src) + len(b.dst) + len(p.src) + len(dst)
		if covers(b.src, p.src) {
			dst = iprange.Subtract(dst, b.dst)
		}
	}
	return dst
}

// full reports whether the search ends because it has found too much.
func (w *walker) full() bool {
	return len(w.conflicts) >= maxFound || w.rewrites != nil && len(*w.rewrites) >= maxFound
}

// add completes a conflict and adds it to what was found.
func (w *walker) add(c *Chain, r nfnetlink.Rule, q path, conflict Conflict) {
	conflict.Rule, conflict.Base, conflict.Via = r, w.base.Name, q.via
	conflict.Source, conflict.Conditions = strings.Join(slices.Compact(q.from), ", "), slices.Compact(q.words)
	if w.base.Hook != nil {
		conflict.Priority = w.base.Hook.Priority
	}
	at := ruleID{chainID(c.Chain), r.Handle}
	if i, ok := w.found[at]; ok {
		w.conflicts[i].merge(conflict)
		return
	}
	w.found[at] = len(w.conflicts)
	w.conflicts = append(w.conflicts, conflict)
}

const orOthers = " or others"

// merge adds a second path to the same rule.
func (c *Conflict) merge(o Conflict) {
	for _, p := range o.Exempt {
		if !slices.Contains(c.Exempt, p) {
			c.Exempt = append(c.Exempt, p)
		}
	}
	for _, d := range o.Destinations {
		if !slices.Contains(c.Destinations, d) && len(c.Destinations) > 0 {
			c.Destinations = append(c.Destinations, d)
		}
	}
	if len(o.Destinations) == 0 {
		c.Destinations = nil
	}
	c.src = nil
	c.More = c.More || o.More
	switch {
	case c.Source == "" || o.Source == "":
		c.Source = ""
	case c.Source != o.Source && len(c.Source) < maxSource:
		c.Source += " or " + o.Source
	case c.Source != o.Source && !strings.HasSuffix(c.Source, orOthers):
		c.Source += orOthers
	}
	c.Conditions = slices.DeleteFunc(slices.Clone(c.Conditions), func(s string) bool { return !slices.Contains(o.Conditions, s) })
}

// Bits of the packet mark with which these programs mark what they will
// masquerade: kube-proxy's default, and that of the CNI plugin portmap.
const (
	kubeProxyMark = 0x4000
	portmapMark   = 0x2000
)

// markedForIt reports whether a rule is for packets marked by the rule's own
// program. kube-proxy's bit is configurable, the names of its chains are not.
func markedForIt(c *Chain, marks []mark) bool {
	for _, m := range marks {
		bits, ok := m.set()
		if ok && (bits&^(kubeProxyMark|portmapMark) == 0 || c.Name == "KUBE-POSTROUTING" || c.Table == "kube-proxy") {
			return true
		}
	}
	return false
}

// needed reports whether the connections need the translation to work: those from
// an address to itself, or from a loopback address out of the node.
func needed(q path) bool {
	src := q.src[0]
	return len(q.src) == 1 && (slices.Equal(q.src, q.dst) && src.From == src.To || src.From.IsLoopback() && src.To.IsLoopback())
}

// allLeft reports whether all packets to the exempt prefixes have left, possibly
// at different rules for different sources.
func (p path) allLeft(exempt []netip.Prefix, left []box) bool {
	var to, from []iprange.Range
	for _, e := range exempt {
		to = append(to, iprange.Of(e))
	}
	to = iprange.Intersect(p.dst, to)
	for _, b := range left {
		if covers(b.dst, to) {
			from = append(from, b.src...)
		}
	}
	return len(from) > 0 && covers(iprange.Normal(from), p.src)
}
