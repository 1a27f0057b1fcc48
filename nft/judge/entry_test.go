package judge_test

import (
	"fmt"
	"testing"

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
			if conn.InInterface == "" {
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
