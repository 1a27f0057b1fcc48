package kernel

import (
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
	defaults, only10 := config.Default(config.Defaults{}), config.Config{NonMasqueradeCIDRs: cases.CIDRs("10.0.0.0/8")}
	six := config.Config{NonMasqueradeCIDRs: cases.CIDRs("fd00:10::/32"), EnableIPv6: true}
	masqLinkLocal, ours := only10, xtables.Layout{Name: cases.DefaultChain}
	masqLinkLocal.MasqLinkLocal = true
	ports := []nft.PortRange{{Min: 1024, Max: 29999}, {Min: 32768, Max: 65535}}
	for _, tt := range []struct {
		name    string
		config  config.Config
		options nft.Options
	}{
		{"default", defaults, nft.Options{Layout: ours}},
		{"only-10", only10, nft.Options{Layout: ours}},
		{"masq-link-local", masqLinkLocal, nft.Options{Layout: ours}},
		{"random-fully", defaults, nft.Options{Layout: ours, RandomFully: true}},
		{"to-ports", defaults, nft.Options{Layout: ours, Ports: ports}},
		{"non-masquerade-daemon", defaults, nft.Options{Layout: xtables.Layout{Name: "NON-MASQUERADE-DAEMON"}}},
		{"ipv6", six, nft.Options{Layout: ours}},
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
			for line := range strings.Lines(nfttest.Save(t, ns, program+"-save", "nat")) {
				if rule, ok := strings.CutPrefix(line, "-A "); ok {
					nfttest.Run(t, ns, rule, "xargs", nfttest.Command(program).Path, "-t", "nat", "-C")
				}
			}
			inSync(t, ns, want)
		})
	}
}

