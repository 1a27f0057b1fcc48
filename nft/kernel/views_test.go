package kernel

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/xt"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/layouts"
	"nft-masq-agent/nft/nfnetlink"
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
	{"10.0.0.0/8", "10.1.0.0/16"},
	{"10.1.0.0/16", "10.0.0.0/8", "10.1.0.0/16", "10.1.0.0/16"},
	{"192.0.2.0/24", "169.254.0.0/16", "10.0.0.0/8", "169.254.169.254/32"},
	{"203.0.113.0/24", "203.0.113.0/24"},
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

// firstComment is the comment of a rule of the first version.
func firstComment(f nfnetlink.Family, text string) nft.Node {
	info := xt.Comment(text)
	return nft.Node{Text: text, Exprs: nfnetlink.Marshal(f, &expr.Match{Name: "comment", Info: &info})}
}

// The comments of the first version began with the chain's name in lower case.
func TestRulesOfTheFirstVersionAreOursAndAreRewritten(t *testing.T) {
	for _, mode := range []nft.Mode{nft.ModeIPTables, nft.ModeNFTables} {
		ns := nfttest.NewNS(t, "upgrade")
		c := config.Config{
			NonMasqueradeCIDRs: cases.CIDRs("10.0.0.0/8", "fd00::/8"),
			MasqueradeSrcCIDRs: cases.CIDRs("10.244.0.0/16"), EnableIPv6: true,
		}
		options := nft.Options{Layout: xtables.Layout{Name: "IP-MASQ"}}
		want := nft.Compile(c, options)
		before := nft.Compile(c, options)
		for _, table := range before.Tables {
			for _, ch := range table.Chains {
				for _, r := range ch.Rules {
					for i, n := range r.Nodes {
						if _, comment, ok := strings.Cut(n.Text, `-m comment --comment "ip-masq-agent: `); ok {
							r.Nodes[i] = firstComment(table.Family, "ip-masq: "+strings.TrimSuffix(comment, `"`))
						}
					}
				}
			}
		}
		apply(t, open(t, ns), before, layout.Ours)
		found, ok, err := open(t, ns).Installed(t.Context())
		if err != nil || !ok || found != (layout.Installed{Layout: want.Layout, Hash: want.Hash()}) {
			t.Fatalf("installed are %+v, %t, %v", found, ok, err)
		}
		options.Layout = layouts.Of(mode, "IP-MASQ")
		want = nft.Compile(c, options)
		a, err := open(t, ns).Apply(t.Context(), want, everything)
		if err != nil || len(a.Differences) == 0 || len(a.Replaced) > 0 {
			t.Fatalf("%s: %+v, %v", mode, a, err)
		}
		inSync(t, ns, want)
		if saved := nfttest.Save(t, ns, "iptables-nft-save", "nat"); strings.Contains(saved, "ip-masq:") ||
			mode == nft.ModeNFTables && strings.Contains(saved, "IP-MASQ") {
			t.Errorf("%s: left\n%s", mode, saved)
		}
	}
}
