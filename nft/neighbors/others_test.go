package neighbors

import (
	"errors"
	"fmt"
	"testing"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/routes"
)

// Of other programs, one masquerades what 172.17.0.0/16 sends, one translates what
// 10.244.0.0/16 sends to 203.0.113.0/24, and one accepts loopback traffic.
func TestOthersAreComparedWithWhatThePolicyMasquerades(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNS(t, "node")
	nfttest.NFT(t, ns, `
		table inet other {
			chain post { type nat hook postrouting priority 100; ip saddr 172.17.0.0/16 oifname != "docker0" masquerade
			}
			chain early { type nat hook postrouting priority 50
				ip saddr 10.244.0.0/16 ip daddr 203.0.113.0/24 snat ip to 192.0.2.7
			}
		}
		table ip nat {
			chain POSTROUTING { type nat hook postrouting priority 100
				ip saddr 127.0.0.0/8 accept
				ip daddr 127.0.0.0/8 accept
			}
		}`, "-f", "-")
	n := open(t, ns)
	pods, docker := cases.CIDRs("10.244.0.0/16"), cases.CIDRs("172.17.0.0/16")
	wg := []config.Interface{{Name: "wg0"}}
	for _, tt := range []struct {
		name string
		set  func(*config.Config)
		want string // numbers of conflicts, podless, overridden, and rules that translate first
	}{
		{"any source", func(*config.Config) {}, "1 0 0 1"},
		{"pods", func(c *config.Config) { c.MasqueradeSrcCIDRs = pods }, "0 1 0 1"},
		{"pods of IPv4", func(c *config.Config) { c.MasqueradeSrcCIDRs, c.EnableIPv6 = pods, true }, "0 1 0 1"},
		{"pods of IPv6", func(c *config.Config) {
			c.MasqueradeSrcCIDRs, c.EnableIPv6 = cases.CIDRs("fd00::/64"), true
		}, "1 0 0 1"},
		{"other pods", func(c *config.Config) { c.MasqueradeSrcCIDRs = docker }, "1 0 0 0"},
		{"enforced", func(c *config.Config) { c.MasqueradeSrcCIDRs, c.Enforce = docker, &config.Position{} }, "0 0 1 0"},
		{"enforced for others", func(c *config.Config) {
			c.MasqueradeSrcCIDRs, c.Enforce = pods, &config.Position{}
		}, "0 0 0 1"},
		{"sources that are exempt", func(c *config.Config) { c.NonMasqueradeSrcCIDRs = pods }, "1 0 0 0"},
		{"all sources exempt", func(c *config.Config) { c.NonMasqueradeSrcCIDRs = cases.CIDRs("0.0.0.0/0") }, "1 0 0 0"},
		{"no interface left", func(c *config.Config) {
			c.MasqueradeOutInterfaces, c.NonMasqueradeOutInterfaces = wg, wg
		}, "1 0 0 0"},
		{"a destination that is exempt", func(c *config.Config) {
			c.NonMasqueradeCIDRs = append(c.NonMasqueradeCIDRs, cases.CIDRs("203.0.0.0/16")...)
		}, "2 0 0 0"},
		{"a destination that is forced", func(c *config.Config) {
			c.NonMasqueradeCIDRs = append(c.NonMasqueradeCIDRs, cases.CIDRs("203.0.0.0/16")...)
			c.ForceMasqueradeCIDRs = cases.CIDRs("203.0.113.9/32")
		}, "2 0 0 1"},
	} {
		c := config.Default(config.Defaults{})
		tt.set(&c)
		o := others(t, n, nft.Compile(c, nft.Options{Layout: native.Layout{}}))
		got := fmt.Sprint(len(o.Conflicts), len(o.Podless), len(o.Overridden), len(o.Of(Translates)))
		if got != tt.want || len(o.Of(Exempts)) > 0 {
			t.Errorf("%s: %s, want %s, and exempting %v", tt.name, got, tt.want, o.Of(Exempts))
		}
	}
}

// A change of the config asks for few things: without rules of others, what is on the node does not matter.
func TestNodeIsNotAskedWithoutRulesOfOthers(t *testing.T) {
	t.Parallel()
	n := open(t, nfttest.NewNS(t, "node"))
	n.interfaces = func() ([]routes.Interface, error) { return nil, errors.New("asked") }
	others(t, n, exempting("10.0.0.0/8"))
}
