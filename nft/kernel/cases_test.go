package kernel

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/judge"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/xtables"
)

func TestRulesAreThoseThatNFTAndIPTablesWriteFromTheText(t *testing.T) {
	t.Parallel()
	cases.Each(t, func(t *testing.T, c cases.Case) {
		c.SkipIfShort(t)
		t.Parallel()
		for _, m := range c.Modes() {
			t.Run(string(m), func(t *testing.T) { sameAsTheirs(t, c.Compile(m)) })
		}
	})
	for name, c := range map[string]config.Config{
		"prefix lengths": {
			NonMasqueradeCIDRs: prefixLengths, MasqLinkLocal: true, MasqLinkLocalIPv6: true, EnableIPv6: true,
		},
		"many CIDRs": manyCIDRs(nfttest.Rounds(20, 10_000, 10_000)),
	} {
		for _, o := range []nft.Options{
			{Layout: native.Layout{}},
			{Layout: xtables.Layout{Name: cases.DefaultChain}},
			{Layout: xtables.Layout{Name: cases.DefaultChain}, RandomFully: true},
		} {
			t.Run(fmt.Sprint(name, ", ", o.Layout.Mode(), ", random ", o.RandomFully), func(t *testing.T) {
				t.Parallel()
				if o.Layout.Mode() == nft.ModeIPTables {
					c.NonMasqueradeCIDRs = c.NonMasqueradeCIDRs[:min(len(c.NonMasqueradeCIDRs), xtables.MaxCIDRs/2)]
				}
				sameAsTheirs(t, nft.Compile(c, o))
			})
		}
	}
}

// prefixLengths are those at which the notation of iptables changes.
var prefixLengths = cases.CIDRs(
	"128.0.0.0/1", "10.128.0.0/9", "172.16.0.0/12", "192.0.2.0/24", "198.51.100.128/25", "203.0.113.9/32",
	"fe80::/10", "2001:db8:8000::/33", "fd00:1:2:3::/64", "fd00:1:2:3:8000::/81", "2001:db8::9/128",
	"0.0.0.0/0", "::/0",
)

// manyCIDRs are of random lengths, and no two of them are adjacent.
func manyCIDRs(n int) config.Config {
	m := cases.NewMaker(4)
	c := config.Config{MasqLinkLocal: true, MasqLinkLocalIPv6: true, EnableIPv6: true}
	for i := range n / 2 {
		b := netip.MustParseAddr("fd00::").As16()
		b[2], b[3], b[m.IntN(10)+6] = byte(i>>8), byte(i), byte(m.IntN(256))
		for _, p := range []netip.Prefix{
			netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 5), byte(i << 3), byte(m.IntN(256))}), 22+m.IntN(11)),
			netip.PrefixFrom(netip.AddrFrom16(b), 32+m.IntN(97)),
		} {
			c.NonMasqueradeCIDRs = append(c.NonMasqueradeCIDRs, config.CIDR{Prefix: p.Masked()})
		}
	}
	return c
}

// sameAsTheirs compares what we write with what nft, or iptables, writes from the text.
func sameAsTheirs(t *testing.T, want nft.Ruleset) {
	t.Helper()
	nfttest.Require(t, "nft", "iptables-nft-save", "iptables-nft-restore")
	ns, theirs := nfttest.NewNS(t, "ours"), nfttest.NewNS(t, "theirs")
	apply(t, open(t, ns), want, layout.Ours)
	if want.Mode() == nft.ModeIPTables {
		for _, f := range want.Policy.Families {
			program := map[bool]string{false: "iptables-nft-save", true: "ip6tables-nft-save"}[f.IPv6]
			saved := nfttest.Save(t, ns, program, "nat")
			if diff := cmp.Diff(byChain(want.String(), f.IPv6), byChain(saved, f.IPv6)); diff != "" {
				t.Errorf("%s (-text +kernel):\n%s", program, diff)
			}
		}
		restore(t, theirs, want.String(), want)
		if diff := cmp.Diff(natRules(t, theirs), natRules(t, ns)); diff != "" {
			t.Errorf("raw rules (-iptables-restore +ours):\n%s", diff)
		}
		adopted(t, theirs, want)
		return
	}
	ours := nfttest.ListRuleset(t, ns)
	if listing := nfttest.NFT(t, ns, "", "list", "table", "inet", nft.TableName); listing != ours {
		t.Errorf("there is more than the table (-table +ruleset):\n%s", cmp.Diff(listing, ours))
	}
	nfttest.NFT(t, theirs, want.String(), "-f", "-")
	if diff := cmp.Diff(paragraphs(nfttest.ListRuleset(t, theirs)), paragraphs(ours)); diff != "" {
		t.Errorf("listing (-nft +ours):\n%s", diff)
	}
	nfttest.NFT(t, ns, ours, "-c", "-f", "-")
	t.Run("bytecode", func(t *testing.T) { // which newer versions of nft choose otherwise, or print otherwise
		if diff := cmp.Diff(paragraphs(bytecode(t, theirs)), paragraphs(bytecode(t, ns))); diff != "" {
			t.Errorf("bytecode (-nft +ours):\n%s", diff)
		}
		inSync(t, theirs, want)
	})
}

// paragraphs are in no order: chains are listed as they were created.
func paragraphs(listing string) (all []string) {
	for p := range strings.SplitSeq(strings.TrimSuffix(listing, "}\n"), "\n\n") {
		all = append(all, strings.TrimSpace(p))
	}
	slices.Sort(all)
	return all
}

// bytecode returns nft's dump of the rules and sets in the kernel: without
// handles, and without nft's own notes, a bound before the first interval of a
// set and a mark at one without an end.
func bytecode(t *testing.T, ns *nfttest.NS) string {
	t.Helper()
	out := nfttest.NFT(t, ns, "", "--debug=netlink", "list", "ruleset")
	for _, r := range [][2]string{
		{`(?m)^(inet \S+ \S+) [\d ]+$`, "\n$1"},
		{`(?m)^\s*element 00000000( 00000000)*  : 1 \[end\]\n`, ""},
		{`(?m)^(\s*element .*\[end\])  userdata = .*$`, "$1"},
	} {
		out = regexp.MustCompile(r[0]).ReplaceAllString(out, r[1])
	}
	// The elements of a map have no order.
	return regexp.MustCompile(`(\telement .*\n)+`).ReplaceAllStringFunc(out, func(elements string) string {
		return strings.Join(slices.Sorted(strings.Lines(elements)), "")
	})
}

// restore loads a rendering as documented.
func restore(t testing.TB, ns *nfttest.NS, text string, r nft.Ruleset) {
	t.Helper()
	nfttest.Run(t, ns, text, "iptables-nft-restore", "--noflush")
	if len(r.Policy.Families) > 1 {
		nfttest.Run(t, ns, text, "ip6tables-nft-restore", "--noflush")
	}
}

// byChain returns the rules of one family by chain, from the output of
// iptables-save or a rendering for both families.
func byChain(text string, ipv6 bool) map[string][]string {
	ours, others := "-4 ", "-6 "
	if ipv6 {
		ours, others = others, ours
	}
	rules := map[string][]string{}
	for line := range strings.Lines(text) {
		line = strings.TrimPrefix(strings.TrimSpace(line), ours)
		words := strings.SplitN(line, " ", 3)
		if strings.HasPrefix(line, others) || words[0] != "-A" {
			continue
		}
		rules[words[1]] = append(rules[words[1]], words[2])
	}
	return rules
}

// natRules returns the chains of the tables that iptables lists, and the raw
// attributes of their rules.
func natRules(t testing.TB, ns *nfttest.NS) map[string][]nfnetlink.Rule {
	t.Helper()
	c := connect(t, ns)
	all := map[string][]nfnetlink.Rule{}
	for _, f := range []nfnetlink.Family{nfnetlink.IPv4, nfnetlink.IPv6} {
		chains, err := c.Chains(f)
		if err != nil {
			t.Fatal(err)
		}
		for _, ch := range chains {
			rules := rulesOf(t, c, f, ch.Table, ch.Name)
			for i := range rules {
				rules[i].Handle = 0
				rules[i].UserData = nil // our signature
			}
			// iptables-restore also creates the other chains of the table.
			if ch.Hook == nil || len(rules) > 0 {
				all[f.String()+" "+ch.Table+" "+ch.Name] = rules
			}
		}
	}
	return all
}

func TestPacketsMatchTheCases(t *testing.T) {
	t.Parallel()
	cases.Each(t, func(t *testing.T, c cases.Case) {
		c.SkipIfShort(t)
		t.Parallel()
		wire := newWire(t)
		k := open(t, wire.Node)
		for _, m := range c.Modes() {
			want := c.Compile(m)
			apply(t, k, want, everything)
			for _, p := range c.Packets {
				if unrouted(p.Dst) {
					wire.check(t, k, want, p)
				}
			}
		}
	})
}

// check sends a packet and compares what was seen of it with what is expected:
// its source, and in mode nftables the counter that was incremented.
func (w *wire) check(t *testing.T, k *Kernel, r nft.Ruleset, p cases.Packet) {
	t.Helper()
	before := counters(t, k)
	s := w.send(t, p)
	what := string(r.Mode()) + ": " + p.Line
	// The node's own address stays the same when it is masqueraded.
	if p.Src != w.NodeV4 && p.Src != w.NodeV6 && s.Masqueraded() != (p.Verdict == nft.Masqueraded) {
		t.Errorf("%s: sent from %s, seen from %s", what, s.Sent, s.Seen)
	}
	if p.Verdict == nft.Masqueraded {
		if p.Proto != nfttest.ICMP { // which has no ports
			checkPort(t, what, r.Policy, s)
		}
		w.checkSource(t, what, r.Policy, p, s)
	} else if s.Sent != s.Seen {
		t.Errorf("%s: sent from %s, seen from %s", what, s.Sent, s.Seen)
	}
	if r.Mode() == nft.ModeNFTables && len(r.Policy.Families) >= map[bool]int{false: 1, true: 2}[p.Dst.Is6()] {
		before[nft.Counts{IPv6: p.Dst.Is6(), Verdict: p.Verdict}]++
	}
	if diff := cmp.Diff(before, counters(t, k)); diff != "" {
		t.Errorf("%s: counters (-want +got):\n%s", what, diff)
	}
}

// checkSource compares the address of a masqueraded connection with those that are
// possible, and with the one that explain names.
func (w *wire) checkSource(t *testing.T, what string, p nft.Policy, packet cases.Packet, s nfttest.Sighting) {
	t.Helper()
	seen := s.Seen.Addr()
	snat, _ := judge.SourceOf(p, packet.Connection())
	switch named, _ := snat.Of(packet.Src); {
	case !p.HasSNAT():
	case len(packet.Seen) > 0:
		if !slices.Contains(packet.Seen, seen) || named != seen {
			t.Errorf("%s: seen from %s, want one of %v, and %s", what, seen, packet.Seen, named)
		}
	case seen != w.NodeV4 && seen != w.NodeV6:
		t.Errorf("%s: seen from %s, want the node's address", what, seen)
	}
}

// checkPort compares the source port of a masqueraded connection with the policy.
func checkPort(t *testing.T, what string, p nft.Policy, s nfttest.Sighting) {
	t.Helper()
	port, ipv6 := s.Seen.Port(), s.Seen.Addr().Is6()
	switch b := p.PortBlocks(ipv6); {
	case b.Count() > 0:
		owner, ok := b.Owner(port)
		own := s.Sent.Addr() == s.Seen.Addr() // this node's
		if ok == own || ok && owner != b.Of(s.Sent.Addr()) {
			t.Errorf("%s: port %d is of block %d, %t", what, port, owner, ok)
		}
	case len(p.Ports) > 0:
		if !slices.ContainsFunc(p.Ports, func(r nft.PortRange) bool { return r.Min <= port && port <= r.Max }) {
			t.Errorf("%s: port %d is outside %v", what, port, p.Ports)
		}
	case !p.RandomFully && port != s.Sent.Port():
		t.Errorf("%s: port %d became %d", what, s.Sent.Port(), port)
	}
}

// counters returns the number of packets of each counter.
func counters(t testing.TB, k *Kernel) map[nft.Counts]uint64 {
	t.Helper()
	all, err := k.Counters(native.Layout{})
	if err != nil {
		t.Fatal(err)
	}
	m := map[nft.Counts]uint64{}
	for _, c := range all {
		m[nft.Counts{IPv6: c.IPv6, Verdict: c.Verdict}] = c.Packets
	}
	return m
}
