package others_test

import (
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/others"
)

func TestMain(m *testing.M) { os.Exit(nfttest.Main(m)) }

func find(t *testing.T, n *nfttest.NS, q others.Query) []others.Rule {
	t.Helper()
	return nfttest.In(t, n, func() ([]others.Rule, error) {
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
	all := []struct {
		rule  string
		named bool
	}{
		{"ip daddr 10.9.0.9 accept", true},
		{"ip daddr 10.9.0.0/16 accept", true},
		{"ip daddr 10.9.0.0/20 accept", true},
		{"ip daddr 10.0.0.0/8 accept", true},
		{"ip daddr != 10.9.0.0/20 accept", true},
		{"ip daddr & 255.255.0.255 == 10.9.0.9 accept", true},
		{"ip saddr 10.244.1.2 accept", true},
		{"ip saddr 10.244.0.0/16 counter", true},
		{"meta l4proto tcp ip daddr 10.9.0.9 tcp dport 80 accept", true},
		{"ip daddr { 10.1.0.0, 10.9.0.9 } accept", true},
		{"ip daddr { 10.8.0.0/16, 10.9.0.0/24 } accept", true},
		{"ip daddr { 10.8.0.0-10.9.0.9 } accept", true},
		{"ip daddr { 10.9.0.0/24, 255.0.0.0/8 } accept", true},
		{"ip daddr { 0.0.0.0/8, 10.9.0.0/24 } accept", true},
		{"ip daddr { 10.9.0.9-10.9.0.20, 10.8.0.0/16 } accept", true},
		{"ip daddr . tcp dport { 10.9.0.9 . 80, 10.9.0.8 . 80 } accept", true},
		{"tcp dport . ip daddr { 80 . 10.9.0.9 } accept", true},
		{"ip saddr . ip daddr { 10.244.0.0/16 . 10.9.0.0/24 } accept", true},
		{"ip saddr . ip daddr { 10.244.0.0/16 . 10.9.0.9-10.9.0.12 } accept", true},
		{"ip saddr . ip daddr { 10.8.0.0/16 . 10.9.0.9-10.9.0.12 } accept", true},
		{"ip saddr . ip daddr { 10.8.0.0/16 . 10.9.0.7-10.9.0.9 } accept", true},
		{"ip daddr . tcp dport vmap { 10.9.0.9 . 80 : accept }", true},
		{"ip daddr vmap { 10.9.0.0/24 : accept, 10.10.0.0/24 : drop }", true},
		{"ip daddr 0.0.0.0/1 accept", true},
		{"ip daddr { 0.0.0.0/1 } accept", true},
		{"ip daddr { 0.0.0.0/1, 255.0.0.0/8 } accept", true},
		{"ip saddr . ip daddr { 10.8.0.0/16 . 0.0.0.0/1 } accept", true},
		{"ip saddr . ip daddr { 10.8.0.0/16 . 10.0.0.0-255.255.255.255 } accept", true},
		{"ip daddr @plain accept", true},
		{"ip daddr @intervals accept", true},

		{"accept", false},
		{"ip daddr 10.9.0.8 accept", false},
		{"ip daddr 10.8.0.0/16 accept", false},
		{"ip saddr 10.9.0.9 accept", false},
		{"ip daddr { 0.0.0.0/0 } accept", false},
		{"ip daddr @any accept", false},
		{"ip daddr { 0.0.0.0/1, 128.0.0.0/1 } accept", false}, // nft makes one of them
		{"ip daddr & 0.0.0.0 == 0.0.0.0 accept", false},
		{"ip daddr & 0.0.0.0 == 10.9.0.9 accept", false},
		{"ip daddr { 10.8.0.0/16, 10.10.0.0/16 } accept", false},
		{"ip daddr { 10.9.0.0-10.9.0.8, 10.8.0.0/16 } accept", false},
		{"ip saddr . ip daddr { 10.8.0.0/16 . 10.9.0.7-10.9.0.8 } accept", false},
		{"ip saddr . ip daddr { 10.8.0.0/16 . 10.9.0.10-10.9.0.12 } accept", false},
		{"ip daddr { 10.1.0.0, 10.9.0.10 } accept", false},
		{"ip daddr . tcp dport { 10.9.0.8 . 80 } accept", false},
		{"ip saddr . ip daddr { 10.9.0.0/24 . 10.244.0.0/24 } accept", false},
		{"ip saddr . ip daddr { 0.0.0.0/0 . 0.0.0.0/0 } accept", false},
		{"ip protocol tcp accept", false},
		{"ct state established accept", false},
		{"ip daddr 10.8.0.0/16 tcp dport { 1-60000, 60010 } accept", false}, // 10.9 would be a port of these
		{"ip daddr 10.9.0.8 meta mark { 0x0a000000-0x0affffff, 1 } accept", false},
		{"ip daddr 10.9.0.8 ct mark { 0x0a000000-0x0affffff, 1 } accept", false},
		{"ip6 daddr fd00::1 accept", false},
		{"ip daddr vmap { 10.1.0.0 : accept, * : drop }", false},
	}
	if nfttest.KernelBefore(t, 5, 13) {
		all = all[:len(all)-1] // elements for everything
	}
	for part := range slices.Chunk(all, 12) { // so many are named
		text := `flush ruleset
			table inet x {
				set plain { type ipv4_addr; elements = { 10.9.0.9, 10.9.0.7 }; }
				set any { type ipv4_addr; flags interval; elements = { 0.0.0.0/0 }; }
				set intervals { type ipv4_addr; flags interval; elements = { 10.9.0.0/30, 10.9.0.8/29 }; }
		`
		for i, tt := range part {
			text += fmt.Sprintf("chain y%d { %s; }\n", i, tt.rule)
		}
		nfttest.NFT(t, n, text+"}", "-f", "-")
		found := map[string]others.Rule{}
		for _, r := range find(t, n, query("10.244.1.2", "10.9.0.9")) {
			if _, twice := found[r.Chain]; twice || r.Handle == 0 {
				t.Errorf("%+v is found twice, or has no handle", r)
			}
			found[r.Chain] = r
		}
		for i, tt := range part {
			chain := fmt.Sprint("y", i)
			got, named := found[chain]
			want := others.Rule{Table: "inet x", Chain: chain, Handle: got.Handle, Command: "nft -a list chain inet x " + chain}
			if named != tt.named || named && got != want {
				t.Errorf("%s: found %t: %+v", tt.rule, named, got)
			}
		}
	}
}

func TestRulesOfTheOtherFamilyNameNoAddress(t *testing.T) {
	t.Parallel()
	n := nfttest.NewNode(t)
	for _, tt := range []struct {
		family, rule, source, destination string
		named                             bool
	}{
		{"ip6", "ip6 daddr fd00:9::9 accept", "fd00::2", "fd00:9::9", true},
		{"ip6", "ip6 saddr fd00::2 accept", "fd00::2", "fd00:9::9", true},
		{"inet", "ip6 saddr fd00::/64 accept", "fd00::2", "fd00:9::9", true},
		{"ip6", "ip6 saddr fd00:9::9 accept", "fd00::2", "fd00:9::9", false},
		{"ip6", "@nh,128,32 0x0a090009 accept", "", "10.9.0.9", false}, // at the place of an address of IPv4
		{"ip", "@nh,128,32 0x0a090009 accept", "", "10.9.0.9", true},
		{"ip", "@th,128,32 0x0a090009 accept", "", "10.9.0.9", false},
		{"ip", "@nh,192,32 0xfd000009 accept", "", "fd00:9::9", false},
		{"ip6", "@nh,192,32 0xfd000009 accept", "", "fd00:9::9", true},
		{"ip", "ip saddr set 10.9.0.9", "", "10.9.0.9", false},
	} {
		nfttest.NFT(t, n, "flush ruleset\ntable "+tt.family+" x { chain y { "+tt.rule+"; }; }", "-f", "-")
		if found := find(t, n, query(tt.source, tt.destination)); len(found) > 0 != tt.named {
			t.Errorf("%+v: %+v", tt, found)
		}
	}
}

// Each set is read once. One that is deleted meanwhile has no address, and what cannot be read is an error.
func TestSetsAreReadOnceWhileTheRulesAreListed(t *testing.T) {
	t.Parallel()
	n := nfttest.NewNode(t)
	text := "table ip x {\nset s { type ipv4_addr; elements = { 10.9.0.9 }; }\n"
	for i := range 20 { // more than are listed
		text += fmt.Sprintf("chain c%d { ip daddr @s accept; }\n", i)
		text += fmt.Sprintf("chain n%d { type nat hook postrouting priority %[1]d; masquerade; }\n", i)
	}
	nfttest.NFT(t, n, text+"}", "-f", "-")
	for _, tt := range []struct {
		fails error
		rules int
	}{{nil, 16}, {unix.ENOENT, 0}, {unix.EPERM, 0}} {
		reads := 0
		var sockets []*netlink.Conn
		dial := func() (*netlink.Conn, error) {
			nl, err := nfttest.DialNetfilter(n)
			sockets = append(sockets, nl)
			return nl, err
		}
		c := nfnetlink.New(nfttest.Through(dial, func(m *netlink.Message) error {
			if m.Header.Type != unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETSETELEM {
				return nil
			}
			reads++
			return tt.fails
		}, nil))
		found, err := others.Find(t.Context(), c, query("", "10.9.0.9"))
		_ = c.Close()
		named := slices.DeleteFunc(slices.Clone(found), func(r others.Rule) bool { return r.Handle == 0 })
		broken := tt.fails == unix.EPERM
		if reads != 1 || len(named) != tt.rules || broken != (err != nil) || !broken && len(found)-len(named) != 16 {
			t.Errorf("%v: read %d times, %+v: %v", tt.fails, reads, found, err)
		}
		for i, nl := range sockets {
			if nl.SetDeadline(time.Time{}) == nil {
				t.Errorf("%v: socket %d of %d is open", tt.fails, i, len(sockets))
			}
		}
	}
}

func TestNamesOfOtherProgramsAreEscaped(t *testing.T) {
	n := nfttest.NewNode(t)
	nfttest.In(t, n, func() (any, error) {
		c := nfnetlink.Dial()
		defer func() { _ = c.Close() }()
		b := &nfnetlink.Batch{}
		b.AddTable(nfnetlink.IPv4, "t\x1b")
		b.AddChain(nfnetlink.Chain{Family: nfnetlink.IPv4, Table: "t\x1b", Name: "c\x1b"})
		r := nfnetlink.Rule{
			Family: nfnetlink.IPv4, Table: "t\x1b", Chain: "c\x1b",
			Exprs: nfnetlink.Marshal(nfnetlink.IPv4, nfnetlink.AddressPayload(false, false),
				&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{10, 9, 0, 9}}),
		}
		b.AddRule(r)
		r.UserData = nfnetlink.Signature() // it is none of another program
		b.AddRule(r)
		return nil, c.Commit(b)
	})
	want := []others.Rule{{Table: `ip $'t\033'`, Chain: `$'c\033'`, Handle: 2, Command: "nft -a list ruleset ip"}}
	if diff := cmp.Diff(want, find(t, n, query("", "10.9.0.9"))); diff != "" {
		t.Error(diff)
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
	want := []others.Rule{
		{Table: "ip6 a", Chain: "b", Handle: 2, Command: "nft -a list chain ip6 a b"},
		{Table: "ip6 a", Chain: "b", Command: "nft -a list chain ip6 a b"},
		{Table: "ip nat", Chain: "POSTROUTING", Command: "nft -a list chain ip nat POSTROUTING"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
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
	got := nfttest.In(t, n, func() ([]others.Rule, error) {
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
	if len(got) != 1+16 || got[0].Chain != "CNI-257" || got[0].Handle == 0 {
		t.Errorf("%+v", got)
	}
	if grown > 16 {
		t.Errorf("the heap grew by %d MB", grown)
	}
}
