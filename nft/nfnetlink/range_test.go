package nfnetlink_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"

	"nft-masq-agent/nft/nfnetlink"
)

func TestPrefixesConvertToRanges(t *testing.T) {
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
		if r.String() != tt.text {
			t.Errorf("%s prints %s, want %s", p, r, tt.text)
		}
	}
	for _, text := range []string{
		"10.0.0.0-10.0.2.255", "10.0.0.1-10.0.0.6", "0.0.0.0-255.255.255.254", "0.0.0.1-255.255.255.255",
		"fd00::-fd00::2", "10.0.0.255-10.0.1.0", "10.0.0.2-10.0.0.1",
		"8000::-ffff:ffff:ffff:ffff:ffff:ffff:ffff:fffe",
	} {
		from, to, _ := strings.Cut(text, "-")
		r := nfnetlink.Range{First: netip.MustParseAddr(from), Last: netip.MustParseAddr(to)}
		if r.String() != text {
			t.Errorf("%s prints %s", text, r)
		}
	}
	if all := (nfnetlink.Range{}); all.String() != "*" {
		t.Errorf("the catch-all element prints %s", all)
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
