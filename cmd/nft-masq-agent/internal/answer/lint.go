package answer

import (
	"fmt"
	"net/netip"
	"slices"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/judge"
)

// nowhere is the position of a problem that is not about a place in a file.
var nowhere config.Position

func problem(level config.Level, id string, at config.Position, format string, args ...any) config.Problem {
	return config.Problem{ID: id, Level: level, Pos: at, Msg: fmt.Sprintf(format, args...)}
}

// A lint is the warnings about a policy. Of those about entries of a list, the first ones
// of each ID are kept, and the others counted.
type lint struct {
	kept  config.Problems
	found map[string]int // by ID
}

func (l *lint) warn(id string, at config.Position, format string, args ...any) {
	const most = 100
	l.found[id]++
	switch n := l.found[id]; {
	case n <= most:
		l.kept = append(l.kept, problem(config.Warning, id, at, format, args...))
	case n == most+1:
		l.kept = append(l.kept, problem(config.Warning, id, nowhere, "and more like the last one"))
	}
}

// Lint finds likely mistakes in a config. It does not repeat warnings of the
// parser (an empty list, IPv6 CIDRs while IPv6 is off).
func Lint(p nft.Policy, podCIDRs []netip.Prefix) config.Problems {
	l := lint{found: map[string]int{}}
	for _, f := range p.Families {
		l.nothing(f)
		l.unusable(f.SNAT)
		l.shared(p.PortBlocks(f.IPv6), f.IPv6, podCIDRs)
		for i, r := range f.SNATRules {
			if by, covered := judge.CoveredBy(r, f.SNATRules[:i]); covered {
				l.warn("snat-rule-covered", r.At,
					"%s: entry %d never matches for %s on nodes that have an address of entry %d: that covers it",
					config.KeySNATRules, r.Place, familyName(f.IPv6), by.Place)
			}
		}
	}
	if blocks := p.PortBlocks(false).Count() + p.PortBlocks(true).Count(); blocks > 0 && p.PortsPerPod < plentyOfPorts {
		l.kept = append(l.kept, problem(config.Note, "time-wait", nowhere,
			"%s: to one destination and port, a pod can open %d UDP sockets in 30 s, and up to Linux 6.4 %[2]d TCP connections "+
				"in 120 s, because closed ones keep their ports for so long", config.KeyPortsPerPod, p.PortsPerPod))
	}
	return append(l.kept, UncoveredPods(p, podCIDRs)...)
}

// plentyOfPorts is a block of which hardly a pod needs all: eight new connections a second to one
// destination.
const plentyOfPorts = 1000

// shared finds pod CIDRs with more addresses than there are blocks of ports.
func (l *lint) shared(b nft.PortBlocks, ipv6 bool, podCIDRs []netip.Prefix) {
	for _, p := range podCIDRs {
		if bits := p.Addr().BitLen() - p.Bits(); b.Count() > 0 && p.Addr().Is6() == ipv6 && 1<<min(bits, 16) > b.Count() {
			l.warn("pod-cidr-blocks", nowhere, "pod CIDR %s has more addresses than the %d blocks of %s: "+
				"pods of a node whose IPs have the same low bits share a block", p, b.Count(), config.KeyPortsPerPod)
		}
	}
}

// unusable finds addresses of snatAddresses that no node can use. In snatRules they are errors.
func (l *lint) unusable(s nft.SNAT) {
	for _, c := range s.CIDRs {
		if none, unusable := config.Unusable(c.Prefix); unusable {
			l.warn("snat-address-unusable", c.Pos,
				"%s: %s is in %s: no reply returns to such an address, so it is never used",
				config.KeySNATAddresses, c.Text(), none)
		}
	}
}

// nothing finds policies that leave no destination, or nothing at all, to masquerade.
func (l *lint) nothing(f nft.FamilyPolicy) {
	all, name, exempt := everything(f.IPv6), familyName(f.IPv6), f.List(config.KeyNonMasqueradeCIDRs)
	if _, some := uncovered(all, exempt.Prefixes()); some {
		if judge.Masqueraded(f).Empty() {
			l.warn("nothing-masqueraded", nowhere, "the conditions together exempt every %s connection: nothing is masqueraded",
				name)
		}
		return
	}
	at, what := nowhere, "nonMasqueradeCIDRs together cover"
	for _, c := range exempt.CIDRs {
		if c.Prefix == all {
			at, what = c.Pos, "nonMasqueradeCIDRs: "+all.String()+" covers"
		}
	}
	l.warn("everything-exempt", at, "%s every %s destination: nothing %sis masqueraded", what, name,
		either(len(f.List(config.KeyForceMasqueradeCIDRs).CIDRs) > 0, "but forceMasqueradeCIDRs ", ""))
}

// UncoveredPods finds pod CIDRs that a policy does not cover: outside the masqueraded
// sources, or with masqueraded traffic between their pods.
func UncoveredPods(p nft.Policy, podCIDRs []netip.Prefix) config.Problems {
	const seen = "pods of other nodes would see this node's address"
	l := lint{found: map[string]int{}}
	for _, f := range p.Families {
		pods := slices.DeleteFunc(slices.Clone(podCIDRs), func(p netip.Prefix) bool { return p.Addr().Is6() != f.IPv6 })
		sources := f.List(config.KeyMasqueradeSrcCIDRs).Prefixes()
		for _, p := range pods {
			if len(sources) > 0 && !overlapsAny(p, sources) {
				l.warn("pod-cidr-no-source", nowhere, "pod CIDR %s is not in %s: its pods are not masqueraded", p,
					config.KeyMasqueradeSrcCIDRs)
			}
		}
		if len(iprange.Intersect(iprange.SetOf(pods), judge.Masqueraded(f).Src)) == 0 {
			continue // no source among them is masqueraded
		}
		for _, p := range pods {
			for _, c := range f.List(config.KeyForceMasqueradeCIDRs).CIDRs {
				if c.Overlaps(p) {
					l.warn("pod-cidr-forced", c.Pos, "forceMasqueradeCIDRs: %s reaches into pod CIDR %s: %s", c.Prefix, p, seen)
				}
			}
			switch gap, some := uncovered(p, f.List(config.KeyNonMasqueradeCIDRs).Prefixes()); {
			case some && gap == p:
				l.warn("pod-cidr-not-exempt", nowhere, "pod CIDR %s is not exempted: %s", p, seen)
			case some:
				l.warn("pod-cidr-not-exempt", nowhere, "pod CIDR %s is exempted in part, %s is not: %s", p, gap, seen)
			}
		}
	}
	return l.kept
}

// everything returns the network of all addresses.
func everything(ipv6 bool) netip.Prefix { return iprange.All(ipv6).Prefixes()[0] }

// overlapsAny reports whether a network overlaps one of a sorted list of which
// none covers another, as returned by [nft.List.Prefixes].
func overlapsAny(p netip.Prefix, sorted []netip.Prefix) bool {
	byAddress := func(s netip.Prefix, a netip.Addr) int { return s.Addr().Compare(a) }
	next, _ := slices.BinarySearchFunc(sorted, p.Addr(), byAddress)
	return next < len(sorted) && sorted[next].Overlaps(p) || next > 0 && sorted[next-1].Overlaps(p)
}

// uncovered returns a part of a network that no CIDR of a list contains, if there is one.
func uncovered(p netip.Prefix, list []netip.Prefix) (netip.Prefix, bool) {
	left := iprange.Subtract([]iprange.Range{iprange.Of(p)}, iprange.SetOf(list))
	if len(left) == 0 {
		return netip.Prefix{}, false
	}
	return left[0].Prefixes()[0], true
}
