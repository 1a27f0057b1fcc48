package trace

import (
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/routes"
	"nft-masq-agent/nft/rule"
)

// A Finding is a rule that does something to the packet, or may do it.
type Finding struct {
	Code Code
	// Rule without a handle is the policy of the base chain, or stands for rules that were not read.
	Rule nfnetlink.Rule
	Base *Chain           // the base chain from which it is reached
	Via  []nfnetlink.Rule // the rules that lead to it from there
	// Sure means that it certainly happens. Open are the conditions on its way that may not
	// hold, as nft writes them.
	Sure bool
	Open []string
	// To are the new addresses, of which it takes one; none if the rule does not name them: those of
	// Masquerades are the interface's.
	To []iprange.Range
	// Port is the new port of the destination, 0 if it keeps its own or the rule does not name it; Mark
	// is the packet's when it is translated.
	Port uint16
	Mark Mark
	// Keeps means that the packet keeps its own address.
	Keeps bool
	// OfDestination means that it is the destination that changes.
	OfDestination bool
	// Direct means that a condition leading to the rule names the packet's destination: only then is
	// the rule known to be for this address.
	Direct bool
	Own    bool // the rule is this agent's
}

// Table returns the family and name of the rule's table, as nft writes them.
func (f Finding) Table() string {
	return f.Rule.Family.String() + " " + nfnetlink.Printable(f.Rule.Table)
}

// Chain returns the name of the rule's chain for use in messages.
func (f Finding) Chain() string { return nfnetlink.Printable(f.Rule.Chain) }

// Policy reports whether it is no rule but the policy of the base chain.
func (f Finding) Policy() bool { return f.Rule.Handle == 0 && f.Code == Drops }

// RuleText returns the rule as text.
func (f Finding) RuleText() string {
	if f.Rule.Handle != 0 {
		return rule.String(f.Rule)
	}
	if f.Policy() {
		return "policy drop"
	}
	return "the rules of chain " + f.Chain() + ", which has too many to read"
}

// Ends reports whether the rule ends the connection.
func (f Finding) Ends() bool { return f.Code == Drops || f.Code == Rejects }

// OfSource reports whether the rule decides which source the far end sees: it translates the
// packet, or may do anything where that is done, or writes into the header.
func (f Finding) OfSource() bool {
	switch f.Code {
	case Masquerades, Translates, Rewrites:
		return !f.OfDestination
	case Unknown, Drops, Rejects:
		return f.Base.ofSources()
	}
	return false
}

// Address returns the new source that the rule gives a packet, the zero address if that is not known.
func (f Finding) Address(masqueraded netip.Addr) netip.Addr {
	switch {
	case f.Code == Masquerades:
		return masqueraded
	case len(f.To) == 1 && f.To[0].From == f.To[0].To:
		return f.To[0].From
	}
	return netip.Addr{}
}

// A Result is what rules do to a packet.
type Result struct {
	// Findings are in the order in which the packet meets them.
	Findings []Finding
	// Keeps is whether the packet keeps the address in question, its destination or its source, for
	// all that NAT does.
	Keeps Truth
	// Untracked is whether connection tracking, and with it NAT, is off.
	Untracked Truth
	Mark      Mark // at the end
	Unknown   []string
}

// Seen returns the findings of which one decides what the far end sees, in their order, and
// whether it may see the packet's own source instead.
func (r Result) Seen() (by []Finding, itself bool) {
	itself = r.Keeps != No
	translated, written := false, No
	for _, f := range r.Findings {
		switch {
		case !f.OfSource():
			continue
		case f.Keeps && written != No: // it keeps what was written
			translated, itself = true, itself || written != Yes
			continue
		case f.Code != Rewrites: // it replaces what was written before, unless the packet keeps its source
			if !translated && r.Keeps == No {
				by, written = nil, No
			}
			translated = true
		case f.Sure:
			by, itself, written = nil, false, Yes
		default:
			written = max(written, Maybe)
		}
		by = append(by, f)
	}
	return by, itself
}

// Bounds of what a trace follows and reports.
const (
	maxDepth    = 16 // the kernel's NFT_JUMP_STACK_SIZE
	maxFindings = 1000
	maxVisits   = 500_000 // of statements, by one packet
	maxUnknown  = 100
)

// TooMany is the unknown condition of a packet that met more rules than are followed.
const TooMany = "too many rules to follow"

// A Tracer follows packets through rules, one after the other.
type Tracer struct {
	*Rules
	// Has asks for one element of a set that is too large to read; nil: what that has is unknown.
	Has    func(family nfnetlink.Family, table, set string, a netip.Addr) (has, limited bool, err error)
	Visits int // of statements, by all packets
	passage
}

// A passage is the packet at hand on its way.
type passage struct {
	Result
	packet   Packet
	template bool   // connection tracking may have been told about it: it has a zone, and cannot be untracked
	others   uint32 // bits of the mark that chains of equal priority may have changed or not
	base     *Chain
	last     int      // visit of the packet
	left     []string // conditions by which rules of the base chain may have ended the way
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

// A way is what is known of the way of the packet to a rule, as a finding says it.
type way struct {
	Finding
	chain *Chain
}

// under returns the way past a condition of a statement.
func (w way) under(is Truth, s rule.Statement) way {
	w.Direct = w.Direct || s.Op == "==" && s.Last == nil && isDestination(s.Field) ||
		s.Op == "" && slices.ContainsFunc(s.Key, ofDestination)
	if is == Maybe && len(w.Open) < maxUnknown {
		w.Open = append(slices.Clip(w.Open), s.String())
	}
	return w.sure(is == Yes)
}

// sure limits how certain a way is.
func (w way) sure(is bool) way {
	w.Sure = w.Sure && is
	return w
}

func ofDestination(p rule.Part) bool { return isDestination(p.Field) }

func isSource(field string) bool { return field == "ip saddr" || field == "ip6 saddr" }

func isDestination(field string) bool { return field == "ip daddr" || field == "ip6 daddr" }

// Trace follows a packet: first through the hook at which its destination can be translated,
// then through those at which its source can be, or which drop it. At each hook the base
// chains come in the kernel's order: by priority. Of chains with equal priority the one
// registered last runs first, but the kernel does not report the order: if several of them
// translate the packet, any of them may be first.
func (t *Tracer) Trace(p Packet) (destination, source Result) {
	early, hooks := p, []uint32{unix.NF_INET_PRE_ROUTING, unix.NF_INET_FORWARD, unix.NF_INET_POST_ROUTING}
	if early.Out = (routes.Interface{}); p.FromNode { // the node routes what it sends before
		early, hooks = p, []uint32{unix.NF_INET_LOCAL_OUT, unix.NF_INET_POST_ROUTING}
	} else if p.Delivered() {
		p.Out, hooks = early.Out, []uint32{unix.NF_INET_PRE_ROUTING, unix.NF_INET_LOCAL_IN}
	}
	destination = t.At(early, hooks[0])
	p.Src, p.SrcType = t.packet.Src, t.packet.SrcType
	t.packet, t.Keeps, t.Findings, t.Unknown = p, Yes, destination.ofSource(), slices.Clip(destination.Unknown)
	return destination, t.pass(hooks[1:])
}

// Onward follows a packet from where its destination has been translated as a rule does, which was
// found at the first hook. It has the new destination, its connection is translated, and no other
// program has set its mark.
func (t *Tracer) Onward(destination Result, by Finding, p Packet) (source Result) {
	p.redirected, p.mark = true, by.Mark
	_, source = t.Trace(p)
	source.Findings = slices.Concat(destination.ofSource(), source.Findings)
	return source
}

// ofSource returns the findings about a destination that concern the packet's source too.
func (r Result) ofSource() []Finding {
	return slices.DeleteFunc(slices.Clone(r.Findings), func(f Finding) bool {
		return f.OfDestination || f.Code == Accepts
	})
}

// At follows a packet through the base chains of some hooks.
func (t *Tracer) At(p Packet, hooks ...uint32) Result {
	t.passage = passage{Result: Result{Keeps: Yes, Mark: p.mark}, packet: p, last: t.Visits + maxVisits}
	return t.pass(hooks)
}

func (t *Tracer) pass(hooks []uint32) Result {
	for _, hook := range hooks {
		if t.packet.Bridged && hook == unix.NF_INET_POST_ROUTING {
			t.packet.In = routes.Interface{}
		}
		t.atHook(hook)
	}
	t.Keeps = max(t.Keeps, t.Untracked)
	if t.spent() {
		t.unknown(TooMany)
		t.Keeps = max(t.Keeps, Maybe)
	}
	return t.Result
}

// spent reports whether the packet has met too many rules.
func (t *Tracer) spent() bool { return t.Visits > t.last || len(t.Findings) >= maxFindings }

// Priorities of connection tracking, and of NAT, which asks the chains of type nat.
const (
	conntrackPriority = -200 // NF_IP_PRI_CONNTRACK
	dstPriority       = -100 // NF_IP_PRI_NAT_DST
	srcPriority       = 100  // NF_IP_PRI_NAT_SRC
)

// atHook follows the packet through the base chains of a hook.
func (t *Tracer) atHook(hook uint32) {
	translates := func(f Finding) bool { return f.Base.NAT() && f.Code != Accepts }
	all := slices.DeleteFunc(slices.Clone(t.bases), func(c *Chain) bool {
		return c.Hook.Number != hook || !t.ofFamily(c.Family)
	})
	for len(all) > 0 {
		n := 1
		for n < len(all) && slices.Equal(all[n].when(), all[0].when()) {
			n++
		}
		equal := all[:n]
		all = all[n:]
		others, several := t.changes(equal), uint32(allBits)
		keeps, first, translate := t.Keeps, len(t.Findings), 0
		for i, c := range equal {
			several &= others[i]
			switch at := c.Hook.Priority; {
			case c.NAT() && (t.Untracked == Yes || keeps == No), t.packet.redirected && c.early() && at <= dstPriority:
				continue
			case c.NAT():
			case c.early() && at > dstPriority && t.Keeps == No:
				return // these chains see another destination: see Onward
			case !c.early() && at >= srcPriority && t.packet.natted == No:
				t.becomes(at > srcPriority)
			}
			met := len(t.Findings)
			t.others = others[i]
			if t.enter(c, keeps); slices.ContainsFunc(t.Findings[met:], translates) {
				translate++
			}
		}
		t.Mark = t.Mark.without(several)
		if translate > 1 {
			t.unknown("which of the chains of equal priority was registered last")
			for i, f := range t.Findings[first:] {
				t.Findings[first+i].Sure = f.Sure && !translates(f)
			}
		}
	}
}

// changes returns, for each of several chains that run in an unknown order, the bits of the mark that
// others may change before it. Those that more than one may change are in all of them.
func (t *Tracer) changes(equal []*Chain) []uint32 {
	others := make([]uint32, len(equal))
	for i, c := range equal {
		if len(equal) == 1 {
			break // it is not followed twice
		}
		before := t.passage
		t.enter(c, t.Keeps)
		now, was := t.Mark, before.Mark
		t.passage = before
		for k := range others {
			if k != i {
				others[k] |= now.changed&^was.changed | now.Value ^ was.Value | now.Known ^ was.Known
			}
		}
	}
	return others
}

// becomes replaces the source of the packet by that to which a rule certainly translated it: chains after
// NAT see that. Our own chain, if it was not read, may do so, too.
func (t *Tracer) becomes(after bool) {
	ours := func(f Finding) bool { return f.Code == Ours && f.Base.NAT() }
	by, itself := t.Seen()
	certain := after && len(by) == 1 && !itself && t.Untracked == No
	if t.Keeps == Yes && !slices.ContainsFunc(t.Findings, ours) || certain && by[0].Keeps {
		return
	}
	t.packet.natted, t.packet.Src, t.packet.SrcType = Maybe, netip.Addr{}, unix.RTN_UNSPEC
	if certain {
		t.packet.natted, t.packet.Src = Yes, by[0].Address(t.packet.Masqueraded)
	}
}

// when returns the priority at which the kernel runs a base chain, and its own.
func (c *Chain) when() []int32 {
	at := c.Hook.Priority
	switch {
	case c.ofSources():
		at = srcPriority
	case c.NAT():
		at = dstPriority
	}
	return []int32{at, c.Hook.Priority}
}

// NAT reports whether a base chain is of type nat.
func (c *Chain) NAT() bool { return c.Hook.Type == "nat" }

// early reports whether a base chain is at the first hook of packets.
func (c *Chain) early() bool {
	return c.Hook.Number == unix.NF_INET_PRE_ROUTING || c.Hook.Number == unix.NF_INET_LOCAL_OUT
}

// ofSources reports whether a base chain of type nat translates sources, and not destinations.
func (c *Chain) ofSources() bool { return c.NAT() && !c.early() }

// enter follows the packet through a base chain. One of type nat before it may have translated it.
func (t *Tracer) enter(c *Chain, keeps Truth) {
	t.base, t.left = c, nil
	met, w := len(t.Findings), way{}
	w.Base, w.Sure = c, !c.NAT() || keeps == Yes && t.Untracked == No
	to := t.walk(c, w)
	if to&back != 0 && c.Policy == drop {
		t.find(c.rest(w).sure(to&past == 0), Drops)
		to = to&^back | gone
	}
	switch { // whether it does not get past it as it was
	case !c.NAT():
	case to&(back|past) == 0:
		t.Keeps = No
	case to&gone != 0:
		t.Keeps = min(t.Keeps, Maybe)
	}
	for _, f := range t.Findings[met:] {
		if !c.NAT() && (f.Code != Rewrites || f.OfDestination) {
			continue
		}
		if t.unknown(f.Open...); f.Code == Unknown {
			t.unknown(f.RuleText())
		} else if !f.Sure {
			t.unknown(t.left...)
		}
	}
}

// rest returns the way to what is no rule of a chain.
func (c *Chain) rest(w way) way {
	w.chain, w.Rule = c, nfnetlink.Rule{Family: c.Family, Table: c.Table, Chain: c.Name}
	return w
}

// walk follows the packet through a chain, and returns where it may be then.
func (t *Tracer) walk(c *Chain, w way) (to flow) {
	switch {
	case c == nil, len(w.Via) > maxDepth:
		return back
	case c.Unread > 0:
		t.Mark = Mark{changed: allBits}
		t.find(c.rest(w).sure(false), Unknown)
		return anywhere &^ on
	case c.Own && c.Rules == nil: // it was not read
		t.find(c.rest(w), Ours)
		return back
	}
	src, meets := t.packet.Src, t.meets(c)
	for k := 0; k < len(meets); k++ {
		i := meets[k]
		if t.spent() {
			return anywhere &^ on
		}
		w.chain, w.Rule = c, c.Rules[i]
		next := t.rule(w)
		if to |= next &^ on; next&on == 0 {
			return to
		}
		if w = w.sure(next == on); t.packet.Src != src { // a rule wrote it
			src, meets = t.packet.Src, t.meets(c)
			k, _ = slices.BinarySearch(meets, i+1)
			k--
		}
	}
	return to | back
}

// rule follows the packet through the rule that a way has come to.
func (t *Tracer) rule(w way) (to flow) {
	maybe := flow(0)
	for s := range rule.Statements(w.Rule) {
		t.Visits++
		e, is := t.statement(w.chain, s)
		if is == No {
			return to | on
		}
		if w = w.under(is, s); is == Maybe {
			maybe = on
		}
		next := t.do(w, e, s)
		if next != on {
			t.left = add(t.left, w.Open...)
		}
		if next&on == 0 {
			return to | next | maybe
		}
		to |= next &^ on
		w = w.sure(next == on)
	}
	return to | on
}

// do applies an effect to the packet.
func (t *Tracer) do(w way, e effect, s rule.Statement) flow {
	switch e.code {
	case marks:
		t.Mark = t.Mark.set(*s.NewMark, w.Sure)
	case chooses:
		return t.choose(w, s)
	case Masquerades, Translates:
		return t.translate(w, e.code, s)
	case jumps, goes:
		w.Via = append(slices.Clip(w.Via), w.Rule)
		before := len(t.left)
		to := t.walk(t.ByID[idOf(w.chain.Chain, e.chain)], w)
		if to&(to-1) == 0 { // wherever the packet leaves the chain, it is in the same place
			t.left = t.left[:before]
		}
		if e.code == jumps && to&back != 0 {
			to = to&^back | on
		}
		return to
	case Rewrites:
		t.write(w, *s.Write)
	case Untracks:
		if before := t.beforeTracking(); before != No && t.Untracked != Yes {
			t.Untracked = Yes
			if f := t.find(w.sure(before == Yes), Untracks); !f.Sure {
				t.Untracked = Maybe
				t.unknown("whether connection tracking is off, by " + f.RuleText())
			}
		}
	case Unknown:
		t.find(w.sure(false), Unknown)
		return anywhere
	case Drops, Rejects:
		t.find(w, e.code)
		return gone
	case Accepts, returns:
		if t.base.NAT() && (e.code == Accepts || len(w.Via) == 0) { // it ends a base chain of type nat early
			t.find(w, Accepts)
		}
		if e.code == returns {
			return back
		}
		return past
	case templates:
		t.template = true
	case nothing, Ours:
	}
	return on
}

// beforeTracking reports whether connection tracking comes after the base chain at hand. At its own
// priority, whichever was registered last is the first. A packet with a template looks tracked before.
func (t *Tracer) beforeTracking() Truth {
	switch at := t.base.Hook.Priority; {
	case !t.base.early(), at > conntrackPriority:
		return No
	case at == conntrackPriority, t.template:
		return Maybe
	}
	return Yes
}

// find adds a finding.
func (t *Tracer) find(w way, code Code) *Finding {
	f := w.Finding
	f.Code, f.Own = code, w.chain.Own
	t.Findings = append(t.Findings, f)
	return &t.Findings[len(t.Findings)-1]
}

func (t *Tracer) unknown(words ...string) { t.Unknown = add(t.Unknown, words...) }

// add adds the words that a list does not have.
func add(to []string, words ...string) []string {
	for _, w := range words {
		if len(to) < maxUnknown && !slices.Contains(to, w) {
			to = append(to, w)
		}
	}
	return to
}

// write notes that a rule writes into the header of the packet. Parts of an address, and what is
// not a constant, are unknown addresses.
func (t *Tracer) write(w way, of rule.Write) {
	destination := isDestination(of.Field)
	if !destination && !isSource(of.Field) {
		return
	}
	f := t.find(w, Rewrites)
	if f.OfDestination = destination; of.To.IsValid() {
		f.To = []iprange.Range{{From: of.To, To: of.To}}
	}
	if !destination {
		if t.packet.Src = of.To; !w.Sure {
			t.packet.Src = netip.Addr{}
		}
		t.packet.SrcType = unix.RTN_UNSPEC
	}
}

// choose applies the verdict that a map has, or each that it may have.
func (t *Tracer) choose(w way, s rule.Statement) (to flow) {
	found, has := t.lookup(w.chain, s.Expr.Set(), s.Key)
	if has != Yes {
		to = on
	}
	if has != Yes || len(found) > 1 {
		w = w.under(Maybe, s)
	}
	if has == Maybe && len(found) == 0 { // it was not read
		return t.do(w, effect{code: Unknown}, s)
	}
	for _, e := range found {
		to |= t.do(w, verdict(e.Code, e.Chain), s)
	}
	return to
}

// translate notes that a rule translates the packet. The kernel takes such rules only where they can.
func (t *Tracer) translate(w way, code Code, s rule.Statement) flow {
	n, source, of := s.NAT, t.base.ofSources(), t.packet.Dst
	if source {
		of = t.packet.Src
	}
	to, has := []iprange.Range{n.To}, Yes
	if n.ToMap != "" {
		if to, has = t.addresses(w.chain, s); has == No {
			return on
		}
	}
	f := t.find(w.under(has, s), code)
	f.Mark, f.OfDestination, f.Keeps = t.Mark.without(t.others), !source, n.ToMap == "" && source && isSource(n.ToField)
	for _, r := range to {
		if n.Flags&nfnetlink.NATPrefix != 0 {
			r = prefixed(r, of)
		}
		if r.From.IsValid() {
			f.To = append(f.To, r)
		}
	}
	if !source && n.MinPort == n.MaxPort {
		f.Port = n.MinPort
	}
	f.To = iprange.Normal(f.To)
	if has == Maybe {
		return on | gone
	}
	return gone
}

// addresses returns those to which a map may translate the packet, and whether it has one.
func (t *Tracer) addresses(c *Chain, s rule.Statement) (all []iprange.Range, has Truth) {
	found, has := t.lookup(c, s.NAT.ToMap, s.NAT.ToKey)
	for _, e := range found {
		size := min(len(e.Value), t.packet.Dst.BitLen()/8)
		from, _ := netip.AddrFromSlice(e.Value[:size])
		to := from
		if s.NAT.Flags&nfnetlink.NATPrefix != 0 { // what follows is the last one, or else a port
			to, _ = netip.AddrFromSlice(e.Value[size:])
		}
		all = append(all, iprange.Range{From: from, To: to})
	}
	return all, has
}

// prefixed returns an address in another network, with its host part: the bits in which the
// first and the last address of the network differ. It is not known if the address is not.
func prefixed(to iprange.Range, a netip.Addr) iprange.Range {
	made, last, have := to.From.AsSlice(), to.To.AsSlice(), a.AsSlice()
	if len(made) != len(last) || len(made) != len(have) {
		return iprange.Range{}
	}
	for i := range made {
		made[i] |= have[i] & (made[i] ^ last[i])
	}
	to.From, _ = netip.AddrFromSlice(made)
	return iprange.Range{From: to.From, To: to.From}
}
