package cluster_test

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"nft-masq-agent/manifests/cluster"
	"nft-masq-agent/nft/nfttest"
)

// A flannel is flanneld on each node.
type flannel struct {
	backend string
	running []*nfttest.Process
}

// start starts flanneld, and returns when it has written its rules and the file for its
// CNI plugin.
func (f *flannel) start(l *lab, flags ...string) {
	l.t.Helper()
	conf := l.Write("net-conf.json", fmt.Sprintf(`{"Network": "10.244.0.0/16", "EnableIPv6": true,
"IPv6Network": "fd00:10:244::/56", "EnableNFTables": %t, "Backend": {"Type": "host-gw"}}`, f.backend == "nftables"))
	for _, n := range l.nodes {
		env := filepath.Join(l.Dir, n.Name, "subnet.env")
		_ = os.Remove(env)
		args := append([]string{
			"NODE_NAME=" + n.Name, "flanneld", "--kube-subnet-mgr", "--kubeconfig-file=" + l.Kubeconfig(),
			"--net-config-path=" + conf, "--subnet-file=" + env, "--iptables-resync=1",
		}, flags...)
		f.running = append(f.running, l.Start(n.NS, n.Name+"-flanneld", "env", args...))
		l.Await("flannel on "+n.Name, func() bool { _, err := os.Stat(env); return err == nil })
	}
}

func (f *flannel) stop() {
	for _, p := range f.running {
		_ = p.Kill()
		_ = p.Wait()
	}
	f.running = nil
}

// pods is what flannel's CNI plugin, of which no module can be downloaded, makes of an
// empty delegate: a bridge, which masquerades if flanneld does not (flannel_linux.go,
// doCmdAdd, of flannel-io/cni-plugin at 6f13a99).
func (f *flannel) pods(l *lab, n *cluster.Node, number int) []map[string]any {
	l.t.Helper()
	env, err := os.ReadFile(filepath.Join(l.Dir, n.Name, "subnet.env"))
	must(l.t, err)
	return l.network(n, number, "bridge", "iptables", strings.Contains(string(env), "FLANNEL_IPMASQ=false"))
}

// commands are those of manifests/README.md that delete the rules of a backend.
func (f *flannel) commands(l *lab) (commands [][]string) {
	l.t.Helper()
	readme, err := os.ReadFile("../README.md")
	must(l.t, err)
	_, text, _ := strings.Cut(string(readme), "\n## Rules that flannel leaves\n")
	for line := range strings.Lines(text) {
		if !strings.HasPrefix(line, "| "+f.backend) {
			continue
		}
		for _, m := range regexp.MustCompile("`((?:nft|ip6?tables) [^`]+)`").FindAllStringSubmatch(line, -1) {
			commands = append(commands, strings.Fields(m[1]))
		}
	}
	if len(commands) != 2 {
		l.t.Fatalf("%d commands for flannel's backend %s", len(commands), f.backend)
	}
	return commands
}

func flannelNeighbors() (all []neighbor) {
	for _, backend := range backends {
		f := &flannel{backend: backend}
		named := [2]string{"ip flannel-ipv4 postrtg", "ip6 flannel-ipv6 postrtg"}
		if backend == "iptables" {
			named = [2]string{"ip nat FLANNEL-POSTRTG", "ip6 nat FLANNEL-POSTRTG"}
		}
		without := plugin("bridge", "iptables", false) // "ipMasq": false in the delegate
		all = append(all,
			neighbor{
				name: "--ip-masq, " + backend, pods: f.pods, named: named,
				start:   func(l *lab) { f.start(l, "--ip-masq") },
				restart: func(l *lab) { f.stop(); f.start(l, "--ip-masq") },
				off: func(l *lab) {
					f.stop()
					f.start(l)
					for _, n := range l.nodes {
						for _, c := range f.commands(l) {
							nfttest.Run(l.t, n.NS, "", c[0], c[1:]...)
						}
					}
					l.renew(without)
				},
				masquerades: masquerades{exempt: true},
			},
			neighbor{
				name: "its plugin masquerades, " + backend, pods: f.pods,
				named:       [2]string{"ip nat CNI-", "ip6 nat CNI-"},
				start:       func(l *lab) { f.stop(); f.start(l) },
				restart:     func(l *lab) { f.stop(); f.start(l) },
				off:         func(l *lab) { l.renew(without) },
				masquerades: masquerades{exempt: true, remote: true},
			},
			neighbor{
				name:    "ipMasq false in the delegate, " + backend,
				pods:    without,
				restart: func(l *lab) { f.stop(); f.start(l) },
				off:     func(*lab) { f.stop() },
			})
	}
	return all
}
