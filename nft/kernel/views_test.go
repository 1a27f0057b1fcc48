package kernel

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
)

func TestIPTablesPrintsTheDocumentedView(t *testing.T) {
	nfttest.Require(t, "iptables-nft", "iptables-nft-save")
	only10 := config.Config{NonMasqueradeCIDRs: cases.CIDRs("10.0.0.0/8")}
	masqLinkLocal := only10
	masqLinkLocal.MasqLinkLocal = true
	ports := []nft.PortRange{{Min: 1024, Max: 29999}, {Min: 32768, Max: 65535}}
	for _, tt := range []struct {
		name    string
		config  config.Config
		options nft.Options
	}{
		{"default", config.Default(config.Defaults{}), nft.Options{Chain: cases.DefaultChain}},
		{"only-10", only10, nft.Options{Chain: cases.DefaultChain}},
		{"masq-link-local", masqLinkLocal, nft.Options{Chain: cases.DefaultChain}},
		{"random-fully", config.Default(config.Defaults{}), nft.Options{Chain: cases.DefaultChain, RandomFully: true}},
		{"to-ports", config.Default(config.Defaults{}), nft.Options{Chain: cases.DefaultChain, Ports: ports}},
		{"non-masquerade-daemon", config.Default(config.Defaults{}), nft.Options{Chain: "NON-MASQUERADE-DAEMON"}},
		{"ipv6", config.Config{NonMasqueradeCIDRs: cases.CIDRs("fd00:10::/32"), EnableIPv6: true}, nft.Options{Chain: cases.DefaultChain}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			ns := nfttest.NewNS(t, "view")
			tt.options.Mode = nft.ModeIPTables
			want := nft.Compile(tt.config, tt.options)
			apply(t, open(t, ns), want, Look{})
			program := "iptables-nft"
			if tt.config.EnableIPv6 {
				program = "ip6tables-nft"
			}
			for file, got := range map[string]string{
				tt.name + ".list.txt": nfttest.Run(t, ns, "", program, "-t", "nat", "-L", tt.options.Chain),
				tt.name + ".save.txt": nfttest.Save(t, ns, program+"-save", "nat"),
			} {
				text, err := os.ReadFile(filepath.Join("../../testdata/views", file))
				if err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(string(text), got); diff != "" {
					t.Errorf("%s (-documented +printed):\n%s", file, diff)
				}
			}
			inStep(t, ns, want)
		})
	}
}

// prefixLengths are those at which iptables changes how it writes a prefix.
var prefixLengths = cases.CIDRs(
	"128.0.0.0/1", "10.128.0.0/9", "172.16.0.0/12", "192.0.2.0/24", "198.51.100.128/25", "203.0.113.9/32",
	"fe80::/10", "2001:db8:8000::/33", "fd00:1:2:3::/64", "fd00:1:2:3:8000::/81", "2001:db8::9/128",
	"0.0.0.0/0", "::/0",
)

func TestRawRulesAreThoseOfIPTables(t *testing.T) {
	nfttest.Require(t, "iptables-nft")
	for _, p := range prefixLengths {
		for _, random := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s random-fully %t", strings.ReplaceAll(p.String(), "/", " "), random), func(t *testing.T) {
				t.Parallel()
				c := config.Config{
					NonMasqueradeCIDRs: []config.CIDR{p}, MasqLinkLocal: true, MasqLinkLocalIPv6: true, EnableIPv6: true,
				}
				want := nft.Compile(c, nft.Options{Mode: nft.ModeIPTables, Chain: cases.DefaultChain, RandomFully: random})
				ours, theirs := nfttest.NewNS(t, "ours"), nfttest.NewNS(t, "theirs")
				apply(t, open(t, ours), want, Look{})
				iptablesOneByOne(t, theirs, want)
				if diff := cmp.Diff(natRules(t, theirs), natRules(t, ours)); diff != "" {
					t.Errorf("raw attributes (-iptables-nft +ours):\n%s", diff)
				}
				inStep(t, theirs, want)
			})
		}
	}
}

// iptablesOneByOne lets iptables make the rules, each with a command of its own.
func iptablesOneByOne(t *testing.T, ns *nfttest.NS, r nft.Ruleset) {
	t.Helper()
	for _, table := range r.Tables {
		program := "iptables-nft"
		if table.Family == nfnetlink.IPv6 {
			program = "ip6tables-nft"
		}
		for _, c := range table.Chains {
			if c.Hook == nil {
				nfttest.Run(t, ns, "", program, "-t", "nat", "-N", c.Name)
			}
		}
		for _, c := range table.Chains {
			for _, rule := range c.Rules {
				nfttest.Run(t, ns, "", program, append([]string{"-t", "nat", "-A", c.Name}, shellWords(rule.String())...)...)
			}
		}
	}
}

// shellWords splits a line of iptables-save: words, and quoted texts without
// quotes in them.
func shellWords(line string) []string {
	var words []string
	for i, part := range strings.Split(line, `"`) {
		if i%2 == 1 {
			words = append(words, part)
		} else {
			words = append(words, strings.Fields(part)...)
		}
	}
	return words
}
