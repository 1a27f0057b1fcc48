package cluster_test

import (
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"nft-masq-agent/manifests/cluster"
	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/nfttest"
)

// A neighbor is another program that translates what pods send, and how it is set up.
type neighbor struct {
	name string // of the row
	pods connector
	// proxy changes how kube-proxy is set up.
	proxy func(n *cluster.Node)
	// start starts it; restart starts it again, which may change its rules.
	start, restart func(l *lab)
	// off is the way of manifests/README.md to turn its masquerading off.
	off         func(l *lab)
	masquerades masquerades
	// named is the beginning of what a trace says of its rule that masquerades, for each family.
	named [2]string
}

// podInterface is where packets of the pods of a network arrive.
func podInterface(list []map[string]any) string {
	if list[0]["type"] == "bridge" {
		return "cni0"
	}
	return "veth*"
}

// labRows are those of the lab.
func labRows(masq masquerades, enforced bool) []row {
	return append(commonRows(masq, enforced), []row{
		{"hairpin through a host port", "near", node1, 8081, false, gate1},
		{"pod to a host port of another node", "near", node2, 8081, false, node1},
		{"node to its own host port", "node1", node1, 8081, false, node1},
		{"host port from outside", "outside", node1, 8081, false, client},
	}...)
}

// labPolicies are configs for nodes whose pods send by an interface.
func labPolicies(podInterface string) []policy {
	const pods = "masqueradeSrcCIDRs: [10.244.0.0/16, \"fd00:10:244::/56\"]\n"
	plain := policies[0]
	return []policy{
		plain,
		{
			name:   "enforceNonMasquerade, pods by interface",
			config: plain.config + "enforceNonMasquerade: true\nmasqueradeSrcInterfaces: [" + podInterface + "]\n",
		},
		{name: "dropInvalid", config: plain.config + "dropInvalid: true\n" + pods},
		{
			name:   "enforceNonMasquerade and dropInvalid, pods by CIDR",
			config: plain.config + "enforceNonMasquerade: true\ndropInvalid: true\n" + pods,
		},
	}
}

// labMatrix is matrix in the lab, where no packet is dropped.
func (l *lab) labMatrix(t *testing.T, name string, masq masquerades, p policy) {
	t.Helper()
	l.matrix(t, name, l.families, labRows(masq, strings.Contains(p.config, "enforceNonMasquerade")), p)
	if strings.Contains(p.config, "dropInvalid") {
		for _, counter := range []string{"invalid-v4", "invalid-v6"} {
			out := nfttest.NFT(t, l.inside[0], "", "list", "counter", "inet", "nft-masq-agent", counter)
			if !strings.Contains(out, "packets 0 ") {
				t.Errorf("%s: dropped: %s", name, out)
			}
		}
	}
}

// says compares what status says of connections that another program decides, and which rule a trace names for each
// family, with what is so.
func (l *lab) says(t *testing.T, name string, named [2]string) {
	t.Helper()
	const contradicted = "that began under this policy contradict it: another program decides"
	out, _ := l.ask("status")
	others := named != [2]string{}
	if strings.Contains(strings.Join(strings.Fields(out), " "), contradicted) != others {
		t.Errorf("%s: another program decides is %t, and status says:\n%s", name, others, out)
	}
	if !others {
		return
	}
	for i, f := range l.families {
		to := netip.AddrPortFrom(exempt(f, policies[0]), 8080)
		got, seen := l.trace(t, "near", false, f.source("near"), "tcp", to)
		if got.SeenAs != conntrack.HostPort(seen) || !strings.HasPrefix(decided(got), "other: "+named[i]) {
			t.Errorf("%s: the far end sees %s, the rule is in %s, and the trace says:\n%s", name, seen, named[i], got)
		}
	}
}

// next runs the agent next to a neighbor, with both modes of kube-proxy.
func (l *lab) next(t *testing.T, nb neighbor) {
	before := l.count
	if nb.start != nil {
		nb.start(l)
	}
	l.renew(nb.pods)
	list := labPolicies(podInterface(nb.pods(l, l.nodes[0], 1)))
	for _, mode := range proxyModes() {
		for _, n := range l.nodes {
			n.ProxyPods, n.MasqueradeAll = "10.244.0.0/16,fd00:10:244::/56", false
			if nb.proxy != nil {
				nb.proxy(n)
			}
			n.StartProxy(mode)
		}
		for _, p := range list {
			name := nb.name + ", kube-proxy " + mode + ", " + p.name
			l.enforce(p.config)
			l.labMatrix(t, name, nb.masquerades, p)
			var named [2]string
			if !strings.Contains(p.config, "enforceNonMasquerade") {
				named = nb.named
			}
			l.says(t, name, named)
		}
		if nb.restart != nil {
			l.watch(t, list[3], l.families, func() { nb.restart(l) })
			l.labMatrix(t, nb.name+", started again", nb.masquerades, list[3])
		}
		l.cleanProxies()
	}
	if nb.off != nil {
		nb.off(l)
		l.startProxies(proxyModes()[0])
		l.enforce(list[0].config)
		l.labMatrix(t, nb.name+", turned off", masquerades{}, list[0])
		l.says(t, nb.name+", turned off", [2]string{})
		if text := l.masquerading(t); text != "" {
			t.Errorf("%s: left:\n%s", nb.name, text)
		}
		l.cleanProxies()
	}
	l.rows = append(l.rows, fmt.Sprintf("| %s | %d |", nb.name, l.connections-before.connections))
}

func proxyModes() []string { return []string{"nftables", "iptables"} }

// masquerading lists the rules that masquerade on node1 but for those of the agent,
// kube-proxy and portmap.
func (l *lab) masquerading(t *testing.T) (left string) {
	t.Helper()
	table := ""
	for line := range strings.Lines(nfttest.NFT(t, l.inside[0], "", "list", "ruleset")) {
		if strings.HasPrefix(line, "table ") {
			table = line
		}
		if line == table || strings.HasPrefix(strings.TrimSpace(line), "comment ") {
			continue
		}
		if strings.Contains(strings.ToLower(line), "masquerade") && !slices.ContainsFunc(
			[]string{"nft-masq-agent", "kube-proxy", "KUBE-", "kubernetes", "cni_hostport", "0x00002000"},
			func(known string) bool { return strings.Contains(table+line, known) }) {
			left += table + line
		}
	}
	return left
}

// A connector is the config of the network of pods.
type connector func(l *lab, n *cluster.Node, number int) []map[string]any

func plugin(name, backend string, masquerade bool) connector {
	return func(l *lab, n *cluster.Node, number int) []map[string]any {
		return l.network(n, number, name, backend, masquerade)
	}
}

// backends are those of flannel and of the CNI plugins.
var backends = []string{"iptables", "nftables"}

// TestNextTo runs the agent next to each program that README.md names and that can be
// built here. CLUSTER_ONLY=flannel make test-cluster runs one group.
func TestNextTo(t *testing.T) {
	for _, group := range []struct {
		name      string
		neighbors []neighbor
	}{
		{"flannel", flannelNeighbors()},
		{"bridge", pluginNeighbors("bridge")},
		{"ptp", pluginNeighbors("ptp")},
		{"portmap", portmapNeighbors()},
		{"kindnet", kindnetNeighbors()},
		{"kube-proxy", proxyNeighbors()},
	} {
		t.Run(group.name, func(t *testing.T) {
			l := newLab(t)
			for _, nb := range group.neighbors {
				l.next(t, nb)
			}
			l.record(group.name, "next to | connections")
		})
	}
	t.Run("uplinks", uplinks)
	t.Run("upgrade", func(t *testing.T) {
		if os.Getenv("CLUSTER_PROGRAMS") == "" {
			t.Skip("builds the last release: make test-cluster")
		}
		w := &world{t: t}
		w.upgrade(t)
		w.record("upgrade", "two versions | updates | connections")
	})
}

// pluginNeighbors are those of a CNI plugin that masquerades.
func pluginNeighbors(name string) (all []neighbor) {
	for _, backend := range backends {
		const table = "inet cni_plugins_masquerade masq_checks"
		named := [2]string{table, table}
		if backend == "iptables" {
			named = [2]string{"ip nat CNI-", "ip6 nat CNI-"}
		}
		with := plugin(name, backend, true)
		all = append(all, neighbor{
			name: name + " with ipMasq, " + backend, pods: with, named: named,
			start:       (*lab).routePods,
			masquerades: masquerades{exempt: true, remote: true},
			restart: func(l *lab) { // a pod that comes, and one that goes
				for range 3 {
					l.delete(l.newPod(l.nodes[0], with(l, l.nodes[0], 1)[:1]))
				}
			},
			off: func(l *lab) { l.renew(plugin(name, backend, false)) },
		})
	}
	return all
}

// portmapNeighbors are those whose host ports lead a pod to itself.
func portmapNeighbors() (all []neighbor) {
	for _, name := range []string{"bridge", "ptp"} {
		for _, backend := range backends {
			all = append(all, neighbor{
				name: "portmap with " + name + ", " + backend, pods: plugin(name, backend, false),
				start: (*lab).routePods,
				restart: func(l *lab) {
					p := l.newPod(l.nodes[1], l.network(l.nodes[1], 2, name, backend, false)[:1])
					l.delete(p)
				},
			})
		}
	}
	return all
}

// kindnetNeighbors load the rules that kindnet was seen to write: no module of it can be
// downloaded to build it.
func kindnetNeighbors() []neighbor {
	load := func(l *lab) {
		rules, err := os.ReadFile("../../testdata/foreign/kindnet-recorded/rules.nft")
		must(l.t, err)
		nfttest.NFT(l.t, l.inside[0], "add table inet kindnet-ipmasq\ndelete table inet kindnet-ipmasq\n"+string(rules),
			"-f", "-")
	}
	const chain = "inet kindnet-ipmasq postrouting"
	return []neighbor{{
		name: "kindnet's rules", pods: plugin("ptp", "nftables", false), masquerades: masquerades{exempt: true},
		named: [2]string{chain, chain},
		start: func(l *lab) { l.routePods(); load(l) },
		restart: func(l *lab) { // as at each change of a Node
			for range 50 {
				load(l)
			}
		},
		off: func(l *lab) { nfttest.NFT(l.t, l.inside[0], "", "delete", "table", "inet", "kindnet-ipmasq") },
	}}
}

// proxyNeighbors set kube-proxy up in unusual ways.
func proxyNeighbors() []neighbor {
	restart := func(l *lab) {
		l.nodes[0].StopProxy()
		l.nodes[0].StartProxy(l.nodes[0].ProxyMode)
	}
	return []neighbor{
		{
			name: "kube-proxy with masqueradeAll", pods: plugin("ptp", "nftables", false), start: (*lab).routePods,
			proxy: func(n *cluster.Node) { n.MasqueradeAll = true }, restart: restart,
			masquerades: masquerades{services: true},
		},
		{
			name: "kube-proxy without clusterCIDR", pods: plugin("ptp", "nftables", false), start: (*lab).routePods,
			proxy: func(n *cluster.Node) { n.ProxyPods = "" }, restart: restart,
		},
	}
}
