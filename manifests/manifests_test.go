// Package manifests_test compares the manifests with the Kubernetes types, the
// program's flags and the documentation. The files are those that make manifests
// generates from the kustomizations.
package manifests_test

import (
	"bytes"
	"os"
	"os/exec"
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
}

// The fields that we set of the Prometheus Operator's objects.
type (
	operatorObject struct {
		APIVersion string `json:"apiVersion"`
		Kind       string `json:"kind"`
		Metadata   struct {
			Name      string            `json:"name"`
			Namespace string            `json:"namespace"`
			Labels    map[string]string `json:"labels"`
		} `json:"metadata"`
	}
	podMonitor struct {
		operatorObject `json:",inline"`
		Spec           struct {
			Selector struct {
				MatchLabels map[string]string `json:"matchLabels"`
			} `json:"selector"`
			Endpoints []struct {
				Port        string `json:"port"`
				Relabelings []struct {
					SourceLabels []string `json:"sourceLabels"`
					TargetLabel  string   `json:"targetLabel"`
				} `json:"relabelings"`
			} `json:"podMetricsEndpoints"`
		} `json:"spec"`
	}
	prometheusRule struct {
		operatorObject `json:",inline"`
		Spec           any `json:"spec"`
	}
)

func (r rendered) pod() corev1.PodSpec         { return r.daemonSet.Spec.Template.Spec }
func (r rendered) container() corev1.Container { return r.pod().Containers[0] }

// read decodes a manifest strictly: an unknown key is an error.
func read(t *testing.T, name string) rendered {
	t.Helper()
	file := filepath.Join("testdata", name+".yaml")
	if name == "base" {
		file = oneFile
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var r rendered
	for _, document := range bytes.Split(text, []byte("\n---\n")) {
		var kind struct {
			Kind string `json:"kind"`
		}
		if err := yaml.Unmarshal(document, &kind); err != nil {
			t.Fatal(err)
		}
		switch kind.Kind {
		case "DaemonSet":
			err = yaml.UnmarshalStrict(document, &r.daemonSet)
		case "ServiceAccount":
			r.accounts = append(r.accounts, corev1.ServiceAccount{})
			err = yaml.UnmarshalStrict(document, &r.accounts[len(r.accounts)-1])
		case "Service":
			r.services = append(r.services, corev1.Service{})
			err = yaml.UnmarshalStrict(document, &r.services[len(r.services)-1])
		case "PodMonitor":
			r.monitors = append(r.monitors, podMonitor{})
			err = yaml.UnmarshalStrict(document, &r.monitors[len(r.monitors)-1])
		case "PrometheusRule":
			r.rules = append(r.rules, prometheusRule{})
			err = yaml.UnmarshalStrict(document, &r.rules[len(r.rules)-1])
		default:
			t.Errorf("%s: a %s", file, kind.Kind)
		}
		if err != nil {
			t.Errorf("%s: %v", file, err)
		}
	}
	if n := len(r.pod().Containers); n != 1 {
		t.Fatalf("%s: %d containers", file, n)
	}
	return r
}

// everyManifest runs a test for the base and each overlay.
func everyManifest(t *testing.T, test func(t *testing.T, name string, r rendered)) {
	t.Helper()
	overlays, err := os.ReadDir("overlays")
	if err != nil {
		t.Fatal(err)
	}
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
		if err != nil {
			t.Fatal(err)
		}
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

func TestPodHasOneCapabilityAndNothingElse(t *testing.T) {
	everyManifest(t, func(t *testing.T, _ string, r rendered) {
		yes, no, root := true, false, int64(0)
		want := &corev1.SecurityContext{
			RunAsUser: &root, RunAsGroup: &root, ReadOnlyRootFilesystem: &yes, AllowPrivilegeEscalation: &no,
			Capabilities: &corev1.Capabilities{Add: []corev1.Capability{"NET_ADMIN"}, Drop: []corev1.Capability{"ALL"}},
		}
		if diff := cmp.Diff(want, r.container().SecurityContext); diff != "" {
			t.Errorf("container (-want +got):\n%s", diff)
		}
		profile := &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault}
		seccomp := &corev1.PodSecurityContext{SeccompProfile: profile}
		if diff := cmp.Diff(seccomp, r.pod().SecurityContext); diff != "" {
			t.Errorf("pod (-want +got):\n%s", diff)
		}
		if token := r.pod().AutomountServiceAccountToken; token == nil || *token {
			t.Error("the pod gets a token of the service account")
		}
		if p := r.pod(); p.HostPID || p.HostIPC || len(p.InitContainers) > 0 {
			t.Error("the pod shares more than the host's network")
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

func TestPodRunsOnEveryLinuxNode(t *testing.T) {
	everyManifest(t, func(t *testing.T, name string, r rendered) {
		p := r.pod()
		if !p.HostNetwork || p.PriorityClassName != "system-node-critical" {
			t.Errorf("hostNetwork %t, priority class %q", p.HostNetwork, p.PriorityClassName)
		}
		if diff := cmp.Diff([]corev1.Toleration{{Operator: corev1.TolerationOpExists}}, p.Tolerations); diff != "" {
			t.Errorf("tolerations (-want +got):\n%s", diff)
		}
		want := map[string]string{"kubernetes.io/os": "linux"}
		if name == "labelled-nodes" {
			want["node.kubernetes.io/masq-agent-ds-ready"] = "true"
		}
		if diff := cmp.Diff(want, p.NodeSelector); diff != "" {
			t.Errorf("node selector (-want +got):\n%s", diff)
		}
		if r.daemonSet.Namespace != "kube-system" {
			t.Errorf("namespace %q", r.daemonSet.Namespace)
		}
		selector, labels := r.daemonSet.Spec.Selector.MatchLabels, r.daemonSet.Spec.Template.Labels
		for k, v := range selector {
			if labels[k] != v {
				t.Errorf("the selector %s=%s does not match the pod's labels %v", k, v, labels)
			}
		}
	})
}

func TestRollingUpdateReplacesATenthOfTheNodesAtATime(t *testing.T) {
	everyManifest(t, func(t *testing.T, name string, r rendered) {
		u := r.daemonSet.Spec.UpdateStrategy
		want := "10%"
		if name == "removal" {
			want = "100%"
		}
		if u.Type != appsv1.RollingUpdateDaemonSetStrategyType || u.RollingUpdate.MaxUnavailable.String() != want ||
			u.RollingUpdate.MaxSurge.String() != "0" || r.daemonSet.Spec.MinReadySeconds < 5 {
			t.Errorf("%s, %s unavailable, %s more", u.Type, u.RollingUpdate.MaxUnavailable, u.RollingUpdate.MaxSurge)
		}
	})
}

func TestPodResources(t *testing.T) {
	everyManifest(t, func(t *testing.T, _ string, r rendered) {
		res := r.container().Resources
		if cpu, memory := res.Requests.Cpu().String(), res.Requests.Memory().String(); cpu != "10m" || memory != "16Mi" {
			t.Errorf("requests %s and %s", cpu, memory)
		}
		if res.Limits.Memory().IsZero() || !res.Limits.Cpu().IsZero() {
			t.Errorf("limits %v", res.Limits)
		}
		i := slices.IndexFunc(r.container().Env, func(e corev1.EnvVar) bool { return e.Name == "GOMEMLIMIT" })
		if i < 0 {
			t.Fatal("no GOMEMLIMIT")
		}
		limit := res.Limits.Memory()
		soft := limit.DeepCopy()
		if err := soft.UnmarshalJSON([]byte(strings.TrimSuffix(r.container().Env[i].Value, "B"))); err != nil {
			t.Fatal(err)
		}
		if soft.Value() > limit.Value()*3/4 {
			t.Errorf("GOMEMLIMIT %s leaves the kernel too little of %s", &soft, limit)
		}
	})
}

func TestConfigMapIsOptionalAndMountedAsADirectory(t *testing.T) {
	everyManifest(t, func(t *testing.T, name string, r rendered) {
		source, file := "ip-masq-agent", "ip-masq-agent"
		if name == "non-masquerade-daemon" {
			source, file = name, name
		}
		yes := true
		var probe corev1.Volume
		if err := yaml.Unmarshal([]byte("name: probe\nemptyDir: {medium: Memory, sizeLimit: 1Mi}\n"), &probe); err != nil {
			t.Fatal(err)
		}
		volumes := []corev1.Volume{{
			Name: "config",
			VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{
				LocalObjectReference: corev1.LocalObjectReference{Name: source},
				Optional:             &yes,
				Items:                []corev1.KeyToPath{{Key: "config", Path: file}},
			}},
		}, probe}
		if diff := cmp.Diff(volumes, r.pod().Volumes); diff != "" {
			t.Errorf("volumes (-want +got):\n%s", diff)
		}
		mounts := []corev1.VolumeMount{
			{Name: "config", MountPath: "/etc/config", ReadOnly: true},
			{Name: "probe", MountPath: "/run/nft-masq-agent"},
		}
		if diff := cmp.Diff(mounts, r.container().VolumeMounts); diff != "" {
			t.Errorf("mounts (-want +got):\n%s", diff)
		}
	})
}

func TestArguments(t *testing.T) {
	loopback, probe := "--http-address=127.0.0.1:9717", "--probe-socket=/run/nft-masq-agent/probe.sock"
	want := map[string][]string{
		"base":           {loopback, probe},
		"iptables-nft":   {loopback, probe, "--mode=iptables-nft"},
		"labelled-nodes": {loopback, probe},
		"non-masquerade-daemon": {
			loopback, probe, "--mode=iptables-nft", "--masq-chain=NON-MASQUERADE-DAEMON",
			"--config=/etc/config/non-masquerade-daemon",
		},
		"prometheus":          {loopback, probe, "--http-address=[$(HOST_IP)]:9717", "--conntrack-interval=60"},
		"prometheus-operator": {loopback, probe, "--http-address=[$(HOST_IP)]:9717", "--conntrack-interval=60"},
		"removal":             {"cleanup", "--wait"},
		"takeover":            {loopback, probe, "--takeover"},
	}
	everyManifest(t, func(t *testing.T, name string, r rendered) {
		if diff := cmp.Diff(want[name], r.container().Args); diff != "" {
			t.Errorf("arguments (-want +got):\n%s", diff)
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
		help, err := exec.CommandContext(t.Context(), program, command, "--help").Output()
		if err != nil {
			t.Fatal(err)
		}
		for _, arg := range args {
			flag, _, _ := strings.Cut(arg, "=")
			if !slices.Contains(strings.Fields(string(help)), flag) {
				t.Errorf("%s has no flag %s:\n%s", command, flag, help)
			}
		}
	})
}

func TestProbesQueryTheirOwnAgent(t *testing.T) {
	everyManifest(t, func(t *testing.T, name string, r rendered) {
		start, live, ready := r.container().StartupProbe, r.container().LivenessProbe, r.container().ReadinessProbe
		if name == "removal" {
			if start != nil || live != nil || ready != nil {
				t.Error("overlay removal has a probe")
			}
			return
		}
		alive := []string{"/nft-masq-agent", "ready", "--alive"}
		for p, want := range map[*corev1.Probe][]string{
			start: alive, live: alive, ready: {"/nft-masq-agent", "ready"},
		} {
			if p.Exec == nil || !slices.Equal(p.Exec.Command, want) {
				t.Errorf("probe %v, want %q", p.ProbeHandler, want)
			}
		}
		// Each starts a program: rarely, but until the first answer, after which the kubelet asks at once whether it is
		// ready.
		if start.PeriodSeconds != 1 || live.PeriodSeconds < 60 || ready.PeriodSeconds < 30 {
			t.Errorf("probes every %d, %d and %d s", start.PeriodSeconds, live.PeriodSeconds, ready.PeriodSeconds)
		}
	})
}

func TestPrometheusFindsEachNode(t *testing.T) {
	for _, name := range []string{"prometheus", "prometheus-operator"} {
		r := read(t, name)
		if len(r.services) != 1 {
			t.Fatalf("%d services", len(r.services))
		}
		wantSelected(t, r, r.services[0].Spec.Selector)
		i := slices.IndexFunc(r.container().Env, func(e corev1.EnvVar) bool { return e.Name == "HOST_IP" })
		if i < 0 || r.container().Env[i].ValueFrom.FieldRef.FieldPath != "status.hostIP" {
			t.Errorf("HOST_IP is not the node's address: %v", r.container().Env)
		}
		want := []corev1.ContainerPort{{Name: "metrics", ContainerPort: 9717}}
		if diff := cmp.Diff(want, r.container().Ports); diff != "" {
			t.Errorf("ports (-want +got):\n%s", diff)
		}
	}
}

// wantSelected checks that a selector matches the pods of a manifest.
func wantSelected(t *testing.T, r rendered, selector map[string]string) {
	t.Helper()
	labels := r.daemonSet.Spec.Template.Labels
	for k, v := range selector {
		if labels[k] != v {
			t.Errorf("selects %s=%s, the pod has %v", k, v, labels)
		}
	}
}

func TestPodMonitorNamesTargetsByTheirNode(t *testing.T) {
	r := read(t, "prometheus-operator")
	if len(r.monitors) != 1 || len(r.monitors[0].Spec.Endpoints) != 1 {
		t.Fatalf("%+v", r.monitors)
	}
	wantSelected(t, r, r.monitors[0].Spec.Selector.MatchLabels)
	endpoint := r.monitors[0].Spec.Endpoints[0]
	if endpoint.Port != r.container().Ports[0].Name {
		t.Errorf("port %s", endpoint.Port)
	}
	if l := endpoint.Relabelings; len(l) != 1 || l[0].TargetLabel != "node" ||
		!slices.Equal(l[0].SourceLabels, []string{"__meta_kubernetes_pod_node_name"}) {
		t.Errorf("relabelings %+v", l)
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
		objects := map[string]map[string]string{"DaemonSet": r.daemonSet.Labels}
		for _, o := range r.services {
			objects["Service"] = o.Labels
		}
		for _, o := range r.accounts {
			objects["ServiceAccount"] = o.Labels
		}
		for _, o := range r.monitors {
			objects["PodMonitor"] = o.Metadata.Labels
		}
		for _, o := range r.rules {
			objects["PrometheusRule"] = o.Metadata.Labels
		}
		for kind, labels := range objects {
			if labels["app.kubernetes.io/name"] != "nft-masq-agent" {
				t.Errorf("%s: labels %v", kind, labels)
			}
		}
	})
}

// These overlays replace DaemonSets in place, so they must have their names and
// labels: a selector is immutable, and containers are merged by name.
func TestOverlaysThatReplaceOlderAgentsHaveTheirNames(t *testing.T) {
	for overlay, name := range map[string]string{
		"takeover":              "ip-masq-agent",
		"non-masquerade-daemon": "non-masquerade-daemon",
	} {
		r := read(t, overlay)
		if r.daemonSet.Name != name || r.container().Name != name {
			t.Errorf("%s: DaemonSet %s, container %s", overlay, r.daemonSet.Name, r.container().Name)
		}
		if diff := cmp.Diff(map[string]string{"k8s-app": name}, r.daemonSet.Spec.Selector.MatchLabels); diff != "" {
			t.Errorf("%s: selector (-want +got):\n%s", overlay, diff)
		}
	}
}

// kubectl creates a key for each file in a directory.
func TestSampleConfigHasASingleKey(t *testing.T) {
	files, err := os.ReadDir("agent-config")
	if err != nil || len(files) != 1 || files[0].Name() != read(t, "base").pod().Volumes[0].ConfigMap.Items[0].Key {
		t.Errorf("%v %v", files, err)
	}
}

func TestSampleConfigMeansTheDefaults(t *testing.T) {
	text, err := os.ReadFile("agent-config/config")
	if err != nil {
		t.Fatal(err)
	}
	got, problems := config.Parse(config.Defaults{}, config.Source{Name: "config", Data: text})
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
	document := func(name string) string {
		text, err := os.ReadFile(filepath.Join("..", name))
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	evidence := document("nft/EVIDENCE.md")
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
	_, table, _ := strings.Cut(document("manifests/README.md"), "| tested here |\n|")
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
