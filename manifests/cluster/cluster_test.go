package cluster_test

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"nft-masq-agent/manifests/cluster"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/netns"
)

func TestMain(m *testing.M) {
	code := cluster.Main(m)
	_ = os.RemoveAll(imageDir)
	os.Exit(code)
}

// A world is a cluster of two nodes and a host outside, which is also the
// control plane and the switch.
type world struct {
	*cluster.Control
	t       *testing.T
	outside *nfttest.NS
	inside  []*nfttest.NS // the nodes' namespaces
	nodes   []*cluster.Node
	mode    string // of the agent
	// ask runs a command of the agent on node1, with flags.
	ask   func(args ...string) (string, error)
	flags []string

	families []family
	hosts    map[string]*nfttest.NS // by the names of rows

	count
	rows []string // of the table in nft/EVIDENCE.md
}

type count struct{ connections, explained int }

// Addresses of the outside host: the first of its link, the second masqueraded
// to by the sample config, the third exempt.
var outsideAddrs = []string{
	"192.0.2.100/24", "198.51.100.1/32", "10.9.0.9/32", "2001:db8::100/64", "2001:db8:1::1/128",
	"fd00:9::9/128",
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w, p := newNetwork(t)
	w.routePods()
	w.Control = cluster.StartControl(t, w.outside, p, "192.0.2.100", "*")
	w.Tools(os.Getenv("MANIFEST_TOOLS"))
	w.Start(w.outside, "scheduler", "kube-scheduler", "--kubeconfig="+w.Kubeconfig(), "--leader-elect=false",
		"--cert-dir="+w.Dir)
	for i, ns := range w.inside {
		w.nodes = append(w.nodes, w.NewNode(ns, i+1))
		w.nodes[i].Start()
	}
	w.images(p)
	for _, n := range w.nodes {
		w.Eventually("node", n.Name)
		w.Sh("kubectl wait --for=condition=Ready node/" + n.Name + " --timeout=3m")
	}
	w.ask = w.inPod
	return w
}

// newCluster returns a world with pods, kube-proxy and the config of the plain policy, but without the agent.
func newCluster(t *testing.T) *world {
	t.Helper()
	w := newWorld(t)
	w.workload()
	w.reachable()
	w.startProxies("nftables")
	w.apply(policies[0].config)
	return w
}

// startProxies starts kube-proxy on each node, in place of one that runs.
func (w *world) startProxies(mode string) {
	w.t.Helper()
	for _, n := range w.nodes {
		n.StopProxy()
		n.StartProxy(mode)
	}
}

func (w *world) cleanProxies() {
	w.t.Helper()
	for _, n := range w.nodes {
		n.CleanProxy()
	}
}

// holds waits until the rules of a node have a text, or have it no more.
func (w *world) holds(n *cluster.Node, text string, held bool) {
	w.t.Helper()
	w.Await(fmt.Sprintf("%s: %s: %t", n.Name, text, held), func() bool {
		out, err := n.NS.Output("", "nft", "list", "ruleset")
		return err == nil && strings.Contains(out, text) == held
	})
}

// newNetwork connects two nodes with the host outside.
func newNetwork(t *testing.T) (*world, cluster.Programs) {
	t.Helper()
	dir := os.Getenv("CLUSTER_PROGRAMS")
	if dir == "" {
		t.Skip("starts a cluster: make test-cluster")
	}
	if err := netns.Privileged(); err != nil || os.Geteuid() != 0 {
		t.Fatal("needs root: ", err)
	}
	w := &world{t: t, outside: nfttest.NewNS(t, "outside")}
	w.ip(w.outside, "link add br0 type bridge", "link set br0 up")
	for _, a := range outsideAddrs {
		w.ip(w.outside, "address add "+a+" dev br0 nodad")
	}
	for i := 1; i <= 2; i++ {
		ns := nfttest.NewNS(t, fmt.Sprintf("node%d", i))
		port := fmt.Sprintf("port%d", i)
		must(t, netns.AddVeth(netns.End{NS: w.outside, Dev: port, MAC: mac(2 * i)},
			netns.End{NS: ns, Dev: "eth0", MAC: mac(2*i + 1)}))
		w.ip(w.outside, "link set "+port+" master br0", "link set "+port+" up",
			fmt.Sprintf("route add 10.244.%d.0/24 via 192.0.2.%d", i, 10+i),
			fmt.Sprintf("-6 route add fd00:10:244:%d::/64 via 2001:db8::%d", i, 10+i))
		for _, name := range []string{"net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding"} {
			must(t, ns.Sysctl(name, "1"))
		}
		w.ip(ns, "link set eth0 up", fmt.Sprintf("address add 192.0.2.%d/24 dev eth0", 10+i),
			fmt.Sprintf("address add 2001:db8::%d/64 dev eth0 nodad", 10+i),
			"route add default via 192.0.2.100", "-6 route add default via 2001:db8::100")
		w.inside = append(w.inside, ns)
	}
	return w, cluster.Programs(dir)
}

// routePods has the nodes reach each other's pods.
func (w *world) routePods() {
	w.t.Helper()
	for i, ns := range w.inside {
		other := 2 - i
		w.ip(ns, fmt.Sprintf("route replace 10.244.%d.0/24 via 192.0.2.%d", other, 10+other),
			fmt.Sprintf("-6 route replace fd00:10:244:%d::/64 via 2001:db8::%d", other, 10+other))
	}
}

func mac(i int) net.HardwareAddr { return net.HardwareAddr{2, 0, 0, 0, 0, byte(i)} }

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (w *world) ip(ns *nfttest.NS, commands ...string) {
	w.t.Helper()
	for _, command := range commands {
		if out, err := ns.Output("", "ip", strings.Fields(command)...); err != nil {
			w.t.Fatalf("%v\n%s", err, out)
		}
	}
}

const agentImage = "registry.example/nft-masq-agent"

// imageDir has the archive of the agent's image; "" if no test has needed it yet.
var imageDir string

// buildImage builds the image once for all tests, with the command that README.md has, but for the registry.
var buildImage = sync.OnceValues(func() (name string, err error) {
	if imageDir, err = os.MkdirTemp("", "image-"); err != nil {
		return "", err
	}
	conf := filepath.Join(imageDir, "storage.conf")
	text := fmt.Sprintf("[storage]\ndriver = \"vfs\"\ngraphroot = \"%[1]s/graph\"\nrunroot = \"%[1]s/run\"\n", imageDir)
	if err := os.WriteFile(conf, []byte(text), 0o600); err != nil {
		return "", err
	}
	script := `set -e; TAG=$(make -s version | tr + _); make container CONTAINER_TOOL=buildah IMAGE=$1 >&2
buildah push --quiet $1:$TAG docker-archive:$2/agent.tar:$1:$TAG >&2; printf %s $1:$TAG`
	cmd := exec.Command("bash", "-c", script, "build", agentImage, imageDir)
	cmd.Dir, cmd.Env = "../..", append(os.Environ(), "CONTAINERS_STORAGE_CONF="+conf)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%w\n%s", err, &stderr)
	}
	return string(out), nil
})

// agentArchive returns the archive of the agent's image, and its name.
func agentArchive(t *testing.T) (file, name string) {
	t.Helper()
	name, err := buildImage()
	must(t, err)
	return filepath.Join(imageDir, "agent.tar"), name
}

// images imports the images of all pods into the nodes.
func (w *world) images(p cluster.Programs) {
	w.t.Helper()
	agent, _ := agentArchive(w.t)
	archives := []string{agent}
	for _, image := range []cluster.Image{
		{
			Names: []string{"localhost/pause:1", "registry.k8s.io/pause:3.10.1"},
			Files: map[string]string{"/pause": p.Bin("pause")}, Entrypoint: []string{"/pause"},
		},
		{
			Names: []string{"localhost/coredns:1"}, Files: map[string]string{"/coredns": p.Bin("coredns")},
			Entrypoint: []string{"/coredns"},
		},
		{
			Names: []string{"registry.k8s.io/e2e-test-images/regression-issue-74839:1.4"},
			Files: map[string]string{"/server": p.Bin("regression-issue-74839")}, Entrypoint: []string{"/server"},
		},
		agnhost(w.t, p),
	} {
		file := filepath.Join(w.Dir, "images", filepath.Base(image.Entrypoint[0])+".tar")
		image.Archive(w.t, file)
		archives = append(archives, file)
	}
	for _, n := range w.nodes {
		w.Await("containerd of "+n.Name, n.Listens)
		for _, file := range archives {
			n.Ctr("images import " + file)
		}
	}
}

const agnhostImage = "registry.k8s.io/e2e-test-images/agnhost:2.59"

// agnhost is the image of Kubernetes' own tests, as far as they need it.
func agnhost(t *testing.T, p cluster.Programs) cluster.Image {
	t.Helper()
	image := cluster.Image{
		Names:      []string{agnhostImage, "registry.k8s.io/e2e-test-images/busybox:1.37.0-1"},
		Files:      map[string]string{"/agnhost": p.Bin("agnhost")},
		Entrypoint: []string{"/agnhost"}, Cmd: []string{"pause"},
	}
	for path, name := range map[string]string{
		"/bin/sh": "dash", "/usr/bin/curl": "curl", "/bin/cat": "cat", "/bin/hostname": "hostname",
		"/bin/sleep": "sleep", "/bin/seq": "seq", "/bin/date": "date", "/bin/grep": "grep",
	} {
		from, err := exec.LookPath(name)
		must(t, err)
		image.AddProgram(t, path, from)
	}
	image.AddProgram(t, "/bin/nc", p.Debian("bin/nc.openbsd"))
	return image
}

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

// builtFrom is the version of the sources before any table is written into them.
var builtFrom = sync.OnceValues(func() ([]byte, error) {
	return exec.Command("make", "-s", "-C", "../..", "version").Output()
})

// record prints the table of a test, and with CLUSTER_WRITE=1 writes it into
// nft/EVIDENCE.md, when nothing is wrong.
func (w *world) record(name, header string) {
	w.t.Helper()
	columns, kubernetes := strings.Count(header, "|")+1, ""
	if w.Control != nil {
		kubernetes = " " + w.version() + ","
	}
	version, err := builtFrom()
	must(w.t, err)
	linux, err := os.ReadFile("/proc/sys/kernel/osrelease")
	must(w.t, err)
	table := fmt.Sprintf("%s, %s,%s %s:\n\n| %s |\n|%s\n%s\n",
		time.Now().UTC().Format(time.DateOnly), strings.TrimSpace(string(version)), kubernetes,
		strings.TrimSpace(string(linux)), header, strings.Repeat("---|", columns), strings.Join(w.rows, "\n"))
	w.t.Logf("\n%s", table)
	if w.t.Failed() || os.Getenv("CLUSTER_WRITE") != "1" {
		return
	}
	const file = "../../nft/EVIDENCE.md"
	text, err := os.ReadFile(file)
	must(w.t, err)
	begin, end := "<!-- cluster: "+name+" -->\n", "<!-- /cluster: "+name+" -->\n"
	before, rest, found := strings.Cut(string(text), begin)
	_, after, ends := strings.Cut(rest, end)
	if !found || !ends {
		w.t.Fatalf("%s has no %s", file, begin)
	}
	must(w.t, os.WriteFile(file, []byte(before+begin+table+end+after), 0o644))
}
