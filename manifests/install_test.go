package manifests_test

import (
	"bytes"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"

	"nft-masq-agent/nft/nfttest"
)

// A cluster is a control plane without nodes, in a network namespace.
type cluster struct {
	t       *testing.T
	ns      *nfttest.NS
	env     []string
	kubectl string
	last    string // what kubectl complained of
}

// newCluster starts etcd, kube-apiserver and kube-controller-manager of the
// directory that make install-test builds.
func newCluster(t *testing.T) *cluster {
	t.Helper()
	bin := os.Getenv("CONTROL_PLANE")
	if bin == "" {
		t.Skip("starts a control plane: make install-test")
	}
	dir := t.TempDir()
	c := &cluster{t: t, ns: nfttest.NewNS(t, "cluster"), kubectl: filepath.Join(bin, "kubectl")}
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	write := func(name, text string) string {
		file := filepath.Join(dir, name)
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return file
	}
	keyFile := write("sa.key", string(pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)})))
	tokens := write("tokens", "test,admin,admin,system:masters\n")
	kubeconfig := write("kubeconfig", `{apiVersion: v1, kind: Config, current-context: test,
clusters: [{name: test, cluster: {server: "https://127.0.0.1:6443", insecure-skip-tls-verify: true}}],
users: [{name: admin, user: {token: test}}], contexts: [{name: test, context: {cluster: test, user: admin}}]}`)
	// The namespace has no network for go run.
	c.env = append(os.Environ(), "KUBECONFIG="+kubeconfig, "PATH="+bin+":"+tools(t)+":"+os.Getenv("PATH"), "KUSTOMIZE="+filepath.Join(tools(t), "kustomize"))

	c.start("etcd", "--data-dir="+filepath.Join(dir, "etcd"), "--unsafe-no-fsync")
	c.start(filepath.Join(bin, "kube-apiserver"), "--etcd-servers=http://127.0.0.1:2379", "--bind-address=127.0.0.1", "--advertise-address=127.0.0.1",
		"--cert-dir="+dir, "--token-auth-file="+tokens, "--authorization-mode=RBAC", "--service-cluster-ip-range=10.96.0.0/16",
		"--service-account-issuer=https://test", "--service-account-key-file="+keyFile, "--service-account-signing-key-file="+keyFile)
	c.start(filepath.Join(bin, "kube-controller-manager"), "--kubeconfig="+kubeconfig, "--leader-elect=false", "--use-service-account-credentials=false",
		"--cert-dir="+dir, "--controllers=daemonset-controller,garbage-collector-controller,namespace-controller,endpointslice-controller")
	c.eventually("namespace", "kube-system")
	return c
}

// start runs a program until the test ends.
func (c *cluster) start(program string, args ...string) {
	c.t.Helper()
	log, err := os.Create(filepath.Join(c.t.TempDir(), "log"))
	if err != nil {
		c.t.Fatal(err)
	}
	cmd := exec.Command(program, args...)
	cmd.Stdout, cmd.Stderr = log, log
	p, err := c.ns.Start(cmd)
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() {
		_ = p.Kill()
		_ = p.Wait()
		if text, err := os.ReadFile(log.Name()); err == nil && c.t.Failed() {
			lines := strings.Split(string(text), "\n")
			c.t.Logf("%s:\n%s", program, strings.Join(lines[max(0, len(lines)-20):], "\n"))
		}
	})
}

// sh runs a command line at the root of the repository, as a reader would.
func (c *cluster) sh(line string) string {
	c.t.Helper()
	cmd := exec.CommandContext(c.t.Context(), "bash", "-o", "pipefail", "-c", line)
	cmd.Dir, cmd.Env = "..", c.env
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := c.ns.Run(cmd); err != nil {
		c.t.Fatalf("%s: %v\n%s", line, err, &out)
	}
	c.t.Logf("%s\n%s", line, &out)
	return out.String()
}

// get decodes what kubectl get prints of one object; there may be none.
func (c *cluster) get(into any, args ...string) bool {
	c.t.Helper()
	cmd := exec.CommandContext(c.t.Context(), "kubectl", append([]string{"--namespace=kube-system", "get", "--output=json"}, args...)...)
	cmd.Path, cmd.Env = c.kubectl, c.env
	var out, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &stderr
	if err := c.ns.Run(cmd); err != nil {
		c.last = stderr.String()
		return false
	}
	if err := json.Unmarshal(out.Bytes(), into); err != nil {
		c.t.Fatal(err)
	}
	return true
}

// eventually waits until an object is there.
func (c *cluster) eventually(args ...string) {
	c.t.Helper()
	for end := time.Now().Add(2 * time.Minute); time.Now().Before(end); time.Sleep(200 * time.Millisecond) {
		var found object
		if c.get(&found, args...) {
			return
		}
	}
	c.t.Fatalf("%v is not there: %s", args, c.last)
}

// commands returns the command lines of a section, but for the push and what
// needs a pod.
func commands(t *testing.T, file, title string) []string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	_, section, found := strings.Cut(string(text), "\n## "+title+"\n")
	if !found {
		t.Fatalf("%s has no section %s", file, title)
	}
	section, _, _ = strings.Cut(section, "\n## ")
	section = strings.ReplaceAll(section, "\\\n", "")
	var all []string
	for line := range strings.Lines(section) {
		if command, ok := strings.CutPrefix(strings.TrimRight(line, "\n"), "    "); ok && !strings.HasPrefix(command, "make push ") {
			all = append(all, command)
		}
	}
	return all
}

func TestInstallSectionWorksAsItStands(t *testing.T) {
	c := newCluster(t)
	lines := commands(t, "../README.md", "Install")
	if len(lines) < 2 {
		t.Fatal(lines)
	}
	// Twice: what changes the ConfigMap later must not fail because it exists.
	for range 2 {
		for _, line := range lines {
			c.sh(line)
		}
	}
	var d appsv1.DaemonSet
	if !c.get(&d, "daemonset", "nft-masq-agent") {
		t.Fatal(c.last)
	}
	want := "registry.example/nft-masq-agent:" + strings.TrimSpace(c.sh("make -s version"))
	if got := d.Spec.Template.Spec.Containers[0].Image; got != want {
		t.Errorf("image %s, want %s", got, want)
	}
	var m corev1.ConfigMap
	volume := d.Spec.Template.Spec.Volumes[0].ConfigMap
	if !c.get(&m, "configmap", volume.Name) || m.Data[volume.Items[0].Key] == "" {
		t.Errorf("the pod mounts nothing of %v: %s", m, c.last)
	}

	// What one is told elsewhere: components, and to remove everything.
	for _, components := range []string{"prometheus labelled-nodes", "takeover", "non-masquerade-daemon prometheus"} {
		c.sh("make install IMAGE=registry.example/nft-masq-agent COMPONENTS='" + components + "'")
	}
	c.sh("make uninstall IMAGE=registry.example/nft-masq-agent")
	var left struct {
		Items []struct {
			Kind string
		}
	}
	if !c.get(&left, "daemonset,service,pods", "--selector=app.kubernetes.io/name=nft-masq-agent") || len(left.Items) > 0 {
		t.Errorf("left: %v %s", left, c.last)
	}
	if !c.get(&m, "configmap", volume.Name) {
		t.Error("the ConfigMap went, too")
	}
}

// The manifest of ip-masq-agent, as far as it matters.
const olderAgent = `apiVersion: apps/v1
kind: DaemonSet
metadata: {name: ip-masq-agent, namespace: kube-system}
spec:
  selector: {matchLabels: {k8s-app: ip-masq-agent}}
  template:
    metadata: {labels: {k8s-app: ip-masq-agent}}
    spec:
      containers:
        - {name: ip-masq-agent, image: old, args: [--enable-ipv6=true], securityContext: {privileged: false}}
`

func TestInstallReplacesAnOlderAgentInPlace(t *testing.T) {
	c := newCluster(t)
	c.sh("kubectl apply -f - <<'EOF'\n" + olderAgent + "EOF\n")
	var before, after appsv1.DaemonSet
	c.get(&before, "daemonset", "ip-masq-agent")
	c.sh("make -s manifest COMPONENTS=takeover IMAGE=registry.example/nft-masq-agent | kubectl replace -f -")
	if !c.get(&after, "daemonset", "ip-masq-agent") || after.UID != before.UID {
		t.Fatalf("another DaemonSet: %s", c.last)
	}
	args := after.Spec.Template.Spec.Containers[0].Args
	if !slices.Contains(args, "--takeover") || slices.Contains(args, "--enable-ipv6=true") {
		t.Errorf("arguments %v", args)
	}
}

func TestInstallWithHelmAndRemoval(t *testing.T) {
	c := newCluster(t)
	for _, line := range commands(t, "README.md", "Helm") {
		c.sh(line)
	}
	var d appsv1.DaemonSet
	if !c.get(&d, "daemonset", "nft-masq-agent") {
		t.Fatal(c.last)
	}
	if got := d.Spec.Template.Spec.Containers[0].Image; got != "registry.example/nft-masq-agent:v1.0.0" {
		t.Errorf("image %s", got)
	}
	for _, line := range commands(t, "README.md", "Removal") {
		if strings.HasPrefix(line, "make ") {
			continue
		}
		c.sh(line)
		if strings.Contains(line, "removal=true") {
			c.get(&d, "daemonset", "nft-masq-agent")
			if args := d.Spec.Template.Spec.Containers[0].Args; !slices.Equal(args, []string{"cleanup", "--wait"}) {
				t.Errorf("arguments %v", args)
			}
		}
	}
	if c.get(&d, "daemonset", "nft-masq-agent") {
		t.Error("the DaemonSet is still there")
	}
}

func TestInstallWithHelmReplacesAnOlderAgentInPlace(t *testing.T) {
	c := newCluster(t)
	c.sh("kubectl apply -f - <<'EOF'\n" + olderAgent + "EOF\n")
	var before, after appsv1.DaemonSet
	c.get(&before, "daemonset", "ip-masq-agent")
	c.sh("helm install nft-masq-agent manifests/helm --namespace kube-system --set takeover=true --take-ownership --force")
	if !c.get(&after, "daemonset", "ip-masq-agent") || after.UID != before.UID {
		t.Fatalf("another DaemonSet: %s", c.last)
	}
	container := after.Spec.Template.Spec.Containers[0]
	if !slices.Contains(container.Args, "--takeover") || container.SecurityContext.Privileged != nil {
		t.Errorf("arguments %v, security context %v", container.Args, container.SecurityContext)
	}
}
