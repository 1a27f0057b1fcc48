package cluster

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/netns"
)

// A Node is a network namespace with kubelet, containerd and kube-proxy.
type Node struct {
	Name      string
	NS        *nfttest.NS
	V4, V6    netip.Addr // its addresses
	GateV4    netip.Addr // what pods see it as
	GateV6    netip.Addr
	ProxyMode string
	// ProxyPods are the CIDRs of pods that kube-proxy knows; with MasqueradeAll it
	// masquerades their connections to Services, too.
	ProxyPods     string
	MasqueradeAll bool

	control *Control
	dir     string
	cgroup  string           // its sub-tree
	first   *nfttest.Process // process 1
	proxy   *nfttest.Process
	pods4   string
	pods6   string
}

// containerd, whose root and state are on the node's own mounts.
const containerdConfig = `version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
[grpc]
  address = "%[1]s/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/pause:1"
  disable_apparmor = true
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "%[2]s"
    conf_dir = "%[1]s/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      SystemdCgroup = false
`

const kubeletConfig = `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
containerRuntimeEndpoint: unix://%[1]s/containerd.sock
cgroupDriver: cgroupfs
cgroupRoot: %[2]s
enforceNodeAllocatable: [none]
failCgroupV1: false
failSwapOn: false
featureGates: {KubeletInUserNamespace: true}
resolvConf: ""
clusterDNS: [10.96.0.10]
clusterDomain: cluster.local
localStorageCapacityIsolation: false
evictionHard: {memory.available: "0%%", nodefs.available: "0%%", nodefs.inodesFree: "0%%", imagefs.available: "0%%"}
imageGCHighThresholdPercent: 100
syncFrequency: 10s
`

// Routes between nodes are the network's; each pod is on a cable of its own.
const cniConfig = `{"cniVersion": "0.4.0", "name": "pods", "plugins": [
{"type": "ptp", "ipMasq": false, "ipam": {"type": "host-local", "dataDir": "/run/cni",
 "ranges": [[{"subnet": "%s"}], [{"subnet": "%s"}]], "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]}},
{"type": "portmap", "capabilities": {"portMappings": true}, "snat": true}]}
`

// The parameters that kubelet wants to set, of which the machine has only one.
const firstProcess = `set -e
mount -t proc none /proc
echo "$NAME" >/proc/sys/kernel/hostname # of this namespace
mount --make-rshared /
mount -t tmpfs none /run
mkdir -p /run/netns /run/lock "$DIR/lib" "$DIR/log" "$DIR/sysctl"
mount --bind "$DIR/lib" /var/lib
mount --bind "$DIR/log" /var/log
for name in vm/overcommit_memory vm/panic_on_oom kernel/panic kernel/panic_on_oops kernel/keys/root_maxkeys kernel/keys/root_maxbytes; do
	copy="$DIR/sysctl/$(basename "$name")"
	cat "/proc/sys/$name" >"$copy"
	mount --bind "$copy" "/proc/sys/$name"
done
rm -f "$DIR/containerd.sock"
containerd --config "$DIR/containerd.toml" >>"$DIR/containerd.log" 2>&1 &
until [ -S "$DIR/containerd.sock" ]; do sleep 0.1; done
until kubelet "$@"; do sleep 0.2; done & # it ends if containerd listens but is not ready
wait
`

// NewNode prepares the node number i of a network; Start starts it.
func (c *Control) NewNode(ns *nfttest.NS, i int) *Node {
	c.T.Helper()
	n := &Node{
		Name: fmt.Sprintf("node%d", i), NS: ns, control: c,
		V4: netip.AddrFrom4([4]byte{192, 0, 2, byte(10 + i)}), V6: netip.MustParseAddr(fmt.Sprintf("2001:db8::%d", 10+i)),
		GateV4: netip.AddrFrom4([4]byte{10, 244, byte(i), 1}),
		GateV6: netip.MustParseAddr(fmt.Sprintf("fd00:10:244:%d::1", i)),
		pods4:  fmt.Sprintf("10.244.%d.0/24", i), pods6: fmt.Sprintf("fd00:10:244:%d::/64", i),
		ProxyPods: "10.244.0.0/16,fd00:10:244::/56",
	}
	n.dir = filepath.Join(c.Dir, n.Name)
	n.cgroup = cgroupName(n.dir)
	if err := os.MkdirAll(filepath.Join(n.dir, "cni"), 0o755); err != nil {
		c.T.Fatal(err)
	}
	c.Write(n.Name+"/containerd.toml", fmt.Sprintf(containerdConfig, n.dir, c.programs.Debian("usr/lib/cni")))
	c.Write(n.Name+"/kubelet.yaml", fmt.Sprintf(kubeletConfig, n.dir, n.cgroup))
	c.Write(n.Name+"/cni/pods.conflist", fmt.Sprintf(cniConfig, n.pods4, n.pods6))
	c.T.Cleanup(n.removeCgroups)
	return n
}

// Start boots the node. The namespace may hold what an earlier boot left there.
func (n *Node) Start() {
	c := n.control
	c.T.Helper()
	makeCgroups(c.T, n.cgroup)
	cmd := exec.Command("/bin/sh", "-c", firstProcess, "first", "--config="+n.dir+"/kubelet.yaml", "--kubeconfig="+
		c.kubeconfig,
		"--hostname-override="+n.Name, fmt.Sprintf("--node-ip=%s,%s", n.V4, n.V6), "--cert-dir="+n.dir, "--v=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWUTS}
	env := c.Env
	c.Env = append(env[:len(env):len(env)], "DIR="+n.dir, "NAME="+n.Name)
	n.first = c.start(n.NS, n.Name, cmd)
	c.Env = env
}

// Kill ends everything that runs on the node at once, as a power cut does.
func (n *Node) Kill() {
	n.control.T.Helper()
	n.StopProxy()
	_ = n.first.Kill()
	_ = n.first.Wait()
	n.removeCgroups()
	_ = os.Remove(n.dir + "/containerd.sock")
}

// Ctr runs containerd's client.
func (n *Node) Ctr(args string) string {
	n.control.T.Helper()
	return n.control.Sh("ctr --address " + n.dir + "/containerd.sock --namespace k8s.io " + args)
}

// StartProxy starts kube-proxy in a mode, and returns when it has written its rules.
func (n *Node) StartProxy(mode string) {
	c := n.control
	c.T.Helper()
	n.ProxyMode = mode
	file := c.Write(n.Name+"/proxy.yaml", fmt.Sprintf(`apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: %s
clientConnection: {kubeconfig: %s}
clusterCIDR: "%s"
hostnameOverride: %s
conntrack: {maxPerCore: 0, min: 0}
iptables: {masqueradeAll: %[5]t}
nftables: {masqueradeAll: %[5]t}
`, mode, c.kubeconfig, n.ProxyPods, n.Name, n.MasqueradeAll))
	n.proxy = c.Start(n.NS, n.Name+"-proxy", "kube-proxy", "--config="+file)
	c.Await("rules of kube-proxy on "+n.Name, func() bool {
		out, err := n.NS.Output("", "curl", "-sf", "http://127.0.0.1:10249/metrics")
		return err == nil && strings.Count(out, "\nkubeproxy_sync_proxy_rules_last_timestamp_seconds{") == 2 // both families
	})
}

// CleanProxy ends kube-proxy and removes its rules.
func (n *Node) CleanProxy() {
	n.control.T.Helper()
	n.StopProxy()
	if out, err := n.NS.Output("", n.control.programs.Bin("kube-proxy"), "--cleanup"); err != nil {
		n.control.T.Fatalf("%v\n%s", err, out)
	}
}

// StopProxy ends kube-proxy; its rules stay.
func (n *Node) StopProxy() {
	if n.proxy != nil {
		_ = n.proxy.Kill()
		_ = n.proxy.Wait()
		n.proxy = nil
	}
}

// Processor returns the processor time of all processes of the node, ended ones included: those
// that their parents have waited for.
func (n *Node) Processor() (sum time.Duration) {
	t := n.control.T
	t.Helper()
	paths, err := filepath.Glob(fmt.Sprintf("/proc/%d/root/proc/[0-9]*/stat", n.first.Pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended
		}
		_, fields, _ := strings.Cut(string(text), ") ")       // the name may contain spaces
		for _, ticks := range strings.Fields(fields)[11:15] { // utime, stime, cutime, cstime
			n, err := strconv.Atoi(ticks)
			if err != nil {
				t.Fatal(err)
			}
			sum += time.Duration(n) * time.Second / 100 // USER_HZ
		}
	}
	return sum
}

// PodNS opens the network namespace of the pod with this address, until the
// test ends.
func (n *Node) PodNS(addr netip.Addr) *nfttest.NS {
	t := n.control.T
	t.Helper()
	paths, err := filepath.Glob(fmt.Sprintf("/proc/%d/root/run/netns/*", n.first.Pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range paths {
		ns, err := netns.OpenPath(addr.String(), path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		out, err := ns.Output("", "ip", "-o", "address", "show", "to", addr.String())
		if err == nil && out != "" {
			t.Cleanup(func() { _ = ns.Close() })
			return ns
		}
		_ = ns.Close()
	}
	t.Fatalf("%s: no pod has %s: %v", n.Name, addr, paths)
	return nil
}

// ContainerNS opens the network namespace of a container, as the status of its pod
// names it, until the test ends.
func (n *Node) ContainerNS(id string) *nfttest.NS {
	t := n.control.T
	t.Helper()
	for line := range strings.Lines(n.Ctr("tasks list")) {
		f := strings.Fields(line)
		if len(f) < 2 || "containerd://"+f[0] != id {
			continue
		}
		ns, err := netns.OpenPath(f[0][:12], fmt.Sprintf("/proc/%d/root/proc/%s/ns/net", n.first.Pid, f[1]))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = ns.Close() })
		return ns
	}
	t.Fatalf("%s: %s does not run", n.Name, id)
	return nil
}

// cgroupRoots returns the hierarchies that need a sub-tree: the one of version 2,
// or those of version 1.
func cgroupRoots() []string {
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); err == nil {
		return []string{"/sys/fs/cgroup"}
	}
	var roots []string
	all, _ := filepath.Glob("/sys/fs/cgroup/*")
	for _, dir := range all {
		if _, err := os.Stat(dir + "/cgroup.procs"); err == nil {
			roots = append(roots, dir)
		}
	}
	return roots
}

func (n *Node) removeCgroups() {
	n.control.T.Helper()
	if left := removeCgroups(n.cgroup); left != "" {
		n.control.T.Errorf("cgroups are left: %s", left)
	}
}

func makeCgroups(t testing.TB, name string) {
	t.Helper()
	for _, root := range cgroupRoots() {
		if err := os.Mkdir(root+name, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			t.Fatal(err)
		}
	}
}

// Listens reports whether the container runtime has started.
func (n *Node) Listens() bool {
	_, err := os.Stat(n.dir + "/containerd.sock")
	return err == nil
}
