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
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/xtables"
)

func TestIPTablesPrintsTheDocumentedView(t *testing.T) {
	t.Parallel()
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
		{"default", config.Default(config.Defaults{}), nft.Options{Layout: xtables.Layout{Name: cases.DefaultChain}}},
		{"only-10", only10, nft.Options{Layout: xtables.Layout{Name: cases.DefaultChain}}},
		{"masq-link-local", masqLinkLocal, nft.Options{Layout: xtables.Layout{Name: cases.DefaultChain}}},
		{
			"random-fully", config.Default(config.Defaults{}),
			nft.Options{Layout: xtables.Layout{Name: cases.DefaultChain}, RandomFully: true},
		},
		{
			"to-ports", config.Default(config.Defaults{}),
			nft.Options{Layout: xtables.Layout{Name: cases.DefaultChain}, Ports: ports},
		},
		{
			"non-masquerade-daemon", config.Default(config.Defaults{}),
			nft.Options{Layout: xtables.Layout{Name: "NON-MASQUERADE-DAEMON"}},
		},
		{
			"ipv6",
			config.Config{NonMasqueradeCIDRs: cases.CIDRs("fd00:10::/32"), EnableIPv6: true},
			nft.Options{Layout: xtables.Layout{Name: cases.DefaultChain}},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			ns := nfttest.NewNS(t, "view")
			want := nft.Compile(tt.config, tt.options)
			apply(t, open(t, ns), want, layout.Ours)
			program := "iptables-nft"
			if tt.config.EnableIPv6 {
				program = "ip6tables-nft"
			}
			for file, got := range map[string]string{
				tt.name + ".list.txt": nfttest.Run(t, ns, "", program, "-t", "nat", "-L", tt.options.Layout.Chain()),
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
			inSync(t, ns, want)
		})
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

// viewLists are lists as people write them, with duplicates and covered CIDRs.
var viewLists = [][]string{
	{"10.1.0.0/16", "10.0.0.0/8", "10.1.0.0/16", "10.1.0.0/16"},
	{"192.0.2.0/24", "169.254.0.0/16", "10.0.0.0/8", "169.254.169.254/32"},
	{"0.0.0.0/0", "10.0.0.0/8", "0.0.0.0/0"},
}

func TestViewHasARuleForEachEntryOfTheFile(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "iptables-nft")
	for i, list := range viewLists[:nfttest.Rounds(1, len(viewLists), len(viewLists))] {
		for chain, prefix := range map[string]string{
			cases.DefaultChain: "ip-masq-agent", "IP-MASQ": "ip-masq-agent", "my-chain": "ip-masq-agent",
			"NON-MASQUERADE-DAEMON": "non-masquerade-daemon",
		} {
			t.Run(fmt.Sprint(i, chain), func(t *testing.T) {
				t.Parallel()
				ns := nfttest.NewNS(t, "view")
				want := nft.Compile(config.Config{NonMasqueradeCIDRs: cases.CIDRs(list...)},
					nft.Options{Layout: xtables.Layout{Name: chain}})
				apply(t, open(t, ns), want, layout.Ours)
				listed := []string{"-N " + chain}
				rule := func(match, comment, verdict string) {
					listed = append(listed, fmt.Sprintf(`-A %s%s -m comment --comment "%s: %s" -m addrtype ! --dst-type LOCAL -j %s`,
						chain, match, prefix, comment, verdict))
				}
				for _, cidr := range append([]string{"169.254.0.0/16"}, list...) {
					match := " -d " + cidr
					if cidr == "0.0.0.0/0" {
						match = ""
					}
					rule(match, "cluster-local traffic should not be subject to MASQUERADE", "RETURN")
				}
				rule("", "outbound traffic should be subject to MASQUERADE (this match must come after cluster-local CIDR matches)",
					"MASQUERADE")
				got := strings.Split(strings.TrimSpace(nfttest.Run(t, ns, "", "iptables-nft", "-t", "nat", "-S", chain)), "\n")
				if diff := cmp.Diff(listed, got); diff != "" {
					t.Errorf("iptables -S (-want +got):\n%s", diff)
				}
				listed[0] = fmt.Sprintf(`-A POSTROUTING -m comment --comment "%s: ensure nat POSTROUTING directs all non-LOCAL destination traffic to our custom %s chain" -m addrtype ! --dst-type LOCAL -j %[2]s`, prefix, chain)
				for _, line := range listed {
					nfttest.Run(t, ns, "", "iptables-nft",
						append([]string{"-t", "nat", "-C"}, shellWords(strings.TrimPrefix(line, "-A "))...)...)
				}
				inSync(t, ns, want)
				installed, found, err := open(t, ns).Installed(t.Context())
				if err != nil || !found || installed.Hash != want.Hash() || installed.Layout != want.Layout {
					t.Errorf("installed are %+v, %t, %v", installed, found, err)
				}
			})
		}
	}
}
