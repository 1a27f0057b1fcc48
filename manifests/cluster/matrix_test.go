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

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"nft-masq-agent/manifests/cluster"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/netns"
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
	beyondService                         netip.Addr // of masqueraded
	snat                                  netip.Addr // of node1
	second                                netip.Addr // of near's other interface
}

// source is the address with which a host sends.
func (f family) source(host string) netip.Addr {
	return map[string]netip.Addr{
		"near": f.near, "near's other interface": f.second, "node1": f.node1, "host": f.node1, "outside": f.client,
	}[host]
}

// A place returns an address.
type place func(f family, p policy) netip.Addr

func near(f family, _ policy) netip.Addr       { return f.near }
func far(f family, _ policy) netip.Addr        { return f.far }
func node1(f family, _ policy) netip.Addr      { return f.node1 }
func node2(f family, _ policy) netip.Addr      { return f.node2 }
func gate1(f family, _ policy) netip.Addr      { return f.gate1 }
func client(f family, _ policy) netip.Addr     { return f.client }
func outside(f family, _ policy) netip.Addr    { return f.masqueraded }
func exempt(f family, _ policy) netip.Addr     { return f.exempt }
func toFar(f family, _ policy) netip.Addr      { return f.farService }
func toNear(f family, _ policy) netip.Addr     { return f.nearService }
func balancer(f family, _ policy) netip.Addr   { return f.nearBalancer }
func masquerade(f family, p policy) netip.Addr { return p.masquerade(f) }

// A row is a way of a packet.
type row struct {
	name, from string
	to         place
	port       uint16
	explained  bool  // explain must name the same address; otherwise kube-proxy decides, or no program
	want       place // what the far end sees
}

// masquerades are what another program masquerades of what pods send without enforceNonMasquerade.
type masquerades struct {
	exempt, remote bool // destinations: outside, pods of another node
	services       bool // connections to Services, marked
}

// commonRows are the ways of a packet in a cluster and in the lab. snatAddresses do not count for the node's own
// packets.
func commonRows(masq masquerades, enforced bool) []row {
	unless := func(other bool) place {
		if other {
			return node1
		}
		return near
	}
	return []row{
		{"pod to outside", "near", outside, 8080, true, masquerade},
		{"pod to an exempt address outside", "near", exempt, 8080, true, unless(masq.exempt && !enforced)},
		{"pod to pod", "near", far, 8080, true, unless(masq.remote && !enforced)},
		{"node to outside", "node1", outside, 8080, true, node1},
		{"node to an exempt address outside", "node1", exempt, 8080, true, node1},
		{"ClusterIP", "near", toFar, 8080, false, unless(masq.services || masq.remote && !enforced)},
		{"hairpin", "near", toNear, 8080, false, gate1},
		{"NodePort, policy Cluster", "outside", node1, 30080, false, node1},
		{"NodePort, policy Local", "outside", node1, 30081, false, client},
	}
}

// rows are those of a cluster.
func rows() []row {
	return append(commonRows(masquerades{}, false), []row{
		{"pod to another node", "near", node2, 8080, true, masquerade},
		{"pod to its node", "near", node1, 8080, true, near},
		{"hostNetwork pod to outside", "host", outside, 8080, true, node1},
		{"hostNetwork pod to an exempt address outside", "host", exempt, 8080, true, node1},
		{"hostNetwork pod to pod", "host", far, 8080, true, node1},
		{"ClusterIP from a hostNetwork pod", "host", toFar, 8080, false, node1},
		{"ClusterIP from the node", "node1", toFar, 8080, false, node1},
		{"LoadBalancer address, policy Local", "outside", balancer, 8080, false, client},
	}...)
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

// exemptCIDRs is the plain policy with the flag --enable-ipv6: mode iptables-nft has not the key.
const exemptCIDRs = "nonMasqueradeCIDRs: [10.0.0.0/8, fd00::/8]\n"

var policies = []policy{
	{name: "plain", config: "enableIPv6: true\n" + exemptCIDRs},
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
	w := newCluster(t)
	w.ip(w.nodes[0].NS, "address add 203.0.113.11/32 dev lo", "address add 2001:db8:2::11/128 dev lo nodad")
	for _, ns := range []*nfttest.NS{w.outside, w.nodes[1].NS} {
		w.ip(ns, "route add 203.0.113.11 via 192.0.2.11", "-6 route add 2001:db8:2::11 via 2001:db8::11")
	}
	w.ip(w.outside,
		"route add 198.51.100.200 via 192.0.2.11", "-6 route add 2001:db8:1::200 via 2001:db8::11")

	order, cells := []string(nil), map[string]string{} // rows, with a cell for each mode of kube-proxy
	for _, proxyMode := range proxyModes() {
		w.startProxies(proxyMode)
		for _, mode := range []string{"nftables", "iptables-nft"} {
			// The other policies are errors in mode iptables-nft.
			w.apply(map[string]string{"nftables": policies[0].config, "iptables-nft": exemptCIDRs}[mode])
			// A new agent does not know whether connections are older than its policy.
			w.forgetPod(w.nodes[0], "near")
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
				t.Run(fmt.Sprintf("kube-proxy %s, %s, %s", proxyMode, mode, p.name), func(t *testing.T) {
					w.matrix(t, p.name, w.families, rows(), p)
				})
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

// workload makes pods and services.
func (w *world) workload() {
	w.t.Helper()
	w.Eventually("serviceaccount", "default", "--namespace=default")
	w.Sh("kubectl apply -f " + w.Write("workload.yaml", workload))
	w.Sh(`kubectl patch service near --subresource=status --type=merge -p '{"status":{"loadBalancer":{"ingress":[{"ip":"198.51.100.200"},{"ip":"2001:db8:1::200"}]}}}'`)
	w.Sh("kubectl wait --for=condition=Ready pod/near pod/far pod/host --timeout=3m")
	var near, far corev1.Pod
	w.get("pod/near", &near)
	w.get("pod/far", &far)
	w.families = w.addresses()
	for i := range w.families {
		w.families[i].near, w.families[i].far = addr(near.Status.PodIPs[i].IP), addr(far.Status.PodIPs[i].IP)
	}
}

func (w *world) get(name string, into any) {
	w.t.Helper()
	if !w.Get(into, name, "--namespace=default") {
		w.t.Fatal(w.Complaint())
	}
}

// addresses returns those that are the same in each cluster, and those of the Services.
func (w *world) addresses() []family {
	w.t.Helper()
	n1, n2 := w.nodes[0], w.nodes[1]
	families := []family{
		{
			name: "IPv4", client: addr("192.0.2.100"), masqueraded: addr("198.51.100.1"), exempt: addr("10.9.0.9"),
			nearBalancer: addr("198.51.100.200"), snat: addr("203.0.113.11"), node1: n1.V4, node2: n2.V4, gate1: n1.GateV4,
		},
		{
			name: "IPv6", client: addr("2001:db8::100"), masqueraded: addr("2001:db8:1::1"), exempt: addr("fd00:9::9"),
			nearBalancer: addr("2001:db8:1::200"), snat: addr("2001:db8:2::11"), node1: n1.V6, node2: n2.V6, gate1: n1.GateV6,
		},
	}
	var near, far corev1.Service
	w.get("service/near", &near)
	w.get("service/far", &far)
	for i := range families {
		families[i].nearService, families[i].farService = addr(near.Spec.ClusterIPs[i]), addr(far.Spec.ClusterIPs[i])
	}
	return families
}

// install runs the command of README.md; the image is already on the nodes.
func (w *world) install(mode string, components ...string) {
	w.t.Helper()
	if w.mode = mode; mode != "nftables" {
		components = append(components, mode)
	}
	w.Sh("make -s install" + w.imageFlags() + " COMPONENTS='" + strings.Join(components, " ") + "'")
	if mode != "nftables" {
		w.Sh(enableIPv6("nft-masq-agent"))
	}
	w.Sh(rollout("nft-masq-agent"))
}

// enableIPv6 is the command that gives a DaemonSet's agents the flag.
func enableIPv6(name string) string {
	return "kubectl -n kube-system patch daemonset " + name + " --type=json -p '[{\"op\": \"add\", " +
		"\"path\": \"/spec/template/spec/containers/0/args/-\", \"value\": \"--enable-ipv6\"}]'"
}

// rollout is the command that waits until the pods of a DaemonSet are as it says.
func rollout(name string) string {
	return "kubectl -n kube-system rollout status daemonset/" + name + " --timeout=3m"
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

// inPod runs a command of the agent's in its pod on node1.
func (w *world) inPod(args ...string) (string, error) {
	return w.Try("kubectl -n kube-system exec " + w.agent(w.nodes[0]) + " -- /nft-masq-agent " + strings.Join(args, " ") +
		" 2>/dev/null")
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
		w.holds(n, "config "+c.Config.Hash, true)
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

// matrix opens connections for each row, and asks explain.
func (w *world) matrix(t *testing.T, name string, families []family, rows []row, p policy) {
	t.Helper()
	for _, f := range families {
		for _, row := range rows {
			from, want := f.source(row.from), row.want(f, p)
			at, to := name+": "+f.name+": "+row.name, netip.AddrPortFrom(row.to(f, p), row.port)
			for _, proto := range []string{"tcp", "udp"} {
				w.connect(t, at, w.hosts[row.from], from, proto, to, want)
			}
			if row.explained {
				w.explains(t, at, from, to, want)
			}
		}
	}
}

// connect opens a connection, and compares what the far end sees.
func (w *world) connect(
	t *testing.T, at string, ns *nfttest.NS, from netip.Addr, proto string, to netip.AddrPort, want netip.Addr,
) {
	t.Helper()
	seen, err := dial(ns, from, proto, to)
	if w.connections++; err != nil || seen != want {
		t.Errorf("%s: %s %s sees %s, want %s: %v", at, proto, to, seen, want, err)
	}
}

// forgetPod deletes what a node knows of connections of a pod: over UDP, they are open for half a minute.
func (w *world) forgetPod(n *cluster.Node, pod string) {
	w.t.Helper()
	h, err := n.NS.Netlink()
	must(w.t, err)
	for _, f := range w.families {
		source := f.source(pod)
		ofPod := &netlink.ConntrackFilter{}
		must(w.t, ofPod.AddIP(netlink.ConntrackOrigSrcIP, source.AsSlice()))
		family := netlink.InetFamily(unix.AF_INET)
		if source.Is6() {
			family = unix.AF_INET6
		}
		_, err = h.ConntrackDeleteFilters(netlink.ConntrackTable, family, ofPod)
		must(w.t, err)
	}
}

// explains asks explain on node1 about a connection.
func (w *world) explains(t *testing.T, at string, from netip.Addr, to netip.AddrPort, want netip.Addr) {
	t.Helper()
	out, err := w.ask("explain", to.String(), "--from", from.String(), "-o", "json")
	var answer struct {
		Sees, ShouldSee, Headline string
		Why                       struct{ Code string }
	}
	if json.Unmarshal([]byte(out), &answer) != nil || err != nil {
		t.Errorf("%s: explain: %v\n%s", at, err, out)
	}
	w.explained++
	said := answer.Sees
	if said == "" && answer.Why.Code != "contradicted" { // connections of the node show nothing of the policy
		said = answer.ShouldSee
	}
	if said != want.String() {
		t.Errorf("%s: explain says %q, want %s: %s", at, said, want, answer.Headline)
	}
}

// echo answers on an address, over TCP and UDP, with the address that it sees.
func echo(t *testing.T, ns *nfttest.NS, at netip.AddrPort) {
	t.Helper()
	answer(t, ns, at, func(string, netip.AddrPort) {})
}

// answer is echo that says what it has seen.
func answer(t *testing.T, ns *nfttest.NS, at netip.AddrPort, saw func(proto string, from netip.AddrPort)) {
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
			saw("tcp", netip.MustParseAddrPort(c.RemoteAddr().String()))
			_, _ = fmt.Fprint(c, c.RemoteAddr())
			_ = c.Close()
		}
	}()
	go func() {
		for b := make([]byte, 1); ; {
			_, from, err := u.ReadFrom(b)
			if err != nil {
				return
			}
			saw("udp", netip.MustParseAddrPort(from.String()))
			_, _ = u.WriteTo([]byte(from.String()), from)
		}
	}()
}

// dial opens a connection and returns the source that the far end sees. A
// service works once kube-proxy has seen it; dial retries until then.
func dial(ns *nfttest.NS, from netip.Addr, proto string, to netip.AddrPort) (seen netip.Addr, err error) {
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		var at netip.AddrPort
		if at, err = dialOnce(ns, from, proto, to, patience); err == nil {
			return at.Addr(), nil
		}
	}
	return seen, err
}

// patience is how long a connection may take on a busy machine.
const patience = 20 * time.Second

func dialOnce(
	ns *nfttest.NS, from netip.Addr, proto string, to netip.AddrPort, timeout time.Duration,
) (seen netip.AddrPort, err error) {
	d := net.Dialer{Timeout: timeout, LocalAddr: &net.TCPAddr{IP: from.AsSlice()}}
	if proto == "udp" {
		d.LocalAddr = &net.UDPAddr{IP: from.AsSlice()}
	}
	c, err := netns.In(ns, func() (net.Conn, error) { return d.Dial(proto, to.String()) })
	if err != nil {
		return seen, err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(timeout)); err != nil {
		return seen, err
	}
	if proto == "udp" {
		if _, err := c.Write([]byte("x")); err != nil {
			return seen, err
		}
	}
	b := make([]byte, 100)
	n, err := c.Read(b)
	if err != nil && err != io.EOF {
		return seen, err
	}
	seen, err = netip.ParseAddrPort(string(b[:n]))
	return netip.AddrPortFrom(seen.Addr().Unmap(), seen.Port()), err
}
