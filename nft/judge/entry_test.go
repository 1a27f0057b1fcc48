package judge_test

import (
	"fmt"
	"testing"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/judge"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
)

// A ruling is the last step of the explanation. If interfaces are not known, it is that of each
// interface, or says that it depends on them.
func TestRulingIsTheLastStepOfTheExplanation(t *testing.T) {
	t.Parallel()
	m := cases.NewMaker(31)
	seen := map[string]int{}
	for n := range nfttest.Rounds(300, 800, 5_000) {
		c := extremes(m, m.Config())
		ipv6 := n%2 == 0
		p := policyOf(c)
		f, on := p.Family(ipv6)
		if !on {
			continue
		}
		for _, conn := range someConnections(m, ipv6, c, c) {
			conn.Src, conn.Dst = conn.Src.Unmap(), conn.Dst.Unmap()
			if conn.InInterface == "" && !conn.FromNode {
				conn.InInterface = "eth9"
			}
			if conn.OutInterface == "" {
				conn.OutInterface = "eth9"
			}
			steps, v := judge.Explain(p, conn)
			last := steps[len(steps)-1]
			got := judge.Rule(&f, conn)
			if got.Verdict != v || got.Key != last.Condition.Key || got.CIDR != last.CIDR.Prefix || got.Depends ||
				got.IPv6 != ipv6 {
				t.Fatalf("%+v: %+v, want %+v\n%+v", conn, got, last, c)
			}
			seen[got.Key]++
			unknown := conn
			unknown.InInterface = ""
			unknown.OutInterface = ""
			rough := judge.Rule(&f, unknown)
			if !rough.Depends && rough.Verdict != v {
				t.Fatalf("%+v: %+v on any interface, but %+v\n%+v", conn, rough, last, c)
			}
			seen[fmt.Sprint("depends ", rough.Depends)]++
		}
	}
	for _, what := range []string{
		"nonMasqueradeCIDRs", "forceMasqueradeCIDRs", "nonMasqueradeSrcCIDRs", "masqueradeSrcCIDRs", "masqueradeHost",
		"masqueradeSrcInterfaces", "masqueradeOutInterfaces", "nonMasqueradeOutInterfaces", "", "depends true",
		"depends false",
	} {
		if seen[what] < 20 {
			t.Errorf("%q: %d, of %v", what, seen[what], seen)
		}
	}
}

// What depends on an interface has the ruling without it.
func TestRulingsOnUnknownInterfaces(t *testing.T) {
	const lists = "masqueradeSrcInterfaces: [cni0]\nmasqueradeSrcCIDRs: [10.244.0.0/16]\n" +
		"masqueradeOutInterfaces: [eth0]\nnonMasqueradeCIDRs: [10.9.0.0/16]\n"
	c, problems := config.Parse(config.Defaults{}, config.Source{Name: "f", Data: []byte(lists)})
	if problems.Err() != nil {
		t.Fatal(problems)
	}
	f, _ := policyOf(c).Family(false)
	const pod, other, exempt, outside = "10.244.1.2", "172.17.0.2", "10.9.0.9", "203.0.113.9"
	for _, tt := range []struct {
		src, dst, in, out string
		want              string // the entry, verdict, whether it is of the source, and depends
	}{
		{pod, outside, "cni0", "eth0", "anything else masqueraded false false"},
		{pod, outside, "", "eth0", "anything else masqueraded false true"},
		{pod, outside, "cni0", "", "anything else masqueraded false true"},
		{pod, exempt, "cni0", "", "nonMasqueradeCIDRs 10.9.0.0/16 exempt false false"},
		{pod, exempt, "", "", "nonMasqueradeCIDRs 10.9.0.0/16 exempt false true"},
		{pod, outside, "eth0", "", "masqueradeSrcInterfaces exempt true false"},
		{pod, outside, "cni0", "eth1", "masqueradeOutInterfaces exempt false false"},
		{other, outside, "cni0", "", "masqueradeSrcCIDRs exempt true false"},
	} {
		r := judge.Rule(&f, nft.Connection{
			Src: cases.Addrs(tt.src)[0], Dst: cases.Addrs(tt.dst)[0], InInterface: tt.in, OutInterface: tt.out,
		})
		if got := fmt.Sprint(r.Entry, " ", r.Verdict, " ", r.OfSource, " ", r.Depends); got != tt.want {
			t.Errorf("%+v: %s", tt, got)
		}
	}
}

func TestStepsPointToTheEntryOrToTheList(t *testing.T) {
	at := func(line int) config.Position { return config.Position{File: "f", Line: line} }
	cidrs := nft.Condition{Pos: at(9), List: nft.NewList(cases.CIDRs("10.0.0.0/8"))}
	cidrs.CIDRs[0].Pos = at(2)
	links := nft.Condition{Pos: at(9), Interfaces: []config.Interface{{Name: "eth0", Pos: at(3)}}}
	for _, tt := range []struct {
		condition nft.Condition
		yes       bool
		want      int
	}{{cidrs, true, 1}, {cidrs, false, 2}, {links, false, 3}, {nft.Condition{Pos: at(9)}, false, 9}} {
		s := judge.Step{Condition: tt.condition, Yes: tt.yes, CIDR: config.CIDR{Pos: at(1)}}
		if got := s.Place(); got != at(tt.want) {
			t.Errorf("%t: %s, want line %d", tt.yes, got, tt.want)
		}
	}
}

func TestEntriesAreNamedAsInTheFile(t *testing.T) {
	for want, e := range map[string]judge.Entry{
		"anything else":                 {Verdict: nft.Masqueraded},
		"masqueradeHost":                {Key: "masqueradeHost", Verdict: nft.Exempt},
		"nonMasqueradeCIDRs 10.0.0.0/8": {Key: "nonMasqueradeCIDRs", CIDR: cases.CIDRs("10.0.0.0/8")[0].Prefix},
		"addresses of this node":        {Verdict: nft.Local},
	} {
		if got := e.String(); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
}
