package neighbors

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/judge"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/older"
	"nft-masq-agent/nft/routes"
	"nft-masq-agent/nft/trace"
)

// Bounds of a search: how many packets it asks about at a time, how many statements of rules these
// meet in all, and how many conflicts it reports. Of a large set it asks about a few elements.
const (
	maxPackets   = 200_000
	maxVisits    = 4_000_000
	maxConflicts = 4_000
	perSet       = 4
)

// A packets is those that a search asks about: from sources, received on interfaces, to
// destinations. The zero interface stands for any.
type packets struct {
	src    []netip.Addr
	dst    []iprange.Range
	in     []routes.Interface
	ofPods map[bool]bool // and so not from an address of this node; by whether it is IPv6
}

// of returns those of a family.
func (p packets) of(ipv6 bool) packets {
	p.src = slices.DeleteFunc(slices.Clone(p.src), func(a netip.Addr) bool { return a.Is6() != ipv6 })
	p.dst = iprange.Intersect(p.dst, []iprange.Range{iprange.All(ipv6)})
	return p
}

// A search finds conflicts with a policy. It asks what happens to one packet of each group that
// the rules treat alike, as far as they tell them apart by addresses; what else they compare is
// not known of these packets.
type search struct {
	*trace.Tracer
	ends  trace.Ends
	found map[place]int // in all
	all   []Conflict
	rest  int // packets that were not asked about, or met too many rules
	// How many packets were asked about at all, and how often a rule certainly decides.
	asked  int
	always map[place]int
}

// A place is a rule, and what it does.
type place struct {
	Kind
	family       nfnetlink.Family
	table, chain string
	handle       uint64
}

func at(k Kind, r nfnetlink.Rule) place { return place{k, r.Family, r.Table, r.Chain, r.Handle} }

func newSearch(t *trace.Tracer, ends trace.Ends) *search {
	return &search{Tracer: t, ends: ends, found: map[place]int{}}
}

// ask calls a function with what happens to each of some packets at some hooks, of both families,
// until that returns false. Those from an address to itself need the translation to work.
func (s *search) ask(p packets, hooks []uint32, do func(packet trace.Packet, r trace.Result) bool) {
	s.asked, s.always = 0, map[place]int{}
	for _, ipv6 := range []bool{false, true} {
		of := p.of(ipv6)
		to := destinations(s.ends, of.dst, max(1, maxPackets/max(1, len(of.src)*len(p.in))))
		for _, from := range of.src {
			dst, joined := to(from)
			s.rest += joined * len(p.in)
			for _, in := range p.in {
				for i, to := range dst {
					if s.Visits > maxVisits || len(s.all) >= maxConflicts {
						s.rest += len(dst) - i
						break
					}
					packet := trace.Packet{Src: from, Dst: to, DstType: unix.RTN_UNICAST, In: in, Translated: trace.Maybe}
					if p.ofPods[ipv6] {
						packet.SrcType = unix.RTN_UNICAST
					}
					if from == to {
						continue
					}
					s.asked++
					r := s.At(packet, hooks...)
					if slices.Contains(r.Unknown, trace.TooMany) {
						s.rest++
					}
					if !do(packet, r) {
						return
					}
				}
			}
		}
	}
}

// add adds a conflict, unless the rule is known for it: then one packet is enough. What is
// certain of one packet says more than what may happen to another, and what is not link-local more
// than what is: that has no routes.
func (s *search) add(k Kind, p trace.Packet, f trace.Finding) {
	c := Conflict{Kind: k, Finding: f, Src: p.Src, Dst: p.Dst}
	i, known := s.found[at(k, f.Rule)]
	if !known {
		s.found[at(k, f.Rule)], s.all = len(s.all), append(s.all, c)
	} else if known := s.all[i]; len(c.Open) < len(known.Open) ||
		known.Dst.IsLinkLocalUnicast() && !c.Dst.IsLinkLocalUnicast() {
		s.all[i] = c
	}
}

// masqueraded finds the rules that rewrite the source of what a policy exempts. elsewhere means
// that the packets are no pods'.
func (s *search) masqueraded(p packets, elsewhere bool) {
	known := len(s.all)
	hooks := []uint32{unix.NF_INET_PRE_ROUTING, unix.NF_INET_POST_ROUTING}
	s.ask(p, hooks, func(packet trace.Packet, r trace.Result) bool {
		for _, f := range r.Findings {
			if f.Own || f.Keeps || f.Code != trace.Masquerades && f.Code != trace.Translates {
				continue
			}
			if i, found := s.found[at(Masquerades, f.Rule)]; !elsewhere || !found || i >= known {
				s.add(Masquerades, packet, f)
			}
		}
		return true
	})
	for i := range s.all[known:] {
		s.all[known+i].elsewhere = elsewhere
	}
}

// overruled finds the rules because of which what a policy masquerades is not: before our chain,
// or, those that accept, before the jump to any masquerade agent.
func (s *search) overruled(p packets, shared bool) {
	hooks := []uint32{unix.NF_INET_PRE_ROUTING, unix.NF_INET_POST_ROUTING}
	s.ask(p, hooks, func(packet trace.Packet, r trace.Result) bool {
		ours := len(r.Findings)
		for i, f := range r.Findings {
			if f.Code == trace.Ours && f.Base.NAT() && f.Base.Hook.Priority != nft.EnforcePriority {
				ours = i
			}
		}
		for i, f := range r.Findings {
			kind, is := kindOf(f, i < ours)
			if !is || f.Own {
				continue
			}
			if s.add(kind, packet, f); f.Sure {
				s.always[at(kind, f.Rule)]++
			}
		}
		return true
	})
	s.all = slices.DeleteFunc(s.all, func(c Conflict) bool { // there was nothing after it to exempt from
		_, follows := jump(c.Finding)
		return c.Kind == Exempts && s.always[at(Exempts, c.Rule)] == s.asked && !follows
	})
	for i := range s.all {
		s.all[i].Shared = shared
	}
}

// dropped finds the base chains that drop all of the packets, of one family, by their policy.
func (s *search) dropped(p packets) {
	hooks := []uint32{unix.NF_INET_PRE_ROUTING, unix.NF_INET_FORWARD, unix.NF_INET_POST_ROUTING}
	known := len(s.all)
	s.ask(p, hooks, func(packet trace.Packet, r trace.Result) (all bool) {
		for _, f := range r.Findings {
			if !f.Ends() || !f.Sure || f.Own || f.Base.Policy != 0 { // NF_DROP
				continue
			}
			f.Code, f.Via = trace.Drops, nil
			f.Rule = nfnetlink.Rule{Family: f.Base.Family, Table: f.Base.Table, Chain: f.Base.Name}
			s.add(Drops, packet, f)
			s.always[at(Drops, f.Rule)]++
			all = true
		}
		return all
	})
	some := func(c Conflict) bool { return s.always[at(Drops, c.Rule)] < s.asked }
	s.all = append(s.all[:known], slices.DeleteFunc(s.all[known:], some)...)
}

// kindOf returns the kind of conflict that a finding is for what a policy masquerades.
func kindOf(f trace.Finding, before bool) (Kind, bool) {
	whatever := f.Sure || len(f.Open) > 0 && !slices.ContainsFunc(f.Open, func(condition string) bool {
		return !strings.HasPrefix(condition, "iif") && !strings.HasPrefix(condition, "oif") // it depends on interfaces alone
	})
	switch f.Code {
	case trace.Translates:
		return Translates, before
	case trace.Accepts:
		inPostrouting := f.Rule.Family != nfnetlink.Inet && f.Rule.Table == "nat" && f.Base.Name == "POSTROUTING"
		precedes, _ := jump(f)
		return Exempts, before && inPostrouting && !precedes
	case trace.Untracks:
		return Untracks, whatever
	case trace.Rewrites:
		return Writes, whatever && !f.OfDestination
	}
	return 0, false
}

// jump reports whether the first jump to an older agent's chain precedes the rule of the base chain by
// which the packet meets a finding, or follows it.
func jump(f trace.Finding) (precedes, follows bool) {
	top := append(slices.Clone(f.Via), f.Rule)[0]
	rule := slices.IndexFunc(f.Base.Rules, func(r nfnetlink.Rule) bool { return r.Handle == top.Handle })
	jump := slices.IndexFunc(f.Base.Rules, older.Leads)
	return jump >= 0 && jump < rule, jump > rule
}

// nowhere is from where no packet leaves the node.
var nowhere = iprange.SetOf([]netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/8"), netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::/127"),
})

// conflicts returns the conflicts of a policy, in the order of the kinds, families and
// priorities, and how many packets were not asked about.
func conflicts(r *trace.Rules, want nft.Ruleset, pods judge.Region, local []netip.Prefix, running []netip.Addr) ([]Conflict, int) {
	t := trace.New(r)
	ends := t.Ends(perSet)
	s, over := newSearch(t, ends), newSearch(t, ends)
	mine := iprange.Normal(slices.Concat(iprange.SetOf(local), nowhere))
	everything := iprange.Subtract([]iprange.Range{iprange.All(false), iprange.All(true)}, nowhere)
	known := map[bool]bool{}
	for _, f := range want.Policy.Families {
		known[f.IPv6] = f.KnowsPods()
	}
	var src, dst []iprange.Range // of what is masqueraded
	for _, ipv6 := range []bool{false, true} {
		region := judge.RegionOf(want.Policy, ipv6)
		src, dst = append(src, region.Src...), append(dst, iprange.Subtract(region.Dst, mine)...)
	}
	exempt := iprange.Subtract(iprange.Subtract(iprange.SetOf(judge.ExemptDestinations(want.Policy)), mine), dst)
	sent := iprange.Subtract(iprange.Normal(pods.Src), nowhere)
	p := packets{samples(ends.Src, sent, running, 1), exempt, receiving(pods), known}
	s.masqueraded(p, false)
	if known[false] || known[true] || pods.Origin != nil {
		p.src, p.in, p.ofPods = samples(ends.Src, everything, nil, 1), []routes.Interface{{}}, nil
		s.masqueraded(p, true)
	}
	p = packets{samples(ends.Src, iprange.Intersect(src, sent), running, 1), dst, receiving(pods), known}
	over.overruled(p, want.Mode() == nft.ModeIPTables)
	for _, ipv6 := range []bool{false, true} {
		over.dropped(p.of(ipv6))
	}
	all := slices.Concat(s.all, over.all)
	for i, c := range all { // without the rules, which would stay in memory
		all[i].Base = &trace.Chain{Chain: c.Base.Chain}
	}
	slices.SortStableFunc(all, func(a, b Conflict) int {
		return cmp.Or(
			cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Rule.Family, b.Rule.Family),
			cmp.Compare(a.Base.Hook.Priority, b.Base.Hook.Priority),
		)
	})
	return all, s.rest + over.rest
}

// receiving returns the interfaces on which packets of pods are received; the zero value stands
// for any.
func receiving(pods judge.Region) (all []routes.Interface) {
	for _, p := range pods.Origin {
		all = append(all, routes.Interface{Name: p.Name})
	}
	if len(all) == 0 {
		all = append(all, routes.Interface{})
	}
	return all
}
