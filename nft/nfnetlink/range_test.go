package nfnetlink_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"

	"nft-masq-agent/nft/nfnetlink"
)

func TestPrefixesConvertToRangesAndBack(t *testing.T) {
	for _, tt := range []struct{ prefix, from, to, text string }{
		{"0.0.0.0/0", "0.0.0.0", "255.255.255.255", "0.0.0.0/0"},
		{"10.0.0.0/8", "10.0.0.0", "10.255.255.255", "10.0.0.0/8"},
		{"10.1.2.3/8", "10.0.0.0", "10.255.255.255", "10.0.0.0/8"},
		{"240.0.0.0/4", "240.0.0.0", "255.255.255.255", "240.0.0.0/4"},
		{"198.51.100.2/31", "198.51.100.2", "198.51.100.3", "198.51.100.2/31"},
		{"255.255.255.255/32", "255.255.255.255", "255.255.255.255", "255.255.255.255"},
		{"::/0", "::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "::/0"},
		{"fe80::/10", "fe80::", "febf:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "fe80::/10"},
		{"::1/128", "::1", "::1", "::1"},
	} {
		p := netip.MustParsePrefix(tt.prefix)
		r := nfnetlink.PrefixRange(p)
		if want := (nfnetlink.Range{First: netip.MustParseAddr(tt.from), Last: netip.MustParseAddr(tt.to)}); r != want {
			t.Errorf("%s: range %v, want %v", p, r, want)
		}
		if got, ok := r.Prefix(); !ok || got != p.Masked() {
			t.Errorf("%s: prefix of the range is %s, %t", p, got, ok)
		}
		if got := r.Prefixes(); len(got) != 1 || got[0] != p.Masked() {
			t.Errorf("%s: prefixes of the range are %s", p, got)
		}
		if r.String() != tt.text {
			t.Errorf("%s prints %s, want %s", p, r, tt.text)
		}
	}
	for text, prefixes := range map[string]string{ // of the fewest, the first ones
		"10.0.0.0-10.0.2.255":                            "[10.0.0.0/23 10.0.2.0/24]",
		"10.0.0.1-10.0.0.6":                              "[10.0.0.1/32 10.0.0.2/31 10.0.0.4/31 10.0.0.6/32]",
		"0.0.0.0-255.255.255.254":                        "[0.0.0.0/1 128.0.0.0/2 ",
		"0.0.0.1-255.255.255.255":                        "[0.0.0.1/32 0.0.0.2/31 ",
		"fd00::-fd00::2":                                 "[fd00::/127 fd00::2/128]",
		"10.0.0.255-10.0.1.0":                            "[10.0.0.255/32 10.0.1.0/32]",
		"10.0.0.2-10.0.0.1":                              "[]",
		"8000::-ffff:ffff:ffff:ffff:ffff:ffff:ffff:fffe": "[8000::/2 c000::/3 ",
	} {
		from, to, _ := strings.Cut(text, "-")
		r := nfnetlink.Range{First: netip.MustParseAddr(from), Last: netip.MustParseAddr(to)}
		if p, ok := r.Prefix(); ok || r.String() != text || !strings.HasPrefix(fmt.Sprint(r.Prefixes()), prefixes) {
			t.Errorf("%s is prefix %s, %t, and has %s, want %s", r, p, ok, r.Prefixes(), prefixes)
		}
	}
	if p, ok := (nfnetlink.Range{}).Prefix(); ok || (nfnetlink.Range{}).String() != "*" {
		t.Errorf("the catch-all element is %s, %t and prints %s", p, ok, nfnetlink.Range{})
	}
}

// "!" stands for an end, "*" for the catch-all element.
func TestBoundsFormRangesInAnyOrder(t *testing.T) {
	for _, tt := range []struct{ name, bounds, want string }{
		{"none", "", ""},
		{"one", "10.0.0.0 !11.0.0.0", "10.0.0.0/8"},
		{"without end", "240.0.0.0", "240.0.0.0/4"},
		{"everything", "0.0.0.0", "0.0.0.0/0"},
		{"last address", "255.255.255.255", "255.255.255.255"},
		{"neighbours", "10.0.0.0 !11.0.0.0 11.0.0.0 !12.0.0.0", "10.0.0.0/8 11.0.0.0/8"},
		{"up to the last", "128.0.0.0 !192.0.0.0 192.0.0.0", "128.0.0.0/2 192.0.0.0/2"},
		{"not a prefix", "10.0.0.1 !10.0.0.4", "10.0.0.1-10.0.0.3"},
		{"duplicates", "10.0.0.0 !11.0.0.0 10.0.0.0 !11.0.0.0", "10.0.0.0/8"},
		{"end lost", "10.0.0.0 13.0.0.0 !14.0.0.0", "10.0.0.0-12.255.255.255 13.0.0.0/8"},
		{"start lost", "!11.0.0.0 12.0.0.0 !13.0.0.0", "12.0.0.0/8"},
		{"catch-all element", "10.0.0.0 !11.0.0.0 *", "* 10.0.0.0/8"},
		{"IPv6", "fe80:: !fec0:: ::1 !::2", "::1 fe80::/10"},
		{"IPv6 without end", "8000::", "8000::/1"},
	} {
		for seed := range uint64(5) {
			var bounds []nfnetlink.Bound
			for word := range strings.FieldsSeq(tt.bounds) {
				addr, _ := netip.ParseAddr(strings.TrimPrefix(word, "!"))
				bounds = append(bounds, nfnetlink.Bound{Addr: addr, End: word[0] == '!'})
			}
			rand.New(rand.NewPCG(seed, 0)).Shuffle(len(bounds), func(i, j int) { bounds[i], bounds[j] = bounds[j], bounds[i] })
			if got := strings.Trim(fmt.Sprint(nfnetlink.Ranges(bounds)), "[]"); got != tt.want {
				t.Errorf("%s: got %q, want %q", tt.name, got, tt.want)
			}
		}
	}
}
