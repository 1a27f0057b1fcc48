package routes

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"nft-masq-agent/nft/nfttest"
)

// Only rules of exactly that form are an older agent's, and the commands remove them.
func TestLeftoversAreNamedWithTheCommandThatRemovesThem(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNode(t, `rule add priority 20 to 10.1.0.0/16 lookup main
rule add priority 20 not to 10.2.0.0/16 lookup 100
rule add priority 21 not to 10.3.0.0/16 lookup main
rule add priority 20 not to 10.4.0.0/16 fwmark 0x1 lookup main
rule add priority 20 not from 10.5.0.0/16 to 10.6.0.0/16 lookup main
rule add priority 20 not to 10.7.0.0/16 iif eth0 lookup main
rule add priority 20 not fwmark 0x2 lookup main
-6 rule add priority 20 not to fd01::/16 lookup 100`)
	before := rulesOf(t, ns)
	if got := nfttest.In(t, ns, Leftovers); len(got) > 0 {
		t.Errorf("%q", got)
	}
	nfttest.IP(t, ns, `rule add priority 20 not from all to 10.0.0.0/8 lookup main
rule add priority 20 not to 172.16.0.0/12 lookup main
-6 rule add priority 20 not to fd00::/8 lookup main`)
	got := nfttest.In(t, ns, Leftovers)
	want := []string{
		"ip -4 rule del priority 20 not to 10.0.0.0/8 lookup main",
		"ip -4 rule del priority 20 not to 172.16.0.0/12 lookup main",
		"ip -6 rule del priority 20 not to fd00::/8 lookup main",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	for _, command := range got {
		words := strings.Fields(command)
		nfttest.Run(t, ns, "", words[0], words[1:]...)
	}
	if diff := cmp.Diff(before, rulesOf(t, ns)); diff != "" {
		t.Errorf("(-before +after):\n%s", diff)
	}
}

func rulesOf(t *testing.T, ns *nfttest.NS) string {
	t.Helper()
	return nfttest.Run(t, ns, "", "ip", "-4", "rule") + nfttest.Run(t, ns, "", "ip", "-6", "rule")
}
