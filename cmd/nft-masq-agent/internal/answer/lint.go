package answer

import (
	"fmt"
	"net/netip"
	"slices"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/iprange"
)

// bounded are warnings with the same ID about entries of a list. The first ones are
// kept, and the others counted.
type bounded struct {
	id   string
	kept config.Problems
	more int
}

func (b *bounded) add(at config.Position, format string, args ...any) {
	const most = 100
	if len(b.kept) == most {
		b.more++
		return
	}
	b.kept = append(b.kept, problem(config.Warning, b.id, at, format, args...))
}

func (b *bounded) all() config.Problems {
	if b.more > 0 {
		return append(b.kept, problem(config.Warning, b.id, nowhere, "and %d more like the last one", b.more))
	}
	return b.kept
}

// nowhere is the position of a problem that is not about a place in a file.
var nowhere config.Position

func problem(level config.Level, id string, at config.Position, format string, args ...any) config.Problem {
	return config.Problem{ID: id, Level: level, Pos: at, Msg: fmt.Sprintf(format, args...)}
}

// Lint finds likely mistakes in a config. It does not repeat warnings of the
// parser (an empty list, IPv6 CIDRs while IPv6 is off).
func Lint(p nft.Policy, podCIDRs []netip.Prefix) config.Problems {
	var found config.Problems
	for _, f := range p.Families {
		exempt := lintEverythingExempt(f)
		found = append(found, exempt...)
		if len(exempt) == 0 && f.Region().Empty() {
			found = append(found, problem(config.Warning, "nothing-masqueraded", nowhere, "the conditions together exempt every %s connection: nothing is masqueraded", familyName(f.IPv6)))
		}
		found = append(found, lintForcedOutside(f)...)
		found = append(found, lintSNAT(f)...)
		if !f.IPv6 {
			found = append(found, noteMetadata(f))
		}
	}
	return append(found, UncoveredPods(p, podCIDRs)...)
}

// UncoveredPods finds pod CIDRs that a policy does not cover.
func UncoveredPods(p nft.Policy, podCIDRs []netip.Prefix) config.Problems {
	var found config.Problems
	for _, f := range p.Families {
		found = append(found, lintPodSources(f, podCIDRs)...)
		found = append(found, lintPodCIDRs(f, podCIDRs)...)
	}
	return found
}

// lintPodSources finds pod CIDRs outside the masqueraded sources.
func lintPodSources(f nft.FamilyPolicy, podCIDRs []netip.Prefix) config.Problems {
	var found config.Problems
	only := f.List(config.KeyMasqueradeSrcCIDRs).Prefixes()
	for _, p := range podCIDRs {
		if p.Addr().Is6() == f.IPv6 && len(only) > 0 && !overlapsAny(p, only) {
			found = append(found, problem(config.Warning, "pod-cidr-no-source", nowhere,
				"pod CIDR %s is not in %s: its pods are not masqueraded", p, config.KeyMasqueradeSrcCIDRs))
		}
	}
	return found
}

// lintEverythingExempt finds lists that leave no destination to masquerade.
func lintEverythingExempt(f nft.FamilyPolicy) config.Problems {
	all := everything(f.IPv6)
	if _, some := uncovered(all, f.List(config.KeyNonMasqueradeCIDRs).Prefixes()); some {
		return nil
	}
	found := config.Problem{ID: "everything-exempt", Level: config.Warning}
	what := "nonMasqueradeCIDRs together cover"
	for _, c := range f.List(config.KeyNonMasqueradeCIDRs).CIDRs {
		if c.Prefix == all {
			found.Pos, what = c.Pos, "nonMasqueradeCIDRs: "+all.String()+" covers"
		}
	}
	rest := "nothing"
	if len(f.List(config.KeyForceMasqueradeCIDRs).CIDRs) > 0 {
		rest = "nothing but forceMasqueradeCIDRs"
	}
	found.Msg = fmt.Sprintf("%s every %s destination: %s is masqueraded", what, familyName(f.IPv6), rest)
	return config.Problems{found}
}

// everything returns the network of all addresses.
func everything(ipv6 bool) netip.Prefix {
	if ipv6 {
		return netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	}
	return netip.PrefixFrom(netip.IPv4Unspecified(), 0)
}

// lintForcedOutside finds forced CIDRs without effect.
func lintForcedOutside(f nft.FamilyPolicy) config.Problems {
	exempt := f.List(config.KeyNonMasqueradeCIDRs).Prefixes()
	found := bounded{id: "forced-outside"}
	for _, c := range f.List(config.KeyForceMasqueradeCIDRs).CIDRs {
		if !overlapsAny(c.Prefix, exempt) {
			found.add(c.Pos, "forceMasqueradeCIDRs: %s is outside every exempted CIDR: it is masqueraded anyway", c.Prefix)
		}
	}
	return found.all()
}

// lintSNAT finds source addresses to which no answer can come back.
func lintSNAT(f nft.FamilyPolicy) config.Problems {
	found := bounded{id: "snat-address-unusable"}
	for _, c := range f.SNAT.CIDRs {
		for _, none := range notOfANode {
			if none.Overlaps(c.Prefix) && none.Bits() <= c.Bits() {
				found.add(c.Pos, "%s: %s is in %s: no answer comes back to such an address, and it is never used", config.KeySNATAddresses, c.Text(), none)
			}
		}
	}
	return found.all()
}

// notOfANode has what is not global unicast: unspecified, loopback, link-local,
// multicast and broadcast addresses.
var notOfANode = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/32"), netip.MustParsePrefix("127.0.0.0/8"), linkLocalIPv4, netip.MustParsePrefix("224.0.0.0/4"),
	netip.MustParsePrefix("255.255.255.255/32"), netip.MustParsePrefix("::/127"), linkLocalIPv6, netip.MustParsePrefix("ff00::/8"),
}

// lintPodCIDRs finds pod CIDRs with masqueraded traffic between their pods.
func lintPodCIDRs(f nft.FamilyPolicy, podCIDRs []netip.Prefix) config.Problems {
	pods := slices.DeleteFunc(slices.Clone(podCIDRs), func(p netip.Prefix) bool { return p.Addr().Is6() != f.IPv6 })
	if len(iprange.Intersect(iprange.SetOf(pods), f.Region().Src)) == 0 {
		return nil // no source among them is masqueraded
	}
	const seen = "pods of other nodes would see this node's address"
	var found config.Problems
	for _, p := range pods {
		forced := bounded{id: "pod-cidr-forced"}
		for _, c := range f.List(config.KeyForceMasqueradeCIDRs).CIDRs {
			if c.Overlaps(p) {
				forced.add(c.Pos, "forceMasqueradeCIDRs: %s reaches into pod CIDR %s: %s", c.Prefix, p, seen)
			}
		}
		found = append(found, forced.all()...)
		gap, some := uncovered(p, f.List(config.KeyNonMasqueradeCIDRs).Prefixes())
		switch {
		case some && gap == p:
			found = append(found, problem(config.Warning, "pod-cidr-not-exempt", nowhere, "pod CIDR %s is not exempted: %s", p, seen))
		case some:
			found = append(found, problem(config.Warning, "pod-cidr-not-exempt", nowhere, "pod CIDR %s is exempted in part, %s is not: %s", p, gap, seen))
		}
	}
	return found
}

// noteMetadata describes what happens to requests to the metadata service. If it
// only responds to the node, pods must be masqueraded to reach it.
func noteMetadata(f nft.FamilyPolicy) config.Problem {
	note := config.Problem{ID: "metadata", Level: config.Note}
	for _, asked := range []struct {
		nft.List
		who string
	}{{f.List(config.KeyForceMasqueradeCIDRs), "node's"}, {f.List(config.KeyNonMasqueradeCIDRs), "pod's own"}} {
		for _, c := range asked.CIDRs {
			if !c.Contains(metadata) {
				continue
			}
			hint := ""
			if c.Prefix == linkLocalIPv4 && c.Pos == nowhere {
				hint = "; set it if the cloud only responds to nodes"
			}
			note.Msg = fmt.Sprintf("%s (cloud metadata) sees the %s address: %s, %s%s", metadata, asked.who, c.Prefix, place(c), hint)
			return note
		}
	}
	note.Msg = fmt.Sprintf("%s (cloud metadata) sees the node's address: no CIDR contains it", metadata)
	return note
}

// overlapsAny reports whether a network overlaps one of a sorted list of which
// none covers another, as returned by [nft.List.Prefixes].
func overlapsAny(p netip.Prefix, sorted []netip.Prefix) bool {
	next, _ := slices.BinarySearchFunc(sorted, p.Addr(), func(s netip.Prefix, a netip.Addr) int { return s.Addr().Compare(a) })
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
