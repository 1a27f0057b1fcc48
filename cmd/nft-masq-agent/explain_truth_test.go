package main

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfttest"
)

// explained runs explain on the node, as JSON and as text.
func (n trafficNode) explained(args ...string) (answer.Explanation, string) {
	n.t.Helper()
	args = append([]string{"explain"}, args...)
	got := n.run(append(args, "-o", "json")...)
	var x answer.Explanation
	if err := json.Unmarshal([]byte(got.stdout), &x); err != nil {
		n.t.Fatalf("%v: %+v: %v", args, got, err)
	}
	return x, unwrap(x.String())
}

// seen is the source address that the outside host sees of a connection from the pod.
func (n trafficNode) seen(dst netip.Addr, port uint16) netip.Addr {
	n.t.Helper()
	flow := nfttest.Flow{Proto: nfttest.UDP, From: n.top.Pod, To: n.top.Outside, Dst: netip.AddrPortFrom(dst, port)}
	return nfttest.MustSend(n.t, n.top, flow).Seen.Addr()
}

const staleChain = `table ip nat {
	chain POSTROUTING { type nat hook postrouting priority 100; fib daddr type != local jump IP-MASQ; }
	chain IP-MASQ { ip daddr 10.99.0.0/16 return; masquerade; }
}`

func TestExplainNamesTheAddressThatTheFarEndSees(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	nfttest.Require(t, "nft")
	type situation struct {
		name, rules, dst string
		code             string
		says             []string
	}
	situations := []situation{
		{"exempt", "", "10.9.0.9", "exempt", []string{"10.9.0.9 sees 10.244.1.2, the source's own address"}},
		{
			"masqueraded", "", "203.0.113.9", "masqueraded",
			[]string{"203.0.113.9 sees 192.0.2.1, the address of eth0: masqueraded by this agent"},
		},
		{
			"foreign masquerade of the exempt",
			"table ip x { chain c { type nat hook postrouting priority 100; ip saddr 10.244.1.0/24 masquerade; }; }", "10.9.0.9",
			"foreign-masquerade",
			[]string{"10.9.0.9 sees 192.0.2.1, the address of eth0", "ip x c handle 2", "ip saddr 10.244.1.0/24 masquerade"},
		},
		{
			"chain of an older agent", staleChain, "10.9.0.9", "foreign-masquerade",
			[]string{"10.9.0.9 sees 192.0.2.1", "ip nat IP-MASQ handle"},
		},
		{
			"foreign snat before", "table ip x { chain c { type nat hook postrouting priority 99; snat to 198.51.100.51; }; }",
			"10.9.0.9", "foreign-snat",
			[]string{"10.9.0.9 sees 198.51.100.51", "ip x c handle 2 (priority 99): snat to 198.51.100.51"},
		},
		{
			"foreign snat of what is masqueraded",
			"table ip x { chain c { type nat hook postrouting priority 99; snat to 198.51.100.50; }; }", "203.0.113.9",
			"foreign-snat",
			[]string{"203.0.113.9 sees 198.51.100.50", "ip x c handle 2"},
		},
		{
			"foreign snat after", "table ip x { chain c { type nat hook postrouting priority 120; snat to 198.51.100.50; }; }",
			"203.0.113.9", "masqueraded",
			[]string{"192.0.2.1"},
		},
		{"foreign rule by interface", "table inet x { chain c { type nat hook postrouting priority 90; oifname \"eth*\" " +
			"iifname != \"lo\" ct state new masquerade; }; }", "10.9.0.9", "foreign-masquerade", []string{"192.0.2.1"}},
		{
			"foreign verdict map", "table ip x { chain m { masquerade; }; chain c { type nat hook postrouting priority 90; " +
				"oifname vmap { \"eth0\" : jump m, \"eth1\" : drop }; }; }", "10.9.0.9", "foreign-masquerade",
			[]string{"ip x m handle"},
		},
		{
			"foreign rule that keeps", "table ip x { chain c { type nat hook postrouting priority 90; snat to ip saddr; }; }",
			"203.0.113.9", "foreign-snat",
			[]string{"203.0.113.9 sees 10.244.1.2"},
		},
		{
			"mark that is not known", "table ip x { chain c { type nat hook postrouting priority 90; meta mark 0x77 snat to " +
				"198.51.100.50; }; }", "203.0.113.9", "unknown",
			[]string{"cannot be determined", "meta mark 0x77", "198.51.100.50 by ip x c handle 2", "192.0.2.1 by this agent"},
		},
		{
			"destination that may be translated",
			"table ip x { chain d { type nat hook prerouting priority -100; meta l4proto udp @th,16,16 53 redirect; }; chain " +
				"c { type nat hook postrouting priority 99; masquerade; }; }", "10.9.0.9", "unknown",
			[]string{"cannot be determined", "th dport 53", "192.0.2.1, the address of eth0", "may be translated first"},
		},
		{
			"tproxy", "table ip x { chain c { type filter hook prerouting priority mangle; meta l4proto udp " +
				"tproxy to 127.0.0.1:9; }; }", "203.0.113.9", "unknown",
			[]string{"cannot be determined", "192.0.2.1, the address of eth0", "nothing: ip x c handle 2"},
		},
		{
			"connection tracking off", "table ip x { chain c { type filter hook prerouting priority raw; ip daddr " +
				"203.0.113.0/24 notrack; }; }", "203.0.113.9", "untracked",
			[]string{"203.0.113.9 sees 10.244.1.2", "turns off connection tracking", "ip x c handle 2"},
		},
		{
			"connection tracking off, perhaps",
			"table ip x { chain c { type filter hook prerouting priority raw; meta l4proto udp notrack; }; }", "203.0.113.9",
			"unknown",
			[]string{"whether connection tracking is off", "10.244.1.2", "192.0.2.1 by this agent"},
		},
		{
			"kube-proxy's mark from somebody else",
			"table ip x { chain m { type filter hook prerouting priority mangle; ip saddr 10.244.0.0/16 meta mark set meta " +
				"mark | 0x4000; }; chain c { type nat hook postrouting priority 99; meta mark & 0x4000 == 0x4000 masquerade; }; }",
			"10.9.0.9", "foreign-masquerade",
			[]string{"10.9.0.9 sees 192.0.2.1"},
		},
		{
			"kube-proxy's mark, perhaps", "table ip x { chain m { type filter hook forward priority mangle; meta l4proto udp " +
				"meta mark set 0x4000; }; chain c { type nat hook postrouting priority 99; meta mark & 0x4000 == 0x4000 " +
				"masquerade; }; }", "10.9.0.9", "unknown",
			[]string{"meta mark & 0x4000", "192.0.2.1 by ip x c handle"},
		},
		{
			"another mark", "table ip x { chain m { type filter hook forward priority mangle; meta mark set 0x77; }; chain c " +
				"{ type nat hook postrouting priority 99; meta mark 0x77 masquerade; }; }", "10.9.0.9", "foreign-masquerade",
			[]string{"10.9.0.9 sees 192.0.2.1"},
		},
		{
			"verdict map of networks", "table ip x { chain c { type nat hook postrouting priority 90; ip daddr vmap { " +
				"10.9.0.0/16 : accept, 10.10.0.0/16 : drop }; masquerade; }; }", "10.9.0.9", "exempt",
			[]string{"10.9.0.9 sees 10.244.1.2"},
		},
		{
			"verdict map of networks, not in it",
			"table ip x { chain c { type nat hook postrouting priority 90; ip daddr vmap { 10.8.0.0/16 : accept, " +
				"10.10.0.0/16 : drop }; masquerade; }; }", "10.9.0.9", "foreign-masquerade",
			[]string{"192.0.2.1"},
		},
		{"verdict map with *", "table ip x { chain m { masquerade; }; chain c { type nat hook postrouting priority 90; ip " +
			"daddr vmap { 10.9.0.8 : accept, * : jump m }; }; }", "10.9.0.9", "foreign-masquerade", []string{"ip x m handle"}},
		{
			"address map with *", "table ip x { chain c { type nat hook postrouting priority 90; snat to ip saddr map { " +
				"10.244.9.9 : 198.51.100.50, * : 198.51.100.51 }; }; }", "10.9.0.9", "foreign-snat",
			[]string{"10.9.0.9 sees 198.51.100.51"},
		},
		{
			"address map of networks", "table ip x { chain c { type nat hook postrouting priority 90; snat to ip saddr map { " +
				"10.244.0.0/16 : 198.51.100.50, 10.245.0.0/16 : 198.51.100.51 }; }; }", "10.9.0.9", "foreign-snat",
			[]string{"10.9.0.9 sees 198.51.100.50"},
		},
		{
			"set with a quota", "table ip x { set s { type ipv4_addr; flags interval; quota 1 bytes; elements = { " +
				"10.9.0.0/16 }; }; chain c { type nat hook postrouting priority 90; ip daddr @s masquerade; }; }", "10.9.0.9",
			"unknown",
			[]string{"ip daddr @s", "192.0.2.1 by ip x c handle"},
		},
		{
			"set that counts", "table ip x { set s { type ipv4_addr; flags interval; counter; elements = { 10.9.0.0/16 }; }; " +
				"chain c { type nat hook postrouting priority 90; ip daddr @s masquerade; }; }", "10.9.0.9", "foreign-masquerade",
			[]string{"192.0.2.1"},
		},
		{
			"meter", "table ip x { set s { type ipv4_addr; flags dynamic; size 9; }; chain c { type nat hook postrouting " +
				"priority 90; update @s { ip saddr limit rate over 1000/second } masquerade; }; }", "10.9.0.9", "unknown",
			[]string{"10.244.1.2, the source's own address"},
		},
		{
			"translation of the other family",
			"table inet x { chain c { type nat hook postrouting priority 90; snat ip6 to 2001:db8::77; }; }", "10.9.0.9",
			"exempt",
			[]string{"10.9.0.9 sees 10.244.1.2"},
		},
		{
			"mark of the packet's header",
			"table ip x { chain c { type filter hook postrouting priority 90; ip dscp set cs1; }; }", "10.9.0.9", "exempt",
			[]string{"10.9.0.9 sees 10.244.1.2"},
		},
		{
			"large set", "table ip x { set s { type ipv4_addr; flags interval,timeout; elements = { 10.9.0.0/16 timeout 1h " +
				"}; }; chain c { type nat hook postrouting priority 90; ip daddr @s masquerade; }; }", "10.9.0.9",
			"foreign-masquerade",
			[]string{"192.0.2.1"},
		},
	}
	inEachMode(t, func(t *testing.T, mode nft.Mode, flag string) {
		n := newTrafficNode(t)
		n.enforce("", flag)
		for i, tt := range situations {
			if mode == nft.ModeIPTables { // in which the base chain exists
				tt.rules = strings.ReplaceAll(tt.rules, "chain POSTROUTING { type nat hook postrouting priority 100;",
					"chain POSTROUTING {")
			}
			if _, err := n.top.Node.Output(tt.rules, "nft", "-f", "-"); err != nil {
				if strings.Contains(tt.rules, "* :") && strings.Contains(err.Error(), "Invalid argument") {
					continue // before Linux 5.13 maps have no *
				}
				t.Fatal(err)
			}
			x, text := n.explained(tt.dst, "--from", n.top.PodV4.String(), flag, "--config", n.path)
			if x.Why.Code != tt.code {
				t.Errorf("%s: why %+v, want %s: %s", tt.name, x.Why, tt.code, text)
			}
			for _, want := range tt.says {
				if !strings.Contains(text, want) {
					t.Errorf("%s: %q is not in:\n%s", tt.name, want, text)
				}
			}
			n.judge(x, n.seen(netip.MustParseAddr(tt.dst), uint16(5000+i)))
			if tt.code == "masqueraded" {
				if anyPod, text := n.explained(tt.dst, flag, "--config", n.path); anyPod.Sees != x.Sees {
					t.Errorf("%s, without --from: %s", tt.name, text)
				}
			}
			switch {
			case strings.HasPrefix(tt.rules, "table ip nat"):
				nfttest.NFT(t, n.top.Node, "flush chain ip nat POSTROUTING; delete chain ip nat IP-MASQ", "-f", "-")
				n.enforce("", flag)
			case tt.rules != "":
				nfttest.NFT(t, n.top.Node, "", "delete", "table", strings.Fields(tt.rules)[1], "x")
			}
		}
	})
}

// Other programs can also translate or drop what goes to this node itself, or what
// a filter chain decides.
func TestExplainFollowsConnectionsBeyondOurRules(t *testing.T) {
	nfttest.SkipIfShort(t)
	t.Parallel()
	nfttest.Require(t, "nft")
	n := newTrafficNode(t)
	n.enforce("")
	const none, unknown = "nothing", "an address that is not known by ip x c"
	for i, tt := range []struct{ rules, src, dst, code, sees string }{
		{"", "192.0.2.1", "10.244.1.1", "local", "192.0.2.1"},
		{
			"chain c { type nat hook postrouting priority 99; snat to 10.244.1.1; }", "192.0.2.1", "192.0.2.1", "foreign-snat",
			"10.244.1.1",
		},
		{
			"chain c { type nat hook postrouting priority 99; oifname \"lo\" ip daddr 10.244.1.1 snat to 192.0.2.1; }",
			"10.244.1.1", "10.244.1.1", "foreign-snat", "192.0.2.1",
		},
		{
			"chain c { type nat hook postrouting priority 99; snat to 192.0.2.1; }", "10.244.1.2", "10.244.1.1", "local",
			"10.244.1.2",
		},
		{
			"chain c { type nat hook input priority 100; snat to 192.0.2.77; }", "10.244.1.2", "192.0.2.1", "foreign-snat",
			"192.0.2.77",
		},
		{
			"chain c { type filter hook forward priority 0; ip daddr 203.0.113.0/24 drop; }", "10.244.1.2", "203.0.113.9",
			"dropped", none,
		},
		{
			"chain c { type filter hook forward priority 0; ip daddr 203.0.113.0/24 accept; drop; }", "10.244.1.2",
			"203.0.113.9", "masqueraded", "192.0.2.1",
		},
		{
			"chain c { type filter hook postrouting priority 120; ip saddr set 192.0.2.77; }", "10.244.1.2", "10.9.0.9",
			"rewritten", "192.0.2.77",
		},
		{
			"chain c { type filter hook prerouting priority raw; ip saddr 10.244.1.2 ip saddr set 10.244.1.77; }", "10.244.1.2",
			"203.0.113.9", "masqueraded", "192.0.2.1",
		},
		{
			"chain c { type filter hook postrouting priority 120; meta l4proto tcp ip saddr set 192.0.2.77; }", "10.244.1.2",
			"10.9.0.9", "unknown", "192.0.2.77 by ip x c",
		},
		{
			"chain c { type filter hook postrouting priority 120; ip saddr set ip daddr; }", "10.244.1.2", "10.9.0.9", "unknown",
			unknown,
		},
		{
			"chain c { type filter hook prerouting priority -150; ip daddr 10.9.0.9 ip daddr set 203.0.113.9; }", "10.244.1.2",
			"10.9.0.9", "translated-first", "",
		},
		{
			"chain c { type filter hook forward priority 0; policy drop; ip daddr 10.9.0.0/16 accept; }", "10.244.1.2",
			"203.0.113.9", "dropped", "nft 'chain ip x c { policy accept; }'",
		},
		{
			"chain c { type filter hook forward priority 0; policy drop; ip daddr 203.0.113.0/24 accept; }", "10.244.1.2",
			"203.0.113.9", "masqueraded", "192.0.2.1",
		},
		{
			"chain c { type filter hook forward priority 0; policy drop; meta l4proto udp accept; }", "10.244.1.2",
			"203.0.113.9", "masqueraded", "192.0.2.1",
		},
		{
			"chain c { type filter hook forward priority 0; policy drop; ct state invalid accept; }", "10.244.1.2",
			"203.0.113.9", "dropped", none,
		},
		{"chain c { type nat hook prerouting priority -100; drop; }", "10.244.1.2", "203.0.113.9", "dropped", none},
	} {
		if tt.rules != "" {
			nfttest.NFT(t, n.top.Node, "table ip x { "+tt.rules+"; }", "-f", "-")
		}
		src, dst := netip.MustParseAddr(tt.src), netip.MustParseAddr(tt.dst)
		x, text := n.explained(tt.dst, "--from", tt.src, "--config", n.path)
		if x.Why.Code != tt.code || tt.code != "dropped" && tt.code != "unknown" && tt.code != "translated-first" &&
			x.Sees != tt.sees || !strings.Contains(text, tt.sees) {
			t.Errorf("%s: %+v, sees %q: %s", tt.rules, x.Why, x.Sees, text)
		}
		flow := nfttest.Flow{
			Proto: nfttest.UDP, From: n.top.Pod, To: n.top.Node, Src: netip.AddrPortFrom(src, 0),
			Dst: netip.AddrPortFrom(dst, uint16(6000+i)),
		}
		switch {
		case strings.Contains(tt.rules, "hook input"):
			flow.Proto = nfttest.TCP // a packet is received before this hook
		case src != n.top.PodV4:
			flow.From = n.top.Node
		case dst.String() == "203.0.113.9", dst.String() == "10.9.0.9":
			flow.To = n.top.Outside
		}
		if x.Sees != "" {
			if seen := nfttest.MustSend(t, n.top, flow).Seen.Addr(); seen.String() != tt.sees {
				t.Errorf("%s: %s is seen, want %s", tt.rules, seen, tt.sees)
			}
		}
		if tt.rules != "" {
			nfttest.NFT(t, n.top.Node, "", "delete", "table", "ip", "x")
		}
	}
}

func TestExplainAndStatusMentionLegacyNATRules(t *testing.T) {
	nfttest.SkipIfShort(t)
	t.Parallel()
	nfttest.Require(t, "iptables-legacy")
	n := newTrafficNode(t)
	n.enforce("")
	nfttest.Run(t, n.top.Node, "", "iptables-legacy", "-t", "nat", "-L", "-n")
	const says = "unknown: rules in legacy ip_tables (ip nat) decide, too"
	args := []string{"10.9.0.9", "--from", n.top.PodV4.String()}
	if _, text := n.explained(args...); strings.Contains(text, "legacy") {
		t.Error(text)
	}
	nfttest.Run(t, n.top.Node, "", "iptables-legacy", "-t", "nat", "-A", "POSTROUTING", "-d", "10.9.0.0/16", "-j",
		"MASQUERADE")
	if x, text := n.explained(args...); x.Headline != says || !strings.Contains(text, "iptables-legacy -t nat -S") {
		t.Error(text)
	}
	if status := unwrap(n.run("status").stdout); !strings.Contains(status, says) {
		t.Error(status)
	}
}

// A limit on a set of ours, or on its elements, decides for each packet.
func TestExplainDoesNotTrustALimitedSet(t *testing.T) {
	nfttest.SkipIfShort(t)
	t.Parallel()
	nfttest.Require(t, "nft")
	n := newTrafficNode(t)
	n.enforce("")
	for _, statement := range []string{"quota 1 bytes", "limit rate 1/hour burst 1 packets"} {
		table := nfttest.NFT(t, n.top.Node, "", "list", "table", "inet", nft.TableName)
		limited := strings.Replace(table, "set non-masq-v4-a {\n", "set non-masq-v4-a {\n"+statement+"\n", 1)
		nfttest.NFT(t, n.top.Node, "delete table inet "+nft.TableName+"\n"+limited, "-f", "-")
		x, text := n.explained("10.9.0.9", "--from", n.top.PodV4.String(), "--config", n.path)
		if x.Why.Code != "unknown" || !strings.Contains(text, "Another program changed this agent's rules") {
			t.Errorf("%s: %+v: %s", statement, x.Why, text)
		}
		n.judge(x, n.seen(netip.MustParseAddr("10.9.0.9"), 5000))
		nfttest.NFT(t, n.top.Node, "delete table inet "+nft.TableName+"\n"+table, "-f", "-")
	}
}

// judge compares what was explained with what was seen.
func (n trafficNode) judge(x answer.Explanation, seen netip.Addr) {
	n.t.Helper()
	if x.Why.Code == "unknown" {
		listed := strings.Join(x.Possible, "\n")
		is := strings.Contains(listed, seen.String()) || strings.Contains(listed, "an address that is not known")
		if !is || len(x.Why.Unknown) == 0 {
			n.t.Errorf("%s is seen, explained was %q %q", seen, x.Headline, x.Possible)
		}
		return
	}
	if x.Sees != seen.String() || !strings.Contains(x.Headline, " sees "+seen.String()) {
		n.t.Errorf("%s is seen, explained was %q", seen, x.Headline)
	}
}

func TestExplainAnswersFromTheKernelIfTheFileDiffers(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	inEachMode(t, func(t *testing.T, _ nft.Mode, flag string) {
		n := newTrafficNode(t)
		old := n.enforce("nonMasqueradeCIDRs: [203.0.113.0/24]", flag)
		for config, says := range map[string]string{
			"nonMasqueradeCIDRs: [198.51.100.0/24]": fmt.Sprintf("The kernel enforces %s, neither ", old.Hash()),
			"nonMasqueradeCIDRs: 5":                 fmt.Sprintf("The config is rejected; the kernel enforces %s", old.Hash()),
		} {
			n.swap(config)
			for i, dst := range []string{"203.0.113.9", "198.51.100.9"} {
				x, text := n.explained(dst, "--from", n.top.PodV4.String(), flag, "--config", n.path)
				if !strings.HasPrefix(text, says) {
					t.Errorf("%q does not begin:\n%s", says, text)
				}
				n.judge(x, n.seen(netip.MustParseAddr(dst), uint16(5000+i)))
			}
		}
	})
}

// kubeProxy returns the rules of kube-proxy for the Service 10.96.0.10:5300, as of a mode.
func kubeProxy(mode string, masqueradeAll bool, endpoints ...string) (program, rules string) {
	var first, eps, choice strings.Builder
	if mode == "nftables" {
		for i, e := range endpoints {
			fmt.Fprintf(&eps, "chain e%d { ip saddr %s jump mark-for-masquerade; meta l4proto udp dnat to %[2]s:5300; }\n", i, e)
			fmt.Fprintf(&choice, "%d : goto e%[1]d, ", i)
		}
		if masqueradeAll {
			first.WriteString("ip daddr 10.96.0.10 udp dport 5300 jump mark-for-masquerade;")
		}
		return "nft -f -", fmt.Sprintf(`table ip kube-proxy {
			chain mark-for-masquerade { meta mark set meta mark or 0x4000; }
			%s
			chain service { %s numgen random mod %d vmap { %s }; }
			map service-ips {
				type ipv4_addr . inet_proto . inet_service : verdict; elements = { 10.96.0.10 . udp . 5300 : goto service };
			}
			chain services { ip daddr . meta l4proto . th dport vmap @service-ips; }
			chain masquerading {
				meta mark and 0x4000 == 0 return; meta mark set meta mark xor 0x4000; masquerade fully-random;
			}
			chain nat-prerouting { type nat hook prerouting priority -100; jump services; }
			chain nat-postrouting { type nat hook postrouting priority 100; jump masquerading; }
		}`, eps.String(), first.String(), len(endpoints), choice.String())
	}
	chains := ""
	for i, e := range endpoints {
		chains += fmt.Sprintf(":KUBE-SEP-%d -\n", i)
		fmt.Fprintf(&eps, "-A KUBE-SEP-%d -s %s/32 -j KUBE-MARK-MASQ\n"+
			"-A KUBE-SEP-%[1]d -p udp -j DNAT --to-destination %[2]s:5300\n", i, e)
		random := ""
		if left := len(endpoints) - i; left > 1 {
			random = fmt.Sprintf("-m statistic --mode random --probability %.10f", 1/float64(left))
		}
		fmt.Fprintf(&choice, "-A KUBE-SVC-X %s -j KUBE-SEP-%d\n", random, i)
	}
	if masqueradeAll {
		first.WriteString("-A KUBE-SVC-X -d 10.96.0.10/32 -p udp -m udp --dport 5300 -j KUBE-MARK-MASQ\n")
	}
	return "iptables-nft-restore --noflush", `*nat
:KUBE-SERVICES -
:KUBE-SVC-X -
:KUBE-MARK-MASQ -
:KUBE-POSTROUTING -
` + chains + `-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A POSTROUTING -j KUBE-POSTROUTING
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
-A KUBE-POSTROUTING -j MASQUERADE --random-fully
-A KUBE-SERVICES -d 10.96.0.10/32 -p udp -m udp --dport 5300 -j KUBE-SVC-X
` + first.String() + choice.String() + eps.String() + "COMMIT\n"
}

// A Service is followed to its endpoints, with the mark that kube-proxy sets on the way.
func TestExplainFollowsAServiceToItsEndpoints(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	nfttest.Require(t, "nft", "iptables-nft-restore")
	const all, service = true, "10.96.0.10"
	for _, tt := range []struct {
		endpoints string
		all       bool // masqueraded
		says      []string
	}{
		{"203.0.113.9", false, []string{
			"203.0.113.9, the endpoint of 10.96.0.10:5300, sees 192.0.2.1, the address of eth0: masqueraded by this agent.",
		}},
		{"10.9.0.9", false, []string{"10.9.0.9, the endpoint of 10.96.0.10:5300, sees 10.244.1.2, the source's own address"}},
		{"10.9.0.9", all, []string{
			"10.9.0.9, the endpoint of 10.96.0.10:5300, sees 192.0.2.1, the address of eth0: another program's rule",
			"It is a rule of kube-proxy, which may need it and puts it back. What it does is set by: --masquerade-all,",
		}},
		{"10.9.0.7 10.9.0.8 10.9.0.9", false, []string{
			"Each endpoint of 10.96.0.10:5300 (10.9.0.7, 10.9.0.8, 10.9.0.9) sees 10.244.1.2, the source's own address",
			"The steps are for the endpoint 10.9.0.7.", "destination in nonMasqueradeCIDRs yes, 10.0.0.0/8",
		}},
		{"10.9.0.9 203.0.113.9", all, []string{"Each endpoint of 10.96.0.10:5300 (10.9.0.9, 203.0.113.9) sees 192.0.2.1,"}},
		{"10.9.0.9 203.0.113.9 203.0.113.8", false, []string{
			"What 10.96.0.10:5300 sees depends on its endpoint. 10.9.0.9 sees 10.244.1.2, the source's own address",
			" 203.0.113.9, 203.0.113.8 sees 192.0.2.1, the address of eth0: masqueraded by this agent. ",
		}},
		{"10.244.1.2", false, []string{
			"10.244.1.2, the endpoint of 10.96.0.10:5300, sees 10.244.1.1, the address of pod0: another program's rule",
			"--masquerade-all",
		}},
	} {
		for _, mode := range []string{"nftables", "iptables"} {
			t.Run(fmt.Sprintf("%s %s %t", mode, tt.endpoints, tt.all), func(t *testing.T) {
				t.Parallel()
				n := newTrafficNode(t)
				n.enforce("nonMasqueradeCIDRs: [10.0.0.0/8]\n")
				program, rules := kubeProxy(mode, tt.all, strings.Fields(tt.endpoints)...)
				words := strings.Fields(program)
				nfttest.Run(t, n.NS, rules, words[0], words[1:]...)
				x, text := n.explained(service+":5300", "--protocol", "udp", "--config", n.path)
				text = x.Headline + " " + text // where no line is broken
				for _, want := range tt.says {
					if !strings.Contains(text, want) {
						t.Errorf("%q is not in:\n%s", want, text)
					}
				}
				if strings.Contains(text, "nft delete") || x.Port != 5300 || x.Protocol != "udp" {
					t.Errorf("port %d, protocol %q: %s", x.Port, x.Protocol, text)
				}
				to := n.top.Outside
				if tt.endpoints == n.top.PodV4.String() {
					to = n.top.Pod
				}
				for range 5 { // each may have another endpoint
					n.judge(x, nfttest.MustSend(t, n.top, nfttest.Flow{
						Proto: nfttest.UDP, From: n.top.Pod, To: to, Dst: netip.MustParseAddrPort(service + ":5300"),
					}).Seen.Addr())
				}
				if x, text := n.explained(service, "--config", n.path); x.Why.Code != "translated-first" ||
					!strings.Contains(text, "explain it with its port, or the endpoint") {
					t.Errorf("without a port: %+v %s", x.Why, text)
				}
				for _, other := range []string{"10.96.0.11", "203.0.113.9", service + ":5301"} {
					if x, text := n.explained(other, "--config", n.path); x.Why.Code == "translated-first" ||
						strings.Contains(text, "endpoint") {
						t.Errorf("%s: %s", other, text)
					}
				}
			})
		}
	}
}

func TestExplainHandlesInterfacesAndEnforcement(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	nfttest.Require(t, "nft")
	n := newTrafficNode(t)
	const pods, another = "masqueradeSrcInterfaces: [\"pod*\"]\n",
		"table ip x { chain c { type nat hook postrouting priority 100; ip saddr 10.244.1.0/24 masquerade; }; }"
	for i, tt := range []struct {
		config, rules, dst, code, says string
	}{
		{pods + "enforceNonMasquerade: true\n", another, "10.9.0.9", "exempt", "which this agent enforces"},
		{pods + "enforceNonMasquerade: true\n", another, "203.0.113.9", "foreign-masquerade", "192.0.2.1"},
		{pods + "enforceNonMasquerade: true\n", "", "203.0.113.9", "masqueraded", "192.0.2.1"},
		{pods, another, "10.9.0.9", "foreign-masquerade", "192.0.2.1"},
		{pods, "", "203.0.113.9", "masqueraded", "192.0.2.1"},
		{"masqueradeSrcInterfaces: [cni0]\n", "", "203.0.113.9", "exempt", "10.244.1.2"},
		{"nonMasqueradeOutInterfaces: [\"e*\"]\n", "", "203.0.113.9", "exempt", "10.244.1.2"},
		{"masqueradeOutInterfaces: [\"wg*\", eth0]\n", "", "203.0.113.9", "masqueraded", "192.0.2.1"},
	} {
		n.enforce(tt.config, "--mode=nftables")
		if tt.rules != "" {
			nfttest.NFT(t, n.top.Node, tt.rules, "-f", "-")
		}
		x, text := n.explained(tt.dst, "--from", n.top.PodV4.String(), "--mode=nftables", "--config", n.path)
		if x.Why.Code != tt.code || !strings.Contains(text, tt.says) {
			t.Errorf("%s%s: why %+v: %s", tt.config, tt.rules, x.Why, text)
		}
		n.judge(x, n.seen(netip.MustParseAddr(tt.dst), uint16(6000+i)))
		if tt.rules != "" {
			nfttest.NFT(t, n.top.Node, "", "delete", "table", "ip", "x")
		}
	}
}

// A pod reaches itself through a Service or a host port only with another source address.
func TestExplainKnowsThatEnforcementLeavesHairpinsAlone(t *testing.T) {
	nfttest.SkipIfShort(t)
	t.Parallel()
	nfttest.Require(t, "nft")
	n := newTrafficNode(t)
	n.enforce("masqueradeSrcCIDRs: [10.244.0.0/16, 'fd00:10:244::/48']\nenforceNonMasquerade: true\n", "--enable-ipv6")
	nfttest.NFT(t, n.top.Node, "table inet x { chain c { type nat hook postrouting priority 90; masquerade; }; }", "-f",
		"-")
	for _, tt := range []struct{ dst, src, code string }{
		{n.top.PodV4.String(), n.top.PodV4.String(), "foreign-masquerade"},
		{n.top.PodV6.String(), n.top.PodV6.String(), "foreign-masquerade"},
		{"10.9.0.9", n.top.PodV4.String(), "exempt"},
		{"10.9.0.9", "", "exempt"},
		{n.top.PodV4.String(), "10.244.1.9", "exempt"},
		{"fd00:9::9", n.top.PodV6.String(), "foreign-masquerade"}, // not exempt
		{n.top.PodV4.String(), n.top.NodeV4.String(), "foreign-masquerade"},
	} {
		args := []string{tt.dst, "--enable-ipv6", "--config", n.path}
		if tt.src != "" {
			args = append(args, "--from", tt.src)
		}
		if x, text := n.explained(args...); x.Why.Code != tt.code {
			t.Errorf("%s from %q: %s, want %s: %s", tt.dst, tt.src, x.Why.Code, tt.code, text)
		}
	}
}
