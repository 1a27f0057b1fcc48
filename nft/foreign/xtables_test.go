package foreign_test

import (
	"strings"
	"testing"

	"nft-masq-agent/nft/foreign"
	"nft-masq-agent/nft/nfttest"
)

func TestLegacyIPTablesChainsAreFoundAndRemovedByTheirCommands(t *testing.T) {
	nfttest.SkipIfShort(t)
	t.Parallel()
	nfttest.Require(t, "iptables-legacy", "ip6tables-legacy", "iptables-legacy-save", "ip6tables-legacy-save", "bash")
	ns := nfttest.NewNS(t, "node")
	find := func() (found []foreign.XTChain) {
		if err := ns.Do(func() (err error) {
			found, err = foreign.LegacyChains("/proc/thread-self/net")
			return err
		}); err != nil {
			t.Fatal(err)
		}
		return found
	}
	if found := find(); len(found) > 0 {
		t.Fatalf("found %v", found)
	}
	for _, program := range []string{"iptables-legacy", "ip6tables-legacy"} {
		run := func(args ...string) { nfttest.Run(t, ns, "", program, append([]string{"-t", "nat"}, args...)...) }
		run("-N", "OTHER")
		run("-A", "OTHER", "-m", "comment", "--comment", "another program's", "-j", "RETURN")
		run("-A", "POSTROUTING", "-j", "OTHER")
		before := nfttest.Run(t, ns, "", program+"-save", "-t", "nat")
		for _, chain := range []string{"IP-MASQ-AGENT", "MY-MASQ", "a;$(id)'\x1b[2J", "b;$(id)'`"} {
			run("-N", chain)
			run("-A", "POSTROUTING", "-m", "comment", "--comment", "ip-masq-agent: ensure nat POSTROUTING directs all non-LOCAL destination traffic to our custom "+chain+" chain", "-m", "addrtype", "!", "--dst-type", "LOCAL", "-j", chain)
			run("-A", "POSTROUTING", "-j", chain)
			run("-A", chain, "-m", "comment", "--comment", "ip-masq-agent: outbound traffic is subject to MASQUERADE (must be last in chain)", "-j", "MASQUERADE")
		}
		if found := find(); len(found) != 4 || found[0].Rules != 1 || len(found[0].Jumps) != 2 {
			t.Fatalf("found %v", found)
		}
		for found := find(); len(found) > 0; found = find() {
			for _, command := range found[0].Commands() {
				nfttest.Run(t, ns, "", "bash", "-c", command)
			}
		}
		lines := func(s string) (out []string) {
			for _, l := range strings.Split(s, "\n") {
				if !strings.HasPrefix(l, "#") && !strings.HasPrefix(l, ":") {
					out = append(out, l)
				}
			}
			return out
		}
		if after := nfttest.Run(t, ns, "", program+"-save", "-t", "nat"); strings.Join(lines(after), "\n") != strings.Join(lines(before), "\n") {
			t.Errorf("left:\n%s\nwant:\n%s", after, before)
		}
	}
}
