package cluster_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"nft-masq-agent/manifests/cluster"
)

// sigTests are tests of Kubernetes' sig-network, with what selects them. Those that
// take longest start first.
var sigTests = []struct{ name, focus string }{
	{"session affinity", `session affinity`},
	{"dual stack, with Granular Checks", `IPv6DualStack`},
	{
		"Granular Checks of services, UDP and others",
		`Networking Granular Checks: Services should .*(udp|selector|hostNetwork)`,
	},
	{"Granular Checks of services, HTTP", `Networking Granular Checks: Services should .*http`},
	{"Conntrack", `Conntrack`},
	{"internalTrafficPolicy", `respect internalTrafficPolicy=Local`},
	{"Granular Checks of pods", `Networking Granular Checks: Pods`},
	{"HostPort", `HostPort validates`},
	{"NoSNAT", `NoSNAT`},
	{"source IP of a pod through a ClusterIP", `preserve source pod IP`},
	{"hairpin", `hairpin back`},
}

// The machine has no SCTP and the cluster no load balancer.
const sigSkip = `SCTP|LoadBalancer|\[Disruptive\]`

// coreDNS is the cluster's DNS.
const coreDNS = `apiVersion: v1
kind: ServiceAccount
metadata: {name: coredns, namespace: kube-system}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: coredns}
rules:
  - {apiGroups: [""], resources: [services, pods, namespaces], verbs: [list, watch]}
  - {apiGroups: [discovery.k8s.io], resources: [endpointslices], verbs: [list, watch]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: coredns}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: coredns}
subjects: [{kind: ServiceAccount, name: coredns, namespace: kube-system}]
---
apiVersion: v1
kind: ConfigMap
metadata: {name: coredns, namespace: kube-system}
data:
  Corefile: |
    .:53 {
        errors
        ready
        kubernetes cluster.local in-addr.arpa ip6.arpa
    }
---
apiVersion: v1
kind: Service
metadata: {name: kube-dns, namespace: kube-system}
spec: {clusterIP: 10.96.0.10, selector: {k8s-app: kube-dns}, ports: [{name: dns, port: 53, protocol: UDP}, {name: dns-tcp, port: 53, protocol: TCP}]}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: coredns, namespace: kube-system}
spec:
  selector: {matchLabels: {k8s-app: kube-dns}}
  template:
    metadata: {labels: {k8s-app: kube-dns}}
    spec:
      serviceAccountName: coredns
      dnsPolicy: Default
      containers:
        - name: coredns
          image: localhost/coredns:1
          args: [-conf, /etc/coredns/Corefile]
          readinessProbe: {httpGet: {path: /ready, port: 8181}}
          volumeMounts: [{name: config, mountPath: /etc/coredns}]
      volumes: [{name: config, configMap: {name: coredns}}]
`

// sigRun runs those of sig-network's tests that an expression selects, and returns
// by name why each failed, "" for passed.
func (w *world) sigRun(p cluster.Programs, name, focus string) map[string]string {
	w.t.Helper()
	file := filepath.Join(w.Dir, name+".json")
	_ = os.Remove(file) // of an earlier run
	log, err := os.Create(filepath.Join(w.Dir, name+".log"))
	must(w.t, err)
	defer log.Close()
	cmd := exec.Command(p.Bin("e2e.test"), "--provider=skeleton", "--kubeconfig="+w.Kubeconfig(), "--kubectl-path="+
		p.Bin("kubectl"),
		"--ginkgo.focus="+focus, "--ginkgo.skip="+sigSkip, "--ginkgo.json-report="+file, "--ginkgo.no-color",
		"--ginkgo.timeout=1h", "--ginkgo.succinct",
		"--dump-logs-on-failure=false", "--disable-log-dump", "--e2e-output-dir="+w.Dir)
	cmd.Dir, cmd.Env, cmd.Stdout, cmd.Stderr = w.Dir, w.Env, log, log
	failed := w.outside.Run(cmd)
	var report []struct {
		SpecReports []struct {
			ContainerHierarchyTexts           []string
			LeafNodeType, LeafNodeText, State string
			Failure                           struct{ Message string }
		}
	}
	text, err := os.ReadFile(file)
	if err == nil {
		err = json.Unmarshal(text, &report)
	}
	outcome := map[string]string{}
	for _, suite := range report {
		for _, spec := range suite.SpecReports {
			switch {
			case spec.State == "skipped" || spec.State == "pending":
			case spec.LeafNodeType == "It":
				name := strings.TrimSpace(strings.Join(append(spec.ContainerHierarchyTexts, spec.LeafNodeText), " "))
				if outcome[name] = ""; spec.State != "passed" {
					outcome[name] = spec.State + ": " + spec.Failure.Message
				}
			case spec.State != "passed":
				w.t.Errorf("%s: %s %s: %s", name, spec.LeafNodeType, spec.State, spec.Failure.Message)
			}
		}
	}
	if len(outcome) == 0 {
		out, _ := os.ReadFile(log.Name())
		w.t.Errorf("%s: no test ran: %v, %v\n%s", name, failed, err, out[max(0, len(out)-4000):])
	}
	return outcome
}

// labels are those in the name of a test.
var labels = regexp.MustCompile(` *\[[^\]]*\]`)

func TestSigNetwork(t *testing.T) {
	w := newWorld(t)
	p := cluster.Programs(os.Getenv("CLUSTER_PROGRAMS"))
	// What pods send is masqueraded as without dropInvalid, and less passes.
	dropping := policyNamed("dropInvalid")
	w.apply(dropping.config)
	cells := map[string]string{} // of a row: one for each mode of kube-proxy
	cell := func(row, format string, args ...any) { cells[row] += " " + fmt.Sprintf(format, args...) + " |" }
	const exempt, untracked = "NoSNAT, with `nonMasqueradeCIDRs: []`", "packets that dropInvalid dropped"
	for _, proxyMode := range []string{"nftables", "iptables"} {
		w.startProxies(proxyMode)
		w.Sh("kubectl apply -f " + w.Write("coredns.yaml", coreDNS) +
			" && kubectl -n kube-system rollout status deployment/coredns --timeout=3m")
		w.install("nftables")

		// The control: the tests see a pod's address that is masqueraded.
		w.configure(policy{name: "pod to pod masqueraded", config: "nonMasqueradeCIDRs: []\n"})
		control := w.sigRun(p, "control", `NoSNAT`)
		for spec, why := range control {
			if t.Logf("%s: %s", spec, why); why == "" {
				t.Errorf("%s passes with a config that masquerades what pods send to pods", spec)
			}
		}
		cell(exempt, "%d/%d", len(control)-failures(control), len(control))

		w.configure(dropping)
		// Most of them wait most of the time.
		outcomes := make([]map[string]string, len(sigTests))
		var all sync.WaitGroup
		places := make(chan struct{}, 4)
		for i, test := range sigTests {
			places <- struct{}{}
			all.Go(func() {
				outcomes[i] = w.sigRun(p, fmt.Sprintf("sig-%d", i), test.focus)
				t.Logf("kube-proxy %s, %s: %d of %d passed", proxyMode, test.name, len(outcomes[i])-failures(outcomes[i]),
					len(outcomes[i]))
				<-places
			})
		}
		all.Wait()

		// Their time limits are for a machine that does nothing else: what fails is run
		// again alone.
		second := make([]int, len(sigTests))
		for i := range sigTests {
			for spec, why := range outcomes[i] {
				if why == "" {
					continue
				}
				t.Logf("%s fails next to others: %s", spec, why)
				if again := w.sigRun(p, "alone", regexp.QuoteMeta(spec)+"$"); len(again) == 1 && failures(again) == 0 {
					outcomes[i][spec] = ""
					second[i]++
				}
			}
		}

		cell(untracked, "%d", w.dropped())

		// What fails again is run without the agent: some fail in such a cluster.
		w.uninstall()
		for i, test := range sigTests {
			var also []string
			for _, spec := range slices.Sorted(maps.Keys(outcomes[i])) {
				why := outcomes[i][spec]
				if why == "" {
					continue
				}
				again := w.sigRun(p, "without", regexp.QuoteMeta(spec)+"$")
				if len(again) == 1 && failures(again) == 1 {
					also = append(also, strings.TrimSpace(labels.ReplaceAllString(spec, "")))
					t.Logf("%s fails without the agent, too: %s", spec, why)
					continue
				}
				t.Errorf("%s passes without the agent only (%v): %s", spec, again, why)
			}
			notes := ""
			if second[i] > 0 {
				notes = fmt.Sprintf(", %d alone", second[i])
			}
			if len(also) > 0 {
				notes += ", without the agent neither: " + strings.Join(also, "; ")
			}
			cell(test.name, "%d/%d%s", len(outcomes[i])-failures(outcomes[i]), len(outcomes[i]), notes)
		}
	}
	names := []string{exempt, untracked}
	for _, test := range sigTests {
		names = append(names, test.name)
	}
	for _, name := range names {
		w.rows = append(w.rows, "| "+name+" |"+cells[name])
	}
	w.record("sig-network", "tests | kube-proxy nftables | kube-proxy iptables")
}

// dropped is how many packets dropInvalid dropped, on all nodes.
func (w *world) dropped() (packets int) {
	w.t.Helper()
	counter := regexp.MustCompile(`counter invalid-v[46] {\s*packets (\d+)`)
	for _, n := range w.nodes {
		out, err := n.NS.Output("", "nft", "list", "counters")
		must(w.t, err)
		counters := counter.FindAllStringSubmatch(out, -1)
		if len(counters) != 2 {
			w.t.Errorf("%s: the agent does not count dropped packets:\n%s", n.Name, out)
		}
		for _, c := range counters {
			count, err := strconv.Atoi(c[1])
			must(w.t, err)
			packets += count
		}
	}
	return packets
}

func failures(outcome map[string]string) (n int) {
	for _, why := range outcome {
		if why != "" {
			n++
		}
	}
	return n
}
