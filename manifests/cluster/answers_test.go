package cluster_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/kernel"
	"nft-masq-agent/nft/nftrace"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/agent"
)

// A traced is a way of a packet, of which the trace must say who decides about its source.
type traced struct {
	row
	endpoint place // of a Service
	decides  string
}

const (
	theAgent  = "agent"
	kubeProxy = "kube-proxy"
)

func toBeyond(f family, _ policy) netip.Addr { return f.beyondService }

var tracedRows = []traced{
	{row{"pod to outside", "near", outside, 8080, true, masquerade}, nil, theAgent},
	{row{"pod to exempt", "near", exempt, 8080, true, near}, nil, theAgent},
	{row{"ClusterIP", "near", toFar, 8080, false, near}, far, theAgent},
	{row{"ClusterIP of a host outside", "near", toBeyond, 8080, false, masquerade}, outside, theAgent},
	{row{"hairpin", "near", toNear, 8080, false, gate1}, near, kubeProxy},
	{row{"node to a ClusterIP", "node1", toFar, 8080, false, node1}, far, kubeProxy},
	{row{"NodePort, policy Cluster", "outside", node1, 30080, false, node1}, far, kubeProxy},
	{row{"NodePort, policy Local", "outside", node1, 30081, false, client}, near, theAgent},
}

// masqueradesOf is where kube-proxy masquerades, by its mode.
var masqueradesOf = map[string]string{"nftables": "kube-proxy masquerading", "iptables": "nat KUBE-POSTROUTING"}

// What traces say, and which destinations are said not to answer, is what the far end saw. The mode ipvs of kube-proxy
// is not among them: it needs a kernel with ip_vs, as make test-ipvs has.
func TestTracesAndSilenceAreWhatTheFarEndSaw(t *testing.T) {
	w := newCluster(t)
	w.serveOutside()
	w.install("nftables")
	cells := make([]string, len(tracedRows))
	var silence []string
	for _, mode := range proxyModes() {
		w.startProxies(mode)
		w.configure(policies[0])
		for i, row := range tracedRows {
			before := w.connections
			t.Run(mode+", "+row.name, func(t *testing.T) { w.traces(t, row) })
			cells[i] += fmt.Sprintf(" %d |", w.connections-before)
		}
		t.Run(mode+", silence", func(t *testing.T) {
			exempt := w.silence(t)
			forced := w.forced(t)
			silence = append(silence, fmt.Sprintf("| %s | %s | 0 of %d | %s |", mode, exempt, 2*each, forced))
		})
	}
	for i, row := range tracedRows {
		w.rows = append(w.rows, fmt.Sprintf("| %s | %s |%s", row.name, row.decides, cells[i]))
	}
	w.record("trace", "connection | decided by | kube-proxy nftables | kube-proxy iptables")
	w.rows = silence
	w.record("unanswered", "kube-proxy | exempt | status | forced")
}

// serveOutside makes a Service of the host outside.
func (w *world) serveOutside() {
	w.t.Helper()
	text := fmt.Sprintf(labService, "beyond", "Cluster", 30082)
	for i, f := range w.families {
		text += fmt.Sprintf(labEndpoints, "beyond", []string{"v4", "v6"}[i], f.name, f.masqueraded, "node2")
	}
	w.Sh("kubectl apply -f " + w.Write("beyond.yaml", text))
	var beyond corev1.Service
	w.get("service/beyond", &beyond)
	for i := range w.families {
		w.families[i].beyondService = addr(beyond.Spec.ClusterIPs[i])
	}
}

// traces opens and traces a connection of each family and protocol.
func (w *world) traces(t *testing.T, row traced) {
	plain := policies[0]
	for _, f := range w.families {
		for _, proto := range []string{"tcp", "udp"} {
			from, want := f.source(row.from), row.want(f, plain)
			at, to := f.name+", "+proto, netip.AddrPortFrom(row.to(f, plain), row.port)
			_, err := dial(w.hosts[row.from], from, proto, to) // until kube-proxy has the Service
			must(t, err)
			plugin := row.from == "near" && row.endpoint == nil && proto == "tcp" // it takes seconds
			got, seen := w.trace(t, row.from, plugin, from, proto, to)
			w.connections++
			if seen.Addr() != want || got.SeenAs != conntrack.HostPort(seen) {
				t.Errorf("%s: the far end sees %s, want %s, and the trace says:\n%s", at, seen, want, got)
			}
			outcome, rule := nftrace.Kept, row.rule(f, w.nodes[0].ProxyMode, from != want)
			if conntrack.HostPort(seen) != got.Source {
				outcome = nftrace.Translated
			}
			if got.Outcome != outcome || decided(got) != rule {
				t.Errorf("%s: want %s by %q:\n%s", at, outcome, rule, got)
			}
			if row.endpoint == nil {
				continue
			}
			endpoint := netip.AddrPortFrom(row.endpoint(f, plain), 8080)
			if got.Endpoint != conntrack.HostPort(endpoint) || !strings.Contains(got.String(), ": dnat") {
				t.Errorf("%s: want the endpoint %s, and the rule that translates to it:\n%s", at, endpoint, got)
			}
		}
	}
}

// trace runs explain --trace, on node1 or by the plugin of kubectl, and opens the connection.
func (w *world) trace(
	t *testing.T, host string, plugin bool, from netip.Addr, proto string, to netip.AddrPort,
) (got nftrace.Trace, seen netip.AddrPort) {
	t.Helper()
	args := []string{"explain", to.String(), "--protocol", proto, "--trace", "1m", "-o", "json"}
	node := w.nodes[0]
	at, program := node.NS, agent.Program(t)
	if plugin {
		at, program = w.outside, "../kubectl-masq"
		args = append(args, "--pod", "default/near")
	} else {
		args = append(args, "--from", from.String())
		args = append(args, w.flags...)
	}
	cmd := exec.Command(program, args...)
	var out, stderr bytes.Buffer
	cmd.Env, cmd.Stdout, cmd.Stderr = w.Env, &out, &stderr
	p, err := at.Start(cmd)
	must(t, err)
	w.holds(node, kernel.TraceTable, true)
	seen, dialed := dialOnce(w.hosts[host], from, proto, to, patience)
	var answer struct{ Trace nftrace.Trace }
	if err := p.Wait(); err != nil || dialed != nil || json.Unmarshal(out.Bytes(), &answer) != nil {
		t.Fatalf("%s: %v, %v\n%s%s", cmd, err, dialed, &out, &stderr)
	}
	return answer.Trace, seen
}

// rule is the one that must decide.
func (row traced) rule(f family, mode string, translated bool) string {
	table := map[string]string{"IPv4": "ip ", "IPv6": "ip6 "}[f.name]
	switch {
	case row.decides == kubeProxy:
		return "other: " + table + masqueradesOf[mode] + " masquerade"
	case translated:
		return "agent: masquerade"
	}
	return "agent: return"
}

// decided is the rule that decided a trace; that of the agent by what it does.
func decided(got nftrace.Trace) string {
	r := got.Rule
	switch {
	case r == nil:
		return ""
	case r.Owner == nftrace.Agent:
		return "agent: " + r.Action
	}
	return fmt.Sprintf("%s: %s %s %s %s", r.Owner, r.Family, r.Table, r.Chain, r.Action)
}

// dropsPods is a fabric that does not route what comes from pods to the exempt addresses.
const dropsPods = `table inet fabric { chain in { type filter hook prerouting priority raw;
ip saddr 10.244.0.0/16 ip daddr 10.9.0.9 drop
ip6 saddr fd00:10:244::/56 ip6 daddr fd00:9::9 drop
}; }
`

// each is how many connections of a pod are opened to each exempt address over TCP, and over UDP.
const each = 10

// opens has the pod open connections to the exempt addresses, and says how many were answered.
func (w *world) opens(t *testing.T, want place) string {
	t.Helper()
	var answered atomic.Int64
	var all sync.WaitGroup
	for _, f := range w.families {
		for _, proto := range []string{"tcp", "udp"} {
			for range each {
				all.Go(func() {
					seen, err := dialOnce(w.hosts["near"], f.near, proto, netip.AddrPortFrom(f.exempt, 8080), 2*time.Second)
					if err != nil {
						return
					}
					answered.Add(1)
					if seen.Addr() != want(f, policy{}) {
						t.Errorf("%s: %s sees %s", proto, f.exempt, seen)
					}
				})
			}
		}
	}
	all.Wait()
	return fmt.Sprintf("%d of %d", answered.Load(), len(w.families)*2*each)
}

// silence opens connections that are not answered, because they are exempt, and returns how many were.
func (w *world) silence(t *testing.T) string {
	nfttest.NFT(t, w.outside, dropsPods, "-f", "-")
	forget(t, w.nodes[0].NS)
	for _, name := range []string{"udp_timeout", "tcp_timeout_syn_sent"} { // until all have been asked
		must(t, w.nodes[0].NS.Sysctl("net.netfilter.nf_conntrack_"+name, "600"))
	}
	for _, f := range w.families { // UDP counts on ports on which somebody answers
		_, err := dial(w.hosts["near"], f.near, "udp", netip.AddrPortFrom(f.masqueraded, 8080))
		must(t, err)
	}
	answered := w.opens(t, near)
	for _, f := range w.families {
		said := fmt.Sprintf("%s answered 0 of %d connections that show the pod's IP", f.exempt, 2*each)
		w.Await(said, func() bool {
			out, err := w.Try("manifests/kubectl-masq status node1")
			return err != nil && strings.Contains(out, said)
		})
		out, err := w.Try("manifests/kubectl-masq explain --pod default/near " + f.exempt.String())
		unshown := fmt.Sprintf("%d open connections to it agree, but none was answered", 2*each)
		if err != nil || !strings.Contains(out, unshown) {
			t.Errorf("explain: %v, without %q\n%s", err, unshown, out)
		}
	}
	out, err := w.Try("manifests/kubectl-masq fleet")
	if err == nil || !strings.Contains(out, fmt.Sprintf("answered 0 of %d connections", 2*each)) {
		t.Errorf("fleet: %v\n%s", err, out)
	}
	return answered
}

// forced masquerades the same connections, until nothing is said of them, and returns how many were answered.
func (w *world) forced(t *testing.T) string {
	w.configure(policy{config: policies[0].config + "forceMasqueradeCIDRs: [10.9.0.9/32, \"fd00:9::9/128\"]\n"})
	answered := w.opens(t, node1)
	if out, err := w.Try("manifests/kubectl-masq status node1"); err != nil || strings.Contains(out, "answered") {
		t.Errorf("status: %v\n%s", err, out)
	}
	for _, f := range w.families {
		out, err := w.Try("manifests/kubectl-masq explain --pod default/near " + f.exempt.String())
		if err != nil || !strings.Contains(out, f.exempt.String()+" sees "+f.node1.String()) {
			t.Errorf("explain: %v\n%s", err, out)
		}
	}
	nfttest.NFT(t, w.outside, "", "delete", "table", "inet", "fabric")
	return answered
}
