package cluster_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"nft-masq-agent/manifests/cluster"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/agent"
)

// A lab is a cluster without kubelets: the test runs CNI plugins for its pods, and
// writes Nodes, Services and EndpointSlices. kube-proxy, flannel, the plugins and the
// agent on node1 are the programs themselves.
type lab struct {
	*world
	plugins string    // their directory
	pods    []*labPod // near, far
	made    int       // pods
	agent   *agent.Agent
	config  string // its file
}

// A labPod is a network namespace that CNI plugins have connected.
type labPod struct {
	ns       *nfttest.NS
	node     *cluster.Node
	id       string
	attached []attachment
	addrs    []netip.Addr // of eth0, IPv4 first
}

// An attachment is what a plugin was asked for.
type attachment struct {
	ifname string
	conf   map[string]any
}

const labNode = `apiVersion: v1
kind: Node
metadata: {name: %[1]s, annotations: {by: test}} # flannel needs one
spec: {podCIDR: 10.244.%[2]d.0/24, podCIDRs: [10.244.%[2]d.0/24, "fd00:10:244:%[2]d::/64"]}
status: {addresses: [{type: InternalIP, address: %[3]s}, {type: InternalIP, address: "%[4]s"}]}
`

// newLab starts everything but kube-proxy, the agent and the pods.
func newLab(t *testing.T) *lab {
	t.Helper()
	w, p := newNetwork(t)
	l := &lab{world: w, plugins: filepath.Join(string(p), "cni")}
	l.Control = cluster.StartControl(t, w.outside, p, "192.0.2.100", "")
	l.flags = []string{"--probe-socket", l.Dir + "/probe"}
	l.ask = func(args ...string) (string, error) {
		return l.inside[0].Output("", agent.Program(t), append(args, l.flags...)...)
	}
	for i, ns := range l.inside {
		n := l.NewNode(ns, i+1)
		l.nodes = append(l.nodes, n)
		l.Sh("kubectl create -f " + l.Write(n.Name+".yaml", fmt.Sprintf(labNode, n.Name, i+1, n.V4, n.V6)))
	}
	l.config = l.Write("ip-masq-agent", policies[0].config)
	for _, a := range []string{"198.51.100.1", "10.9.0.9", "2001:db8:1::1", "fd00:9::9"} {
		echo(t, l.outside, netip.AddrPortFrom(addr(a), 8080))
	}
	return l
}

// network is the config of a CNI plugin bridge or ptp, and of portmap.
func (l *lab) network(n *cluster.Node, number int, plugin, backend string, masquerade bool) []map[string]any {
	state := filepath.Join(l.Dir, n.Name, "ipam")
	return []map[string]any{
		{
			"cniVersion": "1.0.0", "name": "pods", "type": plugin, "ipMasq": masquerade, "ipMasqBackend": backend,
			"bridge": "cni0", "isGateway": true, "hairpinMode": true,
			"ipam": map[string]any{
				"type": "host-local", "dataDir": state,
				"ranges": []any{
					[]any{map[string]any{"subnet": fmt.Sprintf("10.244.%d.0/24", number)}},
					[]any{map[string]any{"subnet": fmt.Sprintf("fd00:10:244:%d::/64", number)}},
				},
				"routes": []any{map[string]any{"dst": "0.0.0.0/0"}, map[string]any{"dst": "::/0"}},
			},
		},
		{
			"cniVersion": "1.0.0", "name": "pods", "type": "portmap", "backend": backend, "snat": true,
			"runtimeConfig": map[string]any{"portMappings": []any{
				map[string]any{"hostPort": 8081, "containerPort": 8080, "protocol": "tcp"},
				map[string]any{"hostPort": 8081, "containerPort": 8080, "protocol": "udp"},
			}},
		},
	}
}

// plugin runs a CNI plugin as a container runtime does.
func (l *lab) plugin(p *labPod, command, ifname string, conf map[string]any) (result map[string]any) {
	l.t.Helper()
	stdin, err := json.Marshal(conf)
	must(l.t, err)
	cmd := exec.Command(filepath.Join(l.plugins, fmt.Sprint(conf["type"])))
	cmd.Env = append(os.Environ(), "CNI_COMMAND="+command, "CNI_CONTAINERID="+p.id, "CNI_IFNAME="+ifname,
		"CNI_PATH="+l.plugins, fmt.Sprintf("CNI_NETNS=/proc/%d/fd/%d", os.Getpid(), p.ns.Fd()))
	var out, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(stdin), &out, &stderr
	if err := p.node.NS.Run(cmd); err != nil {
		l.t.Fatalf("%s %s: %v\n%s%s\n%s", command, conf["type"], err, &out, &stderr, stdin)
	}
	if out.Len() > 0 {
		must(l.t, json.Unmarshal(out.Bytes(), &result))
	}
	return result
}

// newPod makes a pod, which answers on port 8080.
func (l *lab) newPod(n *cluster.Node, list []map[string]any) *labPod {
	l.t.Helper()
	l.made++
	p := &labPod{ns: nfttest.NewNS(l.t, "pod"), node: n, id: fmt.Sprintf("pod%d", l.made)}
	p.addrs = l.attach(p, "eth0", list)
	for _, a := range p.addrs {
		echo(l.t, p.ns, netip.AddrPortFrom(a, 8080))
	}
	return p
}

// attach connects a pod to a network, and returns its addresses there.
func (l *lab) attach(p *labPod, ifname string, list []map[string]any) (addrs []netip.Addr) {
	l.t.Helper()
	var result map[string]any
	for _, conf := range list {
		conf = maps.Clone(conf)
		if result != nil {
			conf["prevResult"] = result
		}
		result = l.plugin(p, "ADD", ifname, conf)
		p.attached = append(p.attached, attachment{ifname, conf})
	}
	ips, _ := result["ips"].([]any)
	for _, ip := range ips {
		at, _ := ip.(map[string]any)
		addrs = append(addrs, netip.MustParsePrefix(fmt.Sprint(at["address"])).Addr())
	}
	return addrs
}

// delete removes a pod's interfaces and what the plugins made for them.
func (l *lab) delete(p *labPod) {
	l.t.Helper()
	for _, a := range slices.Backward(p.attached) {
		l.plugin(p, "DEL", a.ifname, a.conf)
	}
}

const labService = `apiVersion: v1
kind: Service
metadata: {name: %[1]s}
spec: {type: NodePort, externalTrafficPolicy: %[2]s, ipFamilyPolicy: RequireDualStack,
  ports: [{name: tcp, protocol: TCP, port: 8080, nodePort: %[3]d}, {name: udp, protocol: UDP, port: 8080, nodePort: %[3]d}]}
---
`

const labEndpoints = `apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: %[1]s-%[2]s, labels: {kubernetes.io/service-name: %[1]s}}
addressType: %[3]s
ports: [{name: tcp, protocol: TCP, port: 8080}, {name: udp, protocol: UDP, port: 8080}]
endpoints: [{addresses: ["%[4]s"], nodeName: %[5]s, conditions: {ready: true}}]
---
`

// renew makes a pod on each node, in front of which the Services are, and deletes those
// that were there.
func (l *lab) renew(network connector) {
	l.t.Helper()
	for _, p := range l.pods {
		l.delete(p)
	}
	l.pods = nil
	var text strings.Builder
	for i, n := range l.nodes {
		p := l.newPod(n, network(l, n, i+1))
		l.pods = append(l.pods, p)
		name := []string{"near", "far"}[i]
		fmt.Fprintf(&text, labService, name, []string{"Local", "Cluster"}[i], 30081-i)
		for j, a := range p.addrs {
			fmt.Fprintf(&text, labEndpoints, name, []string{"v4", "v6"}[j], []string{"IPv4", "IPv6"}[j], a, n.Name)
		}
	}
	l.Sh("kubectl apply -f " + l.Write("services.yaml", text.String()))
	l.hosts = map[string]*nfttest.NS{
		"outside": l.outside, "node1": l.inside[0], "near": l.pods[0].ns, "near's other interface": l.pods[0].ns,
	}
	l.families = l.addresses()
	for i := range l.families {
		l.families[i].near, l.families[i].far = l.pods[0].addrs[i], l.pods[1].addrs[i]
	}
}

// enforce changes the agent's config, starts the agent if it does not run, and waits
// until the kernel holds the policy.
func (l *lab) enforce(config string) {
	l.t.Helper()
	must(l.t, os.WriteFile(l.config+".new", []byte(config), 0o600))
	must(l.t, os.Rename(l.config+".new", l.config))
	var c checked
	out, _ := l.inside[0].Output("", agent.Program(l.t), "check", "--config", l.config, "-o", "json")
	must(l.t, json.Unmarshal([]byte(out), &c))
	if !c.Config.Accepted || len(c.Warnings) > 0 {
		l.t.Fatalf("%s\n%s", config, out)
	}
	if l.agent == nil {
		l.agent = agent.Run(l.t, l.inside[0], exec.Command(agent.Program(l.t), "run", "--config", l.config,
			"--probe-socket", l.Dir+"/probe"))
	}
	l.holds(l.nodes[0], "config "+c.Config.Hash, true)
	for _, ns := range l.inside {
		forget(l.t, ns)
	}
}

// forget deletes what a node knows of connections: an entry under the policy before
// would decide when a port is used again.
func forget(t *testing.T, ns *nfttest.NS) {
	t.Helper()
	h, err := ns.Netlink()
	must(t, err)
	must(t, h.ConntrackTableFlush(netlink.ConntrackTable))
}
