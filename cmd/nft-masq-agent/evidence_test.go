package main

import (
	"errors"
	"math/rand/v2"
	"net"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/judge"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/netns"
)

// compared calls a task with the comparison of connections with a policy, in the namespace of the node.
func (n trafficNode) compared(p nft.Policy, task func(*conntrack.Comparison) error) {
	n.t.Helper()
	n.check(n.NS.Do(func() error {
		node, err := conntrack.ReadNode()
		if err != nil {
			return err
		}
		return task(conntrack.NewComparison(p, node))
	}))
}

// noted notes the connections that contradict a policy.
func (n trafficNode) noted(p nft.Policy) (h conntrack.History) {
	n.t.Helper()
	n.compared(p, func(c *conntrack.Comparison) (err error) {
		h.Earlier, h.Incomplete, err = conntrack.New().Note(n.t.Context(), c)
		h.AtStart = true
		return err
	})
	return h
}

// gathered is the evidence about a policy.
func (n trafficNode) gathered(p nft.Policy, h conntrack.History, questions ...conntrack.Query) (
	e conntrack.Evidence,
) {
	n.t.Helper()
	n.compared(p, func(c *conntrack.Comparison) (err error) {
		e, err = conntrack.New().Gather(n.t.Context(), c, h, questions...)
		return err
	})
	return e
}

// podFor is the address of the pod in the family of another.
func (n trafficNode) podFor(a netip.Addr) netip.Addr {
	if a.Is6() {
		return n.top.PodV6
	}
	return n.top.PodV4
}

// A sending is a packet, and what the far end saw.
type sending struct {
	question conntrack.Query
	nfttest.Sighting
	asked, verdict string // the destination, and what the policy says
}

// sendNext sends packets of UDP to addresses, and returns those that arrived.
func (n trafficNode) sendNext(p nft.Policy, addresses []string) (all []sending) {
	n.t.Helper()
	for i, address := range addresses {
		dst := netip.AddrPortFrom(netip.MustParseAddr(address), uint16(4000+i))
		src := n.podFor(dst.Addr())
		flow := nfttest.Flow{
			Proto: nfttest.UDP, From: n.top.Pod, To: n.top.Outside, Dst: dst, Timeout: 60 * time.Millisecond,
		}
		s, err := n.top.Send(flow)
		if errors.Is(err, nfttest.ErrNotSeen) {
			continue
		}
		n.check(err)
		_, verdict := judge.Explain(p, nft.Connection{Src: src, Dst: dst.Addr(), InInterface: "pod0"})
		q := conntrack.Query{From: src, To: dst, Protocol: unix.IPPROTO_UDP}
		all = append(all, sending{q, s, address, string(verdict)})
	}
	return all
}

// Next to the rules of any other program, a connection agrees with the policy if the far end sees what the policy
// says, and otherwise contradicts it. Which rule it was does not matter. explain claims no other address than the far
// end sees, before a connection shows it and afterwards.
func TestEvidenceIsWhatTheFarEndSaw(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	nfttest.Require(t, "nft", "iptables-nft-restore", "ip6tables-nft-restore")
	dirs, err := filepath.Glob("../../testdata/foreign/*")
	if err != nil || len(dirs) == 0 {
		t.Fatal("no cases", err)
	}
	r := rand.New(rand.NewPCG(*seed, 63))
	n := newTrafficNode(t)
	addresses := []string{
		"10.9.0.9", "10.240.7.7", "203.0.113.9", "198.51.100.9", "10.96.0.11", "192.168.122.7", "2001:db8:77::8",
		"fd00:88::9", "10.1.1.5",
	}
	pods := []string{"masqueradeSrcCIDRs: [10.244.1.0/24, 'fd00::/8']\n", "masqueradeSrcInterfaces: [pod0]\n"}
	agreed, contradicted := 0, 0
	for i, dir := range dirs {
		n.flush()
		nfttest.LoadForeign(t, n.top.Node, dir, func(rules string) string { return meetThePod(r, rules) })
		for j, config := range []string{"", pods[i%len(pods)]} {
			if i/2%2 != j && !nfttest.Long() {
				continue // the next ones of the same kind have the other config
			}
			n.forget()
			mode := nft.ModeNFTables
			if j == 0 {
				mode = modes[i%len(modes)] // which has no keys for pods
			}
			want := n.enforce(config, "--enable-ipv6", "--mode="+string(mode))
			history := n.noted(want.Policy)
			asked := r.IntN(len(addresses))
			to := netip.AddrPortFrom(netip.MustParseAddr(addresses[asked]), uint16(4000+asked))
			var before, after answer.Explanation
			args := append([]string{"explain", to.String(), "--from", n.podFor(to.Addr()).String()}, *n.flags...)
			n.here(&before, args...)
			sent := n.sendNext(want.Policy, addresses)
			n.here(&after, args...)
			var questions []conntrack.Query
			var seen netip.Addr
			for _, s := range sent {
				questions = append(questions, s.question)
				if s.question.To == to {
					seen = s.Seen.Addr()
				}
			}
			n.judge(before, seen)
			n.judge(after, seen)
			e := n.gathered(want.Policy, history, questions...)
			for j, s := range sent {
				c := e.Answers[j]
				right := s.Masqueraded() == (s.verdict == string(nft.Masqueraded))
				if c.Open() == 0 { // tracking is off, or the destination was translated
					if e.NotJudged["service"] == 0 && !untracked(dir) {
						t.Errorf("seed %d: %s, %q: nothing about %s, %v", *seed, filepath.Base(dir), config, s.asked, e.NotJudged)
					}
					continue
				}
				if right != (c.Agrees == 1) || right == (c.Overruled == 1) {
					t.Errorf("seed %d: %s, %q: %s is %s and seen from %s, but %+v", *seed, filepath.Base(dir), config, s.asked,
						s.verdict, s.Seen, c)
				}
				agreed += c.Agrees
				contradicted += c.Overruled
			}
			if t.Failed() {
				t.Fatalf("seed %d: %s, mode %s, %q, asked about %s", *seed, filepath.Base(dir), mode, config, to)
			}
		}
	}
	t.Logf("%d agreed, %d contradicted", agreed, contradicted)
	if agreed < 100 || contradicted < 10 {
		t.Errorf("%d agreed, %d contradicted", agreed, contradicted)
	}
}

// meetThePod replaces addresses and interfaces in a ruleset with those of the
// pod, so that the rules match it.
func meetThePod(r *rand.Rand, rules string) string {
	for from, to := range map[string][]string{
		"192.168.122.0/24": {"10.244.1.0/24"}, "172.17.0.0/16": {"10.244.0.0/16"}, "10.88.0.5": {"10.244.1.2"},
		"192.168.1.1": {"10.244.1.2"},
		"fd00:88::5":  {"fd00:10:244:1::2"}, "docker0": {"eth0", "pod0"},
		"vlan+":            {"eth+", "e+"},
		"0x40000/0xff0000": {"0x0/0xff0000"}, "10.96.0.10": {"10.96.0.10", "203.0.113.9"},
	} {
		if r.IntN(2) == 0 {
			rules = strings.ReplaceAll(rules, from, to[r.IntN(len(to))])
		}
	}
	return rules
}

// untracked reports whether a program turns off the tracking of connections.
func untracked(dir string) bool { return filepath.Base(dir) == "cilium-iptables-native" }

// besideEvidence are the rules of a Service to an exempt endpoint, which are masqueraded as kube-proxy does, and of one
// to the pod itself; another zone; and a destination that another program masquerades against the policy.
const besideEvidence = `table inet beside {
	chain raw {
		type filter hook prerouting priority raw
		ip daddr 10.9.0.7 ct zone set 7
		ip saddr 10.9.0.7 ct zone set 7
	}
	chain pre {
		type nat hook prerouting priority dstnat - 20
		ip daddr 198.18.0.11 ct mark set 1 dnat ip to 10.9.0.9
		ip daddr 198.18.0.12 ct mark set 1 dnat ip to 10.244.1.2
	}
	chain post {
		type nat hook postrouting priority srcnat - 30
		ct mark 1 masquerade
		ip daddr 10.9.0.8 masquerade
	}
}
`

// Connections that are no evidence are counted as that, next to the rules of programs that translate. IPVS of
// kube-proxy is not among them: it needs a kernel with ip_vs.
func TestWhatIsNoEvidenceIsCountedByReason(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft", "iptables-nft-restore", "ip6tables-nft-restore")
	for _, name := range []string{
		"kube-proxy-iptables", "kube-proxy-nftables", "cni-portmap", "docker-iptables", "docker-nftables", "cni-bridge",
		"netavark", "crio-hostport",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newTrafficNode(t)
			want := n.enforce("nonMasqueradeCIDRs: [10.0.0.0/8]\nnonMasqueradeSrcCIDRs: [10.244.1.77/32]\n")
			nfttest.LoadForeign(t, n.top.Node, filepath.Join("../../testdata/foreign", name), nil)
			n.nft(besideEvidence)
			n.check(n.top.AddAddr(n.top.Pod, netip.MustParseAddr("10.244.1.77")))
			history := n.noted(want.Policy)
			to := func(ns *nfttest.NS, from *nfttest.NS, src, dst string) {
				flow := nfttest.Flow{Proto: nfttest.UDP, From: from, To: ns, Dst: netip.MustParseAddrPort(dst)}
				if src != "" {
					flow.Src = netip.MustParseAddrPort(src)
				}
				nfttest.MustSend(t, n.top, flow)
			}
			outside, node, pod := n.top.Outside, n.top.Node, n.top.Pod
			to(outside, pod, "", "198.18.0.11:5001") // service
			to(pod, pod, "", "198.18.0.12:5002")     // hairpin
			to(outside, pod, "", "10.9.0.7:5003")    // zone
			to(outside, node, "", "203.0.113.9:5004")
			to(node, pod, "", "192.0.2.1:5005")
			to(outside, pod, "10.244.1.77:5006", "203.0.113.9:5006") // source
			to(outside, pod, "", "10.9.0.8:5007")                    // overruled
			to(outside, pod, "", "203.0.113.9:5008")
			e := n.gathered(want.Policy, history)
			for reason, least := range map[string]int{"service": 1, "hairpin": 1, "zone": 1, "node": 2, "source": 1} {
				if e.NotJudged[reason] < least {
					t.Errorf("%s: %d, want %d", reason, e.NotJudged[reason], least)
				}
			}
			agree, overruled := 0, 0
			for _, c := range e.Counts {
				agree += c.Agrees
				overruled += c.Overruled
			}
			if agree != 1 || overruled != 1 || e.Counts[0].Examples[0].Destination().String() != "10.9.0.8:5007" {
				t.Errorf("%d agree, %d are overruled: %+v", agree, overruled, e)
			}
		})
	}
}

// By the time at which the kernel says that a connection began, nothing has to be noted.
func TestConnectionsWithATimeAreDatedByIt(t *testing.T) {
	t.Parallel()
	n := newTrafficNode(t)
	n.check(n.NS.Sysctl("net.netfilter.nf_conntrack_timestamp", "1"))
	want := n.enforce("nonMasqueradeCIDRs: [10.0.0.0/8]\n")
	n.nft("table inet other { chain c { type nat hook postrouting priority 0; ip daddr 10.9.0.0/16 masquerade; }; }")
	n.open(nfttest.UDP, "10.9.0.9:5001")
	since := time.Now()
	n.open(nfttest.UDP, "10.9.0.9:5002")
	e := n.gathered(want.Policy, conntrack.History{Since: since})
	if len(e.Counts) != 1 || e.Counts[0].Stale != 1 || e.Counts[0].Overruled != 1 {
		t.Errorf("%+v", e.Counts)
	}
}

// Connections of a second are closed whenever anybody looks.
func TestShortConnectionsThatAnotherProgramDecidesAreOverruled(t *testing.T) {
	t.Parallel()
	n := newTrafficNode(t)
	want := n.enforce("nonMasqueradeCIDRs: [10.0.0.0/8]\n")
	history := n.noted(want.Policy)
	n.nft("table ip x { chain post { type nat hook postrouting priority srcnat; ip daddr 10.9.0.9 masquerade; }; }")
	for range 3 {
		nfttest.MustSend(t, n.top, nfttest.Flow{
			Proto: nfttest.TCP, From: n.top.Pod, Dst: netip.MustParseAddrPort("10.9.0.9:80"),
		})
	}
	e := n.gathered(want.Policy, history)
	if len(e.Counts) != 1 || e.Counts[0].Overruled != 3 || e.Counts[0].Examples[0].Open() {
		t.Errorf("under this policy: %+v", e)
	}
	e = n.gathered(want.Policy, n.noted(want.Policy))
	if len(e.Counts) != 0 || e.NotJudged["closed"] != 3 {
		t.Errorf("noted at a change: %+v", e)
	}
}

// The kernel's timeout is raised, so that the packets seem to be older than they are.
func TestDestinationsWithoutAnswersAreSeenInRealConnections(t *testing.T) {
	t.Parallel()
	n := newTrafficNode(t)
	want := n.enforce("nonMasqueradeCIDRs: [10.0.0.0/8]\n")
	for range 6 {
		n.open(nfttest.UDP, "10.9.0.9:53")
		n.open(nfttest.UDP, "10.9.0.8:514") // syslog does not answer
		n.open(nfttest.UDP, "203.0.113.9:53")
	}
	if e := n.gathered(want.Policy, conntrack.History{}); len(e.Unanswered) > 0 {
		t.Errorf("at once: %+v", e.Unanswered)
	}
	n.check(n.NS.Sysctl("net.netfilter.nf_conntrack_udp_timeout", "60"))
	e := n.gathered(want.Policy, conntrack.History{})
	if len(e.Unanswered) != 1 || !strings.HasPrefix(e.Unanswered[0].String(), "10.9.0.9 answered 0 of 6") {
		t.Errorf("%+v", e.Unanswered)
	}
}

// Whatever keeps replies from masqueraded connections, it is one line, not one for each destination.
func TestAnUplinkWithoutRepliesIsOneLine(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name   string
		breaks func(n trafficNode)
		silent bool
	}{
		{"nothing is wrong", func(trafficNode) {}, false},
		{"the next hop is gone", func(n trafficNode) {
			nfttest.Run(t, n.NS, "", "ip", "route", "add", "203.0.113.0/24", "via", "192.0.2.77")
		}, true},
		{"replies are in another zone", func(n trafficNode) {
			n.nft("table ip z { chain c { type filter hook prerouting priority raw; iifname eth0 ct zone set 7; }; }")
		}, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			n := newTrafficNode(t)
			want := n.enforce("nonMasqueradeCIDRs: [10.0.0.0/8]\n")
			tt.breaks(n)
			for i := range 6 {
				_, err := n.top.Send(nfttest.Flow{
					Proto: nfttest.UDP, From: n.top.Pod, Answered: true, Timeout: 200 * time.Millisecond,
					Dst: netip.AddrPortFrom(netip.AddrFrom4([4]byte{203, 0, 113, byte(9 + i)}), 53),
				})
				if err != nil && !errors.Is(err, nfttest.ErrNotSeen) {
					t.Fatal(err)
				}
			}
			n.check(n.NS.Sysctl("net.netfilter.nf_conntrack_udp_timeout", "60")) // as if the packets were older
			e := n.gathered(want.Policy, conntrack.History{})
			silent := len(e.Unanswered) == 1 && !e.Unanswered[0].To.IsValid()
			if silent != tt.silent || !tt.silent && len(e.Unanswered) > 0 {
				t.Errorf("%v", e.Unanswered)
			}
		})
	}
}

// Whether what a bridge passes on meets chains that translate depends on the kernel: with br_netfilter it does, with
// nf_conntrack_bridge not, which the kernel of this test may lack.
func TestConnectionsThatABridgePassesOnAreNoEvidence(t *testing.T) {
	t.Parallel()
	n := newBridgeNode(t)
	other := nfttest.NewNS(t, "pod2")
	here := netns.End{NS: n.NS, Dev: "pod1", MAC: net.HardwareAddr{2, 0, 0, 0, 4, 1}}
	there := netns.End{NS: other, Dev: "eth0", MAC: net.HardwareAddr{2, 0, 0, 0, 4, 2}}
	n.check(netns.AddVeth(here, there))
	nfttest.Run(t, n.NS, "", "ip", "link", "set", "pod1", "master", "cni0")
	nfttest.Run(t, n.NS, "", "ip", "route", "add", "10.244.1.3/32", "dev", "cni0")
	n.check(n.NS.LinkUp("pod1"))
	n.check(other.LinkUp("eth0"))
	n.check(other.AwaitCarrier("eth0"))
	n.check(n.NS.AwaitCarrier("pod1")) // before, the bridge forwards nothing to it
	n.check(other.AddAddr("eth0", netip.MustParsePrefix("10.244.1.3/24")))
	nfttest.Run(t, n.top.Pod, "", "ip", "route", "add", "10.244.1.3/32", "dev", "eth0")
	n.check(n.top.Pod.AddNeighbour("eth0", netip.MustParseAddr("10.244.1.3"), there.MAC))
	nfttest.PassBridgedPackets(t, n.NS)
	want := n.enforce("nonMasqueradeCIDRs: [10.0.0.0/8]\n")
	nfttest.MustSend(t, n.top, nfttest.Flow{
		Proto: nfttest.UDP, From: n.top.Pod, To: other, Dst: netip.MustParseAddrPort("10.244.1.3:5001"),
	})
	e := n.gathered(want.Policy, conntrack.History{})
	if e.NotJudged["bridge"] == 0 || len(e.Counts) > 0 {
		t.Errorf("%+v", e)
	}
}
