package main

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfttest"
)

// A limit on a set of ours, or on its elements, decides for each packet.
func TestExplainDoesNotTrustALimitedSet(t *testing.T) {
	nfttest.SkipIfShort(t)
	t.Parallel()
	nfttest.Require(t, "nft")
	n := newTrafficNode(t)
	n.enforce("")
	for _, statement := range []string{"quota 1 bytes", "limit rate 1/hour burst 1 packets"} {
		table := nfttest.NFT(t, n.top.Node, "", "list", "table", "inet", nft.TableName)
		limited := strings.Replace(table, "set non-masq-v4-a {\n", "set non-masq-v4-a {\n"+statement+"\n", 1)
		nfttest.NFT(t, n.top.Node, "delete table inet "+nft.TableName+"\n"+limited, "-f", "-")
		x, text := n.explained("10.9.0.9", "--from", n.top.PodV4.String(), "--config", n.path)
		if x.Why.Code != "unknown" || !strings.Contains(text, "Another program changed this agent's rules") {
			t.Errorf("%s: %+v: %s", statement, x.Why, text)
		}
		n.judge(x, n.seen(netip.MustParseAddr("10.9.0.9"), 5000))
		nfttest.NFT(t, n.top.Node, "delete table inet "+nft.TableName+"\n"+table, "-f", "-")
	}
}

func TestExplainAnswersFromTheKernelIfTheFileDiffers(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	inEachMode(t, func(t *testing.T, _ nft.Mode, flag string) {
		n := newTrafficNode(t)
		old := n.enforce("nonMasqueradeCIDRs: [203.0.113.0/24]", flag)
		for config, says := range map[string]string{
			"nonMasqueradeCIDRs: [198.51.100.0/24]": fmt.Sprintf("The kernel enforces %s, neither ", old.Hash()),
			"nonMasqueradeCIDRs: 5":                 fmt.Sprintf("The config is rejected; the kernel enforces %s", old.Hash()),
		} {
			n.swap(config)
			for i, dst := range []string{"203.0.113.9", "198.51.100.9"} {
				x, text := n.explained(dst, "--from", n.top.PodV4.String(), flag, "--config", n.path)
				if !strings.HasPrefix(text, says) {
					t.Errorf("%q does not begin:\n%s", says, text)
				}
				n.judge(x, n.seen(netip.MustParseAddr(dst), uint16(5000+i)))
			}
		}
	})
}
