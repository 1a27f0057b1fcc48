package cases

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"time"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
)

// Specified returns the verdict of the policy, as specified.
func Specified(c config.Config, conn nft.Connection) nft.Verdict {
	src, dst := conn.Src, conn.Dst
	linkLocal := dst.IsLinkLocalUnicast() && (dst.Is4() && !c.MasqLinkLocal || dst.Is6() && !c.MasqLinkLocalIPv6)
	switch {
	case dst.Is6() && !c.EnableIPv6:
		return nft.Exempt
	case conn.ToNode:
		return nft.Local
	case conn.FromNode && c.ExemptHost:
		return nft.Exempt
	case len(c.MasqueradeSrcInterfaces) > 0 && (conn.FromNode || !named(c.MasqueradeSrcInterfaces, conn.InInterface)):
		return nft.Exempt
	case ofFamilyOf(src, c.MasqueradeSrcCIDRs) && !holds(c.MasqueradeSrcCIDRs, src), holds(c.NonMasqueradeSrcCIDRs, src):
		return nft.Exempt
	case named(c.NonMasqueradeOutInterfaces, conn.OutInterface), len(c.MasqueradeOutInterfaces) > 0 &&
		!named(c.MasqueradeOutInterfaces, conn.OutInterface):
		return nft.Exempt
	case holds(c.ForceMasqueradeCIDRs, dst):
		return nft.Masqueraded
	case holds(c.NonMasqueradeCIDRs, dst), linkLocal:
		return nft.Exempt
	}
	return nft.Masqueraded
}

// SpecifiedPod reports whether a connection is from a pod, and whether the config
// lists what is one in that family.
func SpecifiedPod(c config.Config, conn nft.Connection) (pod, known bool) {
	byInterface, bySource := len(c.MasqueradeSrcInterfaces) > 0, ofFamilyOf(conn.Src, c.MasqueradeSrcCIDRs)
	pod = !conn.FromNode && (!byInterface || named(c.MasqueradeSrcInterfaces, conn.InInterface)) &&
		(!bySource || holds(c.MasqueradeSrcCIDRs, conn.Src))
	return pod, byInterface || bySource
}

// SpecifiedSources returns the addresses from which a masqueraded connection leaves on
// a node with some addresses; none: from that of its interface.
func SpecifiedSources(c config.Config, conn nft.Connection, node []netip.Addr) []netip.Addr {
	if conn.FromNode {
		return nil
	}
	of := func(list []config.CIDR) (out []netip.Addr) {
		for _, a := range node {
			if a.Is6() == conn.Dst.Is6() && holds(list, a) {
				out = append(out, a)
			}
		}
		return out
	}
	for _, r := range c.SNATRules {
		from, to, out := len(r.From) == 0 || holds(r.From, conn.Src), len(r.To) == 0 ||
			holds(r.To, conn.Dst), len(r.Out) == 0 || named(r.Out, conn.OutInterface)
		if has := of(r.Addresses); from && to && out && len(has) > 0 {
			return has
		}
	}
	return of(c.SNATAddresses)
}

// named reports whether an interface is in the list.
func named(list []config.Interface, name string) bool {
	return slices.ContainsFunc(list, func(i config.Interface) bool {
		prefix, several := strings.CutSuffix(i.Name, "*")
		return name != "" && (i.Name == name || several && strings.HasPrefix(name, prefix))
	})
}

func holds(list []config.CIDR, a netip.Addr) bool {
	return slices.ContainsFunc(list, func(c config.CIDR) bool { return c.Contains(a) })
}

// ofFamilyOf reports whether the list has an entry of the address's family.
func ofFamilyOf(a netip.Addr, list []config.CIDR) bool {
	return slices.ContainsFunc(list, func(c config.CIDR) bool { return c.Addr().Is6() == a.Is6() })
}

// A Maker generates random configs, and addresses at the edges of their prefixes.
type Maker struct{ *rand.Rand }

// NewMaker returns a maker that always generates the same values for a seed.
func NewMaker(seed uint64) Maker { return Maker{rand.New(rand.NewPCG(seed, 0))} }

// addr returns a unicast address. These are close to each other, so that prefixes
// overlap.
func (m Maker) addr(ipv6 bool) netip.Addr {
	if ipv6 {
		heads := []string{"fd00::", "fd00:10:244::", "fdff:ffff::", "2001:db8:1::", "2001:db8:77::", "2001:db8:ffff::"}
		b := netip.MustParseAddr(heads[m.IntN(len(heads))]).As16()
		b[m.IntN(8)+2] ^= byte(m.IntN(4))
		b[15] = byte(m.IntN(255) + 1)
		return netip.AddrFrom16(b)
	}
	heads := []string{
		"10.0.0.0", "10.9.0.0", "10.64.0.0", "100.64.0.0", "172.16.0.0", "192.168.0.0", "198.18.0.0",
		"203.0.113.0",
	}
	b := netip.MustParseAddr(heads[m.IntN(len(heads))]).As4()
	b[m.IntN(2)+1] ^= byte(m.IntN(4))
	b[3] = byte(m.IntN(254) + 1)
	return netip.AddrFrom4(b)
}

func (m Maker) cidr() config.CIDR {
	a := m.addr(m.IntN(2) == 0)
	bits := m.IntN(a.BitLen() + 1)
	if m.IntN(4) > 0 { // mostly lengths that do not cover everything
		bits = a.BitLen()/4 + m.IntN(a.BitLen()*3/4+1)
	}
	p, _ := a.Prefix(bits)
	return config.CIDR{Prefix: p}
}

func (m Maker) list(most int) []config.CIDR {
	if m.IntN(3) == 0 {
		return nil
	}
	list := make([]config.CIDR, m.IntN(most)+1)
	for i := range list {
		list[i] = m.cidr()
	}
	return list
}

// Config generates a config. A test holds that each field is set in some of them.
func (m Maker) Config() config.Config {
	c := config.Config{
		NonMasqueradeCIDRs: m.list(12), ForceMasqueradeCIDRs: m.list(4),
		NonMasqueradeSrcCIDRs: m.list(4), MasqueradeSrcCIDRs: m.list(6),
		MasqLinkLocal: m.IntN(2) == 0, MasqLinkLocalIPv6: m.IntN(2) == 0, EnableIPv6: m.IntN(4) > 0,
		ResyncInterval:   time.Duration(m.IntN(60)) * time.Minute,
		StaleConnections: []config.Stale{config.StaleKeep, config.StaleUDP, config.StaleAll}[m.IntN(3)],
		CIDRLimit:        m.IntN(100),
	}
	if ranges := m.ports(); m.IntN(4) == 0 {
		c.ToPorts = &ranges
	}
	if random := m.IntN(2) == 0; m.IntN(3) == 0 {
		c.RandomFully = &random
	}
	if m.IntN(4) == 0 {
		c.ExemptHost = true
	}
	for _, list := range []*[]config.Interface{
		&c.MasqueradeSrcInterfaces, &c.NonMasqueradeOutInterfaces,
		&c.MasqueradeOutInterfaces,
	} {
		if m.IntN(4) == 0 {
			*list = m.interfaces()
		}
	}
	if m.IntN(3) == 0 {
		c.Enforce = true
	}
	if m.IntN(3) == 0 {
		c.DropInvalid = true
	}
	c.PortsPerPod = config.PodPorts(1000 * (len(c.NonMasqueradeSrcCIDRs) % 3)) // few blocks, or none
	for m.IntN(3) > 0 {
		c.SNATAddresses = append(c.SNATAddresses, m.snatAddress())
	}
	if m.IntN(2) == 0 {
		c.PortsPerPod = 0 // portsPerPod excludes snatRules
	}
	for c.PortsPerPod == 0 && m.IntN(5) > 0 && len(c.SNATRules) < 12 {
		c.SNATRules = append(c.SNATRules, m.snatRule())
	}
	return c
}

func (m Maker) snatAddress() config.CIDR {
	entries := append(SNATAddresses(), "198.51.100.208/29", "198.51.100.0/24", "198.51.100.77", "2001:db8:5::/64",
		"2001:db8:5::77")
	a := entries[m.IntN(len(entries))]
	if !strings.Contains(a, "/") {
		a += map[bool]string{false: "/32", true: "/128"}[strings.Contains(a, ":")]
	}
	return config.CIDR{Prefix: netip.MustParsePrefix(a)}
}

// snatRule generates an entry of snatRules, often by the source alone.
func (m Maker) snatRule() config.SNATRule {
	r := config.SNATRule{From: m.list(3), Addresses: []config.CIDR{m.snatAddress()}}
	for m.IntN(3) == 0 {
		r.Addresses = append(r.Addresses, m.snatAddress())
	}
	if m.IntN(3) == 0 {
		r.To = m.list(3)
	}
	if m.IntN(4) == 0 || len(r.From)+len(r.To) == 0 {
		r.Out = m.interfaces()
	}
	return r
}

// SNATAddresses returns addresses that a node can have for the configs of a [Maker].
func SNATAddresses() []string {
	return []string{
		"198.51.100.211", "198.51.100.212", "198.51.100.213", "198.51.100.225", "198.51.100.226", "2001:db8:5::2",
		"2001:db8:5::3", "2001:db8:5::4",
	}
}

// Addresses generates the addresses that a node has, some of [SNATAddresses].
func (m Maker) Addresses() (some []netip.Addr) {
	for _, a := range SNATAddresses() {
		if m.IntN(2) == 0 {
			some = append(some, netip.MustParseAddr(a))
		}
	}
	return some
}

// Interfaces returns names for lists and connections; those in lists may also be
// prefixes.
func Interfaces() []string { return []string{"wg0", "wg1", "w", "eth0", "eth0.7", "eth01", "pod0"} }

func (m Maker) interfaces() []config.Interface {
	names := append(Interfaces(), "wg*", "w*", "eth0*", "eth*", "pod*")
	list := make([]config.Interface, m.IntN(3)+1)
	for i := range list {
		list[i].Name = names[m.IntN(len(names))]
	}
	return list
}

// Connection generates a connection between two addresses, mostly not to the node. A test holds
// that each field is set in some of them.
func (m Maker) Connection(src, dst netip.Addr) nft.Connection {
	names := append(Interfaces(), "veth123456789ab", "lo")
	c := nft.Connection{Src: src, Dst: dst, FromNode: m.IntN(4) == 0, OutInterface: names[m.IntN(len(names))]}
	c.ToNode = m.IntN(8) == 0
	if !c.FromNode {
		c.InInterface = names[m.IntN(len(names))]
	}
	return c
}

// ForView removes from a config what mode iptables-nft cannot express.
func ForView(c config.Config) config.Config {
	c.Enforce, c.DropInvalid, c.SNATAddresses, c.SNATRules = false, false, nil, nil
	c.ForceMasqueradeCIDRs, c.NonMasqueradeSrcCIDRs, c.MasqueradeSrcCIDRs, c.PortsPerPod = nil, nil, nil, 0
	c.ExemptHost, c.MasqueradeSrcInterfaces, c.NonMasqueradeOutInterfaces, c.MasqueradeOutInterfaces = false, nil, nil, nil
	return c
}

// Options generates options for a mode.
func (m Maker) Options(mode nft.Mode) nft.Options {
	return nft.Options{
		Layout: Layout(mode, DefaultChain), RandomFully: m.IntN(2) == 0, Ports: m.ports(), Marks: Marks()[:1+m.IntN(2)],
	}
}

func (m Maker) ports() (ranges []nft.PortRange) {
	for from := 1024; m.IntN(3) == 0; from += 10000 {
		ranges = append(ranges, nft.PortRange{Min: uint16(from), Max: uint16(from + m.IntN(5000))})
	}
	return ranges
}

// Near returns an address for a config: often the first or last address of one of
// its prefixes, or the one next to it.
func (m Maker) Near(c config.Config, ipv6 bool) netip.Addr {
	all := slices.Concat(c.NonMasqueradeCIDRs, c.ForceMasqueradeCIDRs, c.NonMasqueradeSrcCIDRs, c.MasqueradeSrcCIDRs)
	for _, r := range c.SNATRules {
		all = slices.Concat(all, r.From, r.To)
	}
	all = append(all, CIDRs("169.254.0.0/16", "fe80::/10")...)
	all = slices.DeleteFunc(all, func(c config.CIDR) bool { return c.Addr().Is6() != ipv6 })
	p := all[m.IntN(len(all))].Prefix
	first, last := p.Addr(), lastOf(p)
	if a := []netip.Addr{first, last, first.Prev(), last.Next()}[m.IntN(4)]; a.IsValid() && m.IntN(4) > 0 {
		return a
	}
	return m.addr(ipv6)
}

// lastOf returns the last address of a prefix, computed independently of package
// nfnetlink.
func lastOf(p netip.Prefix) netip.Addr {
	a := p.Addr()
	for bits := p.Bits() + 1; bits <= a.BitLen(); bits++ {
		b := a.AsSlice()
		b[(bits-1)/8] |= 0x80 >> ((bits - 1) % 8)
		a, _ = netip.AddrFromSlice(b)
	}
	return a
}
