package neighbors

import (
	"fmt"
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

// Docker, libvirt and the like masquerade what their own bridges send. That is no conflict
// with a policy for pods, however it knows them.
func TestRulesThatMeetNoPodAreNoConflicts(t *testing.T) {
	t.Parallel()
	network := func(link, prefix string, connected bool) routes.Network {
		return routes.Network{Prefix: netip.MustParsePrefix(prefix), Interface: link, Connected: connected}
	}
	usual := []routes.Network{
		network("eth0", "0.0.0.0/0", false), network("docker0", "172.17.0.0/16", true),
		network("virbr0", "192.168.122.0/24", true), network("bridge1", "192.0.2.0/24", true),
		network("bridge1", "fd00:1::/64", true), network("cali1", "10.244.1.2/32", false),
		network("docker0", "fd00:17::/64", true),
	}
	tailscale := sample(t, "tailscale-nftables")
	within := network("cali2", "172.17.9.9/32", false)
	const (
		docker    = "oifname != \"docker0\" ip saddr 172.17.0.0/16 masquerade"
		everybody = "oifname != \"docker0\" masquerade"
		its       = "ip saddr 172.17.0.0/16 masquerade"
	)
	table := func(chain, post string) string {
		return `table inet t {
			chain c { ` + chain + `; }
			map m { type ifname : verdict; elements = { "docker0" : jump c }; }
			map other { type ifname : verdict; elements = { "docker0" : drop }; }
			chain p { type nat hook postrouting priority srcnat; policy accept
				` + post + `
			}
		}`
	}
	for _, tt := range []struct {
		name, rules string
		networks    []routes.Network
		conflicts   string // with masqueradeSrcCIDRs, with masqueradeSrcInterfaces, without both
	}{
		{"Docker's backend for nftables", sample(t, "docker-nftables"), usual, "0 0 2"},
		{"one map", table(docker, "iifname vmap @m"), usual, "0 0 1"},
		{"two maps", table(docker, "iifname vmap @m\noifname vmap @other"), usual, "0 0 1"},
		{"two maps to it", table(docker, "iifname vmap @m\noifname vmap @m"), usual, "0 0 1"},
		{"a map and a jump", table(docker, "iifname vmap @m\njump c"), usual, "0 0 1"},
		{"a map of interfaces alone", table(everybody, "iifname vmap @m"), usual, "1 0 1"},
		{"a jump for an interface alone", table(everybody, `iifname "docker0" jump c`), usual, "1 0 1"},
		{"a jump for all but the pods' interfaces", table(everybody, `iifname != "cali*" jump c`), usual, "1 0 1"},
		{"a jump for one of the pods' interfaces", table(everybody, `iifname "cali7" jump c`), usual, "1 1 1"},
		{"a jump for all that it may be", table(everybody, `iifname "c*" jump c`), usual, "1 1 1"},
		{"libvirt", table(everybody, "ip saddr 192.168.122.0/24 ip daddr != 192.168.122.0/24 masquerade"), usual, "0 0 1"},
		{"pods", table(docker, "ip saddr 10.244.0.0/16 masquerade"), usual, "1 1 1"},
		{"a pod", table(docker, "ip saddr 10.244.1.2 masquerade"), usual, "1 1 1"},
		{"IPv6", table(docker, "ip6 saddr fd00:17::/64 masquerade"), usual, "0 0 1"},
		{"more than Docker's network", table(docker, "ip saddr 172.16.0.0/12 masquerade"), usual, "0 1 1"},
		{"a network that is not connected", table(docker, "ip saddr 172.18.0.0/16 masquerade"), usual, "0 1 1"},
		{
			"a network behind a gateway", table(docker, its),
			[]routes.Network{network("docker0", "172.17.0.0/16", false)},
			"0 1 1",
		},
		{"a pod in Docker's network", table(docker, its), append([]routes.Network{within}, usual...), "0 1 1"},
		{
			"Docker's network on the pods' interface", table(docker, its),
			[]routes.Network{network("cali2", "172.17.0.0/16", true)},
			"0 1 1",
		},
		{"tailscale", tailscale, usual, "0 0 2"},
		{"tailscale's mark in another chain", strings.ReplaceAll(tailscale, "ts-post", "post"), usual, "2 2 2"},
		{"another address for Docker", table(docker, "ip saddr 172.17.0.0/16 snat ip to 192.0.2.7"), usual, "0 0 1"},
		{"another address for a pod", table(docker, "ip saddr 10.244.1.2 snat ip to 192.0.2.7"), usual, "1 1 1"},
	} {
		ns := nfttest.NewNS(t, "node")
		nfttest.NFT(t, ns, tt.rules, "-f", "-")
		n := open(t, ns)
		n.networks = func() ([]routes.Network, error) { return tt.networks, nil }
		var got []string
		for i, set := range []func(*config.Config){
			func(c *config.Config) {
				c.MasqueradeSrcCIDRs = append(cases.CIDRs("10.244.0.0/16"), cases.CIDRs("fd00:10:244::/48")...)
			},
			func(c *config.Config) { c.MasqueradeSrcInterfaces = []config.Interface{{Name: "cali*"}} },
			func(*config.Config) {},
		} {
			c := config.Default(config.Defaults{})
			c.EnableIPv6 = true
			c.NonMasqueradeCIDRs = append(c.NonMasqueradeCIDRs, cases.CIDRs("fd00::/8")...)
			set(&c)
			o := others(t, n, nft.Compile(c, nft.Options{Layout: native.Layout{}}))
			got = append(got, fmt.Sprint(len(o.Conflicts)))
			translates := strings.Contains(tt.rules, "snat ip to") && got[i] != "0"
			if len(o.Conflicts)+len(o.Podless) == 0 || translates != (len(o.Of(Translates)) > 0) {
				t.Errorf("%s: %v, without pods %v, %v", tt.name, o.Conflicts, o.Podless, o.Overruled)
			}
		}
		if got := strings.Join(got, " "); got != tt.conflicts {
			t.Errorf("%s: %s conflicts, want %s", tt.name, got, tt.conflicts)
		}
	}
}
