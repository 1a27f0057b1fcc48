package others_test

import (
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/others"
)

func TestMain(m *testing.M) { os.Exit(nfttest.Main(m)) }

func find(t *testing.T, n *nfttest.NS, q others.Query) others.Found {
	t.Helper()
	return nfttest.In(t, n, func() (others.Found, error) {
		c := nfnetlink.Dial()
		defer func() { _ = c.Close() }()
		return others.Find(t.Context(), c, q)
	})
}

func query(source, destination string) others.Query {
	q := others.Query{Destination: netip.MustParseAddr(destination)}
	if source != "" {
		q.Source = netip.MustParseAddr(source)
	}
	return q
}

func TestRulesThatNameAnAddressAreFound(t *testing.T) {
	n := nfttest.NewNode(t)
	for _, tt := range []struct{ rule, field string }{
		{"ip daddr 10.9.0.9 accept", "destination"},
		{"ip daddr 10.9.0.0/16 accept", "destination"},
		{"ip daddr 10.9.0.0/20 accept", "destination"},
		{"ip daddr 10.0.0.0/8 accept", "destination"},
		{"ip daddr != 10.9.0.0/20 accept", "destination"},
		{"ip daddr & 255.255.0.255 == 10.9.0.9 accept", "destination"},
		{"ip daddr 10.9.0.1-10.9.0.20 accept", "destination"},
		{"ip saddr 10.244.1.2 accept", "source"},
		{"ip saddr 10.244.0.0/16 counter", "source"},
		{"meta l4proto tcp ip daddr 10.9.0.9 tcp dport 80 accept", "destination"},
		{"ip daddr { 10.1.0.0, 10.9.0.9 } accept", "destination"},
		{"ip daddr { 10.8.0.0/16, 10.9.0.0/24 } accept", "destination"},
		{"ip daddr { 10.8.0.0-10.9.0.9 } accept", "destination"},
		{"ip daddr . tcp dport { 10.9.0.9 . 80, 10.9.0.8 . 80 } accept", "destination"},
		{"tcp dport . ip daddr { 80 . 10.9.0.9 } accept", "destination"},
		{"ip saddr . ip daddr { 10.244.0.0/16 . 10.9.0.0/24 } accept", "source destination"},
		{"ip daddr . tcp dport vmap { 10.9.0.9 . 80 : accept }", "destination"},
		{"ip daddr vmap { 10.9.0.0/24 : accept, 10.10.0.0/24 : drop }", "destination"},
		{"ip daddr @plain accept", "destination plain"},
		{"ip daddr @intervals accept", "destination intervals"},

		{"accept", ""},
		{"ip daddr 10.9.0.8 accept", ""},
		{"ip daddr 10.8.0.0/16 accept", ""},
		{"ip saddr 10.9.0.9 accept", ""},
		{"ip daddr { 0.0.0.0/0 } accept", ""},
		{"ip daddr 0.0.0.0-255.255.255.255 accept", ""},
		{"ip daddr { 10.8.0.0/16, 10.10.0.0/16 } accept", ""},
		{"ip daddr { 10.1.0.0, 10.9.0.10 } accept", ""},
		{"ip daddr . tcp dport { 10.9.0.8 . 80 } accept", ""},
		{"ip saddr . ip daddr { 10.9.0.0/24 . 10.244.0.0/24 } accept", ""},
		{"ip saddr . ip daddr { 0.0.0.0/0 . 0.0.0.0/0 } accept", ""},
		{"ip daddr vmap { 10.1.0.0 : accept, * : drop }", ""},
		{"ip protocol tcp accept", ""},
		{"ip6 daddr fd00::1 accept", ""},
	} {
		nfttest.NFT(t, n, fmt.Sprintf(`flush ruleset
			table inet x {
				set plain { type ipv4_addr; elements = { 10.9.0.9, 10.9.0.7 }; }
				set intervals { type ipv4_addr; flags interval; elements = { 10.9.0.0/30, 10.9.0.8/29 }; }
				chain y { %s; }
			}`, tt.rule), "-f", "-")
		got := ""
		for _, r := range find(t, n, query("10.244.1.2", "10.9.0.9")).Rules {
			got = strings.TrimSpace(r.Field + " " + r.Set)
			if r.Table != "x" || r.Chain != "y" || r.Handle == 0 || r.Command != "nft -a list chain inet x y" {
				t.Errorf("%s: %+v", tt.rule, r)
			}
		}
		if got != tt.field && (got == "" || !strings.Contains(tt.field, got)) {
			t.Errorf("%s: %q, want %q", tt.rule, got, tt.field)
		}
	}
}

func TestChainsThatTranslateSourcesAreFound(t *testing.T) {
	n := nfttest.NewNode(t)
	nfttest.NFT(t, n, `flush ruleset
		table ip6 a { chain b { type nat hook postrouting priority 100;
			ip6 daddr fd00:9::/32 masquerade; snat to fd00::1; }; }
		table inet nft-masq-agent { chain postrouting { type nat hook postrouting priority 110;
			ip6 daddr fd00:9::9 masquerade; }; }
		`, "-f", "-")
	nfttest.Run(t, n, "*nat\n-A POSTROUTING -s 10.0.0.0/8 -j MASQUERADE\nCOMMIT\n", "iptables-nft-restore")
	got := find(t, n, query("", "fd00:9::9"))
	text := fmt.Sprintf("%v", got)
	for _, want := range []string{
		"{ip6 a b 2 destination  nft -a list chain ip6 a b}", "{ip6 a b [2 3] nft -a list chain ip6 a b}",
		"{ip nat POSTROUTING [",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %s in %s", want, text)
		}
	}
	if len(got.Rules) != 1 || len(got.Translating) != 2 {
		t.Error(text)
	}
}

// A node with 30,000 chains of pods, and 60,000 rules.
func TestTheRulesOfALargeNodeAreReadInAFewMegabytes(t *testing.T) {
	nfttest.SkipIfShort(t)
	n := nfttest.NewNode(t)
	var b strings.Builder
	b.WriteString("*nat\n")
	const chains = 30_000
	for i := range chains {
		fmt.Fprintf(&b, ":CNI-%d -\n", i)
	}
	for i := range chains {
		fmt.Fprintf(&b, "-A CNI-%d -d 10.9.%d.%d/32 -j ACCEPT\n", i, i/256, i%256)
		fmt.Fprintf(&b, "-A CNI-%d ! -d 224.0.0.0/4 -j MASQUERADE\n", i)
	}
	b.WriteString("COMMIT\n")
	nfttest.Run(t, n, b.String(), "iptables-nft-restore")
	var before, after runtime.MemStats
	var usage, used unix.Rusage
	runtime.GC()
	runtime.ReadMemStats(&before)
	got := nfttest.In(t, n, func() (others.Found, error) {
		c := nfnetlink.Dial()
		defer func() { _ = c.Close() }()
		_ = unix.Getrusage(unix.RUSAGE_THREAD, &usage)
		found, err := others.Find(t.Context(), c, query("", "10.9.1.1"))
		_ = unix.Getrusage(unix.RUSAGE_THREAD, &used)
		return found, err
	})
	runtime.ReadMemStats(&after)
	grown := (int64(after.HeapSys) - int64(before.HeapSys)) >> 20
	t.Logf("%d ms of processor, %d MB allocated, the heap grew by %d MB",
		(used.Utime.Nano()-usage.Utime.Nano()+used.Stime.Nano()-usage.Stime.Nano())/1e6,
		(after.TotalAlloc-before.TotalAlloc)>>20, grown)
	if len(got.Rules) != 1 || got.Rules[0].Chain != "CNI-257" || len(got.Translating)+got.MoreTranslating != chains {
		t.Errorf("%+v", got)
	}
	if grown > 16 {
		t.Errorf("the heap grew by %d MB", grown)
	}
}
