package foreign

import (
	"iter"
	"slices"
	"sort"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/facts"
	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/older"
	"nft-masq-agent/nft/rule"
)

// A walker follows packets through the chains: all at once, or those from one address
// to another. Their addresses are sets, which a rule divides into the packets that match
// it and the others. A condition on anything that is not known of them may be true or
// false.
type walker struct {
	Snapshot
	facts  Packet          // what is known of the packets besides their addresses
	conn   *nfnetlink.Conn // to look up single addresses in sets; nil: sets were read
	chains map[id]*Chain
	// dst is the destinations that matter: sorted, none overlaps another.
	dst []iprange.Range
	// visit is called for each step that may happen to packets to them.
	visit func(step)

	base     nfnetlink.Chain
	entering packets // the base chain
	mark     marking
	doubt    bool        // some of the packets may have left the way before
	mapped   map[id]bool // tables of whose maps all other paths were followed
	finished map[id]bool // chains that were visited for all other paths
	work     int         // the number of ranges compared
	examined map[id]int  // by chain: how many of its rules
	full     bool        // the search ends because it has found too much
}

// A path is packets, and what is known of their way to a rule.
type path struct {
	packets
	conditions []condition
	direct     bool             // a condition names their destination
	via        []nfnetlink.Rule // the jumps
}

// A condition on the way.
type condition struct {
	text string
	from string // the source, if it is about that
	of   field
	open bool // some of the packets may not satisfy it
}

// A field is what a condition is about.
type field int

const (
	other field = iota
	source
	destination
	device
)

// open returns the conditions that some of the packets may not satisfy, as text.
func (p path) open() (all []string) {
	for _, c := range p.conditions {
		if c.open {
			all = append(all, c.text)
		}
	}
	return all
}

// A step is what a rule does with packets that may reach it.
type step struct {
	path
	chain *Chain
	rule  nfnetlink.Rule
	action
	// certain means that it happens to all of the packets that entered the base chain.
	certain bool
}

// An action is what a rule does with a packet that it matches.
type action struct {
	rule.NAT
	verdict  int32  // NFT_CONTINUE if there is none
	target   string // the chain it goes to
	writes   []rule.Write
	untracks bool

	byMap *rule.Statement // the verdict comes from a map
}

// ends reports whether the packet does not go on in this chain.
func (a action) ends() bool { return a.verdict != unix.NFT_CONTINUE && a.verdict != unix.NFT_JUMP }

// leaves reports whether the packet does not reach the rules after it in the base chain.
func (a action) leaves(inBase bool) bool {
	return a.verdict == accept || inBase && a.verdict == unix.NFT_RETURN
}

const (
	drop   = 0 // NF_DROP
	accept = 1 // NF_ACCEPT
)

// does reports whether there is anything to say about an action.
func (a action) does() bool {
	return a.Source || a.Destination || a.verdict != unix.NFT_CONTINUE || a.byMap != nil ||
		len(a.writes) > 0 || a.untracks
}

// Limits that real rulesets do not approach. Beyond them less is ruled out and
// more is reported.
const (
	maxDepth  = 16      // the kernel's NFT_JUMP_STACK_SIZE
	maxWork   = 500_000 // ranges compared on all paths
	ruleWork  = 5       // ranges that take as long to compare as a rule takes to visit
	maxBoxes  = 32      // of the packets that reach a rule
	maxWords  = 32      // conditions of a path that are kept as text
	maxSource = 512     // bytes of the sources of a conflict on several paths, as text; beyond: any
	maxFound  = 5_000   // conflicts; with the last one, the search ends
	maxKept   = 50_000  // ranges of all rewrites together
)

func newWalker(s Snapshot, facts Packet) *walker {
	w := &walker{Snapshot: s, facts: facts, chains: s.byID(), examined: map[id]int{}}
	w.restart()
	return w
}

// restart prepares another search, which adds to what was found.
func (w *walker) restart() {
	w.finished, w.mapped, w.work = map[id]bool{}, map[id]bool{}, 0
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

// bases returns the base chains but ours.
func (w *walker) bases() (all []*Chain) {
	for i := range w.Chains {
		if c := &w.Chains[i]; c.Hook != nil && !c.Own {
			all = append(all, c)
		}
	}
	return all
}

// jump returns the index of the first rule of a base chain that leads to this agent or, with
// others, to any masquerade agent; -1 if none does.
func (w *walker) jump(base *Chain, others bool) int {
	seen := map[id]bool{}
	var leads func(nfnetlink.Rule) bool
	leads = func(r nfnetlink.Rule) bool {
		to, ok := facts.Target(r)
		at := id{r.Family, r.Table, to}
		if !ok || seen[at] {
			return false
		}
		seen[at] = true
		if others && older.Leads(r) {
			return true
		}
		c := w.chains[at]
		return c != nil && (c.Own || slices.ContainsFunc(c.Rules, leads))
	}
	return slices.IndexFunc(base.Rules, leads)
}

// place returns the place of a rule of the current base chain, or of one that it leads to.
func (w *walker) place(r nfnetlink.Rule) Place {
	return Place{r, w.base.Name, w.base.Hook.Priority}
}

// begin follows packets through a base chain and reports whether they may pass it.
func (w *walker) begin(base *Chain, p packets) bool {
	w.base, w.entering, w.doubt = base.Chain, p, false
	return len(w.walk(base, path{packets: p})) > 0
}

const otherConditions = "other conditions"

func (p path) narrow(m match) path {
	p.packets = p.in(m.src, m.dst)
	p.direct = p.direct || m.direct
	if all := slices.Concat(p.conditions, m.conditions); len(all) > len(p.conditions) && len(p.conditions) <= maxWords {
		if len(all) > maxWords {
			all = append(all[:maxWords:maxWords], condition{text: otherConditions, open: true})
		}
		p.conditions = all
	}
	return p
}

// certain reports whether a rule is reached by all packets that entered the base chain.
func (w *walker) certain(p path) bool {
	return !w.doubt && !slices.ContainsFunc(p.conditions, func(c condition) bool { return c.open })
}

// walk follows packets through a chain, and returns those that may return from it.
func (w *walker) walk(c *Chain, p path) (back packets) {
	switch {
	case c == nil || c.Own && w.conn == nil || len(p.via) > maxDepth:
		return p.packets
	case c.Unread:
		w.mark = marking{changed: allBits}
		w.visit(step{path: p, chain: c, action: action{verdict: unix.NFT_CONTINUE}})
		w.doubt = true
	}
	at := chainID(c.Chain)
	switch {
	case w.finished[at]:
		w.doubt, w.mark = true, marking{changed: allBits}
		return p.packets
	case w.spent(): // one last time, for all other paths
		w.finished[at], w.doubt, w.mark = true, true, marking{changed: allBits}
		p = path{packets: w.entering, via: p.via, conditions: []condition{{text: otherConditions, open: true}}}
	}
	all := p.packets
	for i, r := range c.Rules {
		if len(p.packets) == 0 || w.full {
			break
		}
		w.examined[at] = max(w.examined[at], i+1)
		w.work += ruleWork
		m, a := w.parse(c, r, &p)
		if m.truth == no || !a.does() {
			continue
		}
		w.spend(&p, &m)
		q := p.narrow(m)
		if !w.reaches(q.packets) {
			continue
		}
		left, returned := w.apply(c, r, q, a)
		back = back.and(returned, all)
		w.doubt = w.doubt || len(left) > 0 && m.open()
		if m.truth != yes {
			continue
		}
		if w.conn == nil && w.translates(a) && len(p.without(box{m.src, m.dst})) > 0 {
			continue // those that a rule translates are taken from the way only if that keeps them few
		}
		w.work += len(left) * p.size()
		if rest := p.without(left...); len(rest) <= maxBoxes {
			p.packets = rest
		}
	}
	return back.and(p.packets, all)
}

// apply applies a rule to packets that it matches. It returns those that certainly do not go
// on in this chain, and those that may return to the calling one.
func (w *walker) apply(c *Chain, r nfnetlink.Rule, q path, a action) (left, back packets) {
	if a.verdict != unix.NFT_JUMP && a.byMap == nil {
		w.visit(step{q, c, r, a, w.certain(q)})
	}
	switch {
	case a.byMap != nil:
		return w.choose(c, r, q, *a.byMap)
	case a.target != "":
		q.via = append(slices.Clip(q.via), r)
		back = w.walk(w.chains[id{c.Family, c.Table, a.target}], q)
		if a.verdict == unix.NFT_GOTO {
			return q.packets, back
		}
		return q.without(back...), nil
	case w.translates(a) && a.ToMap != "":
		switch _, found := w.toAddress(q.packets, r, a.NAT); found {
		case yes:
			return q.packets, nil
		case maybe:
			w.doubt = true
		case no:
		}
	case a.verdict == unix.NFT_RETURN:
		return q.packets, q.packets
	case w.translates(a), a.ends():
		return q.packets, nil
	}
	return nil, nil
}

// translates reports whether an action translates packets in this base chain: one of type
// nat translates sources at some hooks, and destinations at the others.
func (w *walker) translates(a action) bool {
	return w.base.Hook.Type == "nat" && either(ofSources(w.base), a.Source, a.Destination)
}

// ofSources reports whether a base chain of type nat translates sources.
func ofSources(c nfnetlink.Chain) bool {
	return c.Hook.Number == unix.NF_INET_POST_ROUTING || c.Hook.Number == unix.NF_INET_LOCAL_IN
}

// choose applies the verdicts of a map.
func (w *walker) choose(c *Chain, r nfnetlink.Rule, q path, s rule.Statement) (left, back packets) {
	targets, unread := w.lookup(c, s, q)
	if unread {
		table := id{c.Family, c.Table, ""}
		if w.mapped[table] {
			w.doubt, w.mark = true, marking{changed: allBits}
			return nil, q.packets
		}
		targets = w.anyVerdict(c, s)
		w.work += len(targets)
		w.mapped[table] = w.spent() // this time for all other paths
	}
	for _, to := range targets {
		one := q.narrow(to.match)
		if !w.reaches(one.packets) {
			continue
		}
		gone, returned := w.apply(c, r, one, action{verdict: to.Code, target: to.Chain})
		back = back.and(returned, q.packets)
		w.doubt = w.doubt || len(gone) > 0 && to.open()
		if to.truth == yes {
			w.work += left.size()
			left = left.and(gone, left)
		}
	}
	return left, back
}

// spend counts the ranges that have to be compared for a rule. If there were too many,
// conditions with long lists of ranges count as unknown, and the path has packets again
// that have left it.
func (w *walker) spend(p *path, m *match) {
	n := p.size()
	w.work += n + len(p.packets)*(len(m.src)+len(m.dst))
	if !w.spent() {
		return
	}
	if len(m.src) > maxNamed {
		m.src, m.truth = nil, maybe
	}
	if len(m.dst) > maxNamed {
		m.dst, m.truth = nil, maybe
	}
	if n > maxNamed {
		p.packets = w.entering
	}
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
