package manifests_test

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"

	"nft-masq-agent/manifests/cluster"
	"nft-masq-agent/nft/nfttest"
)

// newControl starts a control plane without nodes.
func newControl(t *testing.T) *cluster.Control {
	t.Helper()
	dir := os.Getenv("CLUSTER_PROGRAMS")
	if dir == "" {
		t.Skip("starts a control plane: make install-test")
	}
	c := cluster.StartControl(t, nfttest.NewNS(t, "control"), cluster.Programs(dir), "127.0.0.1",
		"daemonset-controller,garbage-collector-controller,namespace-controller,endpointslice-controller")
	c.Tools(tools(t))
	return c
}

// commands returns the command lines of a section, except those that bring the image to nodes or to a registry.
func commands(t *testing.T, file, title string) []string {
	t.Helper()
	_, section, found := strings.Cut(readFile(t, file), "\n## "+title+"\n")
	if !found {
		t.Fatalf("%s has no section %s", file, title)
	}
	section, _, _ = strings.Cut(section, "\n## ")
	brings := regexp.MustCompile(`^(make push |make image$|ctr )`)
	return slices.DeleteFunc(shellLines(section), brings.MatchString)
}

func TestInstallSectionWorksAsWritten(t *testing.T) {
	c := newControl(t)
	lines := commands(t, "../README.md", "Install")
	if len(lines) < 2 {
		t.Fatal(lines)
	}
	// Twice: updating the ConfigMap must not fail because it exists.
	for range 2 {
		for _, line := range lines {
			c.Sh(line)
		}
	}
	var d appsv1.DaemonSet
	if !c.Get(&d, "daemonset", "nft-masq-agent") {
		t.Fatal(c.Complaint())
	}
	want := "registry.example/nft-masq-agent:" + strings.TrimSpace(c.Sh("make -s version"))
	if got := d.Spec.Template.Spec.Containers[0].Image; got != want {
		t.Errorf("image %s, want %s", got, want)
	}
	var m corev1.ConfigMap
	volume := d.Spec.Template.Spec.Volumes[0].ConfigMap
	if !c.Get(&m, "configmap", volume.Name) || m.Data[volume.Items[0].Key] == "" {
		t.Errorf("the pod mounts none of %v: %s", m, c.Complaint())
	}

	// From other sections: components, and removing everything.
	for _, components := range []string{"prometheus labelled-nodes", "takeover", "non-masquerade-daemon prometheus"} {
		c.Sh("make install IMAGE=registry.example/nft-masq-agent COMPONENTS='" + components + "'")
	}
	c.Sh("make uninstall IMAGE=registry.example/nft-masq-agent")
	var left struct {
		Items []struct {
			Kind string
		}
	}
	const ours = "--selector=app.kubernetes.io/name=nft-masq-agent"
	if !c.Get(&left, "daemonset,service,serviceaccount,pods", ours) || len(left.Items) > 0 {
		t.Errorf("left: %v %s", left, c.Complaint())
	}
	if !c.Get(&m, "configmap", volume.Name) {
		t.Error("the ConfigMap was deleted, too")
	}
}

// What commands of a section need that is in another one.
var needed = map[string]string{
	"manifests/MIGRATION.md, From ip-masq-agent": "make build; kubectl create configmap ip-masq-agent " +
		"--from-file=manifests/agent-config --namespace=kube-system --dry-run=client -o yaml | kubectl apply -f -; " +
		"kubectl apply -f - <<'EOF'\n" + olderAgent + "EOF\n",
	"manifests/README.md, Removal": "helm install nft-masq-agent manifests/helm --namespace kube-system " +
		"--set image.repository=registry.example/nft-masq-agent --set takeover=true",
	"manifests/helm/README.md, ": "rm -rf bin/chart && cp -r manifests/helm bin/chart && " +
		"cp manifests/agent-config/config bin/chart/ip-masq-agent.yaml",
}

const removeEverything = `for release in $(helm -n kube-system list -q); do helm -n kube-system uninstall $release; done
ours=app.kubernetes.io/name=nft-masq-agent
kubectl -n kube-system delete daemonsets,services,configmaps,serviceaccounts --selector=$ours
kubectl -n kube-system delete daemonset ip-masq-agent non-masquerade-daemon --ignore-not-found
kubectl -n kube-system delete serviceaccount nft-masq-agent --ignore-not-found`

// There are no nodes, so that no pod runs.
func TestInstallCommandsOfTheDocumentsRun(t *testing.T) {
	c := newControl(t)
	t.Cleanup(func() { c.Sh(removeEverything) })
	before := ""
	for _, d := range by(t, "cluster") {
		section := d.document + ", " + d.section
		if section != before {
			before = section
			c.Sh(removeEverything)
			if setup, ok := needed[section]; ok {
				c.Sh(setup)
			}
		}
		line := strings.ReplaceAll(d.line, "=NODE ", "=node-1 ")
		line = strings.NewReplacer(" NAMESPACE SELECTOR", "", " NAMESPACE ", " kube-system ").Replace(line)
		if d.document == "manifests/helm/README.md" {
			line = "cd bin/chart && " + line
		}
		c.Sh(line)
	}
}

// The relevant parts of ip-masq-agent's manifest.
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
	for name, line := range map[string]string{
		"manifest": "kubectl -n kube-system create serviceaccount nft-masq-agent; " +
			"make -s manifest COMPONENTS=takeover IMAGE=registry.example/nft-masq-agent | kubectl replace --save-config -f -",
		"chart": "helm install nft-masq-agent manifests/helm --namespace kube-system --set takeover=true --take-ownership " +
			"--force",
	} {
		t.Run(name, func(t *testing.T) {
			c := newControl(t)
			c.Sh("kubectl apply -f - <<'EOF'\n" + olderAgent + "EOF\n")
			var before, after appsv1.DaemonSet
			c.Get(&before, "daemonset", "ip-masq-agent")
			c.Sh(line)
			if !c.Get(&after, "daemonset", "ip-masq-agent") || after.UID != before.UID {
				t.Fatalf("it is another DaemonSet: %s", c.Complaint())
			}
			container := after.Spec.Template.Spec.Containers[0]
			if !slices.Contains(container.Args, "--takeover") || slices.Contains(container.Args, "--enable-ipv6=true") ||
				container.SecurityContext.Privileged != nil {
				t.Errorf("arguments %v, security context %v", container.Args, container.SecurityContext)
			}
		})
	}
}

// With all rights, but outside of the group, nobody changes the ConfigMap, and everything else stays as it is.
func TestInstallPolicyLetsOneGroupChangeTheConfig(t *testing.T) {
	c := newControl(t)
	const somebody = "kubectl -n kube-system --as=somebody --as-group=system:masters"
	const member = somebody + " --as-group=network-admins"
	const denied = "only network-admins may change it"
	const annotate = " annotate --overwrite configmap ip-masq-agent changed=yes"
	c.Sh(somebody + " create configmap ip-masq-agent --from-file=manifests/agent-config")
	c.Sh("kubectl apply -f manifests/admission.yaml")
	c.Await("the policy to apply", func() bool {
		out, err := c.Try(somebody + annotate)
		return err != nil && strings.Contains(out, denied)
	})
	for line, allowed := range map[string]bool{
		member + annotate: true,
		somebody + " delete configmap ip-masq-agent":             false,
		somebody + " delete configmaps --all":                    false,
		somebody + " create configmap another --from-literal=a=": true,
	} {
		out, err := c.Try(line + " --dry-run=server")
		if allowed && err != nil || !allowed && !strings.Contains(out, denied) {
			t.Errorf("%s: allowed %t, want %t\n%s", line, err == nil, allowed, out)
		}
	}
	all := " delete --raw '/api/v1/namespaces/kube-system/configmaps?dryRun=All'" // one request
	if out, err := c.Try(somebody + all); err == nil || !strings.Contains(out, denied) {
		t.Errorf("deleted all: %v\n%s", err, out)
	}
	c.Sh(member + all)
	c.Sh(member + " delete configmap ip-masq-agent")
	if out, err := c.Try(somebody + " create configmap ip-masq-agent"); err == nil || !strings.Contains(out, denied) {
		t.Errorf("created: %v\n%s", err, out)
	}
	c.Sh("kubectl delete -f manifests/admission.yaml")
}
