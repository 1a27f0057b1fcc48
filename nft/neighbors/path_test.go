package neighbors

import (
	"fmt"
	"hash/maphash"
	"net/netip"
	"strings"
	"testing"


	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/routes"
)

// A conflict is named by what is reported about it, and accepted by its chain. What is link-local has no routes, so
// another packet stands for the rule.
func TestConflictsAreToldApartByWhatIsReported(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNS(t, "node")
	n := open(t, ns)
	n.running = func(bool) ([]netip.Addr, error) { return []netip.Addr{netip.MustParseAddr("10.244.7.7")}, nil }
	load := func(rules string) (o Others) {
		nfttest.NFT(t, ns, "flush ruleset; table ip t { chain a { type nat hook postrouting priority 99;\n"+rules+
			"\n}; }", "-f", "-")
		return others(t, n, exempting(defaultExempt))
	}
	const rule = "ip daddr { 169.254.0.0/16, 172.16.0.0/12 } counter "
	seed := maphash.MakeSeed()
	first := load(rule + "masquerade")
	c := first.Conflicts[0]
	if n := c.Packets(); n == nil || *n != 0 || c.Src.String() != "10.244.7.7" || c.Dst.IsLinkLocalUnicast() ||
		c.Base.Rules != nil { // they would stay in memory
		t.Errorf("%v packets, %s", n, c.Why())
	}
	for other, same := range map[string]bool{
		"ip daddr 192.0.2.1 accept\n" + rule + "masquerade": true, rule + "snat to 192.0.2.1": false,
		rule + "meta l4proto tcp masquerade": false,
	} {
		if got := load(other).Conflicts[0]; (got.Hash(seed) == c.Hash(seed)) != same {
			t.Errorf("%s: the same is %t", other, !same)
		}
	}
	o := load("ip daddr 172.16.0.1 masquerade\nip daddr 203.0.113.1 snat to 192.0.2.1")
	o.Accept([]string{"ip t b", "ip6 t a"})
	if len(o.Conflicts) != 1 || len(o.Overruled) != 1 || len(o.Accepted) != 0 || o.Conflicts[0].Packets() != nil {
		t.Errorf("other chains are accepted: %+v", o)
	}
	o.Accept([]string{"ip t b", "ip t a"})
	if len(o.Conflicts) != 0 || len(o.Overruled) != 0 || len(o.Accepted) != 2 {
		t.Errorf("the chain is not accepted: %+v", o)
	}
}

// A policy enforces its exemptions on interfaces that the node has, and only against chains that come after it.
func TestEnforcedExemptionsOverrideWhatComesLater(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNS(t, "node")
	n := open(t, ns)
	want := nft.Compile(config.Config{
		NonMasqueradeCIDRs: cases.CIDRs("10.0.0.0/8"), Enforce: &config.Position{},
		MasqueradeSrcInterfaces: []config.Interface{{Name: "cali*"}},
	}, nft.Options{Layout: native.Layout{}})
	for _, tt := range []struct {
		priority   int32
		name       string
		overridden bool
	}{
		{nft.EnforcePriority + 1, "cali1", true},
		{nft.EnforcePriority, "cali1", false},
		{nft.EnforcePriority + 1, "eth0", false},
	} {
		nfttest.NFT(t, ns, fmt.Sprintf("flush ruleset; table ip t { chain c { type nat hook postrouting priority %d; "+
			"masquerade; }; }", tt.priority), "-f", "-")
		n.interfaces = func() ([]routes.Interface, error) { return []routes.Interface{{Name: tt.name}}, nil }
		o := others(t, n, want)
		if over := len(o.Overridden) == 1; over != tt.overridden || (len(o.Conflicts) == 1) == over {
			t.Errorf("%+v: conflicts %v, overridden %v", tt, o.Conflicts, o.Overridden)
		}
	}
}

// What a bridge has both ends of may never have passed rules: that is an interface with the longest route to both.
func TestAddressesBehindOneInterface(t *testing.T) {
	var networks []routes.Network
	for prefix, names := range map[string]string{
		"0.0.0.0/0": "eth0", "10.244.0.0/16": "eth1", "10.244.1.0/24": "cni0", "10.244.1.9/32": "cali9",
		"10.9.0.0/16": "eth1 eth2", "fd00::/64": "cni0",
	} {
		for name := range strings.FieldsSeq(names) {
			networks = append(networks, routes.Network{Prefix: netip.MustParsePrefix(prefix), Interface: name})
		}
	}
	behind := oneInterface(networks)
	for pair, want := range map[[2]string]bool{
		{"10.244.1.2", "10.244.1.3"}: true, {"10.244.1.2", "10.244.1.9"}: false, {"10.244.1.2", "10.244.2.1"}: false,
		{"10.244.2.1", "10.9.0.1"}: true, {"10.9.0.1", "10.9.0.2"}: true, {"10.244.1.2", "192.0.2.1"}: false,
		{"192.0.2.1", "203.0.113.9"}: true, {"fd00::1", "fd00::2"}: true, {"fd00::1", "fd01::2"}: false,
		{"fd01::1", "fd01::2"}: false, {"fd00::1", "10.244.1.2"}: true,
	} {
		if got := behind(netip.MustParseAddr(pair[0]), netip.MustParseAddr(pair[1])); got != want {
			t.Errorf("%q: %t", pair, got)
		}
	}
}
