package answer

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/nft-masq-agent/internal/health"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/foreign"
	"nft-masq-agent/nft/neighbors"
	"nft-masq-agent/nft/older"
)

// A Why is the reason for an answer: a code for programs and its parameters.
type Why struct {
	// Code is masqueraded, snat, exempt, local, foreign-masquerade, foreign-snat, rewritten, accepted-first, dropped,
	// untracked, no-route, translated-first, unknown, or config, which is an answer without the kernel.
	Code string `json:"code"`
	// Interface that the connection leaves by.
	Interface string `json:"interface,omitempty"`
	// Rules that translate the connection, or may do so.
	Rules []Rule `json:"rules,omitempty"`
	// Unknown are conditions on which the answer depends.
	Unknown []string `json:"unknown,omitempty"`
}

// ownAddress is the text for the address of an unknown source.
const ownAddress = "the pod's own address"

// Follow sets the headline from what the kernel does to the connection on each of its
// paths. Those that lead nowhere are left out if the first one leads to another host.
func (x *Explanation) Follow(paths []neighbors.Path) {
	x.follow(paths[0])
	all, away := []Explanation{*x}, []string(nil)
	why := Why{Code: "unknown", Unknown: slices.Concat(paths[0].Depends, x.Why.Unknown)}
	for _, n := range paths[1:] {
		y := Explanation{Destination: x.Destination}
		switch y.follow(n); {
		case y.Headline == x.Headline && slices.Equal(y.Possible, x.Possible), x.Sees != "" && y.Sees == x.Sees:
		case leads(paths[0]) && !leads(n):
			away = append(away, n.Depends...)
		default:
			all = append(all, y)
			why.Unknown = slices.Concat(why.Unknown, n.Depends, y.Why.Unknown)
		}
	}
	if len(away) > 0 {
		on := strings.Join(distinct(away), "; ")
		x.Add(config.Note, "some-packets", "Some packets do not go there, depending on %s.", on)
	}
	if len(all) == 1 {
		return
	}
	why.Unknown = distinct(why.Unknown)
	on := strings.Join(why.Unknown, "; ")
	x.Headline = fmt.Sprintf("What %s sees cannot be determined here: it depends on %s.", x.Destination, on)
	x.Sees, x.Possible = "", nil
	for _, y := range all {
		why.Rules = append(why.Rules, y.Why.Rules...)
		if y.Why.Code != "unknown" {
			y.Possible = []string{strings.TrimPrefix(y.Headline, x.Destination+" sees ")}
		}
		x.Possible = append(x.Possible, y.Possible...)
	}
	x.Why = why
}

// distinct sorts texts and drops those that are there already.
func distinct(texts []string) []string { return slices.Compact(slices.Sorted(slices.Values(texts))) }

// leads reports whether a path leads to another host.
func leads(n neighbors.Path) bool {
	return n.Packet.DstType != unix.RTN_LOCAL && n.Packet.DstType != unix.RTN_UNSPEC
}

// follow is Follow for one path.
func (x *Explanation) follow(n neighbors.Path) {
	defer func() { x.Why.Interface = n.Out() }()
	if dropped := n.Source.Dropped; dropped != nil {
		r := newWay(*dropped, n)
		x.Why = Why{Code: "dropped", Rules: []Rule{r}}
		x.Headline = fmt.Sprintf("%s sees nothing: a rule drops the connection: %s.", x.Destination, r)
		x.turnOff(*dropped)
		return
	}
	x.mayDrop(n)
	if x.translatedFirst(n) {
		return
	}
	switch untracked := n.Source.Untracked; {
	case untracked != nil && n.Packet.DstType != unix.RTN_UNSPEC:
		r := newWay(*untracked, n)
		x.Why, x.Sees = Why{Code: "untracked", Rules: []Rule{r}}, either(n.Packet.Src.IsValid(), n.Packet.Src.String(), "")
		x.Headline = fmt.Sprintf("%s sees %s: another program's rule turns off connection tracking, and with it NAT: %s.",
			x.Destination, keptWords(n.Packet.Src), r)
		x.turnOff(*untracked)
		return
	case n.Packet.DstType == unix.RTN_LOCAL && len(n.Source.Ways) == 0:
		x.Why.Code = "local"
		x.Headline = fmt.Sprintf("%s is an address of this node: a connection from %s is not masqueraded.",
			x.Destination, either(n.Packet.Src.IsValid(), n.Packet.Src.String(), "a pod"))
		x.Sees = either(n.Packet.Src.IsValid(), n.Packet.Src.String(), "")
		return
	case n.Packet.DstType == unix.RTN_UNSPEC:
		x.Why.Code = "no-route"
		x.Headline = fmt.Sprintf("This node has no route to %s.", x.Destination)
		return
	}
	var found []Rule
	var sees []string
	for _, w := range n.Source.Ways {
		r := newWay(w, n)
		found, sees = append(found, r), append(sees, r.Sees)
	}
	if n.Source.Through {
		sees = append(sees, keptText(n.Packet.Src))
	}
	x.Why.Rules = found
	if all := distinct(sees); len(all) > 1 || all[0] == "" {
		x.cannotKnow(n, found)
		return
	}
	x.certain(n, found, sees[0])
}

func (x *Explanation) certain(n neighbors.Path, found []Rule, sees string) {
	if a, err := netip.ParseAddr(sees); err == nil {
		x.Sees = a.String()
	}
	if len(found) == 0 {
		x.Why.Code = "exempt"
		if left := n.Source.Left; left != nil && n.Wanted {
			r := newWay(*left, n)
			x.Why = Why{Code: "accepted-first", Rules: []Rule{r}}
			x.Headline = fmt.Sprintf("%s sees %s: another program's rule accepts the connection before this agent's rules: %s.",
				x.Destination, keptWords(n.Packet.Src), r)
			x.turnOff(*left)
			return
		}
		x.Headline = fmt.Sprintf("%s sees %s: no rule of this node translates it.", x.Destination, keptWords(n.Packet.Src))
		return
	}
	last := found[len(found)-1]
	of := ""
	way := n.Source.Ways[len(found)-1]
	if way.Masquerade {
		of = ", the address of " + n.Out()
	}
	switch {
	case way.Drops:
		x.Why.Code, x.Sees = "dropped", ""
		x.Headline = fmt.Sprintf("%s sees nothing: a rule drops the connection: %s.", x.Destination, last)
	case last.Own && way.Keeps:
		x.Why.Code = "exempt"
		x.Headline = fmt.Sprintf("%s sees %s, which this agent enforces (enforceNonMasquerade).", x.Destination,
			keptWords(n.Packet.Src))
	case last.Own:
		if !way.Masquerade {
			of = ", one of " + config.KeySNATAddresses
			if name, is := strings.CutPrefix(last.Chain, nft.RuleChain); is {
				place, _, _ := strings.Cut(name, "-")
				of = ", by entry " + place + " of " + config.KeySNATRules
			}
			if slices.ContainsFunc(found, func(r Rule) bool { return r.Chain != last.Chain }) {
				of = "" // either of them chooses this address
			}
		}
		x.Why.Code = either(way.Masquerade, "masqueraded", "snat")
		x.Headline = fmt.Sprintf("%s sees %s%s: masqueraded by this agent.", x.Destination, sees, of)
	case way.Writes:
		x.Why.Code = "rewritten"
		x.Headline = fmt.Sprintf("%s sees %s: another program's rule writes that source address into each packet, without "+
			"NAT: %s.", x.Destination, sees, last)
	default:
		x.Why.Code = either(way.Masquerade, "foreign-masquerade", "foreign-snat")
		x.Headline = fmt.Sprintf("%s sees %s%s: another program's rule rewrites the source address, not this agent: %s.",
			x.Destination, sees, of, last)
	}
	if !last.Own {
		x.turnOff(way)
	}
}

// turnOff says how to turn off another program's rule.
func (x *Explanation) turnOff(w foreign.Way) {
	how := fmt.Sprintf("nft delete rule %s %s handle %d", w.Table(), w.Chain(), w.Rule.Handle)
	if w.Policy() {
		how = fmt.Sprintf("nft 'chain %s %s { policy accept; }'", w.Table(), w.Chain())
	}
	x.Details = "Until its program adds it again, this turns it off:\n" + how
}

// SetLegacy makes the headline unknown because of tables of legacy ip_tables that decide, too.
// open counts the open connections to the destination by the source that it sees.
func (x *Explanation) SetLegacy(tables []older.LegacyTable, open map[netip.Addr]int) {
	if len(tables) == 0 {
		return
	}
	names := texts(tables)
	without := x.Headline
	x.Headline = fmt.Sprintf("unknown: rules in legacy ip_tables (%s) decide, too", strings.Join(names, ", "))
	x.Details = health.LegacyDetails(tables)
	x.Why, x.Sees, x.Possible = Why{Code: "unknown", Unknown: names}, "", nil
	for _, seen := range slices.SortedFunc(maps.Keys(open), netip.Addr.Compare) {
		x.Possible = append(x.Possible, fmt.Sprintf("%s %s seen as %s", Plural(open[seen], "open connection"),
			either(open[seen] == 1, "is", "are"), seen))
	}
	if without != "" {
		x.Possible = append(x.Possible, "without them: "+without)
	}
}

// mayDrop notes the rules that drop the connection if a condition is true that is unknown.
func (x *Explanation) mayDrop(n neighbors.Path) {
	const most = 3
	for i, w := range n.Source.Drops {
		if i == most {
			x.Add(config.Note, "may-drop", "Other rules may also drop it.")
			break
		}
		x.Add(config.Note, "may-drop", "A rule may drop it, by a condition that is unknown here: %s.", newWay(w, n))
	}
}

// cannotKnow describes what the answer depends on.
func (x *Explanation) cannotKnow(n neighbors.Path, found []Rule) {
	x.Why.Code, x.Why.Unknown = "unknown", n.Source.Unknown
	on := strings.Join(n.Source.Unknown, "; ")
	switch {
	case on != "":
	case slices.ContainsFunc(n.Source.Ways, func(w foreign.Way) bool { return len(w.Among) > 1 }):
		on = "the source: set --from"
	default:
		on = "a translation that the rule does not name"
	}
	x.Headline = fmt.Sprintf("What %s sees cannot be determined here: it depends on %s.", x.Destination, on)
	for i, r := range found {
		sees := r.Sees
		switch among := n.Source.Ways[i].Among; {
		case sees != "":
		case len(among) > 1:
			sees = "one of " + addressList(among)
		default:
			sees = "an address that is not known"
		}
		x.Possible = append(x.Possible, fmt.Sprintf("%s by %s", sees, r))
	}
	if n.Source.Through {
		x.Possible = append(x.Possible, keptWords(n.Packet.Src)+" if no rule translates it")
	}
	if !n.Packet.Src.IsValid() && slices.ContainsFunc(n.Source.Unknown, aboutSource) {
		x.Possible = append(x.Possible, "Rules of this node depend on the source: set --from.")
	}
}

func aboutSource(condition string) bool {
	return strings.Contains(condition, "saddr") || strings.HasPrefix(condition, "iif")
}

// translatedFirst adds notes about rules that translate the destination address
// first. If one does so for any connection, or for exactly this address, that is
// the answer, and it returns true.
func (x *Explanation) translatedFirst(n neighbors.Path) bool {
	for _, w := range slices.Concat(n.Destination.Ways, n.Destination.Redirects, n.Source.Redirects) {
		if w.Drops {
			continue
		}
		r := newWay(w, n)
		r.Sees = ""
		if w.Direct || !n.Destination.Through && !w.Writes {
			x.Why = Why{Code: "translated-first", Rules: []Rule{r}, Unknown: n.Destination.Unknown}
			x.Headline = fmt.Sprintf("%s is translated to another address before this agent's rules: explain the endpoint. "+
				"The rule is %s.", x.Destination, r)
			return true
		}
		x.Add(config.Note, "translated-first", "Its destination may be translated first (%s): then explain that address.", r)
	}
	return false
}

func newWay(w foreign.Way, n neighbors.Path) Rule {
	r := newRule(w.Place, "translates")
	r.Own = w.Own
	switch {
	case w.Drops:
		r.Kind = foreign.Drops.String()
	case w.Keeps:
		r.Kind = "keeps"
	case w.Masquerade:
		r.Kind = foreign.Masquerades.String()
	case w.Writes:
		r.Kind = foreign.Writes.String()
	}
	switch {
	case w.Drops:
		r.Sees = "nothing"
	case w.Keeps:
		r.Sees = keptText(n.Packet.Src)
	case w.Masquerade && n.Masqueraded.IsValid():
		r.Sees = n.Masqueraded.String()
	case w.To.From.IsValid() && w.To.From == w.To.To:
		r.Sees = w.To.From.String()
	}
	return r
}

// addressList lists the first addresses or CIDRs and counts the others.
func addressList[T fmt.Stringer](all []T) string {
	const most = 8
	text := strings.Join(texts(all[:min(len(all), most)]), ", ")
	if len(all) > most {
		text += fmt.Sprintf(" and %d more", len(all)-most)
	}
	return text
}

func keptText(src netip.Addr) string { return either(src.IsValid(), src.String(), ownAddress) }

func keptWords(src netip.Addr) string {
	return keptText(src) + either(src.IsValid(), ", the source's own address", "")
}

func either(first bool, a, b string) string {
	if first {
		return a
	}
	return b
}
