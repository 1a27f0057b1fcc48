package cluster_test

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"nft-masq-agent/manifests/cluster"
	"nft-masq-agent/nft/nfttest"
)

// Traffic opens connections from a pod, one after the other to each address,
// until it is stopped.
type traffic struct {
	end                 chan struct{}
	all                 sync.WaitGroup
	opened, wrong, lost atomic.Int64
	first               atomic.Value // what went wrong
}

func startTraffic(ns *nfttest.NS, p policy, families []family) *traffic {
	r := &traffic{end: make(chan struct{})}
	for _, f := range families {
		for _, proto := range []string{"tcp", "udp"} {
			for to, want := range map[netip.Addr]netip.Addr{f.masqueraded: p.masquerade(f), f.exempt: f.near} {
				r.all.Go(func() { r.send(ns, f.near, proto, netip.AddrPortFrom(to, 8080), want) })
			}
		}
	}
	return r
}

func (r *traffic) send(ns *nfttest.NS, from netip.Addr, proto string, to netip.AddrPort, want netip.Addr) {
	for {
		select {
		case <-r.end:
			return
		case <-time.After(2 * time.Millisecond): // others use the machine, too
		}
		seen, err := dialOnce(ns, from, proto, to, patience)
		switch {
		case err != nil:
			r.lost.Add(1)
			r.first.CompareAndSwap(nil, err.Error())
		case seen.Addr() != want:
			r.opened.Add(1)
			r.wrong.Add(1)
			r.first.CompareAndSwap(nil, fmt.Sprintf("%s %s saw %s, want %s", proto, to, seen, want))
		default:
			r.opened.Add(1)
		}
	}
}

// during counts the connections while something happens.
func (w *world) during(what string, p policy, families []family, happens func()) {
	w.t.Run(what, func(t *testing.T) {
		w.rows = append(w.rows, fmt.Sprintf("| %s | %d |", what, w.watch(t, p, families, happens)))
	})
}

// watch fails if a connection fails or has a wrong source while something happens.
func (w *world) watch(t *testing.T, p policy, families []family, happens func()) (opened int) {
	t.Helper()
	r := startTraffic(w.hosts["near"], p, families)
	w.Await("connections", func() bool { return r.opened.Load() > 100 })
	happens()
	seen := r.opened.Load()
	w.Await("connections", func() bool { return r.opened.Load() > seen+100 })
	close(r.end)
	r.all.Wait()
	opened = int(r.opened.Load())
	w.connections += opened
	if wrong := r.wrong.Load(); wrong > 0 || r.lost.Load() > 0 {
		t.Errorf("%d connections, %d wrong, %d lost: %v", opened, wrong, r.lost.Load(), r.first.Load())
	}
	return opened
}

func TestNoWrongSourceThroughTheLifeOfAnAgent(t *testing.T) {
	w := newCluster(t)
	node, plain := w.nodes[0], policies[0]
	w.install("nftables")
	w.configure(plain)
	during := func(what string, happens func()) { w.during(what, plain, w.families, happens) }

	during("rolling update", func() {
		w.Sh("kubectl -n kube-system rollout restart daemonset/nft-masq-agent; " + rollout("nft-masq-agent"))
	})
	during("a config that is rejected, and its repair", func() {
		w.apply("nonMasqueradeCIDRs: [10.0.0.1/8]\n")
		w.touch(node)
		w.Await("rejected", func() bool { return !w.agentReady(node) })
		w.configure(plain)
		w.Await("ready", func() bool { return w.agentReady(node) })
	})
	during("kill -9", func() {
		old := agentPID(t, node)
		must(t, syscall.Kill(old, syscall.SIGKILL))
		w.Await("another process", func() bool { now := agentPID(t, node); return now != 0 && now != old })
		w.Await("ready", func() bool { return w.agentReady(node) })
	})
	during("kube-proxy started again", func() {
		node.StopProxy()
		node.StartProxy("nftables")
	})
	during("kube-proxy's mode changed", func() {
		node.StopProxy()
		node.StartProxy("iptables")
	})
	// kindnet does so at each start and each change of a Node.
	enforced, kindnet := policies[1], w.Sh("cat testdata/foreign/kindnet-recorded/rules.nft")
	enforced.foreign = false
	w.configure(enforced)
	w.nft(node, kindnet)
	w.during("kindnet's rules loaded again and again, with enforceNonMasquerade", enforced, w.families, func() {
		for range 500 {
			w.nft(node, "delete table inet kindnet-ipmasq\n"+kindnet)
		}
	})
	w.nft(node, "delete table inet kindnet-ipmasq")
	w.configure(plain)
	// The built-in defaults, which then apply, have no IPv6.
	w.during("the ConfigMap deleted", plain, w.families[:1], func() {
		w.Sh("kubectl -n kube-system delete configmap ip-masq-agent")
		w.touch(node)
		w.Await("defaults", func() bool {
			out, _ := node.NS.Output("", "nft", "list", "table", "inet", "nft-masq-agent")
			return !strings.Contains(out, "non-masq-v6")
		})
	})
	w.uninstall()
	w.record("life", "what happens | connections")
}

// uninstall runs the command of manifests/README.md, and checks the nodes.
func (w *world) uninstall() {
	w.t.Helper()
	w.Sh("make -s uninstall" + w.imageFlags())
	for _, n := range w.nodes {
		out, err := n.NS.Output("", "nft", "list", "tables")
		if must(w.t, err); strings.Contains(out, "nft-masq-agent") {
			w.t.Errorf("%s: left: %s", n.Name, out)
		}
	}
	// The last pods end after the command.
	w.Await("nothing left", func() bool {
		out, err := w.Try("kubectl -n kube-system get all -o name -l app.kubernetes.io/name=nft-masq-agent")
		return err == nil && out == ""
	})
}

// reachable has all that are sent to answer.
func (w *world) reachable() {
	w.t.Helper()
	w.hosts = map[string]*nfttest.NS{
		"outside": w.outside, "node1": w.nodes[0].NS, "node2": w.nodes[1].NS,
		"near": w.nodes[0].PodNS(w.families[0].near), "far": w.nodes[1].PodNS(w.families[0].far),
	}
	var host corev1.Pod
	w.get("pod/host", &host)
	w.hosts["host"] = w.nodes[0].ContainerNS(host.Status.ContainerStatuses[0].ContainerID)
	for _, f := range w.families {
		for host, addrs := range map[string][]netip.Addr{
			"near": {f.near}, "far": {f.far},
			"outside": {f.masqueraded, f.exempt}, "node1": {f.node1}, "node2": {f.node2},
		} {
			for _, a := range addrs {
				echo(w.t, w.hosts[host], netip.AddrPortFrom(a, 8080))
			}
		}
	}
}

// touch changes the agent's pod, so that the kubelet reads its ConfigMap at once.
func (w *world) touch(n *cluster.Node) {
	w.t.Helper()
	w.Sh("kubectl -n kube-system annotate --overwrite pod " + w.agent(n) + " test=" +
		strconv.FormatInt(time.Now().UnixNano(), 36))
}

func (w *world) agentReady(n *cluster.Node) bool {
	_, err := w.Try("kubectl -n kube-system exec " + w.agent(n) + " -- /nft-masq-agent ready")
	return err == nil
}

// agentPID is the agent's process in the network namespace of a node, or 0.
func agentPID(t *testing.T, n *cluster.Node) (pid int) {
	t.Helper()
	must(t, n.NS.Do(func() error {
		here, err := os.Readlink("/proc/thread-self/ns/net")
		if err != nil {
			return err
		}
		all, err := filepath.Glob("/proc/[0-9]*")
		for _, dir := range all {
			comm, _ := os.ReadFile(dir + "/comm")
			args, _ := os.ReadFile(dir + "/cmdline")
			// Not a probe, which is the same program with a command.
			if net, _ := os.Readlink(dir + "/ns/net"); net == here && string(comm) == "nft-masq-agent\n" &&
				strings.Contains(string(args), "--http-address") {
				pid, err = strconv.Atoi(filepath.Base(dir))
			}
		}
		return err
	}))
	return pid
}
