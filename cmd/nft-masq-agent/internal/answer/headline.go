package answer

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/nft-masq-agent/internal/health"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/neighbors"
	"nft-masq-agent/nft/older"
	"nft-masq-agent/nft/trace"
)

// A Why is the reason for an answer: a code for programs and its parameters.
type Why struct {
	// Code is masqueraded, snat, exempt, local, foreign-masquerade, foreign-snat, rewritten, accepted-first, dropped,
	// rejected, untracked, no-route, translated-first, unknown, or config, which is an answer without the kernel.
	Code string `json:"code"`
	// Interface that the connection leaves by.
	Interface string `json:"interface,omitempty"`
	// Rules that translate the connection, or may do so.
	Rules []Rule `json:"rules,omitempty"`
	// Unknown are conditions on which the answer depends.
	Unknown []string `json:"unknown,omitempty"`
}

// Follow sets the headline from what the kernel does to the connection on each of its
// paths. Those that lead nowhere are left out if the first one leads to another host.
func (x *Explanation) Follow(paths []neighbors.Path) {
	x.follow(paths[0])
	all, away := []Explanation{*x}, []string(nil)
	why := Why{Code: "unknown", Unknown: slices.Concat(paths[0].Depends, x.Why.Unknown)}
	for _, n := range paths[1:] {
		y := Explanation{to: x.to}
		y.follow(n)
		like := func(x Explanation) bool {
			return y.Headline == x.Headline && slices.Equal(y.Possible, x.Possible) || x.Sees != "" && y.Sees == x.Sees
		}
		switch {
		case like(*x):
		case leads(paths[0]) && !leads(n):
			away = append(away, n.Depends...)
		default:
			if !slices.ContainsFunc(all, like) {
				all = append(all, y)
			}
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
	var possible []string
	for _, y := range all {
		why.Rules, possible = append(why.Rules, y.Why.Rules...), append(possible, y.possible()...)
	}
	x.Why, x.Possible = why, possible
	x.dependsOn(distinct(why.Unknown))
}

// possible is what the destination may see.
func (x *Explanation) possible() []string {
	if x.Why.Code == "unknown" {
		return x.Possible
	}
	return []string{strings.TrimPrefix(x.Headline, x.to+" sees ")}
}

// dependsOn says that the answer is not certain.
func (x *Explanation) dependsOn(conditions []string) {
	x.Why.Code, x.Why.Unknown, x.Sees = "unknown", conditions, ""
	x.Headline = fmt.Sprintf("What %s sees cannot be determined here: it depends on %s.", x.to,
		cmp.Or(strings.Join(conditions, "; "), "a translation that the rule does not name"))
}

// FollowEach is Follow for a connection whose destination rules translate to one of several
// endpoints. Those that see the same are one kind of answer.
func (x *Explanation) FollowEach(endpoints [][]neighbors.Path) {
	const endpoint = "\x00" // in the sentences of a kind
	type kind struct {
		Explanation
		of []netip.Addr
	}
	var kinds []kind
	for _, paths := range endpoints {
		k, a := kind{Explanation: Explanation{to: endpoint, Why: x.Why}}, paths[0].Packet.Dst
		k.Follow(paths)
		i := slices.IndexFunc(kinds, func(o kind) bool {
			return o.Headline == k.Headline && slices.Equal(o.Possible, k.Possible)
		})
		if i < 0 {
			i, kinds = len(kinds), append(kinds, k)
			x.Take(k.Problems())
		}
		if !slices.Contains(kinds[i].of, a) {
			kinds[i].of = append(kinds[i].of, a)
		}
	}
	says := func(k kind, name string) string { return strings.ReplaceAll(k.Headline, endpoint, name) }
	if one := kinds[0]; len(kinds) == 1 {
		name := fmt.Sprintf("%s, the endpoint of %s,", one.of[0], x.to)
		if len(one.of) > 1 {
			name = fmt.Sprintf("Each endpoint of %s (%s)", x.to, addressList(one.of))
		}
		x.Headline, x.Details, x.Sees, x.Possible, x.Why = says(one, name), one.Details, one.Sees, one.Possible, one.Why
		return
	}
	x.Headline = fmt.Sprintf("What %s sees depends on its endpoint.", x.to)
	x.Why = Why{Code: "unknown", Unknown: []string{"which endpoint is chosen"}}
	for _, k := range kinds {
		x.Possible = append(append(x.Possible, says(k, addressList(k.of))), k.Possible...)
		x.Why.Rules = append(x.Why.Rules, k.Why.Rules...)
		if !strings.Contains(x.Details, k.Details) {
			x.Details = strings.TrimPrefix(x.Details+"\n"+k.Details, "\n")
		}
	}
}

// distinct sorts texts and drops those that are there already.
func distinct(texts []string) []string { return slices.Compact(slices.Sorted(slices.Values(texts))) }

// leads reports whether a path leads to another host.
func leads(n neighbors.Path) bool {
	return !n.Packet.Delivered() && n.Packet.DstType != unix.RTN_UNSPEC
}

// follow is Follow for one path. What may happen before makes the answer depend on that.
func (x *Explanation) follow(n neighbors.Path) {
	x.answer(n)
	switch x.Why.Code {
	default:
		x.mayMiss(n)
	case string(trace.Drops), string(trace.Rejects), "translated-first", "no-route":
	}
	x.Why.Interface = n.Out()
}

// mayMiss makes the answer depend on the rules that may translate the destination, or do anything.
func (x *Explanation) mayMiss(n neighbors.Path) {
	var on, otherwise []string
	rules := x.Why.Rules
	for _, f := range slices.Concat(n.Destination.Findings, n.Source.Findings) {
		means := "nothing, if its destination is translated: "
		switch {
		case f.Code == trace.Unknown && !f.OfSource():
			means, on = "whatever another program makes of it, or nothing: ", append(on, f.RuleText())
		case !f.OfDestination:
			continue
		}
		r := newWay(f, n)
		if means += r.String(); !slices.Contains(otherwise, means) {
			on, otherwise, rules = append(on, f.Open...), append(otherwise, means), append(rules, r)
		}
	}
	if len(otherwise) == 0 {
		return
	}
	on = append(on, x.Why.Unknown...)
	x.Possible, x.Why.Rules, x.Details = append(x.possible(), otherwise...), rules, ""
	x.dependsOn(distinct(on))
}

// answer says what the destination sees on a path, if it is reached.
func (x *Explanation) answer(n neighbors.Path) {
	for _, f := range n.Source.Findings {
		if f.Ends() && f.Sure {
			x.ends(f, n)
			return
		}
	}
	x.mayEnd(n)
	if x.translatedFirst(n) {
		return
	}
	src := n.Packet.Src.String()
	by, itself := n.Source.Seen()
	switch {
	case n.Source.Untracked == trace.Yes && len(by) == 0 && n.Packet.DstType != unix.RTN_UNSPEC:
		x.Sees = src
		x.decides(last(n.Source, trace.Untracks), n, "untracked", keptWords(n.Packet.Src),
			"another program's rule turns off connection tracking, and with it NAT")
		return
	case n.Packet.Delivered() && len(by) == 0:
		x.Why.Code, x.Sees = "local", src
		x.Headline = fmt.Sprintf("%s is an address of this node: a connection from %s is not masqueraded.",
			x.to, src)
		return
	case n.Packet.DstType == unix.RTN_UNSPEC:
		x.Why.Code = "no-route"
		x.Headline = fmt.Sprintf("This node has no route to %s.", x.to)
		return
	}
	var sees []string
	for _, f := range by {
		r := newWay(f, n)
		x.Why.Rules, sees = append(x.Why.Rules, r), append(sees, r.Sees)
	}
	if itself {
		sees = append(sees, src)
	}
	switch all := distinct(sees); {
	case len(all) > 1 || all[0] == "":
		x.cannotKnow(n, by, itself)
	case len(by) == 0:
		x.kept(n)
	default:
		x.translated(n, by, all[0])
	}
}

// last returns the last certain finding of a code, which is none of this agent's rules.
func last(r trace.Result, code trace.Code) (found trace.Finding) {
	for _, f := range r.Findings {
		if f.Code == code && f.Sure && !f.Own {
			found = f
		}
	}
	return found
}

// ends says that a rule ends the connection.
func (x *Explanation) ends(f trace.Finding, n neighbors.Path) {
	x.decides(f, n, string(f.Code), "nothing", either(f.Code == trace.Rejects, "a rule rejects the connection",
		"a rule drops the connection"))
}

// decides says that another program's rule decides what the destination sees, and what it does.
func (x *Explanation) decides(f trace.Finding, n neighbors.Path, code, sees, what string) {
	r := newWay(f, n)
	x.Why = Why{Code: code, Rules: []Rule{r}}
	x.Headline = fmt.Sprintf("%s sees %s: %s: %s.", x.to, sees, what, r)
	x.turnOff(f)
}

// kept says that no rule translates the packet.
func (x *Explanation) kept(n neighbors.Path) {
	x.Sees = n.Packet.Src.String()
	if left := last(n.Source, trace.Accepts); left.Code != "" && n.Wanted {
		x.decides(left, n, "accepted-first", keptWords(n.Packet.Src),
			"another program's rule accepts the connection before this agent's rules")
		return
	}
	x.Why.Code = "exempt"
	x.Headline = fmt.Sprintf("%s sees %s: no rule of this node translates it.", x.to, keptWords(n.Packet.Src))
}

// translated says which rule certainly decides.
func (x *Explanation) translated(n neighbors.Path, by []trace.Finding, sees string) {
	rules := x.Why.Rules
	f, r := by[len(by)-1], rules[len(rules)-1]
	if a, err := netip.ParseAddr(sees); err == nil {
		x.Sees = a.String()
	}
	of, masquerade := "", f.Code == trace.Masquerades
	if masquerade {
		of = ", the address of " + n.AddressOf()
	}
	switch {
	case f.Ends():
		x.ends(f, n)
		x.Sees = ""
	case r.Own && f.Keeps:
		x.Why.Code = "exempt"
		x.Headline = fmt.Sprintf("%s sees %s, which this agent enforces (enforceNonMasquerade).", x.to,
			keptWords(n.Packet.Src))
	case r.Own:
		if !masquerade {
			of = ", one of " + config.KeySNATAddresses
			if name, is := strings.CutPrefix(r.Chain, nft.RuleChain); is {
				place, _, _ := strings.Cut(name, "-")
				of = ", by entry " + place + " of " + config.KeySNATRules
			}
			if slices.ContainsFunc(rules, func(o Rule) bool { return o.Chain != r.Chain }) {
				of = "" // either of them chooses this address
			}
		}
		x.Why.Code = either(masquerade, "masqueraded", "snat")
		x.Headline = fmt.Sprintf("%s sees %s%s: masqueraded by this agent.", x.to, sees, of)
	case f.Code == trace.Rewrites:
		x.decides(f, n, "rewritten", sees,
			"another program's rule writes that source address into each packet, without NAT")
	default:
		x.decides(f, n, either(masquerade, "foreign-masquerade", "foreign-snat"), sees+of,
			"another program's rule rewrites the source address, not this agent")
	}
	x.Why.Rules = rules
}

// settings are those of programs that put their rules back, by how the name of a table or a chain of
// theirs begins.
var settings = [][3]string{
	{"KUBE-", "--masquerade-all, --cluster-cidr, and externalTrafficPolicy of the Service", "kube-proxy"},
	{"kube-proxy", "--masquerade-all, --cluster-cidr, and externalTrafficPolicy of the Service", "kube-proxy"},
	{"CNI-HOSTPORT", "snat in the CNI config", "the CNI plugin portmap"},
	{"cni_hostport", "snat in the CNI config", "the CNI plugin portmap"},
	{"CNI-", "ipMasq in the CNI config", "a CNI plugin"},
	{"cni_plugins", "ipMasq in the CNI config", "a CNI plugin"},
	{"FLANNEL-", "--ip-masq of flanneld", "flannel"},
	{"flannel-", "--ip-masq of flanneld", "flannel"},
	{"cali", "natOutgoing of the IPPool", "Calico"},
	{"CILIUM_", "enable-ipv4-masquerade and enable-ipv6-masquerade", "Cilium"},
	{"kindnet-", "--masquerading", "kindnet"},
	{"AWS-SNAT", "AWS_VPC_K8S_CNI_EXTERNALSNAT", "the AWS VPC CNI"},
}

// turnOff says how to turn off another program's rule: by a setting of its program, if that is known to
// put it back and may need it, or else by a command.
func (x *Explanation) turnOff(f trace.Finding) {
	for _, r := range append(slices.Clip(f.Via), f.Rule) {
		for _, s := range settings {
			if strings.HasPrefix(r.Chain, s[0]) || strings.HasPrefix(r.Table, s[0]) {
				x.Details = fmt.Sprintf("It is a rule of %s, which may need it and puts it back. What it does is set by:\n%s", s[2],
					s[1])
				return
			}
		}
	}
	how := fmt.Sprintf("nft delete rule %s %s handle %d", f.Table(), f.Chain(), f.Rule.Handle)
	if f.Policy() {
		how = fmt.Sprintf("nft 'chain %s %s { policy accept; }'", f.Table(), f.Chain())
	}
	x.Details = "Until its program adds it again, this turns it off:\n" + how
}

// SetNotForwarded says that the node drops the packet, because it does not forward such ones.
func (x *Explanation) SetNotForwarded(what, remedy string) {
	x.Why, x.Sees, x.Possible = Why{Code: string(trace.Drops)}, "", nil
	x.Headline, x.Details = fmt.Sprintf("%s sees nothing: this node forwards no %s.", x.to, what), remedy
}

// SetLegacy makes the headline unknown because of tables of legacy ip_tables that decide, too.
// open counts the open connections to the destination by the source that it sees. It returns whether it did so.
func (x *Explanation) SetLegacy(tables []older.LegacyTable, open map[netip.Addr]int) bool {
	return len(tables) > 0 && x.unread("in legacy ip_tables", texts(tables), health.LegacyDetails(tables), open)
}

// SetDevices is SetLegacy for chains at network devices.
func (x *Explanation) SetDevices(chains []string, open map[netip.Addr]int) bool {
	const list = "nft list chain "
	return len(chains) > 0 && x.unread("at network devices", chains, list+strings.Join(chains, "\n"+list), open)
}

func (x *Explanation) unread(where string, names []string, details string, open map[netip.Addr]int) bool {
	without := x.Headline
	x.Headline = fmt.Sprintf("unknown: rules %s (%s) decide, too", where, strings.Join(names, ", "))
	x.Details = details
	x.Why, x.Sees, x.Possible = Why{Code: "unknown", Unknown: names}, "", nil
	for _, seen := range slices.SortedFunc(maps.Keys(open), netip.Addr.Compare) {
		x.Possible = append(x.Possible, fmt.Sprintf("%s %s seen as %s", Plural(open[seen], "open connection"),
			either(open[seen] == 1, "is", "are"), seen))
	}
	if without != "" {
		x.Possible = append(x.Possible, "without them: "+without)
	}
	return true
}

// mayEnd notes the rules that end the connection if a condition is true that is unknown.
func (x *Explanation) mayEnd(n neighbors.Path) {
	const most = 3
	found := 0
	for _, f := range n.Source.Findings {
		if !f.Ends() || f.OfSource() {
			continue
		}
		if found++; found > most {
			x.Add(config.Note, "may-drop", "Other rules may also drop it.")
			return
		}
		x.Add(config.Note, "may-drop", "A rule may %s it, by a condition that is unknown here: %s.",
			either(f.Code == trace.Rejects, "reject", "drop"), newWay(f, n))
	}
}

// cannotKnow describes what the answer depends on.
func (x *Explanation) cannotKnow(n neighbors.Path, by []trace.Finding, itself bool) {
	x.dependsOn(n.Source.Unknown)
	for i, r := range x.Why.Rules {
		sees := r.Sees
		switch to := by[i].To; {
		case sees != "":
		case len(to) > 0:
			sees = "one of " + addressList(to)
		default:
			sees = "an address that is not known"
		}
		x.Possible = append(x.Possible, fmt.Sprintf("%s by %s", sees, r))
	}
	if itself {
		x.Possible = append(x.Possible, keptWords(n.Packet.Src)+" if no rule translates it")
	}
}

// translatedFirst adds notes about rules that translate the destination address
// first. If one does so for any connection, or for exactly this address, which is none of this node,
// that is the answer, and it returns true.
func (x *Explanation) translatedFirst(n neighbors.Path) bool {
	for _, f := range slices.Concat(n.Destination.Findings, n.Source.Findings) {
		if !f.OfDestination {
			continue
		}
		r := newWay(f, n)
		r.Sees = ""
		written := f.Code == trace.Rewrites
		if f.Direct && !n.Packet.Delivered() || written && f.Sure || n.Destination.Keeps == trace.No && !written {
			x.Why = Why{Code: "translated-first", Rules: []Rule{r}, Unknown: n.Destination.Unknown}
			x.Headline = fmt.Sprintf("%s is translated to another address before this agent's rules: explain %sthe endpoint. "+
				"The rule is %s.", x.to, either(x.Port == 0, "it with its port, or ", ""), r)
			return true
		}
		x.Add(config.Note, "translated-first", "Its destination may be translated first (%s): then explain that address.", r)
	}
	return false
}

func newWay(f trace.Finding, n neighbors.Path) Rule {
	r := newRule(f, "translates")
	r.Own = f.Own
	switch {
	case f.Ends():
		r.Kind, r.Sees = "drops", "nothing"
	case f.Keeps:
		r.Kind, r.Sees = "keeps", n.Packet.Src.String()
	default:
		if a := f.Address(n.Masqueraded); a.IsValid() {
			r.Sees = a.String()
		}
	}
	if f.Code == trace.Masquerades {
		r.Kind = neighbors.Masquerades.String()
	}
	if f.Code == trace.Rewrites {
		r.Kind = neighbors.Writes.String()
	}
	if f.Code == trace.Rejects {
		r.Kind = "rejects"
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

func keptWords(src netip.Addr) string { return src.String() + ", the source's own address" }

func either(first bool, a, b string) string {
	if first {
		return a
	}
	return b
}
