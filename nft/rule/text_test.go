package rule_test

import (
	"encoding/binary"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/facts"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/rule"
)

func TestMain(m *testing.M) { os.Exit(nfttest.Main(m)) }

// dialNS connects to a new namespace.
func dialNS(t *testing.T) (*nfttest.NS, *nfnetlink.Conn) {
	t.Helper()
	ns := nfttest.NewNS(t, "text")
	c := nfnetlink.New(func() (*netlink.Conn, error) {
		defer runtime.KeepAlive(ns)
		return netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{NetNS: ns.Fd()})
	})
	t.Cleanup(func() { c.Close() })
	return ns, c
}

func ruleTexts(t *testing.T, c *nfnetlink.Conn, family nfnetlink.Family, table, chain string) []string {
	t.Helper()
	rules, _, err := c.FirstRules(family, table, chain, func(nfnetlink.Rule) bool { return false })
	if err != nil {
		t.Fatal(err)
	}
	var texts []string
	for _, r := range rules {
		texts = append(texts, rule.String(r))
	}
	return texts
}

func TestNativeRulesArePrintedLikeNFT(t *testing.T) {
	nfttest.Require(t, "nft")
	ns, c := dialNS(t)
	tests := []struct{ rule, want string }{
		{
			"ip saddr 10.0.0.0/8 ip daddr != 192.0.2.7 return",
			"meta nfproto ipv4 ip saddr 10.0.0.0/8 ip daddr != 192.0.2.7 return",
		},
		{"ip daddr 10.0.0.0/9 accept", "meta nfproto ipv4 ip daddr 10.0.0.0/9 accept"},
		{"ip daddr 10.0.0.1-10.0.0.9 drop", "meta nfproto ipv4 ip daddr >= 10.0.0.1 ip daddr <= 10.0.0.9 drop"},
		{"ip daddr != 10.0.0.1-10.0.0.9 drop", "meta nfproto ipv4 ip daddr != 10.0.0.1-10.0.0.9 drop"},
		{
			"ip6 saddr fd00::/13 ip6 daddr 2001:db8::/32 return",
			"meta nfproto ipv6 ip6 saddr fd00::/13 ip6 daddr 2001:db8::/32 return",
		},
		{"ip saddr . ip daddr { 10.0.0.1 . 10.0.0.2 } return", "meta nfproto ipv4 ip saddr . ip daddr @__set0 return"},
		{"ip daddr != @nets jump sub", "meta nfproto ipv4 ip daddr != @nets jump sub"},
		{"oifname vmap @jumps", "oifname vmap @jumps"},
		{"ct state == invalid drop", "ct state == invalid drop"},
		{"ct state established,related goto sub", "ct state established,related goto sub"},
		{"ct state new ct status dnat ct mark 0x7 accept", "ct state new ct status dnat ct mark 0x7 accept"},
		{"mark and 0x4000 == 0 return", "meta mark & 0x4000 == 0x0 return"},
		{"mark 0x10 return", "meta mark 0x10 return"},
		{"mark set mark xor 0x4000", "meta mark set meta mark ^ 0x4000"},
		{"mark set mark or 0x4000", "meta mark set meta mark & 0xffffbfff ^ 0x4000"},
		{"mark set 5", "meta mark set 0x5"},
		{"iifname \"eth*\" oif lo iif != 7 continue", "iifname \"eth*\" oif \"lo\" iif != 7 continue"},
		{"oifname != \"docker0\" masquerade persistent", "oifname != \"docker0\" masquerade persistent"},
		{"meta l4proto tcp masquerade to :1024-2047 fully-random", "meta l4proto tcp masquerade to :1024-2047 fully-random"},
		{"tcp dport 80 masquerade to :1024", "meta l4proto tcp th dport 80 masquerade to :1024"},
		{"udp sport 1000-2000 return", "meta l4proto udp th sport >= 1000 th sport <= 2000 return"},
		{"snat ip to 1.2.3.4", "snat ip to 1.2.3.4"},
		{
			"tcp dport 1 snat ip to 1.2.3.4-1.2.3.9:1000-2000 random",
			"meta l4proto tcp th dport 1 snat ip to 1.2.3.4-1.2.3.9:1000-2000 random",
		},
		{"snat ip6 to 2001:db8::1", "snat ip6 to 2001:db8::1"},
		{"snat ip to ip saddr map { 10.0.0.1 : 1.2.3.4 }", "meta nfproto ipv4 snat to ip saddr map @__map0"},
		{
			"snat ip to ip saddr & 0.0.0.255 map @pods fully-random",
			"meta nfproto ipv4 snat to ip saddr & 0.0.0.255 map @pods fully-random",
		},
		{
			"tcp dport 1 snat ip6 to ip6 saddr & ::ff map @pods6:1024-2047",
			"meta l4proto tcp th dport 1 meta nfproto ipv6 snat to ip6 saddr & ::ff map @pods6:1024-2047",
		},
		{"fib daddr type local counter name seen return", "fib daddr type local counter name seen return"},
		{"fib saddr . oif type != local masquerade", "fib saddr . oif type != local masquerade"},
		{"numgen random mod 10 < 5 masquerade", "numgen random mod 10 < 5 masquerade"},
		{"limit rate 5/minute counter accept", "limit rate 5/minute counter accept"},
		{"limit rate over 7 bytes/week drop", "limit rate over 7 bytes/604800 seconds drop"},
		{"meta protocol ip accept comment \"a word\"", "meta protocol ip accept comment \"a word\""},
		{"meta nfproto ipv6 log return", "meta nfproto ipv6 log return"},
		{"pkttype broadcast return", "<meta 19> 0x01 return"},
	}
	var script strings.Builder
	script.WriteString("table inet t {\nset nets { type ipv4_addr; flags interval; }\nmap jumps { type ifname : " +
		"verdict; }\nmap pods { type ipv4_addr : ipv4_addr; }\nmap pods6 { type ipv6_addr : ipv6_addr; }\ncounter seen { " +
		"}\nchain sub { }\nchain post { type nat hook postrouting priority 100;\n")
	var want []string
	for _, test := range tests {
		script.WriteString(test.rule + "\n")
		want = append(want, test.want)
	}
	script.WriteString("}\n}\n")
	nfttest.NFT(t, ns, script.String(), "-f", "-")
	if diff := cmp.Diff(want, ruleTexts(t, c, nfnetlink.Inet, "t", "post")); diff != "" {
		t.Errorf("texts (-want +got):\n%s", diff)
	}
}

func TestRedirectionsArePrintedLikeNFT(t *testing.T) {
	nfttest.Require(t, "nft")
	ns, c := dialNS(t)
	nfttest.NFT(t, ns, `table ip t { chain pre { type nat hook prerouting priority -100;
		tcp dport 80 redirect to :8080
		dnat to 10.0.0.2
	}
	}`, "-f", "-")
	want := []string{"meta l4proto tcp th dport 80 redirect to :8080", "dnat to 10.0.0.2"}
	if diff := cmp.Diff(want, ruleTexts(t, c, nfnetlink.IPv4, "t", "pre")); diff != "" {
		t.Errorf("texts (-want +got):\n%s", diff)
	}
}

func TestXTablesRulesArePrintedLikeIPTables(t *testing.T) {
	nfttest.Require(t, "iptables-nft-restore", "ip6tables-nft-restore")
	ns, c := dialNS(t)
	tests := []struct{ rule, want string }{
		{`-s 172.17.0.0/16 ! -o docker0 -j MASQUERADE`, `oifname != "docker0" ip saddr 172.17.0.0/16 counter -j MASQUERADE`},
		{
			`! -o vlan+ -m comment --comment "a \"b\" c" -m addrtype ! --dst-type LOCAL -j SNAT --to-source 192.0.2.9 --random-fully`,
			`oifname != "vlan*" -m comment --comment "a \"b\" c" -m addrtype ! --dst-type LOCAL counter -j SNAT --to-source 192.0.2.9 --random-fully`,
		},
		{
			`-p tcp -j SNAT --to-source 192.0.2.1-192.0.2.9:1000-2000 --persistent`,
			`meta l4proto tcp counter -j SNAT --to-source 192.0.2.1-192.0.2.9:1000-2000 --persistent`,
		},
		{
			`-p udp -j MASQUERADE --to-ports 1024-65535 --random`,
			`meta l4proto udp counter -j MASQUERADE --to-ports 1024-65535 --random`,
		},
		{`-p udp -j MASQUERADE --to-ports 7`, `meta l4proto udp counter -j MASQUERADE --to-ports 7`},
		{
			`-m addrtype ! --src-type LOCAL --limit-iface-out -m addrtype --src-type LOCAL --dst-type UNICAST,LOCAL -j ACCEPT`,
			`-m addrtype ! --src-type LOCAL --limit-iface-out -m addrtype --src-type LOCAL --dst-type UNICAST,LOCAL counter accept`,
		},
		{`-m mark ! --mark 0x4000/0x4000 -j RETURN`, `meta mark & 0x4000 != 0x4000 counter return`},
		{`-j MARK --xor-mark 0x4000`, `counter -j MARK --set-xmark 0x4000/0x0`},
		{
			`-m statistic --mode random --probability 0.5 -j ACCEPT`,
			`-m statistic --mode random --probability 0.50000000000 counter accept`,
		},
		{`-m physdev --physdev-is-bridged -j ACCEPT`, `-m physdev <...> counter accept`},
		{`-j LOG --log-prefix x`, `counter -j LOG <...>`},
	}
	var script strings.Builder
	script.WriteString("*nat\n")
	var want []string
	for _, test := range tests {
		script.WriteString("-A POSTROUTING " + test.rule + "\n")
		want = append(want, test.want)
	}
	script.WriteString("COMMIT\n")
	nfttest.Run(t, ns, script.String(), "iptables-nft-restore")
	if diff := cmp.Diff(want, ruleTexts(t, c, nfnetlink.IPv4, "nat", "POSTROUTING")); diff != "" {
		t.Errorf("texts (-want +got):\n%s", diff)
	}
	nfttest.Run(t, ns, "*nat\n-A POSTROUTING ! -d fd00::/8 -p tcp -j MASQUERADE --to-ports 5-6\n-A POSTROUTING -j SNAT "+
		"--to-source fd00::7\nCOMMIT\n", "ip6tables-nft-restore")
	want = []string{
		"meta l4proto tcp ip6 daddr != fd00::/8 counter -j MASQUERADE --to-ports 5-6",
		"counter -j SNAT --to-source fd00::7",
	}
	if diff := cmp.Diff(want, ruleTexts(t, c, nfnetlink.IPv6, "nat", "POSTROUTING")); diff != "" {
		t.Errorf("texts (-want +got):\n%s", diff)
	}
}

// iptables before 1.8.8 put marks into a match of xtables.
func TestXTablesMarkIsComparedLikeANativeOne(t *testing.T) {
	native := binary.NativeEndian
	info := native.AppendUint32(native.AppendUint32(nil, 0x4000), 0x4000)
	info = append(info, 1, 0, 0, 0) // inverted
	data, err := netlink.MarshalAttributes([]netlink.Attribute{
		{Type: unix.NFTA_MATCH_NAME, Data: []byte("mark\x00")}, {Type: unix.NFTA_MATCH_INFO, Data: info},
	})
	if err != nil {
		t.Fatal(err)
	}
	r := nfnetlink.Rule{Family: nfnetlink.IPv4, Exprs: []nfnetlink.Expr{{Name: "match", Attrs: data}}}
	if got, want := rule.String(r), "-m mark ! --mark 0x4000/0x4000"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	s := slices.Collect(rule.Statements(r))[0]
	if s.Field != "meta mark" || s.Op != "!=" {
		t.Errorf("got %+v", s)
	}
}

func FuzzRuleText(f *testing.F) {
	names := []string{
		"payload", "meta", "ct", "fib", "numgen", "immediate", "bitwise", "byteorder", "lookup", "cmp", "range",
		"match", "target", "masq", "nat", "redir", "objref", "limit", "counter", "other",
	}
	f.Add(byte(2), []byte{0, 8, 0, 1, 0, 0, 0, 0, 1, 9, 8, 0, 1, 0, 0, 0, 0, 1}, []byte{0, 3, 'a'})
	f.Fuzz(func(t *testing.T, family byte, data, userData []byte) {
		r := nfnetlink.Rule{Family: nfnetlink.Family(family), UserData: userData}
		for len(data) > 2 {
			n := min(int(data[1]), len(data)-2)
			r.Exprs = append(r.Exprs, nfnetlink.Expr{Name: names[int(data[0])%len(names)], Attrs: data[2 : 2+n]})
			data = data[2+n:]
		}
		_ = rule.String(r)
		_ = facts.Comment(r)
		for s := range rule.Statements(r) {
			s.Range()
		}
		facts.RandomFully(r)
		_, _ = facts.NAT(r)
		_, _ = facts.Packets(r)
		_ = facts.Sets(r)
		_ = facts.Returns(r)
	})
}
