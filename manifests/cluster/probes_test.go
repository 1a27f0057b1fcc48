package cluster_test

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"
)

// TestWhatProbesCost compares a node whose kubelet asks the agent twice a second with one whose
// kubelet does not ask: the processor time of all that runs on it, kubelet and containerd included.
func TestWhatProbesCost(t *testing.T) {
	w := newWorld(t)
	w.install("nftables")
	const exec = `{"exec": {"command": ["/nft-masq-agent", "ready"]}, "periodSeconds": 1, "timeoutSeconds": 5}`
	const rounds = 3
	var probes int
	var idle, asked time.Duration // processor time
	for range rounds {
		w.probe("null")
		idle += w.busy(func() { time.Sleep(time.Minute) })
		w.probe(exec)
		asked += w.busy(func() {
			before := w.probed()
			time.Sleep(time.Minute)
			probes += w.probed() - before
		})
	}
	if probes < rounds*100 {
		t.Errorf("%d probes in %d minutes, want two a second", probes, rounds)
	}
	each := (asked - idle) / time.Duration(probes)
	w.rows = []string{
		fmt.Sprintf("| %d | %.1f | %.1f | %d |", probes, idle.Seconds(), asked.Seconds(), each.Milliseconds()),
	}
	w.record("probes", "probes | without, s | with, s | each, ms")
}

// probe replaces the agent's probes, of which the one at the start goes.
func (w *world) probe(handler string) {
	w.t.Helper()
	w.Sh(fmt.Sprintf(`kubectl -n kube-system patch daemonset nft-masq-agent --patch '{"spec": {"template": {"spec": `+
		`{"containers": [{"name": "nft-masq-agent", "startupProbe": null, "livenessProbe": %[1]s, `+
		`"readinessProbe": %[1]s}]}}}}'`, handler))
	w.Sh("kubectl -n kube-system rollout status daemonset/nft-masq-agent --timeout=3m")
}

// probed is how often the kubelet of node1 has asked an agent.
func (w *world) probed() (n int) {
	w.t.Helper()
	out, err := w.outside.Output("", "curl", "-sSfk", "https://"+w.nodes[0].V4.String()+":10250/metrics/probes")
	must(w.t, err)
	for line := range strings.Lines(out) {
		if f := strings.Fields(line); strings.HasPrefix(line, "prober_probe_total{") && strings.Contains(line, `"nft-masq-agent"`) {
			count, err := strconv.Atoi(f[len(f)-1])
			must(w.t, err)
			n += count
		}
	}
	return n
}

// busy is the processor time that node1 takes while something happens.
func (w *world) busy(while func()) time.Duration {
	w.t.Helper()
	before := w.nodes[0].Processor()
	while()
	return w.nodes[0].Processor() - before
}
