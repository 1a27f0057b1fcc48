package judge_test

import (
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/judge"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/nfttest/script"
)

// verdict is that of the last step.
func verdict(p nft.Policy, c nft.Connection) nft.Verdict {
	_, v := judge.Explain(p, c)
	return v
}

// What is known of a policy is what is specified: the verdict for each connection, the addresses between which it
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
		p := nft.NewPolicy(c, o).WithAddresses(node)
		family, on := p.Family(ipv6)
		dst, exists := judge.MasqueradedDestination(family)
		for _, conn := range someConnections(m, ipv6, c, c) {
			want := cases.Specified(c, conn)
			if got := verdict(p, conn); got != want {
				t.Fatalf("%+v: got %s, want %s\n%+v", conn, got, want, c)
			}
			inside := conn
			inside.Dst = dst
			inside.ToNode = false
			if want == nft.Masqueraded && !exists || on && exists && exemptByDestination(p, inside) {
				t.Fatalf("%+v: destination %s %t, want %s\n%+v", conn, dst, exists, want, c)
			}
			pod, known := cases.SpecifiedPod(c, conn)
			enforced := c.Enforce && known && pod && want == nft.Exempt && conn.Src != conn.Dst && (!ipv6 || c.EnableIPv6)
			if got := judge.Enforced(p, conn); got != enforced {
				t.Fatalf("%+v: enforced %t, want %t\n%+v", conn, got, enforced, c)
			}
			conn.FromNode = false // its own traffic is masqueraded
			from, _ := judge.SourceAddress(p, conn)
			some := from.IsValid()
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

func exemptByDestination(p nft.Policy, c nft.Connection) bool {
	steps, v := judge.Explain(p, c)
	return v == nft.Exempt && steps[len(steps)-1].Condition.Asks == config.DestinationAddress
}

func TestPolicyMatchesThePackets(t *testing.T) {
	cases.Each(t, func(t *testing.T, c cases.Case) {
		for _, m := range c.Modes() {
			for _, p := range c.Packets {
				if got := verdict(c.Compile(m).Policy, p.Connection()); got != p.Verdict {
					t.Errorf("mode %s: %s: got %s", m, p.Line, got)
				}
			}
		}
	})
}

// The cases of testdata/explain.txt are configs, and what is asked of each. Each step of the answer names the
// condition, what it says, where the entry is, and the verdict if it decides.
func TestExplanationOfEachKindOfCondition(t *testing.T) {
	script.Golden(t, "testdata/explain.txt", false, func(t *testing.T, c *script.Case) {
		yaml := ""
		for _, s := range c.Steps {
			verb, question := s.Words()
			if verb != "ask" {
				yaml += s.Line + "\n"
				continue
			}
			parsed, problems := config.Parse(config.Defaults{}, config.Source{Name: "f", Data: []byte(yaml)})
			if problems.Err() != nil {
				t.Fatal(problems)
			}
			s.Say(explained(policyOf(parsed), question))
		}
		if verb, _ := c.Last().Words(); verb != "ask" {
			c.Last().Unknown(t)
		}
	})
}

// explained returns the steps of an explanation.
func explained(p nft.Policy, question string) string {
	words := append(strings.Fields(strings.ReplaceAll(question, " -", " ")), "", "")
	conn := nft.Connection{
		Src: netip.MustParseAddr(words[0]), Dst: netip.MustParseAddr(words[1]), InInterface: words[2], OutInterface: words[3],
		FromNode: words[2] == "node", ToNode: words[2] == "here",
	}
	var b strings.Builder
	steps, v := judge.Explain(p, conn)
	for i, s := range steps {
		b.WriteString(s.Question)
		if s.Yes {
			b.WriteString(": yes")
		}
		if s.CIDR.IsValid() {
			fmt.Fprintf(&b, " %s %s", s.CIDR.Text(), s.CIDR.Pos)
		} else if s.CIDR.Pos != (config.Position{}) {
			b.WriteString(" " + s.CIDR.Pos.String())
		}
		if s.Name != "" {
			b.WriteString(" " + s.Name)
		}
		if i == len(steps)-1 {
			b.WriteString(" decides: " + string(v))
		}
		b.WriteString("\n")
	}
	return b.String()
}

func TestMain(m *testing.M) { os.Exit(nfttest.Main(m)) }
