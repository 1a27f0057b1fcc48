package main

import (
	"net/netip"
	"testing"

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
)

// The headline of explain is what the far end sees, or says what that depends on, whatever keys
// the config has, and whatever port the connection goes to.
func TestHeadlineKnowsEachKey(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	n := newTrafficNode(t)
	n.assign("198.51.100.12")
	cases.EachKey(t, func(t *testing.T, k cases.Key) {
		for _, text := range k.Files() {
			n.enforce(text)
			for _, dst := range []string{"10.9.0.9", "10.8.0.9", "203.0.113.9", "198.51.100.9", "2001:db8:1::1"} {
				src := n.top.PodV4
				if netip.MustParseAddr(dst).Is6() {
					src = n.top.PodV6
				}
				var x answer.Explanation
				n.here(&x, "explain", dst, "--from", src.String(), "--config", n.path)
				for _, port := range []uint16{53, 443, 7777} {
					n.judge(x, n.seen(netip.MustParseAddr(dst), port))
				}
				if n.t.Failed() {
					t.Fatalf("the headline, of the policy (judge.Explain, neighbors.Trace) or of the answer, is wrong about %s:\n%s",
						k.Name, text)
				}
			}
		}
	})
}
