package main

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
	"nft-masq-agent/nft/nftrace"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/netns"
)

// A neighbor is another program on a node with pods, whose rules are those of testdata/foreign.
type neighbor struct {
	rules   string
	replace []string // in the rules: what is named otherwise here
	// masquerades is to where it masquerades what pods send, without enforceNonMasquerade.
	masquerades reach
	v4Only      bool // has no such rules for IPv6
	// dev is the interface of its own containers or machines, and own one of them, with
	// the prefix that the interface has.
	dev string
	own []string
	// v6Only: node and pods have no IPv4 addresses.
	v6Only bool
}

// A reach is a set of destinations.
type reach int

const (
	nowhere    reach = iota
	outside          // what is not the pods'
	everywhere       // the pods of other nodes, too
	anywhere         // those of this node, too
)

func beside() []neighbor {
	docker, tailnet := []string{"172.17.0.9/16"}, []string{"100.100.2.2/32", "fd7a:115c:a1e0::2/128"}
	firewalld := []string{"172.30.0.9/24"}
	plugin := []string{
		"10.88.0.5", "10.244.1.2", "10.88.0.6", "10.244.1.3", "fd00:88::5", "fd00:10:244:1::2",
		"10.88.0.0/16", "10.244.1.0/24", "fd00:88::/64", "fd00:10:244:1::/64",
		"192.168.1.1", "10.244.1.2", "192.168.1.0/24", "10.244.1.0/24",
	}
	return []neighbor{
		{rules: "docker-iptables", v4Only: true, dev: "docker0", own: docker},
		{rules: "docker-nftables", v4Only: true, dev: "docker0", own: docker},
		{rules: "docker-29", v4Only: true, dev: "docker0", own: docker},
		{rules: "docker-two-maps", v4Only: true, dev: "docker0", own: docker},
		{rules: "netavark", v4Only: true, dev: "podman0", own: []string{"10.88.0.9/16"}},
		{rules: "netavark-iptables", v4Only: true, dev: "podman0", own: []string{"10.88.0.9/16"}},
		{rules: "libvirt", v4Only: true, dev: "virbr0", own: []string{"192.168.122.9/24"}},
		{rules: "tailscale", dev: "tailscale0", own: tailnet},
		{rules: "tailscale-nftables", dev: "tailscale0", own: tailnet},
		{rules: "firewalld", masquerades: outside, v4Only: true, dev: "vm0", own: firewalld},
		{rules: "firewalld-iptables", masquerades: outside, v4Only: true, dev: "vm0", own: firewalld},
		{rules: "calico-iptables", masquerades: outside},
		{rules: "calico-nftables", masquerades: outside, v4Only: true},
		{rules: "cilium-iptables", masquerades: everywhere},
		{rules: "cilium-iptables-native", masquerades: outside},
		{rules: "kube-router", masquerades: outside},
		{rules: "kube-router-nftables", masquerades: outside},
		{
			rules: "amazon-vpc-cni-nftables", masquerades: outside, replace: []string{"eni", "pod"}, v4Only: true,
		},
		{rules: "ovn-kubernetes", masquerades: anywhere},
		{rules: "antrea", masquerades: outside},
		{rules: "kube-ovn", masquerades: anywhere},
		{rules: "flannel-iptables", masquerades: outside, v4Only: true},
		{rules: "flannel-nftables", masquerades: outside},
		{rules: "kindnet-recorded", masquerades: outside},
		{rules: "cni-bridge", masquerades: everywhere, replace: plugin},
		{rules: "cni-nftables", masquerades: everywhere, replace: plugin, v4Only: true},
	}
}

// A lab is a node with two pods, next to another program.
type lab struct {
	trafficNode
	pods    string // their interface, as masqueradeSrcInterfaces has it
	another *nfttest.NS
	own     *nfttest.NS
	sent    uint16 // connections
	asked   int    // policies, under each of which explain is asked about every other connection
}

// connect makes a host that is behind an interface of the node, with the addresses at; the
// node has those of gateways.
func (n trafficNode) connect(dev, master string, id byte, gateways, at []netip.Prefix) *nfttest.NS {
	n.t.Helper()
	ns := nfttest.NewNS(n.t, dev)
	here := netns.End{NS: n.top.Node, Dev: dev, MAC: net.HardwareAddr{2, 0, 0, 0, id, 1}}
	there := netns.End{NS: ns, Dev: "eth0", MAC: net.HardwareAddr{2, 0, 0, 0, id, 2}}
	n.check(netns.AddVeth(here, there))
	n.check(here.NS.LinkUp(dev))
	n.check(ns.LinkUp("eth0"))
	n.check(here.NS.AwaitCarrier(dev))
	n.check(ns.AwaitCarrier("eth0"))
	if master != "" {
		nfttest.Run(n.t, n.top.Node, "", "ip", "link", "set", dev, "master", master)
		dev, here.MAC = master, net.HardwareAddr{2, 0, 0, 0, 1, 1}
	}
	for i, gateway := range gateways {
		n.check(here.NS.AddAddr(dev, gateway))
		a, via := at[i].Addr(), gateway.Addr()
		whole := netip.PrefixFrom(a, a.BitLen())
		n.check(ns.AddAddr("eth0", whole))
		n.check(here.NS.AddNeighbour(dev, a, there.MAC))
		n.check(ns.AddNeighbour("eth0", via, here.MAC))
		n.check(here.NS.AddRoute(netns.Route{Dst: whole, Dev: dev}))
		n.check(ns.AddRoute(netns.Route{Dst: netip.PrefixFrom(via, via.BitLen()), Dev: "eth0"}))
		everything, err := a.Prefix(0)
		n.check(err)
		n.check(ns.AddRoute(netns.Route{Dst: everything, Via: via, Dev: "eth0"}))
	}
	return ns
}

func cidrs(all ...string) (list []netip.Prefix) {
	for _, s := range all {
		list = append(list, netip.MustParsePrefix(s))
	}
	return list
}

// newLab connects pods as the CNI plugins ptp and bridge do.
func newLab(t *testing.T, plugin string, nb neighbor) *lab {
	t.Helper()
	l := &lab{}
	gateways := cidrs("10.244.1.1/32", "fd00:10:244:1::1/128")
	at := cidrs("10.244.1.3/32", "fd00:10:244:1::3/128")
	if plugin == "bridge" {
		l.trafficNode, l.pods = newBridgeNode(t), "cni0"
		l.another = l.connect("pod1", "cni0", 4, gateways, at)
		for pod, other := range map[*nfttest.NS][]netip.Addr{
			l.top.Pod: {at[0].Addr(), at[1].Addr()}, l.another: {l.top.PodV4, l.top.PodV6},
		} { // on the same link
			mac := map[bool]net.HardwareAddr{true: {2, 0, 0, 0, 4, 2}, false: {2, 0, 0, 0, 1, 2}}[pod == l.top.Pod]
			for _, a := range other {
				l.check(pod.AddRoute(netns.Route{Dst: netip.PrefixFrom(a, a.BitLen()), Dev: "eth0"}))
				l.check(pod.AddNeighbour("eth0", a, mac))
			}
		}
	} else {
		l.trafficNode, l.pods = newTrafficNode(t), "pod0, pod1"
		l.another = l.connect("pod1", "", 4, gateways, at)
	}
	if nb.dev != "" {
		var gateways []netip.Prefix
		for _, p := range cidrs(nb.own...) {
			first := p.Masked().Addr().Next()
			if p.IsSingleIP() {
				first = p.Addr().Prev()
			}
			gateways = append(gateways, netip.PrefixFrom(first, p.Bits()))
		}
		l.own = l.connect(nb.dev, "", 5, gateways, cidrs(nb.own...))
	}
	for _, a := range []string{"10.244.2.2", "fd00:10:244:2::2"} { // a pod of another node
		l.check(l.top.AddAddr(l.top.Outside, netip.MustParseAddr(a)))
	}
	if nb.v6Only {
		for _, ns := range []*nfttest.NS{l.top.Node, l.top.Pod, l.another} {
			nfttest.Run(t, ns, "", "ip", "-4", "address", "flush", "scope", "global")
		}
	}
	if nb.rules != "" {
		nfttest.LoadForeign(t, l.top.Node, filepath.Join("../../testdata/foreign", nb.rules),
			strings.NewReplacer(nb.replace...).Replace)
	}
	return l
}

// A labPolicy is a config, and what it does.
type labPolicy struct {
	config                 string
	knows, enforces, force bool // the pods; what is exempt; that it is masqueraded
	pods                   bool // their own network is masqueraded, too
	bridged, apart         bool // what a bridge passes on does not match the interfaces; it passes no rules
}

const (
	labExempts  = "enableIPv6: true\nnonMasqueradeCIDRs: [10.0.0.0/8, 172.16.0.0/12, 192.168.0.0/16, 'fd00::/8']\n"
	labLess     = "enableIPv6: true\nnonMasqueradeCIDRs: [10.9.0.0/16, 'fd00:9::/32']\n"
	labCIDRs    = "masqueradeSrcCIDRs: [10.244.0.0/16, 'fd00:10:244::/56']\n"
	labEnforces = "enforceNonMasquerade: true\n"
)

// policies are those for pods behind a plugin, with other programs or without.
func (l *lab) policies(plugin string, others bool) []labPolicy {
	byInterface := "masqueradeSrcInterfaces: [" + l.pods + "]\n"
	with := map[string][]labPolicy{
		"ptp": {
			{config: labExempts},
			{config: labExempts + byInterface, knows: true},
			{config: labExempts + labCIDRs + labEnforces, knows: true, enforces: true},
		},
		"bridge": {
			{config: labExempts + labCIDRs + "dropInvalid: true\n", knows: true},
			{config: labExempts + byInterface + labEnforces, knows: true, enforces: true, bridged: true},
			{config: labExempts + labCIDRs + "forceMasqueradeCIDRs: [10.9.0.0/16, 'fd00:9::/32']\n", knows: true, force: true},
		},
	}
	if others {
		return with[plugin]
	}
	return append(slices.Concat(with["ptp"], with["bridge"]), labPolicy{config: labLess, pods: true},
		labPolicy{config: labLess + byInterface, pods: true, knows: true, bridged: true},
		labPolicy{config: labLess, pods: true, bridged: true, apart: true})
}

// A way is a connection, and which source address the far end sees of it.
type way struct {
	name     string
	from, to *nfttest.NS
	src, dst netip.Addr
	want     netip.Addr
}

// ways are the connections of a family under a policy.
func (l *lab) ways(nb neighbor, p labPolicy, v4 bool) []way {
	pick := func(a4, a6 string) netip.Addr {
		return netip.MustParseAddr(map[bool]string{true: a4, false: a6}[v4])
	}
	pod, host, reached := l.top.PodV6, l.top.NodeV6, nb.masquerades
	if v4 {
		pod, host = l.top.PodV4, l.top.NodeV4
	} else if nb.v4Only {
		reached = nowhere
	}
	bridged := p.bridged && l.pods == "cni0"
	local := p.pods && !bridged || reached == anywhere && (bridged || !p.enforces)
	if p.enforces {
		reached = nowhere
	}
	either := func(masqueraded bool, as netip.Addr) netip.Addr {
		if masqueraded {
			return as
		}
		return pod
	}
	other, exempt, remote := pick("203.0.113.9", "2001:db8:1::1"), pick("10.9.0.9", "fd00:9::9"),
		pick("10.244.2.2", "fd00:10:244:2::2")
	gateway := pick("10.244.1.1", "fd00:10:244:1::1")
	all := []way{
		{"pod to outside", l.top.Pod, l.top.Outside, pod, other, host},
		{"pod to exempt", l.top.Pod, l.top.Outside, pod, exempt, either(p.force || reached >= outside, host)},
		{
			"pod to a pod of another node", l.top.Pod, l.top.Outside, pod, remote,
			either(p.pods || reached >= everywhere, host),
		},
		{"pod to another pod", l.top.Pod, l.another, pod, pick("10.244.1.3", "fd00:10:244:1::3"), either(local, gateway)},
		{"node to outside", l.top.Node, l.top.Outside, host, other, host},
		{"node to exempt", l.top.Node, l.top.Outside, host, exempt, host},
	}
	for _, s := range nb.own {
		if own := netip.MustParsePrefix(s).Addr(); own.Is4() == v4 {
			all = append(all, way{"its own to outside", l.own, l.top.Outside, own, other, host},
				way{"its own to exempt", l.own, l.top.Outside, own, exempt, host})
		}
	}
	return all
}

// goes opens the connection, and asks explain.
func (l *lab) goes(t *testing.T, nb neighbor, p labPolicy, w way) {
	t.Helper()
	l.sent++
	flow := nfttest.Flow{
		Proto: []nfttest.Proto{nfttest.UDP, nfttest.TCP}[l.sent%2], From: w.from, To: w.to,
		Src: netip.AddrPortFrom(w.src, 20000+l.sent), Dst: netip.AddrPortFrom(w.dst, 9000),
	}
	meets := !p.apart || w.to != l.another
	traced := meets && ((int(l.sent)+l.asked)%8 == 3 || nfttest.Long())
	send := nfttest.Send
	if traced {
		send = func(flow nfttest.Flow) (nfttest.Sighting, error) { return l.traces(t, p.config+w.name, flow) }
	}
	s, err := send(flow)
	if err != nil || s.Seen.Addr() != w.want {
		t.Errorf("%s%s: %s sees %s of %s, want %s: %v", p.config, w.name, w.dst, s.Seen, w.src, w.want, err)
	}
	if (int(l.sent)+l.asked)%2 > 0 && !nfttest.Long() {
		return
	}
	var x answer.Explanation
	l.here(&x, "explain", flow.Dst.String(), "--from", w.src.String(), "--config", l.path)
	if x.Sees.IsValid() && x.Sees != w.want {
		t.Errorf("%s%s: %s sees %s of %s, explain says: %s", p.config, w.name, w.dst, w.want, w.src, x.Headline)
	}
}

// traces opens a connection while it is traced. The trace must say what the far end sees, and nft must show the rule
// that it names.
func (l *lab) traces(t *testing.T, at string, flow nfttest.Flow) (s nfttest.Sighting, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), nfttest.Patient(5*time.Second))
	defer cancel()
	done := make(chan struct{})
	send := func() {
		s, err = nfttest.Send(flow)
		close(done)
	}
	var got nftrace.Trace
	l.check(l.top.Node.Do(func() error {
		return nfttest.While(ctx, nftrace.ErrRunning, func() (failure error) {
			got, failure = nftrace.Run(ctx, nftrace.Query{From: flow.Src.Addr(), To: flow.Dst}, func() { go send() })
			return failure
		})
	}))
	<-done
	translated := got.Outcome == nftrace.Translated
	if got.SeenAs != s.Seen.String() || translated != (s.Seen != flow.Src) || translated && got.Rule == nil {
		t.Errorf("%s: the far end sees %s, and the trace says:\n%s", at, s.Seen, got)
	}
	if got.Rule != nil && !shows(l.listed(got.Rule), got.Rule) {
		t.Errorf("%s: %s, not by the rule %q:\n%s", at, got.Outcome, l.listed(got.Rule), got)
	}
	return s, err
}

// listed is what nft shows of a rule, in lower case; "" if there is none.
func (l *lab) listed(r *nftrace.Rule) string {
	l.t.Helper()
	chain := nfttest.NFT(l.t, l.top.Node, "", strings.Fields(r.Command)[1:]...)
	for line := range strings.Lines(chain) {
		if strings.HasSuffix(line, fmt.Sprintf(" # handle %d\n", r.Handle)) {
			return strings.ToLower(strings.TrimSpace(line))
		}
	}
	return ""
}

// shows reports whether the text of a rule has the action that a trace names, and counted a packet if it counts.
func shows(text string, r *nftrace.Rule) bool {
	action := r.Action
	if strings.Contains(text, "xt target") && action == "notrack" {
		action = `"ct"`
	}
	return strings.Contains(text, action) && !strings.Contains(text, "packets 0 ")
}

// Next to other programs, pods get what the policy says, containers, machines and tailnets of
// the host keep the translation of their own program, and explain claims nothing that the far end does not see.
// nft/EVIDENCE.md has the table.
func TestEachGetsItsSourceAddressNextToOtherPrograms(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	nfttest.Require(t, "nft", "ip", "iptables-nft-restore", "ip6tables-nft-restore")
	rows := append([]neighbor{{}, {v6Only: true}}, beside()...)
	sent := make([]atomic.Int64, len(rows))
	t.Run("next to", func(t *testing.T) {
		for i, nb := range rows {
			if i%4 != 0 && !nfttest.Long() && !*update {
				continue // each kind of program is among the others
			}
			for order, plugin := range []string{"ptp", "bridge"} {
				if nb.rules != "" && i/4%2 != order && !nfttest.Long() && !*update {
					continue // another program is next to it
				}
				name := strings.Trim(nb.cell(), "`")
				t.Run(name+","+plugin, func(t *testing.T) {
					t.Parallel()
					l := newLab(t, plugin, nb)
					for _, p := range l.policies(plugin, nb.rules != "") {
						l.enforce(p.config)
						l.asked++
						if p.apart {
							l.check(l.top.Node.Sysctl("net.bridge.bridge-nf-call-iptables", "0"))
							l.check(l.top.Node.Sysctl("net.bridge.bridge-nf-call-ip6tables", "0"))
						}
						for _, v4 := range []bool{true, false} {
							if v4 && nb.v6Only || !v4 && nb.v4Only && nb.masquerades == nowhere {
								continue // without rules for IPv6 it is as without the program
							}
							for _, w := range l.ways(nb, p, v4) {
								l.goes(t, nb, p, w)
							}
						}
					}
					sent[i].Add(int64(l.sent))
				})
			}
		}
	})
	table := "\n| next to the rules | connections |\n|---|---|\n"
	for i, nb := range rows {
		if sent[i].Load() == 0 {
			return // not all rows were run
		}
		table += fmt.Sprintf("| %s | %d |\n", nb.cell(), sent[i].Load())
	}
	const name = "nft/EVIDENCE.md"
	switch has := section(t, "lab"); {
	case t.Failed():
	case *update:
		text := strings.Replace(readDocument(t, name), has, table, 1)
		nfttest.NoError(t, os.WriteFile(filepath.Join(root, name), []byte(text), 0o644))
	case has != table:
		t.Errorf("%s (-want +got; make golden LONG=1 writes it):\n%s", name, cmp.Diff(has, table))
	}
}

// cell is the first one of its row.
func (nb neighbor) cell() string {
	switch {
	case nb.v6Only:
		return "none, pods with IPv6 alone"
	case nb.rules == "":
		return "none"
	}
	return "`" + nb.rules + "`"
}
