package judge_test

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/judge"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
)

func TestPolicyMatchesTheSpecification(t *testing.T) {
	m := cases.NewMaker(1)
	seen := map[nft.Verdict]int{}
	configs := nfttest.Rounds(2_000, 10_000, 10_000)
	for range configs {
		c := m.Config()
		o := m.Options(cases.Modes()[m.IntN(2)])
		if o.Layout.Mode() == nft.ModeIPTables {
			c = cases.ForView(c)
		}
		node := m.Addresses()
		r := nft.Compile(c, o).On(node)
		for range 20 {
			ipv6 := m.IntN(2) == 0
			conn := m.Connection(m.Near(c, ipv6), m.Near(c, ipv6))
			conn.ToNode = m.IntN(8) == 0
			want := cases.Specified(c, conn)
			seen[want]++
			if got := judge.Decide(r.Policy, conn); got != want {
				t.Fatalf("%+v: got %s, want %s\n%+v", conn, got, want, c)
			}
			conn.FromNode = false // its own traffic is masqueraded
			snat, _ := judge.SourceOf(r.Policy, conn)
			from, some := snat.Of(conn.Src)
			if sources := cases.SpecifiedSources(c, conn, node); r.Policy.Families[len(r.Policy.Families)-1].IPv6 == ipv6 &&
				(some != (len(sources) > 0) || some && !slices.Contains(sources, from)) {
				t.Fatalf("%+v leaves from %s, want one of %v\n%+v", conn, from, sources, c)
			}
		}
	}
	for _, v := range []nft.Verdict{nft.Local, nft.Exempt, nft.Masqueraded} {
		if seen[v] < configs/10 {
			t.Errorf("%d of %d were %s", seen[v], 20*configs, v)
		}
	}
}

func TestPolicyMatchesThePackets(t *testing.T) {
	cases.Each(t, func(t *testing.T, c cases.Case) {
		for _, m := range c.Modes() {
			for _, p := range c.Packets {
				if got := judge.Decide(c.Compile(m).Policy, p.Connection()); got != p.Verdict {
					t.Errorf("mode %s: %s: got %s", m, p.Line, got)
				}
			}
		}
	})
}

func connection(src, dst string, toNode bool) nft.Connection {
	return nft.Connection{Src: netip.MustParseAddr(src), Dst: netip.MustParseAddr(dst), ToNode: toNode}
}

func TestExplanationNamesTheEntryThatDecides(t *testing.T) {
	c := config.Config{
		NonMasqueradeCIDRs:   []config.CIDR{{Prefix: netip.MustParsePrefix("10.0.0.0/8"), Pos: config.At("a", 2, 5)}},
		ForceMasqueradeCIDRs: []config.CIDR{{Prefix: netip.MustParsePrefix("10.9.0.0/16"), Pos: config.At("b", 7, 5)}},
		MasqueradeSrcCIDRs:   cases.CIDRs("10.244.0.0/16"),
	}
	p := nft.NewPolicy(c, nft.Options{Layout: native.Layout{}})
	const toNode = "to an address of this node"
	type step struct {
		Question, CIDR, At string
		Decides            bool
		Verdict            nft.Verdict
	}
	for _, tt := range []struct {
		src, dst string
		local    bool
		want     []step
	}{
		{"10.244.1.2", "192.0.2.1", true, []step{{toNode, "", "", true, nft.Local}}},
		{"10.1.1.1", "198.51.100.8", false, []step{
			{Question: toNode, Verdict: nft.Local},
			{Question: "source in masqueradeSrcCIDRs", Decides: true, Verdict: nft.Exempt},
		}},
		{"10.244.1.2", "10.9.1.1", false, []step{
			{Question: toNode, Verdict: nft.Local},
			{Question: "source in masqueradeSrcCIDRs", CIDR: "10.244.0.0/16", Verdict: nft.Exempt},
			{"destination in forceMasqueradeCIDRs", "10.9.0.0/16", "b:7:5", true, nft.Masqueraded},
		}},
		{"10.244.1.2", "10.8.1.1", false, []step{
			{Question: toNode, Verdict: nft.Local},
			{Question: "source in masqueradeSrcCIDRs", CIDR: "10.244.0.0/16", Verdict: nft.Exempt},
			{Question: "destination in forceMasqueradeCIDRs", Verdict: nft.Masqueraded},
			{"destination in nonMasqueradeCIDRs", "10.0.0.0/8", "a:2:5", true, nft.Exempt},
		}},
		{"10.244.1.2", "198.51.100.8", false, []step{
			{Question: toNode, Verdict: nft.Local},
			{Question: "source in masqueradeSrcCIDRs", CIDR: "10.244.0.0/16", Verdict: nft.Exempt},
			{Question: "destination in forceMasqueradeCIDRs", Verdict: nft.Masqueraded},
			{Question: "destination in nonMasqueradeCIDRs", Verdict: nft.Exempt},
			{Question: "anything else", Decides: true, Verdict: nft.Masqueraded},
		}},
		{"10.244.1.2", "::ffff:10.8.1.1", true, []step{{toNode, "", "", true, nft.Local}}},
		{"fd00::1", "2001:db8::1", false, []step{{"IPv6 is disabled (set enableIPv6)", "", "", true, nft.Exempt}}},
	} {
		var got []step
		for _, s := range judge.Explain(p, connection(tt.src, tt.dst, tt.local)) {
			g := step{Question: s.Question, Decides: s.Decides, Verdict: s.Verdict}
			if s.CIDR.IsValid() {
				g.CIDR = s.CIDR.Prefix.String()
			}
			if s.CIDR.Pos != (config.Position{}) {
				g.At = s.CIDR.Pos.String()
			}
			got = append(got, g)
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s to %s (-want +got):\n%s", tt.src, tt.dst, diff)
		}
	}
}

func TestLinkLocalInTheFileIsExplainedByItsPosition(t *testing.T) {
	c := config.Config{NonMasqueradeCIDRs: cases.CIDRs("10.0.0.0/8", "169.254.0.0/16")}
	c.NonMasqueradeCIDRs[1].Pos = config.At("config", 3, 5)
	p := nft.NewPolicy(c, nft.Options{Layout: native.Layout{}})
	steps := judge.Explain(p, connection("10.0.0.1", "169.254.169.254", false))
	if got := steps[len(steps)-1].CIDR; got != c.NonMasqueradeCIDRs[1] {
		t.Errorf("decided by %v, want %v", got, c.NonMasqueradeCIDRs[1])
	}
}

// Each step names the condition, where it is, and what it says.
func TestExplanationOfEachKindOfCondition(t *testing.T) {
	at := func(line int) config.Position { return config.At("f", line, 1) }
	host := at(1)
	p := nft.NewPolicy(config.Config{
		ExemptHost:                 &host,
		MasqueradeSrcInterfaces:    []config.Interface{{Name: "cni*", Pos: at(2)}, {Name: "veth1", Pos: at(3)}},
		NonMasqueradeSrcCIDRs:      cases.CIDRs("10.244.9.0/24"),
		NonMasqueradeOutInterfaces: []config.Interface{{Name: "wg*", Pos: at(4)}},
		MasqueradeOutInterfaces:    []config.Interface{{Name: "*", Pos: at(5)}},
		MasqLinkLocal:              true,
	}, nft.Options{Layout: native.Layout{}})
	steps := func(all []judge.Step) (texts []string) {
		for _, s := range all[1:] {
			text := fmt.Sprintf("%s %t", s.Of.Key, s.Yes)
			if s.CIDR.IsValid() {
				text += " " + s.CIDR.Text()
			}
			if s.CIDR.Pos != (config.Position{}) {
				text += " " + s.CIDR.Pos.String()
			}
			if s.Name != "" {
				text += " " + s.Name
			}
			if s.Decides {
				text += " " + string(s.Verdict)
			}
			texts = append(texts, text)
		}
		return texts
	}
	c := nft.Connection{Src: netip.MustParseAddr("10.244.1.2"), Dst: netip.MustParseAddr("203.0.113.9")}
	from := func(change func(*nft.Connection)) nft.Connection {
		d := c
		d.In, d.Out = "veth1", "eth0"
		change(&d)
		return d
	}
	for _, tt := range []struct {
		name string
		got  []judge.Step
		want []string
	}{
		{"of the node", judge.Explain(p, from(func(c *nft.Connection) { c.FromNode = true })), []string{
			"masqueradeHost true f:1:1 exempt",
		}},
		{"of a pod", judge.Explain(p, from(func(*nft.Connection) {})), []string{
			"masqueradeHost false f:1:1", "masqueradeSrcInterfaces true f:3:1 veth1", "nonMasqueradeSrcCIDRs false",
			"nonMasqueradeOutInterfaces false", "masqueradeOutInterfaces true f:5:1 *", " true masqueraded",
		}},
		{"of a mapped address", judge.Explain(p, from(func(c *nft.Connection) {
			c.Src, c.Dst = netip.MustParseAddr("::ffff:10.244.9.2"), netip.MustParseAddr("::ffff:203.0.113.9")
		})), []string{
			"masqueradeHost false f:1:1", "masqueradeSrcInterfaces true f:3:1 veth1",
			"nonMasqueradeSrcCIDRs true 10.244.9.0/24 exempt",
		}},
		{"by a tunnel", judge.Explain(p, from(func(c *nft.Connection) { c.In, c.Out = "cni0", "wg0" })), []string{
			"masqueradeHost false f:1:1", "masqueradeSrcInterfaces true f:2:1 cni*", "nonMasqueradeSrcCIDRs false",
			"nonMasqueradeOutInterfaces true f:4:1 wg* exempt",
		}},
		{"from elsewhere", judge.Explain(p, from(func(c *nft.Connection) { c.In = "docker0" })), []string{
			"masqueradeHost false f:1:1", "masqueradeSrcInterfaces false exempt",
		}},
		{"by no interface", judge.Explain(p, from(func(c *nft.Connection) { c.Out = "" })), []string{
			"masqueradeHost false f:1:1", "masqueradeSrcInterfaces true f:3:1 veth1", "nonMasqueradeSrcCIDRs false",
			"nonMasqueradeOutInterfaces false", "masqueradeOutInterfaces false exempt",
		}},
	} {
		if got := steps(tt.got); !slices.Equal(got, tt.want) {
			t.Errorf("%s:\n\t%q\nwant\n\t%q", tt.name, got, tt.want)
		}
	}
}

func TestExemptDestinationsAreThoseOfTheLists(t *testing.T) {
	p := policyOf(config.Config{
		EnableIPv6: true, MasqLinkLocal: true, NonMasqueradeCIDRs: cases.CIDRs("10.0.0.0/8", "fd00::/8"),
		ForceMasqueradeCIDRs: cases.CIDRs("10.1.0.0/16"), MasqueradeSrcCIDRs: cases.CIDRs("10.2.0.0/16"),
	})
	if got := fmt.Sprint(judge.ExemptDestinations(p)); got != "[10.0.0.0/8 fd00::/8 fe80::/10]" {
		t.Errorf("exempt are %s", got)
	}
}
