package trace

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/routes"
	"nft-masq-agent/nft/rule"
)

// A Finding is a rule that does something to the packet, or may do it.
type Finding struct {
	Code Code
	Place
	Via []nfnetlink.Rule // the rules that lead to it from the base chain
	// Sure means that it certainly happens. Open are the conditions on its way that may not
	// hold, as nft writes them; with ByDevice, all of them are about interfaces.
	Sure     bool
	Open     []string
	ByDevice bool
	// To are the new addresses, the zero value if the rule does not name them: those of Masquerades
	// are the interface's. Among are those that a map has, if there are several.
	To    iprange.Range
	Among []netip.Addr
	// Keeps means that the packet keeps its own address.
	Keeps bool
	// OfDestination means that it is the destination that changes.
	OfDestination bool
	// Direct means that a condition leading to the rule names the packet's destination: only then is
	// the rule known to be for this address.
	Direct    bool
	Own       bool // the rule is this agent's
	nat       bool // in a chain of type nat
	ofSources bool // and it translates sources
}

// A Place is a rule of a base chain, or of a chain that is reached from one. A rule without
// a handle is the policy of the base chain, or stands for rules that were not read.
type Place struct {
	Rule     nfnetlink.Rule
	Base     string // the base chain from which it is reached
	Priority int32  // of the base chain
}

// Table returns the family and name of the rule's table, as nft writes them.
func (p Place) Table() string {
	return p.Rule.Family.String() + " " + nfnetlink.Printable(p.Rule.Table)
}

// Chain returns the name of the rule's chain for use in messages.
func (p Place) Chain() string { return nfnetlink.Printable(p.Rule.Chain) }

// Policy reports whether it is no rule but the policy of the base chain.
func (f Finding) Policy() bool { return f.Rule.Handle == 0 && f.Code == Drops }

// RuleText returns the rule as text.
func (f Finding) RuleText() string {
	switch {
	case f.Rule.Handle != 0:
		return rule.String(f.Rule)
	case f.Policy():
		return "policy drop"
	}
	return "the rules of chain " + f.Chain() + ", which has too many to read"
}

// InNAT reports whether the rule is in a chain of type nat.
func (f Finding) InNAT() bool { return f.nat }

// Ends reports whether the rule ends the connection.
func (f Finding) Ends() bool { return f.Code == Drops || f.Code == Rejects }

// OfSource reports whether the rule decides which source the far end sees: it translates the
// packet, or may do anything where that is done, or writes into the header.
func (f Finding) OfSource() bool {
	switch f.Code {
	case Masquerades, Translates, Rewrites:
		return !f.OfDestination
	case Unknown, Drops, Rejects:
		return f.ofSources
	}
	return false
}

// A Result is what rules do to a packet.
type Result struct {
	// Findings are in the order in which the packet meets them.
	Findings []Finding
	// Keeps is whether the packet keeps the address in question, its destination or its source, for
	// all that NAT does; Lost whether it is dropped or rejected.
	Keeps, Lost Truth
	// Untracked is whether connection tracking, and with it NAT, is off.
	Untracked Truth
	Mark      Mark // at the end
	Unknown   []string
}

// Seen returns the findings of which one decides what the far end sees, in their order, and
// whether it may see the packet's own source instead.
func (r Result) Seen() (by []Finding, itself bool) {
	itself = r.Keeps != No
	translated := false
	for _, f := range r.Findings {
		switch {
		case !f.OfSource():
			continue
		case f.Code != Rewrites: // it replaces what was written before, unless the packet keeps its source
			if !translated && r.Keeps == No {
				by = nil
			}
			translated = true
		case f.Sure:
			by, itself = nil, false
		}
		by = append(by, f)
	}
	return by, itself
}

// Bounds of what a trace follows and reports.
const (
	maxDepth    = 16 // the kernel's NFT_JUMP_STACK_SIZE
	maxFindings = 1000
	maxVisits   = 200_000 // of rules, by one packet
	maxUnknown  = 100
	maxDecoded  = 10_000 // rules whose statements are kept
)

// TooMany is the unknown condition of a packet that met more rules than are followed.
const TooMany = "too many rules to follow"

// A Tracer follows packets through rules, one after the other.
type Tracer struct {
	*Rules
	// Has asks for one element of a set that is too large to read; nil: what that has is unknown.
	Has       func(family nfnetlink.Family, table, set string, a netip.Addr) (has, limited bool, err error)
	Visits    int // of rules, by all packets, and of statements of rules that had to be decoded
	packet    Packet
	facts     map[string]fact
	mark      Mark
	untracked Truth
	base      *Chain
	result    Result
	visits    int
	decoded   int
}

// New returns a Tracer for rules that were read.
func New(r *Rules) *Tracer { return &Tracer{Rules: r} }

// A flow is where the packet may be after a rule or a chain: one bit for each.
type flow uint8

const (
	on   flow = 1 << iota // at the next rule
	back                  // in the calling chain
	past                  // past this base chain
	gone                  // lost or translated, so that it is not past the base chain as it was

	anywhere = on | back | past | gone
)

// A way is what is known of the way of the packet to a rule.
type way struct {
	reach  Truth
	open   []string
	others bool // some of them are not about interfaces
	direct bool
	via    []nfnetlink.Rule
}

// under returns the way past a condition of a statement.
func (w way) under(is Truth, s rule.Statement, text func() string) way {
	if is == Maybe {
		w.reach = min(w.reach, Maybe)
		w.others = w.others || !strings.HasPrefix(s.Field, "iif") && !strings.HasPrefix(s.Field, "oif")
		if w.open = slices.Clip(w.open); len(w.open) < maxUnknown {
			w.open = append(w.open, text())
		}
	}
	return w
}

// Trace follows a packet: first through the hook at which its destination can be translated,
// then through those at which its source can be, or which drop it. At each hook the base
// chains come in the kernel's order: by priority. Of chains with equal priority the one
// registered last runs first, but the kernel does not report the order: if several of them
// translate the packet, any of them may be first.
func (t *Tracer) Trace(p Packet) (destination, source Result) {
	first, later, out := uint32(unix.NF_INET_PRE_ROUTING), []uint32{unix.NF_INET_FORWARD, unix.NF_INET_POST_ROUTING}, p.Out
	switch {
	case p.FromNode:
		first, later = unix.NF_INET_LOCAL_OUT, later[1:]
	case p.Delivered():
		later, p.Out, out = []uint32{unix.NF_INET_LOCAL_IN}, routes.Interface{}, routes.Interface{}
	default:
		p.Out = routes.Interface{} // not yet known
	}
	destination = t.At(p, first)
	lost := t.result.Lost
	t.packet.Out, t.result = out, Result{Keeps: Yes, Lost: lost}
	for _, f := range destination.Findings { // what concerns its source too
		if !f.OfDestination && f.Code != Accepts {
			t.result.Findings = append(t.result.Findings, f)
		}
	}
	t.pass(later...)
	return destination, t.result
}

// At follows a packet through the base chains of some hooks.
func (t *Tracer) At(p Packet, hooks ...uint32) Result {
	t.packet, t.mark, t.untracked, t.visits = p, Mark{}, No, 0
	t.result = Result{Keeps: Yes}
	t.pass(hooks...)
	return t.result
}

func (t *Tracer) pass(hooks ...uint32) {
	for _, hook := range hooks {
		t.learn()
		t.atHook(hook)
	}
	if t.spent() {
		t.unknown(TooMany)
		t.result.Keeps = max(t.result.Keeps, Maybe)
	}
	if t.untracked != No {
		t.result.Keeps = max(t.result.Keeps, t.untracked)
	}
	for _, f := range t.result.Findings {
		if f.Code == Untracks && t.untracked == Maybe {
			t.unknown("whether connection tracking is off, by " + f.RuleText())
		}
	}
	t.result.Untracked, t.result.Mark = t.untracked, t.mark
}

// spent reports whether the packet has met too many rules.
func (t *Tracer) spent() bool { return t.visits > maxVisits || len(t.result.Findings) >= maxFindings }

// ConntrackPriority is that of connection tracking, NF_IP_PRI_CONNTRACK: what has passed it is
// tracked.
const ConntrackPriority = -200

// Chains of type nat are asked by NAT, at NF_IP_PRI_NAT_DST or NF_IP_PRI_NAT_SRC.
const (
	dstPriority = -100
	srcPriority = 100
)

// atHook follows the packet through the base chains of a hook.
func (t *Tracer) atHook(hook uint32) {
	var bases []*Chain
	for _, c := range t.Chains {
		if c.Hook != nil && c.Hook.Number == hook && t.ofFamily(c.Family) {
			bases = append(bases, c)
		}
	}
	order := func(a, b *Chain) int {
		return cmp.Or(cmp.Compare(a.runsAt(), b.runsAt()), cmp.Compare(a.Hook.Priority, b.Hook.Priority))
	}
	slices.SortStableFunc(bases, order)
	var keeps Truth
	first := 0 // the finding of chains of this priority
	for i, c := range bases {
		if i == 0 || order(bases[i-1], c) != 0 {
			keeps, first = t.result.Keeps, len(t.result.Findings)
		}
		nat := c.Hook.Type == "nat"
		if nat && (t.untracked == Yes || keeps == No) {
			continue
		}
		n := len(t.result.Findings)
		t.enter(c, keeps)
		if equal := t.result.Findings[first:]; len(equal) > n-first && n > first && differ(equal) {
			t.unknown("which of the chains of equal priority was registered last")
			for j := range equal {
				equal[j].Sure = equal[j].Sure && !equal[j].nat
			}
		}
	}
}

// runsAt returns the priority at which the kernel runs a base chain.
func (c *Chain) runsAt() int32 {
	switch {
	case c.Hook.Type != "nat":
		return c.Hook.Priority
	case c.ofSources():
		return srcPriority
	}
	return dstPriority
}

// ofSources reports whether a base chain of type nat translates sources.
func (c *Chain) ofSources() bool {
	return c.Hook.Number == unix.NF_INET_POST_ROUTING || c.Hook.Number == unix.NF_INET_LOCAL_IN
}

// differ reports whether rules of type nat translate a packet in different ways.
func differ(all []Finding) bool {
	all = slices.DeleteFunc(slices.Clone(all), func(f Finding) bool { return !f.nat || f.Code == Accepts })
	return len(all) > 1 && slices.ContainsFunc(all, func(f Finding) bool {
		return f.Code != all[0].Code || f.To != all[0].To || f.Keeps != all[0].Keeps
	})
}

// enter follows the packet through a base chain.
func (t *Tracer) enter(c *Chain, keeps Truth) {
	t.base = c
	reach := Yes
	if c.Hook.Type == "nat" {
		reach = min(keeps, Yes-t.untracked) // one before may have translated it
	}
	to := t.walk(c, way{reach: reach})
	if to&back != 0 && c.Policy == drop {
		end := nfnetlink.Rule{Family: c.Family, Table: c.Table, Chain: c.Name}
		t.find(c, end, way{reach: reach}.sure(to&past == 0), effect{code: Drops})
		to = to&^back | gone
	}
	if passes := to&(back|past) != 0; passes {
		if to&gone != 0 {
			t.ends(c, Maybe)
		}
		return
	}
	t.ends(c, Yes)
}

// ends notes that the packet does not get past a base chain as it was.
func (t *Tracer) ends(c *Chain, is Truth) {
	if c.Hook.Type == "nat" {
		t.result.Keeps = min(t.result.Keeps, Yes-is)
		return
	}
	t.result.Lost = max(t.result.Lost, is)
}

// sure limits how certain a way is.
func (w way) sure(is bool) way {
	if !is {
		w.reach = min(w.reach, Maybe)
	}
	return w
}

// walk follows the packet through a chain, and returns where it may be then.
func (t *Tracer) walk(c *Chain, w way) (to flow) {
	switch {
	case c == nil, len(w.via) > maxDepth:
		return back
	case c.Own && c.statements == nil:
		t.find(c, nfnetlink.Rule{Family: c.Family, Table: c.Table, Chain: c.Name}, w, effect{code: Ours})
		return back
	case c.Unread:
		t.find(c, nfnetlink.Rule{Family: c.Family, Table: c.Table, Chain: c.Name}, w.sure(false), effect{code: Unknown})
		t.mark = Mark{changed: allBits}
		return anywhere &^ on
	}
	for i := range t.meets(c) {
		t.Visits++
		if t.visits++; t.spent() {
			return anywhere &^ on
		}
		next := t.rule(c, i, w)
		if to |= next &^ on; next&on == 0 {
			return to
		}
		w = w.sure(next == on)
	}
	return to | back
}

// rule follows the packet through a rule.
func (t *Tracer) rule(c *Chain, i int, w way) (to flow) {
	maybe := flow(0)
	for _, s := range t.statements(c, i) {
		e, is := t.statement(c, s)
		if is == No {
			return on
		}
		w = w.under(is, s, s.String)
		if is == Maybe {
			maybe = on
		}
		w.direct = w.direct || isDestination(s.Field) && s.Op == "==" || e.byMap && slices.ContainsFunc(s.Key, ofDestination)
		next := t.do(c, c.Rules[i], w, e, s)
		if next&on == 0 {
			return to | next | maybe
		}
		if to |= next &^ on; next != on {
			w = w.sure(false)
		}
	}
	return to | on
}

func ofDestination(p rule.Part) bool { return isDestination(p.Field) }

func isSource(field string) bool { return field == "ip saddr" || field == "ip6 saddr" }

func isDestination(field string) bool { return field == "ip daddr" || field == "ip6 daddr" }

// do applies an effect to the packet.
func (t *Tracer) do(c *Chain, r nfnetlink.Rule, w way, e effect, s rule.Statement) flow {
	switch {
	case e.mark != nil:
		t.mark = t.mark.set(*e.mark, w.reach == Yes)
	case e.byMap:
		return t.choose(c, r, w, s)
	case e.nat.Source || e.nat.Destination:
		return t.translate(c, r, w, e)
	case e.chain != "":
		w.via = append(slices.Clip(w.via), r)
		to := t.walk(t.chains[id{c.Family, c.Table, e.chain}], w)
		if e.verdict == unix.NFT_JUMP && to&back != 0 {
			to = to&^back | on
		}
		return to
	case e.code == Rewrites:
		t.write(c, r, w, e)
	case e.code == Untracks:
		if t.tracks() && t.untracked != Yes {
			t.untracked = max(t.untracked, w.reach)
			t.find(c, r, w, e)
			t.learn()
		}
	case e.code == Unknown:
		t.find(c, r, w.sure(false), e)
		return anywhere
	case e.code == Drops, e.code == Rejects:
		t.result.Lost = max(t.result.Lost, w.reach)
		t.find(c, r, w, e)
		return gone
	case e.verdict == accept:
		t.accepts(c, r, w)
		return past
	case e.verdict == unix.NFT_RETURN:
		if len(w.via) == 0 {
			t.accepts(c, r, w)
		}
		return back
	}
	return on
}

// tracks reports whether connection tracking comes after the base chain at hand.
func (t *Tracer) tracks() bool {
	h := t.base.Hook
	return (h.Number == unix.NF_INET_PRE_ROUTING || h.Number == unix.NF_INET_LOCAL_OUT) && h.Priority < ConntrackPriority
}

// accepts notes a rule that ends a base chain of type nat early.
func (t *Tracer) accepts(c *Chain, r nfnetlink.Rule, w way) {
	if t.base.Hook.Type == "nat" {
		t.find(c, r, w, effect{code: Accepts})
	}
}

// find adds a finding, and the conditions on which it depends.
func (t *Tracer) find(c *Chain, r nfnetlink.Rule, w way, e effect) *Finding {
	f := Finding{
		Code: e.code, Place: Place{r, t.base.Name, t.base.Hook.Priority}, Via: w.via, Sure: w.reach == Yes, Open: w.open,
		ByDevice: len(w.open) > 0 && !w.others, Direct: w.direct, Own: c.Own, nat: t.base.Hook.Type == "nat",
	}
	f.ofSources = f.nat && t.base.ofSources()
	t.result.Findings = append(t.result.Findings, f)
	if f.nat {
		t.unknown(w.open...)
	}
	if f.nat && f.Code == Unknown {
		t.unknown(f.RuleText())
	}
	return &t.result.Findings[len(t.result.Findings)-1]
}

func (t *Tracer) unknown(words ...string) {
	for _, w := range words {
		if len(t.result.Unknown) < maxUnknown && !slices.Contains(t.result.Unknown, w) {
			t.result.Unknown = append(t.result.Unknown, w)
		}
	}
}

// write notes that a rule writes into the header of the packet. Parts of an address, and what is
// not a constant, are unknown addresses.
func (t *Tracer) write(c *Chain, r nfnetlink.Rule, w way, e effect) {
	if of := e.to.Field; !isDestination(of) && !isSource(of) {
		return
	}
	f := t.find(c, r, w, e)
	f.To, f.OfDestination = iprange.Range{From: e.to.To, To: e.to.To}, isDestination(e.to.Field)
	if !f.OfDestination {
		t.unknown(w.open...)
	}
	switch {
	case f.OfDestination:
	case w.reach == Yes && e.to.To.IsValid():
		t.packet.Src = e.to.To
		t.learn()
	default:
		t.packet.Src = netip.Addr{}
		t.learn()
	}
}

// choose applies the verdict that a map has, or each that it may have.
func (t *Tracer) choose(c *Chain, r nfnetlink.Rule, w way, s rule.Statement) (to flow) {
	of := t.sets[id{c.Family, c.Table, s.Expr.Set()}]
	if of == nil {
		t.find(c, r, w.under(Maybe, s, s.String), effect{code: Unknown})
		return anywhere
	}
	found, has := of.lookup(t.key(c, s.Key))
	if has != Yes {
		to = on
	}
	if has != Yes || len(found) > 1 {
		w = w.under(Maybe, s, s.String)
	}
	for _, e := range found {
		to |= t.do(c, r, w, verdict(e.Code, e.Chain), s)
	}
	return to
}

// translate notes that a rule translates the packet, if it does at this hook.
func (t *Tracer) translate(c *Chain, r nfnetlink.Rule, w way, e effect) flow {
	n, source := e.nat, t.base.ofSources()
	if t.base.Hook.Type != "nat" || source && !n.Source || !source && !n.Destination {
		return on
	}
	of, to, has := t.packet.Dst, []iprange.Range{n.To}, Yes
	if source {
		of = t.packet.Src
	}
	if n.ToMap != "" {
		if to, has = t.addresses(c, n); has == No {
			return on
		}
		w = w.under(has, rule.Statement{}, func() string { return rule.String(r) })
	}
	f := t.find(c, r, w, e)
	f.OfDestination, f.Keeps = !source, n.ToMap == "" && source && isSource(n.ToField)
	for i := range to {
		if n.Flags&nfnetlink.NATPrefix != 0 {
			to[i] = prefixed(to[i], of)
		}
		if to[i].From.IsValid() {
			f.Among = append(f.Among, to[i].From)
		}
	}
	if slices.SortFunc(f.Among, netip.Addr.Compare); len(to) == 1 {
		f.To = to[0]
	}
	f.Among = slices.Compact(f.Among)
	if has == Maybe {
		return on | gone
	}
	return gone
}

// addresses returns those to which a map may translate the packet, and whether it has one.
func (t *Tracer) addresses(c *Chain, n rule.NAT) (all []iprange.Range, has Truth) {
	of := t.sets[id{c.Family, c.Table, n.ToMap}]
	if of == nil {
		return nil, Maybe
	}
	found, has := of.lookup(t.key(c, n.ToKey))
	size := t.packet.Dst.BitLen() / 8
	for _, e := range found {
		if len(e.Value) < size {
			continue
		}
		from, _ := netip.AddrFromSlice(e.Value[:size])
		to := from
		if n.Flags&nfnetlink.NATPrefix != 0 && len(e.Value) >= 2*size {
			to, _ = netip.AddrFromSlice(e.Value[size : 2*size])
		}
		all = append(all, iprange.Range{From: from, To: to})
	}
	return all, has
}

// prefixed returns an address in another network, with its host part.
func prefixed(to iprange.Range, a netip.Addr) iprange.Range {
	from, last, have := to.From.AsSlice(), to.To.AsSlice(), a.AsSlice()
	if len(from) != len(last) || len(from) != len(have) {
		return iprange.Range{}
	}
	for i := range from {
		from[i] = have[i]&(from[i]^last[i]) | from[i]&^(from[i]^last[i])
	}
	made, _ := netip.AddrFromSlice(from)
	return iprange.Range{From: made, To: made}
}

// String returns the finding in words.
func (f Finding) String() string {
	return fmt.Sprintf("%s by %s %s (priority %d): %s", f.Code, f.Table(), f.Chain(), f.Priority, f.RuleText())
}
