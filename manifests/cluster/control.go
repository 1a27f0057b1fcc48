package cluster

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"nft-masq-agent/nft/nfttest"
)

// Programs is the directory that build.sh prints.
type Programs string

// Bin returns the path of a program that was built.
func (p Programs) Bin(name string) string { return filepath.Join(string(p), "bin", name) }

// Debian returns the path of a file of Debian's packages.
func (p Programs) Debian(path string) string { return filepath.Join(string(p), "debian", path) }

// path is the search path for all of them.
func (p Programs) path() string {
	return strings.Join([]string{
		p.Bin(""), p.Debian("usr/bin"), p.Debian("usr/sbin"), os.Getenv("PATH"), "/usr/sbin",
		"/sbin",
	}, ":")
}

// A Control is a control plane in a network namespace.
type Control struct {
	T    testing.TB
	NS   *nfttest.NS
	Env  []string // with which commands reach it
	Dir  string   // of the test, with a short name
	last string   // what kubectl complained of

	programs   Programs
	root       string // of the repository
	kubeconfig string
}

const clientConfig = `{apiVersion: v1, kind: Config, current-context: test,
clusters: [{name: test, cluster: {server: "https://%s:6443", insecure-skip-tls-verify: true}}],
users: [{name: admin, user: {token: test}}], contexts: [{name: test, context: {cluster: test, user: admin}}]}`

// StartControl starts a control plane that listens on an address of the
// namespace, with more controllers than controllers names none; without a name
// there is no controller manager. It ends with the test.
func StartControl(t testing.TB, ns *nfttest.NS, p Programs, address, controllers string) *Control {
	t.Helper()
	dir, err := os.MkdirTemp("", "cluster-") //nolint:usetesting // the name of a socket has room for 107 characters
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	root, err := filepath.Abs(".")
	for _, none := os.Stat(filepath.Join(root, "go.mod")); none != nil &&
		root != "/"; _, none = os.Stat(filepath.Join(root, "go.mod")) {
		root = filepath.Dir(root)
	}
	if err != nil {
		t.Fatal(err)
	}
	c := &Control{root: root, T: t, NS: ns, Dir: dir, programs: p}
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	keyFile := c.Write("sa.key", string(pem.EncodeToMemory(&pem.Block{
		Type:  "RSA PRIVATE KEY",
		Bytes: x509.MarshalPKCS1PrivateKey(key),
	})))
	tokens := c.Write("tokens", "test,admin,admin,system:masters\n")
	c.kubeconfig = c.Write("kubeconfig", fmt.Sprintf(clientConfig, address))
	c.Env = append(os.Environ(), "KUBECONFIG="+c.kubeconfig, "PATH="+p.path())

	c.Start(ns, "etcd", "etcd", "--data-dir="+filepath.Join(dir, "etcd"), "--unsafe-no-fsync")
	c.Start(ns, "apiserver", "kube-apiserver", "--etcd-servers=http://127.0.0.1:2379", "--bind-address=0.0.0.0",
		"--advertise-address="+address,
		"--cert-dir="+dir, "--token-auth-file="+tokens, "--authorization-mode=RBAC",
		"--service-cluster-ip-range=10.96.0.0/16,fd00:10:96::/112",
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file="+keyFile,
		"--service-account-signing-key-file="+keyFile,
		"--allow-privileged", "--feature-gates=SizeBasedListCostEstimate=false",
		"--kubelet-preferred-address-types=InternalIP")
	c.Eventually("namespace", "default")
	if controllers == "" {
		return c
	}
	// The controller manager waits for only ten seconds.
	c.Await("/healthz", func() bool {
		out, err := c.Try("kubectl get --raw=/healthz")
		c.last = out
		return err == nil
	})
	c.Start(ns, "controller-manager", "kube-controller-manager", "--kubeconfig="+c.kubeconfig, "--leader-elect=false",
		"--use-service-account-credentials=false",
		"--cert-dir="+dir, "--root-ca-file="+filepath.Join(dir, "apiserver.crt"), "--service-account-private-key-file="+
			keyFile,
		// A machine that is busy is not a node that is gone.
		"--node-monitor-grace-period=10m", "--controllers="+controllers)
	c.Eventually("namespace", "kube-system")
	return c
}

// Tools has commands find kustomize and helm in a directory: the namespace has
// no network for go run.
func (c *Control) Tools(dir string) {
	c.Env = append(c.Env, "KUSTOMIZE="+filepath.Join(dir, "kustomize"), "HELM="+filepath.Join(dir, "helm"), "PATH="+dir+
		":"+c.programs.path())
}

// Write writes a file that goes with the test.
func (c *Control) Write(name, text string) string {
	c.T.Helper()
	file := filepath.Join(c.Dir, name)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		c.T.Fatal(err)
	}
	return file
}

// Start runs a program until the test ends, with its output in a file of this
// name, of which the end is shown when the test has failed.
func (c *Control) Start(ns *nfttest.NS, name, program string, args ...string) *nfttest.Process {
	c.T.Helper()
	return c.start(ns, name, &exec.Cmd{Path: program, Args: append([]string{program}, args...)})
}

func (c *Control) start(ns *nfttest.NS, name string, cmd *exec.Cmd) *nfttest.Process {
	c.T.Helper()
	log, err := os.OpenFile(filepath.Join(c.Dir, name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		c.T.Fatal(err)
	}
	defer log.Close()
	if !strings.Contains(cmd.Path, "/") {
		if cmd.Path, err = lookPath(cmd.Path, c.programs.path()); err != nil {
			c.T.Fatal(err)
		}
	}
	cmd.Env, cmd.Stdout, cmd.Stderr = c.Env, log, log
	p, err := ns.Start(cmd)
	if err != nil {
		c.T.Fatal(err)
	}
	c.T.Cleanup(func() {
		_ = p.Kill()
		_ = p.Wait()
		if text, err := os.ReadFile(log.Name()); err == nil && c.T.Failed() {
			lines := strings.Split(string(text), "\n")
			c.T.Logf("%s:\n%s", name, strings.Join(lines[max(0, len(lines)-20):], "\n"))
		}
	})
	return p
}

func lookPath(name, path string) (string, error) {
	for _, dir := range filepath.SplitList(path) {
		if file := filepath.Join(dir, name); exec.Command(file).Err == nil {
			if info, err := os.Stat(file); err == nil && info.Mode()&0o111 != 0 {
				return file, nil
			}
		}
	}
	return "", fmt.Errorf("%s: %w", name, exec.ErrNotFound)
}

// Sh runs a command line at the root of the repository, as a reader would.
func (c *Control) Sh(line string) string {
	c.T.Helper()
	out, err := c.Try(line)
	if err != nil {
		c.T.Fatalf("%s: %v\n%s", line, err, out)
	}
	c.T.Logf("%s\n%s", line, out)
	return out
}

// Try is Sh for a line that may fail.
func (c *Control) Try(line string) (string, error) {
	cmd := exec.CommandContext(context.Background(), "bash", "-o", "pipefail", "-c", line)
	cmd.Dir, cmd.Env = c.root, c.Env
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := c.NS.Run(cmd)
	return out.String(), err
}

// Get decodes what kubectl get prints of one object; there may be none.
func (c *Control) Get(into any, args ...string) bool {
	c.T.Helper()
	cmd := exec.Command(c.programs.Bin("kubectl"),
		append([]string{"--namespace=kube-system", "get", "--output=json"}, args...)...)
	cmd.Env = c.Env
	var out, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &stderr
	if err := c.NS.Run(cmd); err != nil {
		c.last = stderr.String()
		return false
	}
	if err := json.Unmarshal(out.Bytes(), into); err != nil {
		c.T.Fatal(err)
	}
	return true
}

// Complaint is why the last Get found nothing.
func (c *Control) Complaint() string { return c.last }

// Eventually waits until an object is there.
func (c *Control) Eventually(args ...string) {
	c.T.Helper()
	var found map[string]any
	c.Await(fmt.Sprint(args), func() bool { return c.Get(&found, args...) })
}

// Await waits until something is so.
func (c *Control) Await(what string, so func() bool) {
	c.T.Helper()
	for end := time.Now().Add(3 * time.Minute); time.Now().Before(end); time.Sleep(200 * time.Millisecond) {
		if so() {
			return
		}
	}
	c.T.Fatalf("%s: not within three minutes: %s", what, c.last)
}

// Kubeconfig is the file with which programs reach the API server.
func (c *Control) Kubeconfig() string { return c.kubeconfig }
