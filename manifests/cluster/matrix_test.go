package cluster_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"nft-masq-agent/manifests/cluster"
	"nft-masq-agent/nft/nfttest"
)

// The pods: one on each node, and what is in front of them.
const workload = `apiVersion: v1
kind: Pod
metadata: {name: near, labels: {app: near}}
spec: {nodeName: node1, tolerations: [{operator: Exists}], containers: [{name: c, image: localhost/pause:1}]}
---
apiVersion: v1
kind: Pod
metadata: {name: far, labels: {app: far}}
spec: {nodeName: node2, tolerations: [{operator: Exists}], containers: [{name: c, image: localhost/pause:1}]}
---
apiVersion: v1
kind: Pod
metadata: {name: host}
spec: {nodeName: node1, hostNetwork: true, tolerations: [{operator: Exists}], containers: [{name: c, image: localhost/pause:1}]}
---
apiVersion: v1
kind: Service
metadata: {name: far}
spec: {type: NodePort, ipFamilyPolicy: RequireDualStack, selector: {app: far},
  ports: [{name: tcp, protocol: TCP, port: 8080, nodePort: 30080}, {name: udp, protocol: UDP, port: 8080, nodePort: 30080}]}
---
apiVersion: v1
kind: Service
metadata: {name: near}
spec: {type: LoadBalancer, externalTrafficPolicy: Local, ipFamilyPolicy: RequireDualStack, selector: {app: near},
  ports: [{name: tcp, protocol: TCP, port: 8080, nodePort: 30081}, {name: udp, protocol: UDP, port: 8080, nodePort: 30081}]}
`

// A family is the addresses of one IP version.
type family struct {
	name                                  string
	client, near, far                     netip.Addr // of outside, of the pods
	masqueraded, exempt                   netip.Addr // outside
	node1, node2, gate1                   netip.Addr
	farService, nearService, nearBalancer netip.Addr
	snat                                  netip.Addr // of node1
}

// source is the address with which a host sends.
func (f family) source(host string) netip.Addr {
	return map[string]netip.Addr{"near": f.near, "node1": f.node1, "host": f.node1, "outside": f.client}[host]
}

// decider is who decides the source that the far end sees.
type decider int

const (
	us    decider = iota // explain must name the same address
	proxy                // kube-proxy, or no program
)

// rows are the ways of a packet. want is what the far end sees.
var rows = []struct {
	name    string
	from    string
	to      func(f family) netip.Addr
	port    uint16
	decides decider
	want    func(f family, p policy) netip.Addr
}{
	{
		"pod to outside", "near", func(f family) netip.Addr { return f.masqueraded }, 8080, us,
		func(f family, p policy) netip.Addr { return p.masquerade(f) },
	},
	{
		"pod to an exempt address outside", "near", func(f family) netip.Addr { return f.exempt }, 8080, us,
		func(f family, _ policy) netip.Addr { return f.near },
	},
	{
		"pod to another node", "near", func(f family) netip.Addr { return f.node2 }, 8080, us,
		func(f family, p policy) netip.Addr { return p.masquerade(f) },
	},
	{
		"pod to its node", "near", func(f family) netip.Addr { return f.node1 }, 8080, us,
		func(f family, _ policy) netip.Addr { return f.near },
	},
	{
		"pod to pod", "near", func(f family) netip.Addr { return f.far }, 8080, us,
		func(f family, _ policy) netip.Addr { return f.near },
	},
	{
		"node to outside", "node1", func(f family) netip.Addr { return f.masqueraded }, 8080, us,
		func(f family, p policy) netip.Addr { return p.host(f) },
	},
	{
		"node to an exempt address outside", "node1", func(f family) netip.Addr { return f.exempt }, 8080, us,
		func(f family, _ policy) netip.Addr { return f.node1 },
	},
	{
		"hostNetwork pod to outside", "host", func(f family) netip.Addr { return f.masqueraded }, 8080, us,
		func(f family, p policy) netip.Addr { return p.host(f) },
	},
	{
		"hostNetwork pod to an exempt address outside", "host", func(f family) netip.Addr { return f.exempt }, 8080, us,
		func(f family, _ policy) netip.Addr { return f.node1 },
	},
	{
		"hostNetwork pod to pod", "host", func(f family) netip.Addr { return f.far }, 8080, us,
		func(f family, _ policy) netip.Addr { return f.node1 },
	},
	{
		"ClusterIP from a hostNetwork pod", "host", func(f family) netip.Addr { return f.farService }, 8080, proxy,
		func(f family, _ policy) netip.Addr { return f.node1 },
	},
	{
		"ClusterIP", "near", func(f family) netip.Addr { return f.farService }, 8080, proxy,
		func(f family, _ policy) netip.Addr { return f.near },
	},
	{
		"ClusterIP from the node", "node1", func(f family) netip.Addr { return f.farService }, 8080, proxy,
		func(f family, _ policy) netip.Addr { return f.node1 },
	},
	{
		"hairpin", "near", func(f family) netip.Addr { return f.nearService }, 8080, proxy,
		func(f family, _ policy) netip.Addr { return f.gate1 },
	},
	{
		"NodePort, policy Cluster", "outside", func(f family) netip.Addr { return f.node1 }, 30080, proxy,
		func(f family, _ policy) netip.Addr { return f.node1 },
	},
	{
		"NodePort, policy Local", "outside", func(f family) netip.Addr { return f.node1 }, 30081, proxy,
		func(f family, _ policy) netip.Addr { return f.client },
	},
	{
		"LoadBalancer address, policy Local", "outside", func(f family) netip.Addr { return f.nearBalancer }, 8080, proxy,
		func(f family, _ policy) netip.Addr { return f.client },
	},
}

// A policy is a config, and what it makes of the source.
type policy struct {
	name, config string
	native       bool // needs mode nftables
	foreign      bool // another program masquerades what pods send
	snat         bool
}

func (p policy) masquerade(f family) netip.Addr {
	if p.snat {
		return f.snat
	}
	return f.node1
}

// host is what the node's own packets become, for which snatAddresses do not count.
func (p policy) host(f family) netip.Addr { return f.node1 }

var policies = []policy{
	{name: "plain", config: "enableIPv6: true\nnonMasqueradeCIDRs: [10.0.0.0/8, fd00::/8]\n"},
	{
		name: "enforceNonMasquerade", native: true, foreign: true,
		config: "enableIPv6: true\nnonMasqueradeCIDRs: [10.0.0.0/8, fd00::/8]\nenforceNonMasquerade: " +
			"true\nmasqueradeSrcInterfaces: [veth*]\n",
	},
	{
		name: "dropInvalid", native: true,
		config: "enableIPv6: true\nnonMasqueradeCIDRs: [10.0.0.0/8, fd00::/8]\nmasqueradeSrcCIDRs: [10.244.0.0/16, " +
			"\"fd00:10:244::/56\"]\ndropInvalid: true\n",
	},
	{
		name: "snatAddresses", native: true, snat: true,
		config: "enableIPv6: true\nnonMasqueradeCIDRs: [10.0.0.0/8, fd00::/8]\nsnatAddresses: [203.0.113.11, " +
			"203.0.113.12, \"2001:db8:2::11\", \"2001:db8:2::12\"]\n",
	},
}

// policyNamed returns one of the policies.
func policyNamed(name string) policy {
	return policies[slices.IndexFunc(policies, func(p policy) bool { return p.name == name })]
}

// foreignMasquerade is what a CNI plugin with ipMasq, or a script, adds.
const foreignMasquerade = `add table inet other
add chain inet other post { type nat hook postrouting priority srcnat + 20; }
add rule inet other post iifname "veth*" masquerade
`

func TestFarEndSeesWhatExplainPredicts(t *testing.T) {
	w := newWorld(t)
	families, hosts := w.hosts()
	w.ip(w.nodes[0].NS, "address add 203.0.113.11/32 dev lo", "address add 2001:db8:2::11/128 dev lo nodad")
	for _, ns := range []*nfttest.NS{w.outside, w.nodes[1].NS} {
		w.ip(ns, "route add 203.0.113.11 via 192.0.2.11", "-6 route add 2001:db8:2::11 via 2001:db8::11")
	}
	w.ip(w.outside,
		"route add 198.51.100.200 via 192.0.2.11", "-6 route add 2001:db8:1::200 via 2001:db8::11")

	order, cells := []string(nil), map[string]string{} // rows, with a cell for each mode of kube-proxy
	for _, proxyMode := range []string{"nftables", "iptables"} {
		for _, n := range w.nodes {
			n.StopProxy()
			n.StartProxy(proxyMode)
		}
		for _, mode := range []string{"nftables", "iptables-nft"} {
			// The other policies are errors in mode iptables-nft.
			w.apply(policies[0].config)
			w.install(mode)
			for _, p := range policies {
				if p.native && mode != "nftables" {
					continue
				}
				// What is ready in mode iptables-nft has applied the one policy.
				if mode == "nftables" {
					w.configure(p)
				}
				before := w.count
				for _, f := range families {
					for _, proto := range []string{"tcp", "udp"} {
						w.matrix(fmt.Sprintf("kube-proxy %s, %s, %s, %s %s", proxyMode, mode, p.name, proto, f.name), hosts, f, proto, p)
					}
				}
				row := p.name
				if mode != "nftables" {
					row += ", " + mode
				}
				if cells[row] == "" {
					order = append(order, row)
				}
				cells[row] += fmt.Sprintf(" %d, %d |", w.connections-before.connections, w.explained-before.explained)
				if p.foreign {
					w.nft(w.nodes[0], "delete table inet other")
				}
			}
			w.Sh("kubectl -n kube-system delete daemonset nft-masq-agent --cascade=foreground")
		}
	}
	for _, row := range order {
		w.rows = append(w.rows, "| "+row+" |"+cells[row])
	}
	w.record("matrix", "policy | kube-proxy nftables | kube-proxy iptables")
}

// version is what the control plane runs.
func (w *world) version() string {
	w.t.Helper()
	var v struct{ ServerVersion struct{ GitVersion string } }
	must(w.t, json.Unmarshal([]byte(w.Sh("kubectl version -o json")), &v))
	return v.ServerVersion.GitVersion
}

// workload makes pods and services, and returns their addresses.
func (w *world) workload() []family {
	w.t.Helper()
	w.Eventually("serviceaccount", "default", "--namespace=default")
	w.Sh("kubectl apply -f " + w.Write("workload.yaml", workload))
	w.Sh(`kubectl patch service near --subresource=status --type=merge -p '{"status":{"loadBalancer":{"ingress":[{"ip":"198.51.100.200"},{"ip":"2001:db8:1::200"}]}}}'`)
	w.Sh("kubectl wait --for=condition=Ready pod/near pod/far pod/host --timeout=3m")
	var near, far corev1.Pod
	var nearService, farService corev1.Service
	for name, into := range map[string]any{
		"pod/near": &near, "pod/far": &far, "service/near": &nearService,
		"service/far": &farService,
	} {
		if !w.Get(into, name, "--namespace=default") {
			w.t.Fatal(w.Complaint())
		}
	}
	v4 := family{
		name: "IPv4", client: addr("192.0.2.100"), masqueraded: addr("198.51.100.1"), exempt: addr("10.9.0.9"),
		nearBalancer: addr("198.51.100.200"), snat: addr("203.0.113.11"),
	}
	v6 := family{
		name: "IPv6", client: addr("2001:db8::100"), masqueraded: addr("2001:db8:1::1"),
		exempt: addr("fd00:9::9"), nearBalancer: addr("2001:db8:1::200"), snat: addr("2001:db8:2::11"),
	}
	for i, f := range []*family{&v4, &v6} {
		f.near, f.far = addr(near.Status.PodIPs[i].IP), addr(far.Status.PodIPs[i].IP)
		f.nearService, f.farService = addr(nearService.Spec.ClusterIPs[i]), addr(farService.Spec.ClusterIPs[i])
	}
	v4.node1, v4.node2, v4.gate1 = w.nodes[0].V4, w.nodes[1].V4, w.nodes[0].GateV4
	v6.node1, v6.node2, v6.gate1 = w.nodes[0].V6, w.nodes[1].V6, w.nodes[0].GateV6
	return []family{v4, v6}
}

// install runs the command of README.md; the image is already on the nodes.
func (w *world) install(mode string, components ...string) {
	w.t.Helper()
	if w.mode = mode; mode != "nftables" {
		components = append(components, mode)
	}
	w.Sh("make -s install" + w.imageFlags() + " COMPONENTS='" + strings.Join(components, " ") + "'")
	w.Sh("kubectl -n kube-system rollout status daemonset/nft-masq-agent --timeout=3m")
}

// imageFlags name the agent's image to make.
func (w *world) imageFlags() string {
	w.t.Helper()
	_, image := agentArchive(w.t)
	_, tag, _ := strings.Cut(image, ":")
	return " IMAGE=" + agentImage + " TAG=" + tag
}

// agent is the name of the agent's pod on a node.
func (w *world) agent(n *cluster.Node) string {
	w.t.Helper()
	var pods corev1.PodList
	w.Await("agent of "+n.Name, func() bool {
		return w.Get(&pods, "pods", "--field-selector=spec.nodeName="+n.Name,
			"--selector=app.kubernetes.io/name=nft-masq-agent") && len(pods.Items) == 1
	})
	return pods.Items[0].Name
}

// ask runs a command of the agent's in its pod.
func (w *world) ask(n *cluster.Node, into any, args string) bool {
	w.t.Helper()
	out, err := w.Try("kubectl -n kube-system exec " + w.agent(n) + " -- /nft-masq-agent " + args + " -o json 2>/dev/null")
	return json.Unmarshal([]byte(out), into) == nil && err == nil
}

type checked struct {
	Warnings []struct{ Message string }
	Errors   []struct{ Message string }
	Config   struct {
		Accepted bool
		Hash     string
	}
}

// configure changes the ConfigMap with the command of README.md, and waits until
// the kernels hold it.
func (w *world) configure(p policy) {
	w.t.Helper()
	w.Write("config", p.config)
	out, _ := w.Try("bin/linux_$(go env GOARCH)/nft-masq-agent check --config " + w.Dir + "/config --mode " + w.mode +
		" -o json")
	var c checked
	must(w.t, json.Unmarshal([]byte(out), &c))
	for _, warning := range c.Warnings {
		if strings.Contains(warning.Message, "unknown key") {
			w.t.Fatalf("%s: %s", p.name, warning.Message)
		}
	}
	if !c.Config.Accepted {
		w.t.Fatalf("%s: %s", p.name, out)
	}
	w.apply(p.config)
	for _, n := range w.nodes {
		if p.foreign {
			w.nft(w.nodes[0], foreignMasquerade)
			p.foreign = false
		}
		// The kubelet syncs a pod that has changed at once.
		w.Sh("kubectl -n kube-system annotate --overwrite pod " + w.agent(n) + " test=" + c.Config.Hash)
		w.Await(n.Name+" holds "+p.name, func() bool {
			out, _ := n.NS.Output("", "nft", "list", "ruleset")
			return strings.Contains(out, "config "+c.Config.Hash)
		})
	}
}

// apply runs the command of README.md that changes the config.
func (w *world) apply(config string) {
	w.t.Helper()
	w.Write("config", config)
	w.Sh("kubectl create configmap ip-masq-agent --from-file=" + w.Dir +
		"/config --namespace=kube-system --dry-run=client -o yaml | kubectl apply -f -")
}

func (w *world) nft(n *cluster.Node, rules string) {
	w.t.Helper()
	if _, err := n.NS.Output(rules, "nft", "-f", "-"); err != nil {
		w.t.Fatal(err)
	}
}

// matrix opens a connection for each row.
func (w *world) matrix(name string, hosts map[string]*nfttest.NS, f family, proto string, p policy) {
	w.t.Run(name, func(t *testing.T) {
		for _, row := range rows {
			to, want := row.to(f), row.want(f, p)
			seen, err := dial(hosts[row.from], f.source(row.from), proto, netip.AddrPortFrom(to, row.port))
			w.connections++
			if err != nil {
				t.Errorf("%s: %v", row.name, err)
			} else if seen != want {
				t.Errorf("%s: %s sees %s, want %s", row.name, to, seen, want)
			}
			if row.decides != us || proto != "tcp" {
				continue
			}
			from := f.source(row.from)
			var answer struct {
				Sees     string
				Headline string
			}
			if !w.ask(w.nodes[0], &answer, "explain "+to.String()+" --from "+from.String()) {
				t.Errorf("%s: explain fails", row.name)
			}
			w.explained++
			if answer.Sees == "" {
				answer.Sees = from.String()
			}
			if answer.Sees != want.String() {
				t.Errorf("%s: explain says %s, want %s: %s", row.name, answer.Sees, want, answer.Headline)
			}
		}
	})
}

// echo answers on an address, over TCP and UDP, with the address that it sees.
func echo(t *testing.T, ns *nfttest.NS, at netip.AddrPort) {
	t.Helper()
	var l net.Listener
	var u net.PacketConn
	must(t, ns.Do(func() (err error) {
		if l, err = net.Listen("tcp", at.String()); err != nil {
			return err
		}
		u, err = net.ListenPacket("udp", at.String())
		return err
	}))
	t.Cleanup(func() { _, _ = l.Close(), u.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = fmt.Fprint(c, c.RemoteAddr())
			_ = c.Close()
		}
	}()
	go func() {
		b := make([]byte, 1)
		for {
			_, from, err := u.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = u.WriteTo([]byte(from.String()), from)
		}
	}()
}

// dial opens a connection and returns the source that the far end sees. A
// service works once kube-proxy has seen it; dial retries until then.
func dial(ns *nfttest.NS, from netip.Addr, proto string, to netip.AddrPort) (seen netip.Addr, err error) {
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		if seen, err = dialOnce(ns, from, proto, to); err == nil {
			return seen, nil
		}
	}
	return seen, err
}

// patience is how long a connection may take on a busy machine.
const patience = 20 * time.Second

func dialOnce(ns *nfttest.NS, from netip.Addr, proto string, to netip.AddrPort) (netip.Addr, error) {
	var c net.Conn
	err := ns.Do(func() (err error) {
		d := net.Dialer{Timeout: patience, LocalAddr: &net.TCPAddr{IP: from.AsSlice()}}
		if proto == "udp" {
			d.LocalAddr = &net.UDPAddr{IP: from.AsSlice()}
		}
		c, err = d.Dial(proto, to.String())
		return err
	})
	if err != nil {
		return netip.Addr{}, err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		return netip.Addr{}, err
	}
	if proto == "udp" {
		if _, err := c.Write([]byte("x")); err != nil {
			return netip.Addr{}, err
		}
	}
	b := make([]byte, 100)
	n, err := c.Read(b)
	if err != nil && err != io.EOF {
		return netip.Addr{}, err
	}
	seen, err := netip.ParseAddrPort(string(b[:n]))
	return seen.Addr().Unmap(), err
}
