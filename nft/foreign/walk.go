package foreign

import (
	"iter"
	"slices"
	"sort"
	"strings"

	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/rule"
)

type ruleID struct {
	id
	handle uint64
}

// A walker follows all packets at once through the chains. A condition that it does
// not understand may be true or false.
type walker struct {
	Snapshot
	chains       map[id]*Chain
	unreferenced map[id][]*Chain // by table: chains that no rule jumps to
	// dst is the destinations that matter: sorted, none overlaps another.
	dst []iprange.Range
	// visit is called for each rule with an effect that packets to them reach.
	visit func(c *Chain, r nfnetlink.Rule, p path, a action)

	base      nfnetlink.Chain
	anything  packets     // that enter the base chain
	mapped    map[id]bool // tables of whose maps all other paths were followed
	visits    map[id]int
	finished  map[id]bool // chains that were visited for all other paths
	steps     int         // the number of rules visited
	work      int         // the number of ranges compared
	examined  map[id]int  // by chain: how many of its rules
	conflicts []Conflict
	found     map[ruleID]int // in conflicts
	full      bool           // the search ends because it has found too much
}

func newWalker(s Snapshot) *walker {
	w := &walker{Snapshot: s, chains: s.byID(), unreferenced: map[id][]*Chain{}, found: map[ruleID]int{}, examined: map[id]int{}}
	named := make(map[id]bool, len(s.Chains))
	for _, c := range s.Chains {
		for _, r := range c.Rules {
			if chain, ok := rule.Target(r); ok {
				named[id{c.Family, c.Table, chain}] = true
			}
		}
	}
	for i := range s.Chains {
		if c := &s.Chains[i]; c.Hook == nil && !named[chainID(c.Chain)] {
			table := id{c.Family, c.Table, ""}
			w.unreferenced[table] = append(w.unreferenced[table], c)
		}
	}
	w.restart()
	return w
}

// restart prepares another search, which adds to what was found.
func (w *walker) restart() {
	w.visits, w.finished, w.mapped, w.steps, w.work = map[id]int{}, map[id]bool{}, map[id]bool{}, 0, 0
}

// rest returns the number of rules that were not examined because the search has
// found too much.
func (w *walker) rest() (n int) {
	if w.full {
		for _, c := range w.Chains {
			n += len(c.Rules) - w.examined[chainID(c.Chain)]
		}
	}
	return n
}

// walkAll follows all packets from all base chains but ours.
func (w *walker) walkAll() {
	for i := range w.Chains {
		if c := &w.Chains[i]; c.Hook != nil && !c.Own {
			w.begin(c, allPackets(c.Family))
		}
	}
}

func (w *walker) begin(base *Chain, p packets) {
	w.base, w.anything = base.Chain, p
	w.walk(base, path{packets: p})
}

// A path is what is known about the packets that reach a rule.
type path struct {
	packets
	marks []bits
	from  []string         // the source, as text
	words []string         // the other conditions, as text
	via   []nfnetlink.Rule // the jumps
}

func (p path) narrow(m match) path {
	p.packets = p.in(m.src, m.dst)
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

// Limits that real rulesets do not approach. Beyond them less is ruled out and
// more is reported.
const (
	maxDepth  = 16      // the kernel's NFT_JUMP_STACK_SIZE
	maxVisits = 16      // of one chain, from different rules
	maxSteps  = 100_000 // rules visited on all paths
	maxWork   = 500_000 // ranges compared
	maxBoxes  = 32      // of the packets that reach a rule
	maxWords  = 32      // conditions of a path that are kept as text
	maxSource = 1024    // bytes of the sources of a conflict, as text
	maxFound  = 5_000   // conflicts; with the last one, the search ends
	maxKept   = 50_000  // ranges of all rewrites together
)

// walk traverses a chain. It returns packets that certainly do not return from the
// chain.
func (w *walker) walk(c *Chain, p path) (taken packets) {
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
		p = path{packets: w.anything, via: p.via}
	}
	returned := false // packets that are still in p may have returned
	for i, r := range c.Rules {
		if len(p.packets) == 0 || w.full {
			break
		}
		w.examined[at] = max(w.examined[at], i+1)
		w.steps++
		m, a := w.parse(r)
		if m.never || !a.ends && !a.Source && !a.byMap && a.target == "" {
			continue
		}
		returned = w.spend(&p, &m) || returned
		q := p.narrow(m)
		if !w.reaches(q.packets) {
			continue
		}
		w.visit(c, r, q, a)
		gone, rest := q.packets, p.without(box{m.src, m.dst})
		if a.returns || a.Source && (m.dst != nil || len(rest) > 0) {
			gone = nil
		}
		if a.byMap || a.target != "" {
			gone = w.follow(c, r, q, a)
		}
		if !m.plain() {
			returned = returned || a.returns
			// If the rule checks only the mark, the remaining packets do not have it.
			if a.ends && len(m.marks) == 1 && !m.other && len(rest) == 0 {
				other := m.marks[0]
				other.not = !other.not
				p.marks = append(slices.Clip(p.marks), other)
			}
			continue
		}
		if len(p.via) > 0 && !returned && !w.spent() {
			w.work += taken.size()
			taken = taken.and(gone)
		}
		if !a.ends {
			w.work += len(gone) * p.size()
			rest = p.without(gone...)
		}
		if len(rest) > maxBoxes {
			returned = true
			continue
		}
		p.packets = rest
	}
	return taken
}

// follow walks the chains to which a rule leads: its target, or all to which a verdict
// map of the table may lead. It returns packets that certainly do not return.
func (w *walker) follow(c *Chain, r nfnetlink.Rule, q path, a action) packets {
	q.via = append(slices.Clip(q.via), r)
	if !a.byMap {
		return w.walk(w.chains[id{c.Family, c.Table, a.target}], q)
	}
	table := id{c.Family, c.Table, ""}
	if w.mapped[table] {
		return nil
	}
	chains := w.unreferenced[table]
	w.steps += len(chains)
	w.mapped[table] = w.steps > maxSteps // this time for all other paths
	for _, to := range chains {
		w.walk(to, q)
	}
	return nil
}

// spend counts the ranges that have to be compared for a rule. If there were too
// many, conditions with long lists of ranges count as unknown. It reports whether
// the path has packets again that have left it.
func (w *walker) spend(p *path, m *match) (again bool) {
	n := p.size()
	w.work += n + len(p.packets)*(len(m.src)+len(m.dst))
	if !w.spent() {
		return false
	}
	if len(m.src) > maxNamed {
		m.src, m.other = nil, true
	}
	if len(m.dst) > maxNamed {
		m.dst, m.other = nil, true
	}
	if n > maxNamed {
		p.packets = allPackets(w.base.Family)
	}
	return n > maxNamed
}

// spent reports whether too many ranges have been compared.
func (w *walker) spent() bool { return w.work > maxWork }

func (w *walker) reaches(p packets) bool {
	for _, b := range p {
		for range w.overlaps(b.dst) {
			return true
		}
	}
	return false
}

// overlaps returns the overlaps of ranges with those of w.dst, and the index of the
// latter.
func (w *walker) overlaps(dst []iprange.Range) iter.Seq2[int, iprange.Range] {
	return func(yield func(int, iprange.Range) bool) {
		for d, r := range dst {
			i := sort.Search(len(w.dst), func(i int) bool { return !w.dst[i].To.Less(r.From) })
			for ; i < len(w.dst) && !r.To.Less(w.dst[i].From); i++ {
				if !yield(i, iprange.Intersect(dst[d:d+1], w.dst[i:i+1])[0]) {
					return
				}
			}
		}
	}
}

// add completes a conflict and adds it to what was found.
func (w *walker) add(c *Chain, r nfnetlink.Rule, q path, conflict Conflict) {
	conflict.Place, conflict.Via = Place{r, w.base.Name, w.base.Hook.Priority}, q.via
	conflict.Source, conflict.Conditions = strings.Join(slices.Compact(q.from), ", "), slices.Compact(q.words)
	at := ruleID{chainID(c.Chain), r.Handle}
	if i, ok := w.found[at]; ok {
		w.conflicts[i].merge(conflict)
		return
	}
	w.found[at] = len(w.conflicts)
	w.conflicts = append(w.conflicts, conflict)
	w.full = len(w.conflicts) >= maxFound
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
func markedForIt(c *Chain, marks []bits) bool {
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
func needed(p packets) bool {
	return !slices.ContainsFunc(p, func(b box) bool {
		src := b.src[0]
		self := slices.Equal(b.src, b.dst) && src.From == src.To
		return len(b.src) > 1 || !self && !(src.From.IsLoopback() && src.To.IsLoopback())
	})
}
