package manifests_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/agent"
)

func TestMain(m *testing.M) { os.Exit(agent.Main(m)) }

const image = "localhost/nft-masq-agent:test"

// A node runs the image like the kubelet.
type node struct {
	*nfttest.Topology
	t       *testing.T
	dir     string // mounted at /etc/config
	volume  *agent.Volume
	flags   []string
	running *agent.Agent
}

// newNode builds the image with buildah, and creates a node with podman and runc,
// whose storage is in a directory of the test.
func newNode(t *testing.T) *node {
	t.Helper()
	if os.Getenv("IMAGE_TEST") != "1" {
		t.Skip("builds and runs an image: make container-test")
	}
	if os.Geteuid() != 0 {
		t.Fatal("needs root")
	}
	dir := t.TempDir()
	conf := filepath.Join(dir, "storage.conf")
	text := fmt.Sprintf("[storage]\ndriver = \"vfs\"\ngraphroot = \"%[1]s/graph\"\nrunroot = \"%[1]s/run\"\n", dir)
	writeFile(t, conf, text)
	t.Setenv("CONTAINERS_STORAGE_CONF", conf)
	n := &node{
		Topology: nfttest.NewTopology(t), t: t, dir: filepath.Join(dir, "volume"),
		flags: []string{"--runtime=runc", "--cgroup-manager=cgroupfs", "--events-backend=file", "--tmpdir=" +
			filepath.Join(dir, "tmp")},
	}
	n.volume = agent.NewVolume(n.dir)
	must(t, os.Mkdir(n.dir, 0o755))
	build := exec.CommandContext(t.Context(), "make", "-C", "..", "container", "CONTAINER_TOOL=buildah",
		"IMAGE="+strings.TrimSuffix(image, ":test"), "TAG=test", "SOURCE=https://git.example/nft-masq-agent")
	if out, err := build.CombinedOutput(); err != nil || bytes.Contains(bytes.ToLower(out), []byte("warn")) {
		t.Fatalf("%v\n%s", err, out)
	}
	return n
}

// output runs podman on the node.
func (n *node) output(args ...string) string {
	n.t.Helper()
	out, err := n.Node.Output("", "podman", append(n.flags, args...)...)
	if err != nil {
		n.t.Fatalf("%v\n%s", err, out)
	}
	return out
}

// run starts the container of the base with the security context, limits and
// arguments from its manifest.
func (n *node) run() {
	n.t.Helper()
	c := read(n.t, "base").container()
	args := []string{
		"run", "--pull=never", "--name=agent", "--network=host", "--security-opt=no-new-privileges",
		"--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024",
		"--read-only", "--read-only-tmpfs=false", "--tmpfs=/run/nft-masq-agent", "--volume=" + n.dir + ":/etc/config:ro",
		fmt.Sprintf("--user=%d:%d", *c.SecurityContext.RunAsUser, *c.SecurityContext.RunAsGroup),
		fmt.Sprintf("--memory=%d", c.Resources.Limits.Memory().Value()),
	}
	for _, name := range c.SecurityContext.Capabilities.Drop {
		args = append(args, "--cap-drop="+string(name))
	}
	for _, name := range c.SecurityContext.Capabilities.Add {
		args = append(args, "--cap-add="+string(name))
	}
	for _, e := range c.Env {
		args = append(args, "--env="+e.Name+"="+e.Value)
	}
	cmd := exec.Command("podman", append(append(append(n.flags, args...), image), c.Args...)...)
	n.running = agent.Run(n.t, n.Node, cmd)
	n.t.Cleanup(func() { n.output("rm", "--force", "agent") })
}

// await waits for a line of the log, and returns its fields.
func (n *node) await(event string) agent.Line {
	n.t.Helper()
	line, err := n.running.Await(n.t.Context(), event)
	must(n.t, err)
	return line
}

// write replaces the content of the volume like the kubelet.
func (n *node) write(config string) {
	n.t.Helper()
	must(n.t, n.volume.Write([]byte(config)))
}

// get requests a path from the agent, like the kubelet's probes.
func (n *node) get(path string) (int, string) {
	n.t.Helper()
	client := http.Client{Transport: &http.Transport{DialContext: n.Node.DialContext, DisableKeepAlives: true}}
	request, err := http.NewRequestWithContext(n.t.Context(), http.MethodGet, "http://127.0.0.1:9717"+path, nil)
	must(n.t, err)
	response, err := client.Do(request)
	must(n.t, err)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	must(n.t, err)
	return response.StatusCode, string(body)
}

func (n *node) wantMasqueraded(to string, want bool) {
	n.t.Helper()
	dst := netip.AddrPortFrom(netip.MustParseAddr(to), 5000)
	s := nfttest.MustSend(n.t, n.Topology, nfttest.Flow{Proto: nfttest.TCP, From: n.Pod, Dst: dst})
	if s.Masqueraded() != want {
		n.t.Errorf("%s sees %s, masqueraded: want %t", to, s.Seen, want)
	}
}

func TestImageAppliesConfig(t *testing.T) {
	n := newNode(t)
	n.run()
	n.await("config_applied")
	n.wantMasqueraded("198.51.100.1", true)
	n.wantMasqueraded("10.9.0.9", false)
	for _, path := range []string{"/healthz", "/readyz"} {
		if code, text := n.get(path); code != http.StatusOK {
			t.Errorf("%s: %d %s", path, code, text)
		}
	}
	n.probe()
	if _, text := n.get("/metrics"); !strings.Contains(text, `connections_total{family="ipv4",verdict="masqueraded"} 1`+
		"\n") {
		t.Errorf("metrics:\n%s", text)
	}

	n.write("nonMasqueradeCIDRs: [198.51.100.0/24]\n")
	applied := n.await("config_applied")
	n.wantMasqueraded("198.51.100.1", false)
	n.wantMasqueraded("10.9.0.9", true)

	n.write("nonMasqueradeCIDRs: [198.51.100.1/24]\n")
	if line, want := n.await("config_rejected"),
		fmt.Sprintf("config rejected; last good config (%v) stays enforced", applied["hash"]); line.Message() != want {
		t.Errorf("logged %q, want %q", line.Message(), want)
	}
	if code, text := n.get("/readyz"); code != http.StatusServiceUnavailable ||
		!strings.Contains(text, "/etc/config/ip-masq-agent:1:22: ") {
		t.Errorf("/readyz: %d %s", code, text)
	}
	n.wantMasqueraded("198.51.100.1", false)

	n.wantConfined()
	n.write("nonMasqueradeCIDRs: [198.51.100.0/24]\n# mended\n")
	n.output("exec", "agent", "/nft-masq-agent", "status")
	before := nfttest.NFT(t, n.Node, "", "list", "table", "inet", "nft-masq-agent")
	if err := n.running.Stop(); err != nil {
		t.Error(err)
	}
	if after := nfttest.NFT(t, n.Node, "", "list", "table", "inet", "nft-masq-agent"); after != before {
		t.Errorf("the rules are gone:\n%s", after)
	}
}

// status returns the kernel's status of the process.
func (n *node) status() string {
	n.t.Helper()
	pid := strings.TrimSpace(n.output("inspect", "--format={{.State.Pid}}", "agent"))
	status, err := os.ReadFile("/proc/" + pid + "/status")
	must(n.t, err)
	return string(status)
}

// wantConfined compares the kernel's status of the process with the manifest.
func (n *node) wantConfined() {
	n.t.Helper()
	status := n.status()
	const netAdmin = "0000000000001000"
	for _, want := range []string{"CapEff:\t" + netAdmin, "CapBnd:\t" + netAdmin, "NoNewPrivs:\t1", "Seccomp:\t2"} {
		if !strings.Contains(status, want+"\n") {
			n.t.Errorf("not %s:\n%s", want, status)
		}
	}
}

// probe runs the readiness probe as the kubelet has containerd run it, and logs what that costs.
func (n *node) probe() {
	n.t.Helper()
	const probes = 20
	id := strings.TrimSpace(n.output("inspect", "--format={{.Id}}", "agent"))
	var spent time.Duration
	for range probes {
		cmd := exec.CommandContext(n.t.Context(), "runc",
			append([]string{"exec", id}, read(n.t, "base").container().ReadinessProbe.Exec.Command...)...)
		if out, err := cmd.CombinedOutput(); err != nil {
			n.t.Fatalf("%v\n%s", err, out)
		}
		spent += cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
	}
	n.t.Logf("a probe took %v of processor time", spent/probes)
}

func TestImageUsesAtMost16MBWithDefaultConfig(t *testing.T) {
	n := newNode(t)
	n.run()
	n.await("config_applied")
	for range 300 {
		n.get("/metrics")
		n.get("/readyz")
	}
	_, peak, _ := strings.Cut(n.status(), "VmHWM:")
	kB, err := strconv.Atoi(strings.Fields(peak)[0])
	must(t, err)
	if t.Logf("peak %d kB", kB); kB*1024 > 16_000_000 {
		t.Error("more than 16 MB")
	}
}

// A ConfigMap holds at most 1 MiB.
func TestImageStaysWithinMemoryLimitWithLargestConfigMap(t *testing.T) {
	n := newNode(t)
	n.run()
	n.await("config_applied")
	for first := range 3 {
		var config bytes.Buffer
		config.WriteString("nonMasqueradeCIDRs:\n")
		cidrs := 0
		for ; config.Len() < 1<<20-100; cidrs++ {
			fmt.Fprintf(&config, "- %d.%d.%d.%d/32\n", 1+first, cidrs>>14, cidrs>>7&0x7f, cidrs<<1&0xff)
		}
		n.write(config.String())
		if fields := n.await("config_applied"); fields["cidrs"] != float64(cidrs+1) {
			t.Errorf("%v CIDRs, want %d and link-local", fields["cidrs"], cidrs)
		}
		n.wantMasqueraded("198.51.100.1", true)
		if code, text := n.get("/readyz"); code != http.StatusOK {
			t.Errorf("/readyz: %d %s", code, text)
		}
	}
	n.atOnce(4, "status")
	n.atOnce(4, "status", "-o", "json")
	n.atOnce(4, "explain", "198.51.100.1")
	n.atOnce(2, "check", "-o", "json") // which lists each CIDR
}

// atOnce runs a command several times at once in the agent's container.
func (n *node) atOnce(times int, args ...string) {
	n.t.Helper()
	var all sync.WaitGroup
	for range times {
		all.Go(func() {
			out, err := n.Node.Output("", "podman",
				slices.Concat(n.flags, []string{"exec", "agent", "/nft-masq-agent"}, args)...)
			if err != nil {
				n.t.Errorf("%v: %v\n%s", args, err, out[max(0, len(out)-1000):])
			}
		})
	}
	all.Wait()
}

func TestImageContainsOnlyBinarySBOMAndLicenses(t *testing.T) {
	n := newNode(t)
	n.output("create", "--name=agent", image)
	archive := filepath.Join(t.TempDir(), "image.tar")
	n.output("export", "--output="+archive, "agent")
	list, err := exec.CommandContext(t.Context(), "tar", "--list", "--verbose", "--file="+archive).Output()
	must(t, err)
	for line := range strings.Lines(string(list)) {
		fields := strings.Fields(line) // mode, owner, size, date, time, name
		name := fields[5]
		if name != "nft-masq-agent" && name != "sbom.cdx.json" && !strings.HasPrefix(name, "licenses/") {
			t.Errorf("the image contains %s", name)
		}
		if size, err := strconv.Atoi(fields[2]); name == "nft-masq-agent" && (err != nil || size > 12<<20) {
			t.Errorf("the binary has %d bytes, more than 12 MiB", size)
		}
	}
}

func TestImageLabelsMatchTheBuild(t *testing.T) {
	n := newNode(t)
	var labels map[string]string
	must(t, json.Unmarshal([]byte(n.output("image", "inspect", "--format={{json .Labels}}", image)), &labels))
	for _, name := range []string{"title", "licenses", "version", "revision", "created", "source"} {
		if labels["org.opencontainers.image."+name] == "" {
			t.Errorf("no label %s: %v", name, labels)
		}
	}
	if v := labels["org.opencontainers.image.version"]; !regexp.MustCompile(`^v[0-9]+\.[0-9]+\.[0-9]+`).MatchString(v) {
		t.Errorf("the label version is %q, want v and three numbers", v)
	}
	printed := n.output("run", "--rm", "--pull=never", "--network=none", "--ulimit=nofile=1024:1024",
		"--ulimit=nproc=1024:1024", image, "version")
	for _, name := range []string{"version", "revision"} {
		if !strings.Contains(printed, labels["org.opencontainers.image."+name]) {
			t.Errorf("the labels are %v, the program prints\n%s", labels, printed)
		}
	}
}
