package answer

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
)

func TestLintFindsLikelyMistakes(t *testing.T) {
	const seen = "pods of other nodes would see this node's address"
	tests := []struct {
		name, file, pods string
		want             []string // ID, position if there is one, and message
	}{
		{"defaults", "", "", nil},
		{"pods exempt", "", "10.244.0.0/16", nil},
		{"pods not exempt", "nonMasqueradeCIDRs: [10.0.0.0/8]", "100.64.0.0/10", []string{
			"pod-cidr-not-exempt: pod CIDR 100.64.0.0/10 is not exempted: " + seen,
		}},
		{"pods exempt in part", "nonMasqueradeCIDRs: [10.0.0.0/9]", "10.0.0.0/8", []string{
			"pod-cidr-not-exempt: pod CIDR 10.0.0.0/8 is exempted in part, 10.128.0.0/9 is not: " + seen,
		}},
		{"pods exempt by two together", "nonMasqueradeCIDRs: [10.128.0.0/9, 10.0.0.0/9]", "10.0.0.0/8", nil},
		{"pods forced", "nonMasqueradeCIDRs: [10.0.0.0/8]\nforceMasqueradeCIDRs: [10.244.1.0/24]", "10.244.0.0/16", []string{
			"pod-cidr-forced c:2:24: forceMasqueradeCIDRs: 10.244.1.0/24 reaches into pod CIDR 10.244.0.0/16: " + seen,
		}},
		{"pods as sources never", "nonMasqueradeCIDRs: []\nnonMasqueradeSrcCIDRs: [10.0.0.0/8]", "10.244.0.0/16", nil},
		{
			"pods as sources not listed", "nonMasqueradeCIDRs: []\nmasqueradeSrcCIDRs: [192.168.0.0/16]", "10.244.0.0/16",
			[]string{"pod-cidr-no-source: pod CIDR 10.244.0.0/16 is not in masqueradeSrcCIDRs: its pods are not masqueraded"},
		},
		{"pods as sources listed", "nonMasqueradeCIDRs: []\nmasqueradeSrcCIDRs: [10.0.0.0/8]", "10.244.0.0/16", []string{
			"pod-cidr-not-exempt: pod CIDR 10.244.0.0/16 is not exempted: " + seen,
		}},
		{"pods of both families", "nonMasqueradeCIDRs: []\nenableIPv6: true", "10.244.0.0/16,fd00::/48", []string{
			"pod-cidr-not-exempt: pod CIDR 10.244.0.0/16 is not exempted: " + seen,
			"pod-cidr-not-exempt: pod CIDR fd00::/48 is not exempted: " + seen,
		}},
		{"IPv6 pods while it is off", "", "fd00::/48", nil},
		{"everything exempt", "nonMasqueradeCIDRs: [0.0.0.0/0]", "", []string{
			"everything-exempt c:1:22: nonMasqueradeCIDRs: 0.0.0.0/0 covers every IPv4 destination: nothing is masqueraded",
		}},
		{
			"everything exempt but what is forced", "nonMasqueradeCIDRs: [0.0.0.0/0]\nforceMasqueradeCIDRs: [10.0.0.0/8]", "",
			[]string{
				"everything-exempt c:1:22: nonMasqueradeCIDRs: 0.0.0.0/0 covers every IPv4 destination: nothing but " +
					"forceMasqueradeCIDRs is masqueraded",
			},
		},
		{"everything exempt in two halves", "nonMasqueradeCIDRs: [0.0.0.0/1, 128.0.0.0/1]", "", []string{
			"everything-exempt: nonMasqueradeCIDRs together cover every IPv4 destination: nothing is masqueraded",
		}},
		{"all of IPv6 exempt", "nonMasqueradeCIDRs: ['::/0']\nenableIPv6: true", "", []string{
			"everything-exempt c:1:22: nonMasqueradeCIDRs: ::/0 covers every IPv6 destination: nothing is masqueraded",
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var pods []netip.Prefix
			if tt.pods != "" {
				for _, p := range strings.Split(tt.pods, ",") {
					pods = append(pods, netip.MustParsePrefix(p))
				}
			}
			var got []string
			for _, f := range Lint(policyOf(t, tt.file), pods).Of(config.Warning) {
				place := ""
				if f.Pos != (config.Position{}) {
					place = " " + f.Pos.String()
				}
				got = append(got, fmt.Sprintf("%s%s: %s", f.ID, place, f.Msg))
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func policyOf(t *testing.T, file string) nft.Policy {
	t.Helper()
	c, problems := config.Parse(config.Defaults{}, config.Source{Name: "c", Data: []byte(file)})
	if err := problems.Err(); err != nil {
		t.Fatal(err)
	}
	return nft.NewPolicy(c, nft.Options{Layout: native.Layout{}})
}

func TestUncoveredReturnsAGap(t *testing.T) {
	tests := []struct{ of, by, want string }{
		{"10.0.0.0/8", "", "10.0.0.0/8"},
		{"10.0.0.0/8", "10.0.0.0/8", ""},
		{"10.0.0.0/8", "0.0.0.0/0", ""},
		{"10.0.0.0/8", "11.0.0.0/8", "10.0.0.0/8"},
		{"10.0.0.0/8", "10.0.0.0/9 10.128.0.0/10", "10.192.0.0/10"},
		{"10.0.0.0/31", "10.0.0.1/32", "10.0.0.0/32"},
		{"10.0.0.0/31", "10.0.0.0/32", "10.0.0.1/32"},
		{"0.0.0.0/0", "0.0.0.0/1 128.0.0.0/1", ""},
		{"::/0", "8000::/1", "::/1"},
		{"::/127", "::/128", "::1/128"},
	}
	for _, tt := range tests {
		var by []netip.Prefix
		for _, p := range strings.Fields(tt.by) {
			by = append(by, netip.MustParsePrefix(p))
		}
		gap, some := uncovered(netip.MustParsePrefix(tt.of), by)
		if got := gap.String(); some != (tt.want != "") || some && got != tt.want {
			t.Errorf("%s by %s: %s %t, want %q", tt.of, tt.by, got, some, tt.want)
		}
	}
}

func TestOverlapsAreFoundInSortedLists(t *testing.T) {
	list := nft.NewList([]config.CIDR{
		{Prefix: netip.MustParsePrefix("172.16.0.0/12")},
		{Prefix: netip.MustParsePrefix("10.0.0.0/8")},
		{Prefix: netip.MustParsePrefix("192.168.1.0/24")},
	}).Prefixes()
	for p, want := range map[string]bool{
		"10.0.0.0/8": true, "10.9.0.0/16": true, "10.255.255.255/32": true, "9.0.0.0/8": false, "11.0.0.0/8": false,
		"8.0.0.0/5": true, "0.0.0.0/0": true, "172.0.0.0/8": true, "172.32.0.0/11": false, "192.168.0.0/24": false,
		"192.168.0.0/23": true, "192.168.2.0/24": false, "255.255.255.255/32": false,
	} {
		if got := overlapsAny(netip.MustParsePrefix(p), list); got != want {
			t.Errorf("%s: %t", p, got)
		}
	}
}

func names(list ...string) (interfaces []config.Interface) {
	for _, n := range list {
		interfaces = append(interfaces, config.Interface{Name: n})
	}
	return interfaces
}

func TestLintFindsPoliciesThatMasqueradeNothing(t *testing.T) {
	prefixes := []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}
	cidr := func(s string) []config.CIDR { return []config.CIDR{{Prefix: netip.MustParsePrefix(s)}} }
	for _, tt := range []struct {
		name string
		config.Config
		want string
	}{
		{"pods", config.Config{MasqueradeSrcCIDRs: cidr("10.244.0.0/16")}, ""},
		{"other pods", config.Config{MasqueradeSrcCIDRs: cidr("10.128.0.0/16")}, "pod-cidr-no-source"},
		{
			"the only sources are exempt",
			config.Config{MasqueradeSrcCIDRs: cidr("10.244.0.0/16"), NonMasqueradeSrcCIDRs: cidr("10.0.0.0/8")},
			"nothing-masqueraded",
		},
		{
			"the only interfaces are exempt",
			config.Config{MasqueradeOutInterfaces: names("eth0"), NonMasqueradeOutInterfaces: names("eth*")},
			"nothing-masqueraded",
		},
		{"some of them are", config.Config{
			MasqueradeOutInterfaces:    names("eth0", "bond0"),
			NonMasqueradeOutInterfaces: names("eth*"),
		}, ""},
		{"all destinations", config.Config{NonMasqueradeCIDRs: cidr("0.0.0.0/0")}, "everything-exempt"},
	} {
		tt.NonMasqueradeCIDRs = append(tt.NonMasqueradeCIDRs, cidr("10.0.0.0/8")...)
		var ids []string
		for _, f := range Lint(nft.NewPolicy(tt.Config, nft.Options{Layout: native.Layout{}}), prefixes).Of(config.Warning) {
			ids = append(ids, f.ID)
		}
		if got := strings.Join(ids, " "); got != tt.want {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
	}
}

func TestLintFindsSourceAddressesWithoutReplies(t *testing.T) {
	c := config.Default(config.Defaults{EnableIPv6: true})
	unusable := []string{
		"0.0.0.0/32", "127.0.0.1/32", "169.254.7.0/24", "224.0.0.9/32", "255.255.255.255/32", "::1/128",
		"fe80::7/128", "ff02::1/128",
	}
	for _, a := range append(unusable, "198.51.100.11/32", "10.0.0.1/32", "0.0.0.0/0", "2001:db8::/64", "fd00::1/128") {
		c.SNATAddresses = append(c.SNATAddresses, config.CIDR{Prefix: netip.MustParsePrefix(a)})
	}
	p := nft.NewPolicy(c, nft.Options{Layout: native.Layout{}})
	p.Families[0].SNAT.CIDRs = p.Families[0].SNAT.Written // 0.0.0.0/0 covers the others
	found := 0
	for _, f := range Lint(p, nil) {
		if f.ID == "snat-address-unusable" {
			found++
		}
	}
	if found != len(unusable) {
		t.Errorf("%d of %d were found", found, len(unusable))
	}
}
