package answer

import (
	"fmt"
	"net/netip"
	"slices"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/judge"
)

// nowhere is the position of a problem that is not about a place in a file.
var nowhere config.Position

func problem(level config.Level, id string, place config.Position, format string, args ...any) config.Problem {
	return config.Problem{ID: id, Level: level, Pos: place, Msg: fmt.Sprintf(format, args...)}
}

func warning(id string, place config.Position, format string, args ...any) config.Problem {
	return problem(config.Warning, id, place, format, args...)
}

// Lint finds likely mistakes in a config. It does not repeat warnings of the
// parser (an empty list, IPv6 CIDRs while IPv6 is off).
func Lint(p nft.Policy, podCIDRs []netip.Prefix) (found config.Problems) {
	blocks := 0
	for _, f := range p.Families {
		count := p.PortBlocks(f.IPv6).Count()
		blocks += count
		pods := slices.DeleteFunc(slices.Clone(podCIDRs), func(p netip.Prefix) bool { return p.Addr().Is6() != f.IPv6 })
		found = append(found, nothing(f)...)
		found = append(found, unusable(f.SNATAddresses())...)
		found = append(found, shared(count, pods)...)
		found = append(found, uncoveredPods(f, pods)...)
	}
	if blocks > 0 && p.PortsPerPod < plentyOfPorts {
		found = append(found, problem(config.Note, "time-wait", nowhere,
			"%s: to one destination and port, a pod can open %d UDP sockets in 30 s, and up to Linux 6.4 %[2]d TCP connections "+
				"in 120 s, because closed ones keep their ports for so long", config.KeyPortsPerPod, p.PortsPerPod))
	}
	return found
}

// plentyOfPorts is a block of which hardly a pod needs all: eight new connections a second to one
// destination.
const plentyOfPorts = 1000

// shared finds pod CIDRs with more addresses than there are blocks of ports.
func shared(blocks int, podCIDRs []netip.Prefix) (found config.Problems) {
	for _, p := range podCIDRs {
		bits := p.Addr().BitLen() - p.Bits()
		if blocks > 0 && 1<<min(bits, 16) > blocks {
			found = append(found, warning("pod-cidr-blocks", nowhere,
				"pod CIDR %s has more addresses than the %d blocks of %s: "+
					"pods of a node whose IPs have the same low bits share a block", p, blocks, config.KeyPortsPerPod))
		}
	}
	return found
}

// unusable finds the first of snatAddresses that no node can use. In snatRules they are errors.
func unusable(addresses nft.SNATRule) config.Problems {
	for _, c := range addresses.CIDRs {
		if network, unusable := config.Unusable(c.Prefix); unusable {
			return config.Problems{warning("snat-address-unusable", c.Pos,
				"%s: %s is in %s: no reply returns to such an address, so it is never used", config.KeySNATAddresses, c.Text(),
				network)}
		}
	}
	return nil
}

// nothing finds policies that leave no destination, or nothing at all, to masquerade.
func nothing(f nft.FamilyPolicy) config.Problems {
	everywhere := everything(f.IPv6)
	exempt := f.List(config.KeyNonMasqueradeCIDRs)
	if _, found := uncovered(everywhere, exempt.Prefixes()); found {
		if !judge.Masqueraded(f).Empty() {
			return nil
		}
		return config.Problems{warning("nothing-masqueraded", nowhere,
			"the conditions together exempt every %s connection: nothing is masqueraded", familyName(f.IPv6))}
	}
	place := nowhere
	subject := "nonMasqueradeCIDRs together cover"
	for _, c := range exempt.CIDRs {
		if c.Prefix == everywhere {
			place = c.Pos
			subject = "nonMasqueradeCIDRs: " + everywhere.String() + " covers"
		}
	}
	forced := len(f.List(config.KeyForceMasqueradeCIDRs).CIDRs) > 0
	return config.Problems{warning("everything-exempt", place, "%s every %s destination: nothing %sis masqueraded",
		subject,
		familyName(f.IPv6), choose(forced, "but forceMasqueradeCIDRs ", ""))}
}

// uncoveredPods finds pod CIDRs that a policy does not cover: outside the masqueraded
// sources, or with masqueraded traffic between their pods.
func uncoveredPods(f nft.FamilyPolicy, pods []netip.Prefix) (found config.Problems) {
	const seen = "pods of other nodes would see this node's address"
	sources := f.List(config.KeyMasqueradeSrcCIDRs).Prefixes()
	masqueraded := judge.Masqueraded(f).Src
	for _, p := range pods {
		if len(sources) > 0 && !overlapsAny(p, sources) {
			found = append(found, warning("pod-cidr-no-source", nowhere,
				"pod CIDR %s is not in %s: its pods are not masqueraded",
				p, config.KeyMasqueradeSrcCIDRs))
		}
		if len(judge.NewAddresses(pods).Intersect(masqueraded)) == 0 {
			continue // no source among them is masqueraded
		}
		for _, c := range f.List(config.KeyForceMasqueradeCIDRs).CIDRs {
			if c.Overlaps(p) {
				found = append(found, warning("pod-cidr-forced", c.Pos, "forceMasqueradeCIDRs: %s reaches into pod CIDR %s: %s",
					c.Prefix, p, seen))
				break
			}
		}
		gap, partial := uncovered(p, f.List(config.KeyNonMasqueradeCIDRs).Prefixes())
		if partial {
			found = append(found, warning("pod-cidr-not-exempt", nowhere, "%s of pod CIDR %s is not exempt: %s", gap, p, seen))
		}
	}
	return found
}

// everything returns the network of all addresses.
func everything(ipv6 bool) netip.Prefix { return judge.AllAddresses(ipv6)[0].Prefixes()[0] }

// overlapsAny reports whether a network overlaps one of a sorted list of which
// none covers another, as returned by [nft.List.Prefixes].
func overlapsAny(p netip.Prefix, sorted []netip.Prefix) bool {
	byAddress := func(s netip.Prefix, a netip.Addr) int { return s.Addr().Compare(a) }
	next, _ := slices.BinarySearchFunc(sorted, p.Addr(), byAddress)
	return next < len(sorted) && sorted[next].Overlaps(p) || next > 0 && sorted[next-1].Overlaps(p)
}

// uncovered returns a part of a network that no CIDR of a list contains, if there is one.
func uncovered(p netip.Prefix, list []netip.Prefix) (netip.Prefix, bool) {
	remaining := judge.NewAddresses([]netip.Prefix{p}).Subtract(judge.NewAddresses(list))
	if len(remaining) == 0 {
		return netip.Prefix{}, false
	}
	return remaining[0].Prefixes()[0], true
}
