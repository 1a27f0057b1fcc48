// Package manifests_test compares the manifests with the Kubernetes types, the
// program's flags and the documentation. The files are those that make manifests
// generates from the kustomizations.
package manifests_test

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"nft-masq-agent/config"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/agent"
)

// oneFile is the manifest for people who do not use kustomize.
const oneFile = "nft-masq-agent.yaml"

// A rendered manifest.
type rendered struct {
	daemonSet appsv1.DaemonSet
	accounts  []corev1.ServiceAccount
	services  []corev1.Service
	monitors  []podMonitor
	rules     []prometheusRule
	objects   []operatorObject // all of them
}

// The fields that we set of the Prometheus Operator's objects.
type (
	operatorObject struct {
		APIVersion, Kind string
		Metadata         struct {
			Name, Namespace string
			Labels          map[string]string
		}
	}
	podMonitor struct {
		operatorObject `json:",inline"`
		Spec           struct {
			Selector            struct{ MatchLabels map[string]string }
			PodMetricsEndpoints []struct {
				Port        string
				Relabelings []struct {
					SourceLabels []string
					TargetLabel  string
				}
			}
		}
	}
	prometheusRule struct {
		operatorObject `json:",inline"`
		Spec           any
	}
)

func (r rendered) pod() corev1.PodSpec         { return r.daemonSet.Spec.Template.Spec }
func (r rendered) container() corev1.Container { return r.pod().Containers[0] }

// fileOf returns the file of a manifest.
func fileOf(name string) string {
	if name == "base" {
		return oneFile
	}
	return filepath.Join("testdata", name+".yaml")
}

// read decodes a manifest strictly: an unknown key is an error.
func read(t *testing.T, name string) (r rendered) {
	t.Helper()
	for document := range strings.SplitSeq(readFile(t, fileOf(name)), "\n---\n") {
		var object operatorObject
		must(t, yaml.Unmarshal([]byte(document), &object))
		r.objects = append(r.objects, object)
		var into any
		switch object.Kind {
		case "DaemonSet":
			into = &r.daemonSet
		case "ServiceAccount":
			into = added(&r.accounts)
		case "Service":
			into = added(&r.services)
		case "PodMonitor":
			into = added(&r.monitors)
		case "PrometheusRule":
			into = added(&r.rules)
		default:
			t.Fatalf("%s: a %s", name, object.Kind)
		}
		if err := yaml.UnmarshalStrict([]byte(document), into); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if n := len(r.pod().Containers); n != 1 {
		t.Fatalf("%s: %d containers", name, n)
	}
	return r
}

func added[T any](list *[]T) *T {
	*list = append(*list, *new(T))
	return &(*list)[len(*list)-1]
}

// everyManifest runs a test for the base and each overlay.
func everyManifest(t *testing.T, test func(t *testing.T, name string, r rendered)) {
	t.Helper()
	overlays, err := os.ReadDir("overlays")
	must(t, err)
	names := []string{"base"}
	for _, o := range overlays {
		names = append(names, o.Name())
	}
	for _, name := range names {
		t.Run(name, func(t *testing.T) { test(t, name, read(t, name)) })
	}
}

func TestOverlaysMatchTheirOutput(t *testing.T) {
	list := func(pattern, suffix string) []string {
		found, err := filepath.Glob(pattern)
		must(t, err)
		for i, f := range found {
			found[i] = strings.TrimSuffix(filepath.Base(f), suffix)
		}
		slices.Sort(found)
		return found
	}
	overlays := list("overlays/*", "")
	if diff := cmp.Diff(overlays, list("testdata/*.yaml", ".yaml")); diff != "" {
		t.Errorf("-overlays +output:\n%s", diff)
	}
	components := append(list("components/*", ""), "removal") // which cannot be combined
	// One is for workloads, not for the agent.
	components = slices.DeleteFunc(components, func(c string) bool { return c == "wait-for-rules" })
	slices.Sort(components)
	if diff := cmp.Diff(overlays, components); diff != "" {
		t.Errorf("-overlays +components:\n%s", diff)
	}
}

// The DaemonSet of the base: one capability, no token, a soft limit of half the memory, probes that rarely start
// a program but until the first answer.
const wantDaemonSet = `
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: nft-masq-agent, namespace: kube-system, labels: {app.kubernetes.io/name: nft-masq-agent}}
spec:
  minReadySeconds: 10
  updateStrategy: {type: RollingUpdate, rollingUpdate: {maxUnavailable: 10%, maxSurge: 0}}
  selector: {matchLabels: {app.kubernetes.io/name: nft-masq-agent}}
  template:
    metadata: {labels: {app.kubernetes.io/name: nft-masq-agent}}
    spec:
      hostNetwork: true
      priorityClassName: system-node-critical
      nodeSelector: {kubernetes.io/os: linux}
      tolerations: [{operator: Exists}]
      serviceAccountName: nft-masq-agent
      automountServiceAccountToken: false
      securityContext: {seccompProfile: {type: RuntimeDefault}}
      dnsPolicy: Default
      enableServiceLinks: false
      terminationGracePeriodSeconds: 10
      volumes:
        - {name: config, configMap: {name: ip-masq-agent, optional: true, items: [{key: config, path: ip-masq-agent}]}}
        - {name: probe, emptyDir: {medium: Memory, sizeLimit: 1Mi}}
      containers:
        - name: nft-masq-agent
          image: nft-masq-agent
          imagePullPolicy: IfNotPresent
          args: [--http-address=127.0.0.1:9717, --probe-socket=/run/nft-masq-agent/probe.sock]
          env: [{name: GOMEMLIMIT, value: 96MiB}]
          resources: {requests: {cpu: 10m, memory: 16Mi}, limits: {memory: 192Mi}}
          securityContext:
            runAsUser: 0
            runAsGroup: 0
            readOnlyRootFilesystem: true
            allowPrivilegeEscalation: false
            capabilities: {add: [NET_ADMIN], drop: [ALL]}
          volumeMounts:
            - {name: config, mountPath: /etc/config, readOnly: true}
            - {name: probe, mountPath: /run/nft-masq-agent}
          startupProbe: {exec: {command: &alive [/nft-masq-agent, ready, --alive]}, periodSeconds: 1,
            failureThreshold: 120, timeoutSeconds: 5}
          livenessProbe: {exec: {command: *alive}, periodSeconds: 60, failureThreshold: 3, timeoutSeconds: 5}
          readinessProbe: {exec: {command: [/nft-masq-agent, ready]}, periodSeconds: 30,
            failureThreshold: 1, timeoutSeconds: 5}
`

// differences are what each overlay changes of it.
var differences = map[string]func(d *appsv1.DaemonSet, p *corev1.PodSpec, c *corev1.Container){
	"base": func(*appsv1.DaemonSet, *corev1.PodSpec, *corev1.Container) {},
	"iptables-nft": func(_ *appsv1.DaemonSet, _ *corev1.PodSpec, c *corev1.Container) {
		c.Args = append(c.Args, "--mode=iptables-nft")
	},
	"labelled-nodes": func(_ *appsv1.DaemonSet, p *corev1.PodSpec, _ *corev1.Container) {
		p.NodeSelector["node.kubernetes.io/masq-agent-ds-ready"] = "true"
	},
	"non-masquerade-daemon": func(d *appsv1.DaemonSet, p *corev1.PodSpec, c *corev1.Container) {
		replaces(d, c, "non-masquerade-daemon")
		config := p.Volumes[0].ConfigMap
		config.Name, config.Items[0].Path = "non-masquerade-daemon", "non-masquerade-daemon"
		c.Args = append(c.Args, "--mode=iptables-nft", "--masq-chain=NON-MASQUERADE-DAEMON",
			"--config=/etc/config/non-masquerade-daemon")
	},
	"prometheus": scraped, "prometheus-operator": scraped,
	"removal": func(d *appsv1.DaemonSet, _ *corev1.PodSpec, c *corev1.Container) {
		d.Spec.MinReadySeconds, d.Spec.UpdateStrategy.RollingUpdate.MaxUnavailable.StrVal = 5, "100%"
		c.Args, c.StartupProbe, c.LivenessProbe, c.ReadinessProbe = []string{"cleanup", "--wait"}, nil, nil, nil
	},
	"takeover": func(d *appsv1.DaemonSet, _ *corev1.PodSpec, c *corev1.Container) {
		replaces(d, c, "ip-masq-agent")
		c.Args = append(c.Args, "--takeover")
	},
}

// replaces an older agent's DaemonSet in place, by its name and labels: a selector is immutable, and containers
// are merged by name.
func replaces(d *appsv1.DaemonSet, c *corev1.Container, name string) {
	d.Name, c.Name = name, name
	d.Spec.Selector.MatchLabels = map[string]string{"k8s-app": name}
	d.Spec.Template.Labels["k8s-app"] = name
}

// scraped has the agent listen at the address of the node.
func scraped(d *appsv1.DaemonSet, _ *corev1.PodSpec, c *corev1.Container) {
	d.Spec.Template.Annotations = map[string]string{
		"prometheus.io/scrape": "true", "prometheus.io/port": "9717", "prometheus.io/path": "/metrics",
	}
	c.Args = append(c.Args, "--http-address=[$(HOST_IP)]:9717", "--conntrack-interval=60")
	c.Env = append(c.Env, corev1.EnvVar{Name: "HOST_IP", ValueFrom: &corev1.EnvVarSource{
		FieldRef: &corev1.ObjectFieldSelector{FieldPath: "status.hostIP"},
	}})
	c.Ports = []corev1.ContainerPort{{Name: "metrics", ContainerPort: 9717}}
}

func TestDaemonSetsHaveTheseFieldsAndNoOthers(t *testing.T) {
	everyManifest(t, func(t *testing.T, name string, r rendered) {
		var want appsv1.DaemonSet
		must(t, yaml.UnmarshalStrict([]byte(wantDaemonSet), &want))
		spec := &want.Spec.Template.Spec
		differences[name](&want, spec, &spec.Containers[0])
		for _, d := range []*appsv1.DaemonSet{&want, &r.daemonSet} {
			slices.SortFunc(d.Spec.Template.Spec.Containers[0].Env,
				func(a, b corev1.EnvVar) int { return strings.Compare(a.Name, b.Name) })
		}
		if diff := cmp.Diff(want, r.daemonSet); diff != "" {
			t.Errorf("-want +got:\n%s", diff)
		}
	})
}

// No object gives the account a right: there is no role, and no binding.
func TestPodHasAnAccountOfItsOwnWithoutRights(t *testing.T) {
	everyManifest(t, func(t *testing.T, _ string, r rendered) {
		if len(r.accounts) != 1 || r.accounts[0].Name != r.pod().ServiceAccountName ||
			r.accounts[0].AutomountServiceAccountToken == nil || *r.accounts[0].AutomountServiceAccountToken {
			t.Errorf("account %q of %+v", r.pod().ServiceAccountName, r.accounts)
		}
	})
}

func TestArgumentsAreFlagsOfTheProgram(t *testing.T) {
	nfttest.SkipIfShort(t)
	program := agent.Program(t)
	everyManifest(t, func(t *testing.T, _ string, r rendered) {
		args, command := r.container().Args, "run"
		if !strings.HasPrefix(args[0], "-") {
			args, command = args[1:], args[0]
		}
		help := run(t, program+" "+command+" --help")
		for _, arg := range args {
			flag, _, _ := strings.Cut(arg, "=")
			if !slices.Contains(strings.Fields(help), flag) {
				t.Errorf("%s has no flag %s:\n%s", command, flag, help)
			}
		}
	})
}

func TestPrometheusFindsEachNodeAndNamesTargetsByIt(t *testing.T) {
	for name, monitors := range map[string]int{"prometheus": 0, "prometheus-operator": 1} {
		r := read(t, name)
		if len(r.services) != 1 || len(r.monitors) != monitors {
			t.Fatalf("%d services, %d monitors", len(r.services), len(r.monitors))
		}
		selectors := []map[string]string{r.services[0].Spec.Selector}
		for _, m := range r.monitors {
			selectors = append(selectors, m.Spec.Selector.MatchLabels)
			e := m.Spec.PodMetricsEndpoints
			if len(e) != 1 || e[0].Port != r.container().Ports[0].Name || len(e[0].Relabelings) != 1 ||
				e[0].Relabelings[0].TargetLabel != "node" ||
				!slices.Equal(e[0].Relabelings[0].SourceLabels, []string{"__meta_kubernetes_pod_node_name"}) {
				t.Errorf("endpoints %+v", e)
			}
		}
		for _, selector := range selectors {
			if diff := cmp.Diff(selector, r.daemonSet.Spec.Template.Labels); diff != "" {
				t.Errorf("-selector +pod:\n%s", diff)
			}
		}
	}
}

func TestPrometheusRuleHasTheAlerts(t *testing.T) {
	r := read(t, "prometheus-operator")
	var want any
	readYAML(t, "prometheus/rules.yaml", &want)
	if len(r.rules) != 1 {
		t.Fatalf("%d rules", len(r.rules))
	}
	if diff := cmp.Diff(want, r.rules[0].Spec); diff != "" {
		t.Errorf("-rules.yaml +PrometheusRule:\n%s", diff)
	}
}

// make uninstall deletes the objects of all overlays by this label.
func TestObjectsHaveTheLabelThatUninstallSelects(t *testing.T) {
	everyManifest(t, func(t *testing.T, _ string, r rendered) {
		for _, o := range r.objects {
			if o.Metadata.Labels["app.kubernetes.io/name"] != "nft-masq-agent" {
				t.Errorf("%s: labels %v", o.Kind, o.Metadata.Labels)
			}
		}
	})
}

// kubectl creates a key for each file in a directory.
func TestSampleConfigHasASingleKey(t *testing.T) {
	files, err := os.ReadDir("agent-config")
	if err != nil || len(files) != 1 || files[0].Name() != read(t, "base").pod().Volumes[0].ConfigMap.Items[0].Key {
		t.Errorf("%v %v", files, err)
	}
}

func TestSampleConfigMeansTheDefaults(t *testing.T) {
	text := readFile(t, "agent-config/config")
	got, problems := config.Parse(config.Defaults{}, config.Source{Name: "config", Data: []byte(text)})
	if len(problems) > 0 {
		t.Fatal(problems)
	}
	want := config.Default(config.Defaults{})
	noPlaces := cmp.Transformer("text", func(c config.CIDR) string { return c.Prefix.String() })
	if diff := cmp.Diff(want, got, noPlaces, cmp.AllowUnexported(config.Config{})); diff != "" {
		t.Errorf("-defaults +sample:\n%s", diff)
	}
}

// The last column of the platforms says what was really tested: groups of the cluster test
// that have a table in nft/EVIDENCE.md, rows of the lab, or rules that tests read.
func TestPlatformsSayWhatWasTested(t *testing.T) {
	t.Parallel()
	evidence := readFile(t, "../nft/EVIDENCE.md")
	tested := map[string]string{} // by name: the best of what was tested
	samples, err := filepath.Glob("../testdata/foreign/*")
	if err != nil || len(samples) == 0 {
		t.Fatal("no rules", err)
	}
	for _, dir := range samples {
		tested[filepath.Base(dir)] = "recorded rules"
	}
	for _, row := range regexp.MustCompile("(?m)^\\| `([a-z0-9-]+)` \\|").FindAllStringSubmatch(
		regexp.MustCompile("(?s)<!-- lab -->.*<!-- /lab -->").FindString(evidence), -1) {
		tested[row[1]] = "lab"
	}
	groups := regexp.MustCompile("(?s)<!-- cluster: ([a-z-]+) -->\n(.*?)<!-- /cluster").FindAllStringSubmatch(evidence, -1)
	for _, group := range groups {
		if tested[group[1]] = "cluster"; group[2] == "" {
			tested[group[1]] = "nothing yet: its table in nft/EVIDENCE.md is empty"
		}
	}
	_, table, _ := strings.Cut(readFile(t, "README.md"), "| tested here |\n|")
	table, _, _ = strings.Cut(table, "\n\n")
	named := map[string]bool{}
	rows := strings.Split(strings.TrimSpace(table), "\n")[1:]
	for _, row := range rows {
		cells := strings.Split(strings.Trim(row, "| "), " | ")
		cell := cells[len(cells)-1]
		for part := range strings.SplitSeq(cell, "; ") {
			how, names, lists := strings.Cut(part, ": ")
			if !lists && cell != "no" {
				t.Errorf("%q lists nothing that was tested", cell)
			}
			for name := range strings.SplitSeq(names, ", ") {
				name = strings.Trim(name, "`")
				if named[name] = true; lists && tested[name] != how {
					t.Errorf("%s: %q says %q, want %q", cells[0], name, how, tested[name])
				}
			}
		}
	}
	for _, name := range []string{"flannel", "bridge", "ptp", "portmap", "kindnet", "kube-proxy"} {
		if got, known := tested[name]; !known || got == "cluster" && !named[name] {
			t.Errorf("no platform says %q, of which nft/EVIDENCE.md has a table", "cluster: `"+name+"`")
		}
	}
	if len(rows) < 10 || len(groups) < 8 {
		t.Errorf("%d platforms, %d groups", len(rows), len(groups))
	}
}
