package answer_test

import (
	"encoding/json"
	"net/netip"
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
	for n := range nfttest.Rounds(300, 1_000, 1_000) {
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
	if changed < 1000 || same < 1000 {
		t.Errorf("%d changed, %d did not", changed, same)
	}
}

func TestChangesAreNamedByWhatDistinguishesThem(t *testing.T) {
	list := func(names ...string) (all []config.Interface) {
		for _, name := range names {
			all = append(all, config.Interface{Name: name})
		}
		return all
	}
	const all = "any IPv4 address except 10.0.0.0/8, 169.254.0.0/16"
	base := config.Config{NonMasqueradeCIDRs: cases.CIDRs("10.0.0.0/8")}
	for _, tt := range []struct {
		name          string
		before, after func(*config.Config)
		want          string
	}{
		{
			"a destination", nil, func(c *config.Config) { c.NonMasqueradeCIDRs = cases.CIDRs("10.0.0.0/9") },
			"10.128.0.0/9: exempt → masqueraded",
		},
		{
			"no CIDR", nil, func(c *config.Config) { c.NonMasqueradeCIDRs = cases.CIDRs("10.0.0.0/10") },
			"10.64.0.0-10.255.255.255: exempt → masqueraded",
		},
		{
			"all but two ranges", nil,
			func(c *config.Config) { c.NonMasqueradeCIDRs = cases.CIDRs("10.0.0.0/8", "0.0.0.0/1", "240.0.0.0/4") },
			"any IPv4 address except 10.0.0.0/8, 128.0.0.0-239.255.255.255: masqueraded → exempt",
		},
		{
			"two ranges", nil, func(c *config.Config) {
				c.NonMasqueradeCIDRs = cases.CIDRs("10.0.0.0/8", "172.16.0.0/12", "192.168.0.7/32")
			},
			"172.16.0.0/12, 192.168.0.7: masqueraded → exempt",
		},
		{
			"IPv6", nil, func(c *config.Config) { c.EnableIPv6 = true },
			"any IPv6 address except fe80::/10: exempt → masqueraded",
		},
		{
			"a source", nil, func(c *config.Config) { c.NonMasqueradeSrcCIDRs = cases.CIDRs("10.1.0.0/16") },
			"from 10.1.0.0/16 to " + all + ": masqueraded → exempt",
		},
		{
			"the node", nil, func(c *config.Config) { c.ExemptHost = &config.Position{} },
			"sent by this node itself: " + all + ": masqueraded → exempt",
		},
		{
			"a destination, but of the node",
			func(c *config.Config) { c.ExemptHost = &config.Position{} },
			func(c *config.Config) {
				c.ExemptHost, c.NonMasqueradeCIDRs = &config.Position{}, cases.CIDRs("10.0.0.0/9")
			},
			"received on any interface: 10.128.0.0/9: exempt → masqueraded",
		},
		{
			"an interface", nil, func(c *config.Config) { c.NonMasqueradeOutInterfaces = list("wg*", "eth1") },
			"leaving by eth1, wg*: " + all + ": masqueraded → exempt",
		},
		{
			"an interface of several",
			func(c *config.Config) { c.MasqueradeOutInterfaces = list("eth1", "wg0") },
			func(c *config.Config) { c.MasqueradeOutInterfaces = list("wg*", "eth*") },
			"leaving by eth*, wg*, but not eth1, wg0 (the longest name decides): " + all + ": exempt → masqueraded",
		},
		{
			"all but some interfaces of several", nil,
			func(c *config.Config) {
				c.MasqueradeOutInterfaces, c.NonMasqueradeOutInterfaces = list("eth*"), list("eth1")
			},
			"leaving by any interface except eth*, but eth1 (the longest name decides): " + all + ": masqueraded → exempt",
		},
	} {
		before, after := base, base
		if tt.before != nil {
			tt.before(&before)
		}
		tt.after(&after)
		policy := func(c config.Config) nft.Policy { return nft.NewPolicy(c, nft.Options{Layout: native.Layout{}}) }
		d := answer.NewDiff(policy(before), policy(after))
		got := make([]string, len(d.Changes))
		for i, c := range d.Changes {
			got[i] = c.String()
		}
		if text := strings.Join(got, "; "); text != tt.want {
			t.Errorf("%s:\n%q, want\n%q", tt.name, text, tt.want)
		}
	}
}

func TestChangesThatChangeNoVerdictAreNamed(t *testing.T) {
	policy := func(text string, o nft.Options) nft.Policy {
		data := []byte("nonMasqueradeCIDRs: [10.0.0.0/8]\n" + text)
		c, problems := config.Parse(config.Defaults{}, config.Source{Name: "config", Data: data})
		if err := problems.Err(); err != nil {
			t.Fatal(err)
		}
		o.Layout = native.Layout{}
		return nft.NewPolicy(c, o)
	}
	const pods = "masqueradeSrcCIDRs: [10.244.0.0/16]\n"
	for _, tt := range []struct {
		name                string
		before, after       string
		optBefore, optAfter nft.Options
		want                []string
	}{
		{
			name: "the same in other words", before: "snatAddresses: [192.0.2.2/31]",
			after: "snatAddresses: [192.0.2.2, 192.0.2.3]",
		},
		{
			name: "ports", optBefore: nft.Options{RandomFully: true},
			optAfter: nft.Options{Ports: []nft.PortRange{{Min: 2000, Max: 2999}, {Min: 4000, Max: 4000}}},
			want:     []string{"source ports: fully random → kept if free; tcp, udp, sctp: 2000-2999,4000"},
		},
		{
			name: "ports without NodePorts", optBefore: nft.Options{Ports: []nft.PortRange{{Min: 1024, Max: 65535}}},
			optAfter: nft.Options{Ports: []nft.PortRange{{Min: 1024, Max: 29999}, {Min: 32768, Max: 65535}}},
			want: []string{"source ports: kept if free; tcp, udp, sctp: 1024-65535, with the default NodePorts " +
				"(30000-32767) → kept if free; tcp, udp, sctp: 1024-29999,32768-65535"},
		},
		{
			name: "enforcement", before: pods, after: pods + "enforceNonMasquerade: true",
			optAfter: nft.Options{Marks: []nft.Mark{{Value: 1, Mask: 1}}},
			want:     []string{"exemptions of pods: not enforced → enforced except for marks [0x1/0x1]"},
		},
		{
			name: "addresses", before: "snatAddresses: [192.0.2.7, 198.51.100.0/24, '2001:db8::7']",
			after: "snatAddresses: ['2001:db8::7']",
			want: []string{"masqueraded IPv4 connections leave from: " +
				"those of 192.0.2.7, 198.51.100.0/24 that the node has → the address of the interface"},
		},
		{
			name: "an entry of snatRules is new", before: "snatAddresses: [198.51.100.11]",
			after: "snatAddresses: [198.51.100.11]\n" +
				"snatRules: [{from: [10.244.8.0/24], to: [203.0.113.9/32], addresses: [198.51.100.21]}]",
			want: []string{"snatRules, IPv4: added entry 1: from 10.244.8.0/24 to 203.0.113.9 leaves from 198.51.100.21"},
		},
		{
			name:   "entries of snatRules change, and snatAddresses",
			before: "snatRules: [{from: [10.244.8.0/24], addresses: [198.51.100.20]}, {out: [eth1], addresses: [192.0.2.65]}]",
			after: "snatRules: [{from: [10.244.8.0/23], addresses: [198.51.100.21]}, {out: [eth1], addresses: [192.0.2.65]}]\n" +
				"snatAddresses: [198.51.100.11]",
			want: []string{
				"snatRules, IPv4: added entry 1: from 10.244.8.0/23 leaves from 198.51.100.21",
				"snatRules, IPv4: removed entry 1: from 10.244.8.0/24 leaves from 198.51.100.20",
				"masqueraded IPv4 connections leave from: the address of the interface → " +
					"those of 198.51.100.11 that the node has",
			},
		},
		{
			name: "an entry of snatRules before the others",
			before: "snatRules: [{from: [10.1.0.0/16], addresses: [192.0.2.7]}, " +
				"{from: [10.2.0.0/16], addresses: [192.0.2.8]}]",
			after: "snatRules: [{from: [10.3.0.0/16], addresses: [192.0.2.9]}, {from: [10.1.0.0/16], addresses: [192.0.2.7]}, " +
				"{from: [10.2.0.0/16], addresses: [192.0.2.8]}]",
			want: []string{"snatRules, IPv4: added entry 1: from 10.3.0.0/16 leaves from 192.0.2.9"},
		},
		{
			name: "entries of snatRules change places",
			before: "snatRules: [{from: [10.1.0.0/16], addresses: [192.0.2.7]}, {out: [eth1], addresses: [192.0.2.65]}, " +
				"{from: [10.2.0.0/16], addresses: [192.0.2.8]}]",
			after: "snatRules: [{from: [10.2.0.0/16], addresses: [192.0.2.8]}, {out: [eth1], addresses: [192.0.2.65]}, " +
				"{from: [10.1.0.0/16], addresses: [192.0.2.7]}]",
			want: []string{
				"snatRules, IPv4: moved entry 3 to 1: from 10.2.0.0/16 leaves from 192.0.2.8",
				"snatRules, IPv4: moved entry 1 to 3: from 10.1.0.0/16 leaves from 192.0.2.7",
			},
		},
	} {
		d := answer.NewDiff(policy(tt.before, tt.optBefore), policy(tt.after, tt.optAfter))
		if !slices.Equal(d.Other, tt.want) || len(d.Changes) > 0 || d.Changed() != (len(tt.want) > 0) {
			t.Errorf("%s: %q and %v, want %q", tt.name, d.Other, d.Changes, tt.want)
		}
		d.Add(config.Note, "flags", "a note")
		lines := append(slices.Clone(tt.want), "a note", d.Before.Hash+" → "+d.After.Hash, "")
		text := strings.Join(lines, "\n")
		if len(tt.want) == 0 {
			text = "no change\n" + text
		}
		if got := d.String(); got != text {
			t.Errorf("%s: %q, want %q", tt.name, got, text)
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
