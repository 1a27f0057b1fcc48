package main

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfttest"
)

const staleChain = `table ip nat {
	chain POSTROUTING { type nat hook postrouting priority 100; fib daddr type != local jump IP-MASQ; }
	chain IP-MASQ { ip daddr 10.99.0.0/16 return; masquerade; }
}`

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

func TestExplainAnswersFromTheKernelIfTheFileDiffers(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	inEachMode(t, func(t *testing.T, _ nft.Mode, flag string) {
		n := newTrafficNode(t)
		old := n.enforce("nonMasqueradeCIDRs: [203.0.113.0/24]", flag)
		for config, says := range map[string]string{
			"nonMasqueradeCIDRs: [198.51.100.0/24]": fmt.Sprintf("The kernel enforces %s, not ", old.Hash()),
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
