package judge_test

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/judge"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
)

// What is known of a policy is what is specified: the verdict for each connection, the region of those that it
// masquerades, the address that these leave from, and which keep their own whatever other programs do.
func TestPolicyMatchesTheSpecification(t *testing.T) {
	t.Parallel()
	m := cases.NewMaker(1)
	seen := map[string]int{}
	for n := range nfttest.Rounds(500, 1_500, 10_000) {
		c, ipv6 := extremes(m, m.Config()), n%2 == 0
		o := m.Options(cases.Modes()[m.IntN(2)])
		if o.Layout.Mode() == nft.ModeIPTables {
			c = cases.ForView(c)
		}
		node := m.Addresses()
		p := nft.NewPolicy(c, o).On(node)
		region := judge.RegionOf(p, ipv6)
		for _, conn := range someConnections(m, ipv6, c, c) {
			want := cases.Specified(c, conn)
			if got, in := judge.Decide(p, conn), region.Includes(conn); got != want || in != (want == nft.Masqueraded) {
				t.Fatalf("%+v: got %s, in the region %t, want %s\n%+v", conn, got, in, want, c)
			}
			pod, known := cases.SpecifiedPod(c, conn)
			enforced := c.Enforce != nil && known && pod && want == nft.Exempt && conn.Src != conn.Dst && (!ipv6 || c.EnableIPv6)
			if got := judge.Enforced(p, conn); got != enforced {
				t.Fatalf("%+v: enforced %t, want %t\n%+v", conn, got, enforced, c)
			}
			conn.FromNode = false // its own traffic is masqueraded
			snat, _ := judge.SourceOf(p, conn)
			from, some := snat.Of(conn.Src)
			if sources := cases.SpecifiedSources(c, conn, node); p.Families[len(p.Families)-1].IPv6 == ipv6 &&
				(some != (len(sources) > 0) || some && !slices.Contains(sources, from)) {
				t.Fatalf("%+v leaves from %s, want one of %v\n%+v", conn, from, sources, c)
			}
			seen[string(want)]++
			seen[fmt.Sprint("enforced ", enforced)]++
			seen[fmt.Sprint("from an address ", some)]++
		}
	}
	for _, what := range []nft.Verdict{nft.Local, nft.Exempt, nft.Masqueraded, "enforced true", "from an address true"} {
		if seen[string(what)] < 30 {
			t.Errorf("%v", seen)
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

func TestLinkLocalInTheFileIsExplainedByItsPosition(t *testing.T) {
	c := config.Config{NonMasqueradeCIDRs: cases.CIDRs("10.0.0.0/8", "169.254.0.0/16")}
	c.NonMasqueradeCIDRs[1].Pos = config.At("config", 3, 5)
	steps := judge.Explain(policyOf(c), nft.Connection{
		Src: netip.MustParseAddr("10.0.0.1"), Dst: netip.MustParseAddr("169.254.169.254"),
	})
	if got := steps[len(steps)-1].CIDR; got != c.NonMasqueradeCIDRs[1] {
		t.Errorf("decided by %v, want %v", got, c.NonMasqueradeCIDRs[1])
	}
}

// Each step names the condition, what it says, where the entry is, and the verdict if it decides.
func TestExplanationOfEachKindOfCondition(t *testing.T) {
	at := func(line int) config.Position { return config.At("f", line, 1) }
	host := at(1)
	names := policyOf(config.Config{
		ExemptHost:                 &host,
		MasqueradeSrcInterfaces:    []config.Interface{{Name: "cni*", Pos: at(2)}, {Name: "veth1", Pos: at(3)}},
		NonMasqueradeSrcCIDRs:      cases.CIDRs("10.244.9.0/24"),
		NonMasqueradeOutInterfaces: []config.Interface{{Name: "wg*", Pos: at(4)}},
		MasqueradeOutInterfaces:    []config.Interface{{Name: "*", Pos: at(5)}},
		MasqLinkLocal:              true,
	})
	lists := policyOf(config.Config{
		NonMasqueradeCIDRs:   []config.CIDR{{Prefix: netip.MustParsePrefix("10.0.0.0/8"), Pos: at(6)}},
		ForceMasqueradeCIDRs: []config.CIDR{{Prefix: netip.MustParsePrefix("10.9.0.0/16"), Pos: at(7)}},
		MasqueradeSrcCIDRs:   cases.CIDRs("10.244.0.0/16"),
	})
	var (
		from     = func(in, out string) nft.Connection { return nft.Connection{In: in, Out: out} }
		node     = "from an address of this node"
		received = "received on one of masqueradeSrcInterfaces"
		source   = "source in nonMasqueradeSrcCIDRs"
		tunnel   = "leaving by one of nonMasqueradeOutInterfaces"
		leaves   = "leaving by one of masqueradeOutInterfaces"
		pod      = "source in masqueradeSrcCIDRs yes 10.244.0.0/16"
		forced   = "destination in forceMasqueradeCIDRs"
		exempt   = "destination in nonMasqueradeCIDRs"
	)
	for _, tt := range []struct {
		of       nft.Policy
		src, dst string
		conn     nft.Connection
		want     []string // after the question whether it is to this node
	}{
		{names, "10.244.1.2", "203.0.113.9", nft.Connection{FromNode: true}, []string{node + " yes f:1:1 decides: exempt"}},
		{names, "10.244.1.2", "203.0.113.9", from("veth1", "eth0"), []string{
			node + " f:1:1", received + " yes f:3:1 veth1", source, tunnel, leaves + " yes f:5:1 *",
			"anything else yes decides: masqueraded",
		}},
		{names, "::ffff:10.244.9.2", "::ffff:203.0.113.9", from("veth1", "eth0"), []string{
			node + " f:1:1", received + " yes f:3:1 veth1", source + " yes 10.244.9.0/24 decides: exempt",
		}},
		{names, "10.244.1.2", "203.0.113.9", from("cni0", "wg0"), []string{
			node + " f:1:1", received + " yes f:2:1 cni*", source, tunnel + " yes f:4:1 wg* decides: exempt",
		}},
		{names, "10.244.1.2", "203.0.113.9", from("docker0", "eth0"), []string{
			node + " f:1:1", received + " decides: exempt",
		}},
		{names, "10.244.1.2", "203.0.113.9", from("veth1", ""), []string{
			node + " f:1:1", received + " yes f:3:1 veth1", source, tunnel, leaves + " decides: exempt",
		}},
		{lists, "10.1.1.1", "198.51.100.8", from("", ""), []string{"source in masqueradeSrcCIDRs decides: exempt"}},
		{lists, "10.244.1.2", "10.9.1.1", from("", ""), []string{
			pod, forced + " yes 10.9.0.0/16 f:7:1 decides: masqueraded",
		}},
		{lists, "10.244.1.2", "10.8.1.1", from("", ""), []string{
			pod, forced, exempt + " yes 10.0.0.0/8 f:6:1 decides: exempt",
		}},
		{lists, "10.244.1.2", "198.51.100.8", from("", ""), []string{
			pod, forced, exempt, "anything else yes decides: masqueraded",
		}},
		{lists, "10.244.1.2", "::ffff:10.8.1.1", nft.Connection{ToNode: true}, nil},
		{lists, "fd00::1", "2001:db8::1", from("", ""), nil},
	} {
		tt.conn.Src, tt.conn.Dst = netip.MustParseAddr(tt.src), netip.MustParseAddr(tt.dst)
		var got []string
		for _, s := range judge.Explain(tt.of, tt.conn) {
			text := s.Question
			if s.Yes {
				text += " yes"
			}
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
				text += " decides: " + string(s.Verdict)
			}
			got = append(got, text)
		}
		want := append([]string{"to an address of this node"}, tt.want...)
		if tt.want == nil {
			want = []string{"to an address of this node yes decides: local"}
		}
		if tt.dst == "2001:db8::1" {
			want = []string{"IPv6 is disabled (set enableIPv6) yes decides: exempt"}
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s to %s, %+v:\n\t%q\nwant\n\t%q", tt.src, tt.dst, tt.conn, got, want)
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
