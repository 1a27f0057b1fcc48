package nftrace_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nftrace"
	"nft-masq-agent/nft/nfttest"
)

func TestMain(m *testing.M) { os.Exit(nfttest.Main(m)) }

// trace traces on the node, and calls send as soon as packets are traced.
func trace(t *testing.T, top *nfttest.Topology, q nftrace.Query, send func()) (nftrace.Trace, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), nfttest.Patient(5*time.Second))
	defer cancel()
	var traced nftrace.Trace
	var sending sync.WaitGroup
	defer sending.Wait() // for nothing if it failed before
	err := top.Node.Do(func() error {
		return nfttest.While(ctx, nftrace.ErrRunning, func() (err error) {
			traced, err = nftrace.Run(ctx, q, func() { sending.Go(send) })
			return err
		})
	})
	return traced, err
}

// A situation is what other programs' rules do to a packet.
type situation struct {
	name     string
	nft      string // rules of the node
	iptables string // as iptables-restore takes them; of ip6tables for an IPv6 destination
	proto    nfttest.Proto
	from     string // "": the pod
	to       string
	at       string // the endpoint, if to is not it
	port     uint16 // of the source

	outcome nftrace.Outcome
	rule    string // chain, action and comment; "": none
	seen    string // pod, node or outside, whose address the far end sees; "": nothing
	met     string // the rules that matched, by chain and action
}

const policyOfTheAgent = `table inet nft-masq-agent { chain postrouting { type nat hook postrouting priority 110;
	ip daddr 10.0.0.0/8 return; masquerade; }; }`

const nat = "table ip nat { chain post { type nat hook postrouting priority 100; %s; }; }"

var situations = []situation{
	{
		name: "no rules", proto: nfttest.TCP, to: "203.0.113.9:80", outcome: nftrace.Kept, seen: "pod",
	},
	{
		name: "native masquerade", nft: fmt.Sprintf(nat, `ip saddr 10.244.0.0/16 masquerade comment "all pods"`),
		proto: nfttest.TCP, to: "203.0.113.9:80",
		outcome: nftrace.Translated, rule: "ip nat post masquerade all pods", seen: "node", met: "post masquerade",
	},
	{
		name: "udp", nft: fmt.Sprintf(nat, "masquerade"), proto: nfttest.UDP, to: "203.0.113.9:53",
		outcome: nftrace.Translated, rule: "ip nat post masquerade", seen: "node", met: "post masquerade",
	},
	{
		name: "icmp", nft: fmt.Sprintf(nat, "masquerade"), proto: nfttest.ICMP, to: "203.0.113.9:0",
		outcome: nftrace.Translated, rule: "ip nat post masquerade", seen: "node", met: "post masquerade",
	},
	{
		name: "sctp", nft: fmt.Sprintf(nat, "masquerade"), proto: nfttest.SCTP, to: "203.0.113.9:80",
		outcome: nftrace.Translated, rule: "ip nat post masquerade", seen: "node", met: "post masquerade",
	},
	{
		name: "snat in inet", nft: `table inet x { chain y { type nat hook postrouting priority 90;
			meta nfproto ipv4 snat to 192.0.2.1; }; }`,
		proto: nfttest.UDP, to: "203.0.113.9:53",
		outcome: nftrace.Translated, rule: "inet x y snat", seen: "node", met: "y snat",
	},
	{
		name: "ipv6", nft: "table ip6 nat { chain post { type nat hook postrouting priority 100; masquerade; }; }",
		proto: nfttest.TCP, to: "[2001:db8:1::1]:80",
		outcome: nftrace.Translated, rule: "ip6 nat post masquerade", seen: "node", met: "post masquerade",
	},
	{
		name: "icmpv6", nft: "table ip6 nat { chain post { type nat hook postrouting priority 100; masquerade; }; }",
		proto: nfttest.ICMP, to: "[2001:db8:1::1]:0",
		outcome: nftrace.Translated, rule: "ip6 nat post masquerade", seen: "node", met: "post masquerade",
	},
	{
		name: "iptables-nft", iptables: `*nat
:CNI-abc -
-A POSTROUTING -s 10.244.1.2 -m comment --comment "name: \"cbr0\" id: \"abc\"" -j CNI-abc
-A CNI-abc -d 10.244.0.0/16 -j ACCEPT
-A CNI-abc ! -d 224.0.0.0/4 -m comment --comment "name: \"cbr0\"" -j MASQUERADE
COMMIT
`,
		proto: nfttest.TCP, to: "10.9.0.9:80",
		outcome: nftrace.Translated, rule: `ip nat CNI-abc masquerade name: "cbr0"`, seen: "node",
		met: "POSTROUTING jump, CNI-abc masquerade",
	},
	{
		name: "iptables-nft SNAT for IPv6", iptables: "*nat\n-A POSTROUTING -j SNAT --to-source 2001:db8::1\nCOMMIT\n",
		proto: nfttest.UDP, to: "[2001:db8:1::1]:53",
		outcome: nftrace.Translated, rule: "ip6 nat POSTROUTING snat", seen: "node", met: "POSTROUTING snat",
	},
	{
		name: "iptables-nft NETMAP", iptables: "*nat\n-A POSTROUTING -j NETMAP --to 192.0.2.1/32\nCOMMIT\n",
		proto: nfttest.UDP, to: "203.0.113.9:53",
		outcome: nftrace.Translated, rule: "ip nat POSTROUTING snat", seen: "node", met: "POSTROUTING snat",
	},
	{
		name: "an older agent", iptables: `*nat
:IP-MASQ-AGENT -
-A POSTROUTING -m addrtype ! --dst-type LOCAL -j IP-MASQ-AGENT
-A IP-MASQ-AGENT -d 10.0.0.0/8 -j RETURN
-A IP-MASQ-AGENT -j MASQUERADE
COMMIT
`,
		proto: nfttest.TCP, to: "203.0.113.9:80", outcome: nftrace.Translated,
		rule: "older-agent: ip nat IP-MASQ-AGENT masquerade", seen: "node",
		met: "POSTROUTING jump, IP-MASQ-AGENT masquerade",
	},
	{
		name: "this agent's exemption", nft: policyOfTheAgent,
		proto: nfttest.TCP, to: "10.9.0.9:80", outcome: nftrace.Kept,
		rule: "agent: inet nft-masq-agent postrouting return", seen: "pod", met: "postrouting return",
	},
	{
		name: "the earlier of two", nft: policyOfTheAgent + "\n" + fmt.Sprintf(nat, "masquerade"),
		proto: nfttest.TCP, to: "10.9.0.9:80", outcome: nftrace.Translated, rule: "ip nat post masquerade", seen: "node",
		met: "post masquerade",
	},
	{
		name: "jumps into several levels", nft: `table ip nat {
			chain c { ip daddr 1.2.3.4 return; masquerade; }
			chain b { goto c; }
			chain a { ip protocol udp return; jump b; snat to 192.0.2.1; }
			chain post { type nat hook postrouting priority 100; ip daddr 1.2.3.4 accept; jump a; }
		}`,
		proto: nfttest.TCP, to: "203.0.113.9:80", outcome: nftrace.Translated, rule: "ip nat c masquerade", seen: "node",
		met: "post jump, a jump, b goto, c masquerade",
	},
	{
		name: "a return from several levels", nft: `table ip nat {
			chain c { return; }
			chain b { goto c; }
			chain a { jump b; }
			chain post { type nat hook postrouting priority 100; jump a; snat to 192.0.2.1; }
		}`,
		proto: nfttest.TCP, to: "203.0.113.9:80", outcome: nftrace.Translated, rule: "ip nat post snat", seen: "node",
		met: "post jump, a jump, b goto, c return, post snat",
	},
	{
		name: "verdict map", nft: `table ip nat {
			chain a { masquerade; }
			chain post { type nat hook postrouting priority 100;
				ip daddr vmap { 203.0.113.0/24 : jump a, 10.0.0.0/8 : accept }; }
		}`,
		proto: nfttest.TCP, to: "203.0.113.9:80", outcome: nftrace.Translated, rule: "ip nat a masquerade", seen: "node",
		met: "post jump, a masquerade",
	},
	{
		name: "mark that another rule set", nft: `table ip x {
			chain early { type filter hook prerouting priority -150; ip saddr 10.244.0.0/16 meta mark set 0x4000; }
			chain post { type nat hook postrouting priority 100; meta mark & 0x4000 == 0x4000 masquerade; }
		}`,
		proto: nfttest.TCP, to: "10.9.0.9:80", outcome: nftrace.Translated, rule: "ip x post masquerade", seen: "node",
		met: "early mark, post masquerade",
	},
	{
		name: "Service with an endpoint", nft: `table ip nat {
			chain pre { type nat hook prerouting priority -100; ip daddr 10.96.0.10 udp dport 53 dnat to 203.0.113.9; }
			chain post { type nat hook postrouting priority 100; masquerade; }
		}`,
		proto: nfttest.UDP, to: "10.96.0.10:53", at: "203.0.113.9:53",
		outcome: nftrace.Translated, rule: "ip nat post masquerade", seen: "node", met: "pre dnat, post masquerade",
	},
	{
		name: "Service with several endpoints", iptables: `*nat
:KUBE-SERVICES -
:KUBE-SVC-X -
:KUBE-SEP-A -
:KUBE-SEP-B -
-A PREROUTING -j KUBE-SERVICES
-A KUBE-SERVICES -d 10.96.0.10/32 -p udp -m udp --dport 53 -j KUBE-SVC-X
-A KUBE-SVC-X -m statistic --mode random --probability 0 -j KUBE-SEP-A
-A KUBE-SVC-X -j KUBE-SEP-B
-A KUBE-SEP-A -p udp -j DNAT --to-destination 198.51.100.1:53
-A KUBE-SEP-B -p udp -j DNAT --to-destination 203.0.113.9:53
COMMIT
`,
		proto: nfttest.UDP, to: "10.96.0.10:53", at: "203.0.113.9:53", outcome: nftrace.Kept, seen: "pod",
		met: "PREROUTING jump, KUBE-SERVICES jump, KUBE-SVC-X jump, KUBE-SEP-B dnat",
	},
	{
		name: "dropped", nft: `table inet filter { chain forward { type filter hook forward priority 0;
			ip daddr 203.0.113.0/24 drop comment "no way"; }; }`,
		proto: nfttest.UDP, to: "203.0.113.9:53", outcome: nftrace.Dropped, rule: "inet filter forward drop no way",
		met: "forward drop",
	},
	{
		name: "dropped by a policy", nft: `table inet filter { chain forward { type filter hook forward priority 0;
			policy drop; ip daddr 10.0.0.0/8 accept; }; }`,
		proto: nfttest.TCP, to: "203.0.113.9:80", outcome: nftrace.Dropped, rule: "inet filter forward drop",
	},
	{
		name: "dropped before it is tracked", nft: `table ip raw { chain pre { type filter hook prerouting priority -300;
			ip daddr 203.0.113.0/24 drop; }; }`,
		proto: nfttest.UDP, to: "203.0.113.9:53", outcome: nftrace.Dropped, rule: "ip raw pre drop", met: "pre drop",
	},
	{
		name: "rejected", nft: `table inet filter { chain forward { type filter hook forward priority 0;
			meta l4proto tcp reject with tcp reset; }; }`,
		proto: nfttest.TCP, to: "203.0.113.9:80", outcome: nftrace.Rejected, rule: "inet filter forward reject",
		met: "forward reject",
	},
	{
		name: "rejected by iptables-nft", iptables: "*filter\n-A FORWARD -p udp -j REJECT\nCOMMIT\n",
		proto: nfttest.UDP, to: "203.0.113.9:53", outcome: nftrace.Rejected, rule: "ip filter FORWARD reject",
		met: "FORWARD reject",
	},
	{
		name: "stateless", nft: policyOfTheAgent + "\n" + `table ip x { chain post { type filter hook postrouting priority 120;
			ip saddr set 192.0.2.1; }; }`,
		proto: nfttest.UDP, to: "10.9.0.9:53", outcome: nftrace.Translated, rule: "ip x post saddr set", seen: "node",
		met: "postrouting return, post saddr set",
	},
	{
		name: "stateless before NAT", nft: `table ip x {
			chain forward { type filter hook forward priority 0; ip saddr set 10.244.1.77; }
			chain post { type nat hook postrouting priority 100; ip saddr 10.244.1.77 masquerade; }
		}`,
		proto: nfttest.UDP, to: "10.9.0.9:53", outcome: nftrace.Translated, rule: "ip x post masquerade", seen: "node",
		met: "forward saddr set, post masquerade",
	},
	{
		name: "stateless, of IPv6", nft: `table ip6 x { chain post { type filter hook postrouting priority 120;
			ip6 saddr set 2001:db8::1; }; }`,
		proto: nfttest.UDP, to: "[2001:db8:1::1]:53", outcome: nftrace.Translated, rule: "ip6 x post saddr set", seen: "node",
		met: "post saddr set",
	},
	{
		name: "dropped on the way out", nft: `table netdev x { chain out { type filter hook egress device eth0 priority 0;
			ip daddr 203.0.113.0/24 drop; }; }`,
		proto: nfttest.UDP, to: "203.0.113.9:53", outcome: nftrace.Dropped, rule: "netdev x out drop", met: "out drop",
	},
	{
		name: "dropped by the policy of egress", nft: `table netdev x { chain out {
			type filter hook egress device eth0 priority 0; policy drop; }; }`,
		proto: nfttest.UDP, to: "203.0.113.9:53", outcome: nftrace.Dropped, rule: "netdev x out drop",
	},
	{
		name: "not tracked", nft: `table ip raw { chain pre { type filter hook prerouting priority -300;
			ip daddr 203.0.113.0/24 notrack; }; }` + "\n" + fmt.Sprintf(nat, "masquerade"),
		proto: nfttest.UDP, to: "203.0.113.9:53", outcome: nftrace.Untracked, rule: "ip raw pre notrack", seen: "pod",
		met: "pre notrack",
	},
	{
		name: "not tracked by iptables-nft", iptables: "*raw\n-A PREROUTING -j CT --notrack\nCOMMIT\n",
		proto: nfttest.UDP, to: "203.0.113.9:53", outcome: nftrace.Untracked, rule: "ip raw PREROUTING notrack", seen: "pod",
		met: "PREROUTING notrack",
	},
	{
		name: "the node's own", nft: `table ip nat {
			chain out { type nat hook output priority -100; ip daddr 10.96.0.10 dnat to 203.0.113.9; }
			chain post { type nat hook postrouting priority 100; masquerade; }
		}`,
		proto: nfttest.UDP, from: "node", to: "10.96.0.10:53", at: "203.0.113.9:53",
		outcome: nftrace.Kept, rule: "ip nat post masquerade", seen: "node", met: "out dnat, post masquerade",
	},
	{
		name: "to the node", nft: `table inet filter { chain input { type filter hook input priority 0;
			udp dport 53 accept comment "dns"; }; }`,
		proto: nfttest.UDP, to: "192.0.2.1:53", outcome: nftrace.Kept, seen: "pod", met: "input accept",
	},
	{
		name: "from the node to itself", nft: `table inet filter { chain input { type filter hook input priority 0;
			tcp dport 80 drop; }; }` + "\n" + fmt.Sprintf(nat, "ip daddr 10.0.0.0/8 masquerade; accept"),
		proto: nfttest.TCP, from: "node", to: "192.0.2.1:80", outcome: nftrace.Dropped, rule: "inet filter input drop",
		met: "post accept, input drop",
	},
	{
		name: "hairpin", nft: `table ip nat {
			chain pre { type nat hook prerouting priority -100; ip daddr 10.96.0.10 dnat to 10.244.1.2; }
			chain post { type nat hook postrouting priority 100; ip saddr 10.244.1.2 ip daddr 10.244.1.2 masquerade; }
		}`,
		proto: nfttest.UDP, to: "10.96.0.10:53", at: "10.244.1.2:53",
		outcome: nftrace.Translated, rule: "ip nat post masquerade", seen: "gateway", met: "pre dnat, post masquerade",
	},
}

func TestTheTraceSaysWhatTheFarEndSeesAndWhichRuleDecided(t *testing.T) {
	t.Parallel()
	checkSituations(t, nfttest.NewTopology(t), 1)
}

func TestATableThatIsGoneNeedNotBeDeleted(t *testing.T) {
	t.Parallel()
	top := nfttest.NewTopology(t)
	ctx, cancel := context.WithCancel(t.Context())
	err := top.Node.Do(func() error {
		_, err := nftrace.Run(ctx, nftrace.Query{To: netip.MustParseAddrPort("203.0.113.9:80")}, func() {
			nfttest.NFT(t, top.Node, "", "flush", "ruleset")
			cancel()
		})
		return err
	})
	if err == nil || strings.Contains(err.Error(), "delete table") {
		t.Errorf("%v", err)
	}
}

// With br_netfilter, which kubeadm asks for, a packet meets the chains of prerouting at the bridge, and the others as
// one of the bridge's own interface.
func TestTheTraceFollowsAPacketThroughABridge(t *testing.T) {
	t.Parallel()
	top := nfttest.NewTopology(t)
	top.Bridge(t)
	nfttest.PassBridgedPackets(t, top.Node)
	several := 1
	if nfttest.Short() {
		several = 3
	}
	checkSituations(t, top, several)
}

// checkSituations checks each situation, or one of several.
func checkSituations(t *testing.T, top *nfttest.Topology, several int) {
	t.Helper()
	for i, s := range situations {
		if i%several > 0 {
			continue
		}
		// A packet from a port that was used before may be one of a known connection, which is not traced.
		s.port = uint16(20_000 + i)
		t.Run(s.name, func(t *testing.T) {
			if strings.Contains(s.nft, "hook egress") && nfttest.KernelBefore(t, 5, 16) {
				t.Skip("kernels before 5.16 have no hook egress")
			}
			nfttest.NFT(t, top.Node, "flush ruleset\n"+s.nft, "-f", "-")
			to := netip.MustParseAddrPort(s.to)
			if s.iptables != "" {
				program := map[bool]string{false: "iptables-nft-restore", true: "ip6tables-nft-restore"}[to.Addr().Is6()]
				nfttest.Run(t, top.Node, s.iptables, program)
			}
			s.check(t, top, to)
		})
	}
}

var protocols = map[nfttest.Proto]uint8{
	nfttest.TCP: unix.IPPROTO_TCP, nfttest.UDP: unix.IPPROTO_UDP, nfttest.SCTP: unix.IPPROTO_SCTP,
}

func (s situation) check(t *testing.T, top *nfttest.Topology, to netip.AddrPort) {
	t.Helper()
	flow := nfttest.Flow{
		Proto: s.proto, From: top.Pod, To: top.Outside, Src: netip.AddrPortFrom(netip.Addr{}, s.port), Dst: to,
	}
	addresses := map[string]netip.Addr{"pod": top.PodV4, "node": top.NodeV4, "gateway": top.GatewayV4}
	if to.Addr().Is6() {
		addresses = map[string]netip.Addr{"pod": top.PodV6, "node": top.NodeV6, "gateway": top.GatewayV6}
	}
	if s.from == "node" {
		flow.From = top.Node
	}
	for addr, owner := range map[netip.Addr]*nfttest.NS{top.NodeV4: top.Node, top.PodV4: top.Pod} {
		if at := s.at + s.to; strings.HasPrefix(at, addr.String()) {
			flow.To = owner
		}
	}
	if s.seen == "" {
		flow.Timeout = 100 * time.Millisecond // nothing is awaited
	}
	var saw nfttest.Sighting
	var sendErr error
	query := nftrace.Query{To: to} // of any protocol
	got, err := trace(t, top, query, func() { saw, sendErr = nfttest.Send(flow) })
	if err != nil {
		t.Fatal(err, sendErr)
	}
	defer func() {
		if t.Failed() {
			t.Logf("\n%s", got)
		}
	}()
	silent := errors.Is(sendErr, nfttest.ErrNotSeen) || errors.Is(sendErr, unix.ECONNREFUSED)
	if sendErr != nil && !(s.seen == "" && silent) {
		t.Error(sendErr)
	}
	if saw.Seen.Addr() != addresses[s.seen] {
		t.Errorf("the far end saw %s", saw.Seen)
	}
	if s.seen != "" && got.SeenAs != portless(saw.Seen) {
		t.Errorf("the trace says %s, the far end saw %s", got.SeenAs, saw.Seen)
	}
	rule, met := "", []string{}
	if r := got.Rule; r != nil {
		rule = strings.TrimSpace(fmt.Sprintf("%s %s %s %s %s", r.Family, r.Table, r.Chain, r.Action, r.Comment))
		if r.Owner != nftrace.Other {
			rule = string(r.Owner) + ": " + rule
		}
	}
	for _, c := range got.Chains {
		if c.Hook == "" || c.Type == "" {
			t.Errorf("of what kind is %+v", c)
		}
		for _, r := range c.Rules {
			met = append(met, r.Chain+" "+r.Action)
		}
	}
	if got.Outcome != s.outcome || rule != s.rule || strings.Join(met, ", ") != s.met {
		t.Errorf("%s by %q, met %q; want %s by %q, met %q", got.Outcome, rule, strings.Join(met, ", "), s.outcome, s.rule,
			s.met)
	}
	if list := nfttest.ListRuleset(t, top.Node); strings.Contains(list, "agent-trace") {
		t.Errorf("the table is left:\n%s", list)
	}
}

// portless returns an address as a trace has it.
func portless(a netip.AddrPort) string {
	if a.Port() == 0 {
		return a.Addr().String()
	}
	return a.String()
}
