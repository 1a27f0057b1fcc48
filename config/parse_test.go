package config

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// prefixes prints a list without positions.
func prefixes(list []CIDR) string {
	s := make([]string, len(list))
	for i, c := range list {
		s[i] = c.Prefix.String()
	}
	return strings.Join(s, " ")
}

const rfc1918 = "10.0.0.0/8 172.16.0.0/12 192.168.0.0/16"

func TestDefaultsApplyWithoutSources(t *testing.T) {
	tests := []struct {
		name string
		d    Defaults
		want Config
		list string
	}{
		{"no flag", Defaults{}, Config{ResyncInterval: time.Minute}, rfc1918},
		{
			"all flags",
			Defaults{AllReservedRanges: true, EnableIPv6: true, ResyncInterval: 5 * time.Second},
			Config{EnableIPv6: true, ResyncInterval: 5 * time.Second},
			rfc1918 + " 100.64.0.0/10 192.0.0.0/24 192.0.2.0/24 192.88.99.0/24 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 240.0.0.0/4",
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c, warnings, err := Parse(tt.d)
			if err != nil || len(warnings) > 0 {
				t.Fatal(err, warnings)
			}
			if diff := cmp.Diff(tt.list, prefixes(c.NonMasqueradeCIDRs)); diff != "" {
				t.Errorf("list (-want +got):\n%s", diff)
			}
			for _, cidr := range c.NonMasqueradeCIDRs {
				if cidr.Pos != (Position{}) {
					t.Errorf("%s has the position %s", cidr, cidr.Pos)
				}
			}
			c.NonMasqueradeCIDRs = nil
			if diff := cmp.Diff(meaning(tt.want, nil), meaning(c, nil)); diff != "" {
				t.Errorf("config (-want +got):\n%s", diff)
			}
		})
	}
}

func TestFileOverridesFlags(t *testing.T) {
	all := Defaults{AllReservedRanges: true, EnableIPv6: true, ResyncInterval: time.Hour}
	tests := []struct {
		name, file string
		d          Defaults
		want       string
	}{
		{"IPv6 off", "enableIPv6: false", all, "ipv6=false every=1h0m0s ranges=11"},
		{"IPv6 on", "enableIPv6: true", Defaults{}, "ipv6=true every=1m0s ranges=3"},
		{"IPv6 null", "enableIPv6:", all, "ipv6=true every=1h0m0s ranges=11"},
		{"interval", "resyncInterval: 2h", all, "ipv6=true every=2h0m0s ranges=11"},
		{"list", "nonMasqueradeCIDRs: [10.0.0.0/8]", all, "ipv6=true every=1h0m0s ranges=1"},
		{"empty list", "nonMasqueradeCIDRs: []", all, "ipv6=true every=1h0m0s ranges=0"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c, _, err := Parse(tt.d, Source{Name: "f", Data: []byte(tt.file)})
			if err != nil {
				t.Fatal(err)
			}
			got := fmt.Sprintf("ipv6=%t every=%s ranges=%d", c.EnableIPv6, c.ResyncInterval, len(c.NonMasqueradeCIDRs))
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestFilesAreMerged(t *testing.T) {
	tests := []struct {
		name  string
		files []string
		want  string // the meaning in short, or the error
	}{
		{"booleans are OR-ed", []string{"masqLinkLocal: true", "masqLinkLocal: false"}, "ll=true ll6=false ipv6=false every=1m0s " + rfc1918},
		{"a boolean that one file sets to false is false", []string{"enableIPv6: false", ""}, "ll=false ll6=false ipv6=false every=1m0s " + rfc1918},
		{"linkLocal counts as its inverse", []string{"linkLocal: false", "masqLinkLocal: false"}, "ll=true ll6=false ipv6=false every=1m0s " + rfc1918},
		{"the shortest interval wins", []string{"resyncInterval: 2m", "resyncInterval: 90s", "resyncInterval: 1h"}, "ll=false ll6=false ipv6=false every=1m30s " + rfc1918},
		{"it overrides the flag even if longer", []string{"resyncInterval: 2m", "masqLinkLocal: false"}, "ll=false ll6=false ipv6=false every=2m0s " + rfc1918},
		{"duplicates are kept", []string{"nonMasqueradeCIDRs: [10.0.0.0/8]", "nonMasqueradeCIDRs: [10.0.0.0/8]"}, "ll=false ll6=false ipv6=false every=1m0s 10.0.0.0/8 10.0.0.0/8"},
		{"equal limits agree", []string{"cidrLimit: 3", "cidrLimit: 3"}, "ll=false ll6=false ipv6=false every=1m0s " + rfc1918},
		{"different limits do not", []string{"cidrLimit: 3", "cidrLimit: 4"}, "f1:1:12: cidrLimit is 4 here, but 3 at f0:1:12"},
		{"the limit applies to the defaults", []string{"cidrLimit: 2", ""}, "f0:1:12: cidrLimit is 2, but nonMasqueradeCIDRs has 3 entries"},
		{"one bad file rejects all", []string{"masqLinkLocal: true", "foo: ["}, "f1:1:6: syntax: did not find expected node content: close the bracket, or put the value in quotes"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var sources []Source
			for i, f := range tt.files {
				sources = append(sources, Source{Name: fmt.Sprintf("f%d", i), Data: []byte(f)})
			}
			c, _, err := Parse(Defaults{}, sources...)
			got := fmt.Sprintf("ll=%t ll6=%t ipv6=%t every=%s %s",
				c.MasqLinkLocal, c.MasqLinkLocalIPv6, c.EnableIPv6, c.ResyncInterval, prefixes(c.NonMasqueradeCIDRs))
			if err != nil {
				got = err.Error()
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestTooLargeFileIsAnError(t *testing.T) {
	data := []byte(strings.Repeat("#", maxSize))
	if _, _, err := Parse(Defaults{}, Source{Name: "f", Data: data}); err != nil {
		t.Errorf("4 MiB: %v", err)
	}
	_, _, err := Parse(Defaults{}, Source{Name: "f", Data: append(data, '\n')})
	if diff := cmp.Diff("f:1:1: the file is larger than 4 MiB", fmt.Sprint(err)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestCaretPointsAtTheProblem(t *testing.T) {
	long := `{"nonMasqueradeCIDRs": [` + strings.Repeat(`"10.0.0.0/8", `, 50) + `"10.0.0.1"]}`
	tests := []struct{ name, file, want string }{
		{"spaces", "nonMasqueradeCIDRs:\n  - 10.0.0.1/8\n", "  - 10.0.0.1/8\n    ^"},
		{"tabs", "{\n\t\"masqLinkLocal\":\t1\n}", "\t\"masqLinkLocal\":\t1\n\t                \t^"},
		{"wide characters count as one", "nonMasqueradeCIDRs: [\"é\", 10.0.0.1]\n", "nonMasqueradeCIDRs: [\"é\", 10.0.0.1]\n                          ^"},
		{"a line that is too long is not shown", long, ""},
		{"control characters are not printed", "enableIPv6: \x1b[2J\u202e\u200b\n", "enableIPv6: \uFFFD[2J\uFFFD\uFFFD\n            ^"},
		{"a first line after a byte order mark", "\uFEFFmasqLinkLocal: 1\n", "masqLinkLocal: 1\n               ^"},
		{"the end of the file", "enableIPv6: [", "enableIPv6: [\n            ^"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, _, err := Parse(Defaults{}, Source{Name: "f", Data: []byte(tt.file)})
			problems, ok := err.(Problems)
			if !ok {
				t.Fatalf("error %v of type %T", err, err)
			}
			if diff := cmp.Diff(tt.want, problems[len(problems)-1].Caret()); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestMisspelledKeysAreDistinguishedFromUnknownOnes(t *testing.T) {
	slips := map[string]string{
		"nonMasqueradeCIDR": KeyNonMasqueradeCIDRs, "nonMasquaradeCIDRs": KeyNonMasqueradeCIDRs, "noMasqueradeCIDRs": KeyNonMasqueradeCIDRs,
		"nonMasqueradeCDIRs": KeyNonMasqueradeCIDRs, "non-masquerade-cidrs": KeyNonMasqueradeCIDRs, "nonMasqCIDRs": KeyNonMasqueradeCIDRs,
		"nonMasqueradeSrcCIDR": KeyNonMasqueradeSrcCIDRs, "nonMasqueradeSourceCIDRs": KeyNonMasqueradeSrcCIDRs,
		"masqueradeSrcCidr": KeyMasqueradeSrcCIDRs, "forceMasqCIDRs": KeyForceMasqueradeCIDRs, "forcedMasqueradeCIDRs": KeyForceMasqueradeCIDRs,
		"masqLinklLocal": keyMasqLinkLocal, "masqLinkLocl": keyMasqLinkLocal, "masqueradeLinkLocal": keyMasqLinkLocal,
		"masqLinkLocalIP6": keyMasqLinkLocalIPv6, "masqLinkLocalV6": keyMasqLinkLocalIPv6,
		"enableIP6": keyEnableIPv6, "enabledIPv6": keyEnableIPv6, "enable_ipv6": keyEnableIPv6,
		"resyncIntervall": keyResyncInterval, "syncInterval": keyResyncInterval, "resync-interval": keyResyncInterval,
		"cidrLimits": keyCIDRLimit, "cirdLimit": keyCIDRLimit, "linkLocals": keyLinkLocal,
	}
	for name, want := range slips {
		if got := likelyKey(Keys(), name); got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
	others := []string{
		"", "a", "outputInterface", "outputAddress", "outputAddressIPv6", "apiVersion", "kind", "metadata", "data", "x-note",
		"masqueradeCIDRs", "nonMasqueradeDstCIDRs", "nonMasqueradeIPs", "nonMasqueradeCIDRsIPv6", "nonMasqueradeCIDRs6",
		"masqLinkLocalIPv4", "linkLocalIPv6", "noMasqLinkLocal", "nonMasqLinkLocal", "enableIPv4", "disableIPv6", "ipv6",
		"cidrList", "limit", "resyncPeriod", "resyncIntervalSeconds", "interval", "masq", "toPorts", "randomFully", "masqChain",
		strings.Repeat("nonMasqueradeCIDRs", 1000),
	}
	for _, name := range others {
		if got := likelyKey(Keys(), name); got != "" {
			t.Errorf("%s is taken for a misspelling of %s", name, got)
		}
	}
}
