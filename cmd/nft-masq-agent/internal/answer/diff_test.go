package answer_test

import (
	"encoding/json"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
)

// jsonChange is what a program reads.
type jsonChange struct {
	Family                string
	FromNode              bool
	ReceivedOn, LeavingBy *jsonInterfaces
	Sources, Destinations []netip.Prefix
	Before                nft.Verdict `json:"from"`
	After                 nft.Verdict `json:"to"`
}

type jsonInterfaces struct {
	Names      []string
	But        bool
	Exceptions []string
}

// includes reports whether a change is about a connection.
func (c jsonChange) includes(conn nft.Connection) bool {
	holds := func(list []netip.Prefix, a netip.Addr) bool {
		return slices.ContainsFunc(list, func(p netip.Prefix) bool { return p.Contains(a) })
	}
	origin := c.ReceivedOn == nil
	switch {
	case c.FromNode:
		origin = conn.FromNode
	case c.ReceivedOn != nil:
		origin = !conn.FromNode && c.ReceivedOn.include(conn.In)
	}
	return !conn.ToNode && origin && (c.LeavingBy == nil || c.LeavingBy.include(conn.Out)) &&
		holds(c.Sources, conn.Src) && holds(c.Destinations, conn.Dst) && (c.Family == "ipv6") == conn.Dst.Is6()
}

// include reports whether the longest entry that matches a name is one of the names.
func (i jsonInterfaces) include(name string) bool {
	longest, in := -1, i.But
	for _, list := range [][]string{i.Names, i.Exceptions} {
		for _, entry := range list {
			length := 2 * len(strings.TrimSuffix(entry, "*"))
			if !strings.HasSuffix(entry, "*") {
				length++
			}
			if (config.Interface{Name: entry}).Matches(name) && length > longest {
				longest, in = length, slices.Contains(i.Names, entry) != i.But
			}
		}
	}
	return in
}

// Every connection whose verdict changes is in one change, with both verdicts, and no
// other connection is in any.
func TestChangesAreTheConnectionsWhoseVerdictChanges(t *testing.T) {
	t.Parallel()
	m := cases.NewMaker(25)
	changed, same := 0, 0
	for n := range nfttest.Rounds(100, 300, 1_000) {
		before, after := m.Config(), m.Config()
		if n%2 == 0 { // interfaces and sources alone
			after.NonMasqueradeCIDRs, after.ForceMasqueradeCIDRs = before.NonMasqueradeCIDRs, before.ForceMasqueradeCIDRs
		}
		policy := func(c config.Config) nft.Policy { return nft.NewPolicy(c, nft.Options{Layout: native.Layout{}}) }
		text, err := json.Marshal(answer.NewDiff(policy(before), policy(after)))
		if err != nil {
			t.Fatal(err)
		}
		var d struct{ Changes []jsonChange }
		if err := json.Unmarshal(text, &d); err != nil {
			t.Fatal(err)
		}
		for i := range 40 {
			ipv6 := i%2 == 0
			conn := m.Connection(m.Near(before, ipv6), m.Near(after, ipv6))
			conn.ToNode = m.IntN(8) == 0
			was, is := cases.Specified(before, conn), cases.Specified(after, conn)
			if conn.ToNode {
				was, is = nft.Local, nft.Local // also while IPv6 is off
			}
			var got []jsonChange
			for _, c := range d.Changes {
				if c.includes(conn) {
					got = append(got, c)
				}
			}
			switch {
			case was == is && len(got) == 0:
				same++
			case was != is && len(got) == 1 && got[0].Before == was && got[0].After == is:
				changed++
			default:
				t.Fatalf("%+v: %s → %s, but %+v\n%s", conn, was, is, got, text)
			}
		}
	}
	if changed < 300 || same < 300 {
		t.Errorf("%d changed, %d did not", changed, same)
	}
}

// testdata/diff.txt has what is named.
func TestChangesAreNamedByWhatDistinguishesThem(t *testing.T) {
	text, err := os.ReadFile("../../../../testdata/diff.txt")
	if err != nil {
		t.Fatal(err)
	}
	policy := func(lines []string) nft.Policy {
		data := strings.Join(lines, "\n")
		if !strings.Contains(data, config.KeyNonMasqueradeCIDRs) {
			data += "\nnonMasqueradeCIDRs: [10.0.0.0/8]\n"
		}
		c, problems := config.Parse(config.Defaults{}, config.Source{Name: "config", Data: []byte(data)})
		if err := problems.Err(); err != nil {
			t.Fatal(err)
		}
		return nft.NewPolicy(c, nft.Options{Layout: native.Layout{}, Marks: []nft.Mark{{Value: 1, Mask: 1}}})
	}
	for _, part := range strings.Split(string(text), "\n== ")[1:] {
		name, part, _ := strings.Cut(part, "\n")
		of := map[string][]string{}
		for line := range strings.Lines(part) {
			word, rest, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
			of[word] = append(of[word], rest)
		}
		d := answer.NewDiff(policy(of["before"]), policy(of["after"]))
		var changes []string
		for _, c := range d.Changes {
			changes = append(changes, c.String())
		}
		want := slices.Concat(of["want"], of["other"])
		if !slices.Equal(changes, of["want"]) || !slices.Equal(d.Other, of["other"]) || d.Changed() != (len(want) > 0) {
			t.Errorf("%s: %q and %q, want %q", name, changes, d.Other, want)
		}
		d.Add(config.Note, "flags", "a note")
		lines := append(want, "a note", d.Before.Hash+" → "+d.After.Hash, "")
		if len(want) == 0 {
			lines = append([]string{"no change"}, lines...)
		}
		if got := d.String(); got != strings.Join(lines, "\n") {
			t.Errorf("%s: %q, want %q", name, got, lines)
		}
	}
}

func TestOpenConnectionsOfPodsAreCountedInEachChange(t *testing.T) {
	base := config.Config{NonMasqueradeCIDRs: cases.CIDRs("10.0.0.0/8")}
	after := config.Config{
		NonMasqueradeCIDRs: cases.CIDRs("10.0.0.0/9"), ExemptHost: &config.Position{},
		NonMasqueradeOutInterfaces: []config.Interface{{Name: "wg*"}},
	}
	policy := func(c config.Config) nft.Policy { return nft.NewPolicy(c, nft.Options{Layout: native.Layout{}}) }
	d := answer.NewDiff(policy(base), policy(after))
	for range 2 { // the second count replaces the first
		count := d.CountOpen()
		for _, c := range []string{
			"10.1.1.1 192.0.2.1", "10.1.1.1 10.1.1.2", "10.1.1.2 203.0.113.9", "10.1.1.1 10.200.0.1",
			"fd00::1 2001:db8::1",
		} {
			src, dst, _ := strings.Cut(c, " ")
			count(netip.MustParseAddr(src), netip.MustParseAddr(dst))
		}
	}
	d.Kept = &answer.Open{}
	d.Kept.Add(netip.MustParseAddr("10.1.1.1"))
	const others = "any IPv4 address except 10.0.0.0/8, 169.254.0.0/16: masqueraded → exempt"
	want := "sent by this node itself: " + others + "\n" +
		"received on any interface: leaving by wg*: " + others + "; at most 2 open connections of 2 pods\n" +
		"received on any interface: leaving by any interface except wg*: 10.128.0.0/9: exempt → masqueraded; " +
		"at most 1 open connection of 1 pod\n" +
		"1 open connection of 1 pod would keep another source address than new ones get\n"
	if got := d.String(); !strings.HasPrefix(got, want) {
		t.Errorf("%s, want\n%s", got, want)
	}
	d = answer.NewDiff(policy(base), policy(config.Config{}))
	d.CountOpen()(netip.MustParseAddr("10.1.1.1"), netip.MustParseAddr("10.2.0.1"))
	if got, want := d.Changes[0].String(), "10.0.0.0/8: exempt → masqueraded; 1 open connection of 1 pod"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}
