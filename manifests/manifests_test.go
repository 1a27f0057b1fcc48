// Package manifests_test compares the manifests with the Kubernetes types, the
// program's flags and the documentation. The files are those that make manifests
// generates from the kustomizations.
package manifests_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	admissionv1 "k8s.io/api/admissionregistration/v1"
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
	objects   map[string]object // all of them, by kind and name
}

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
	text := readFile(t, fileOf(name))
	r.objects = objects(t, text)
	for document := range strings.SplitSeq(text, "\n---\n") {
		var of struct{ Kind string }
		must(t, yaml.Unmarshal([]byte(document), &of))
		into := map[string]any{
			"DaemonSet": &r.daemonSet, "ServiceAccount": &corev1.ServiceAccount{}, "Service": &corev1.Service{},
			"PodMonitor": &object{}, "PrometheusRule": &object{}, // the operator's
		}[of.Kind]
		if into == nil {
			t.Fatalf("%s: a %s", name, of.Kind)
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

// What SECURITY.md and README.md say of each pod: paths of its spec, with the values there.
var confined = object{
	"hostNetwork": true, "automountServiceAccountToken": false, "priorityClassName": "system-node-critical",
	"tolerations":     []any{object{"operator": "Exists"}},
	"securityContext": object{"seccompProfile": object{"type": "RuntimeDefault"}},
	"containers.0.securityContext": object{
		"runAsUser": 0.0, "runAsGroup": 0.0, "readOnlyRootFilesystem": true, "allowPrivilegeEscalation": false,
		"capabilities": object{"add": []any{"NET_ADMIN"}, "drop": []any{"ALL"}},
	},
	"containers.0.resources.limits": object{"memory": "192Mi"},
}

// What README.md says of each agent, paths of the DaemonSet's spec. The removal runs on all nodes at once, and is not
// probed.
var updated = object{
	"minReadySeconds": 10.0, "updateStrategy.rollingUpdate": object{"maxUnavailable": "10%", "maxSurge": 0.0},
	"template.spec.containers.0.startupProbe":   probe(1, 120, "--alive"), // until the first answer
	"template.spec.containers.0.livenessProbe":  probe(60, 3, "--alive"),
	"template.spec.containers.0.readinessProbe": probe(30, 1),
	"template.spec.containers.0.args.1":         "--probe-socket=/run/nft-masq-agent/probe.sock",
}

func probe(period, failures float64, flags ...any) object {
	return object{
		"exec":          object{"command": append([]any{"/nft-masq-agent", "ready"}, flags...)},
		"periodSeconds": period, "failureThreshold": failures, "timeoutSeconds": 5.0,
	}
}

// All else is in the files, which make manifests-check compares with kustomize and with the chart.
func TestDaemonSetsAreAsTheDocumentsSay(t *testing.T) {
	everyManifest(t, func(t *testing.T, name string, r rendered) {
		wants := func(within any, all object) {
			for path, want := range all {
				if diff := cmp.Diff(want, at(within, path)); diff != "" {
					t.Errorf("%s (-want +got):\n%s", path, diff)
				}
			}
		}
		spec := at(r.objects["DaemonSet "+r.daemonSet.Name], "spec")
		wants(at(spec, "template.spec"), confined)
		if name != "removal" {
			wants(spec, updated)
		}
		// A soft limit of half the memory.
		if !slices.Contains(r.container().Env, corev1.EnvVar{Name: "GOMEMLIMIT", Value: "96MiB"}) {
			t.Errorf("environment %v", r.container().Env)
		}
	})
}

// No object gives the account a right: there is no role, and no binding.
func TestPodHasAnAccountOfItsOwnWithoutRights(t *testing.T) {
	everyManifest(t, func(t *testing.T, _ string, r rendered) {
		account := r.objects["ServiceAccount "+r.pod().ServiceAccountName]
		if at(account, "automountServiceAccountToken") != false {
			t.Errorf("account %q: %v", r.pod().ServiceAccountName, account)
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
	for name, monitored := range map[string]bool{"prometheus": false, "prometheus-operator": true} {
		r := read(t, name)
		pods := at(r.objects["DaemonSet nft-masq-agent"], "spec.template.metadata.labels")
		if diff := cmp.Diff(pods, at(r.objects["Service nft-masq-agent"], "spec.selector")); diff != "" {
			t.Errorf("%s: -pod +selector:\n%s", name, diff)
		}
		var want any
		if monitored {
			want = object{"selector": object{"matchLabels": pods}, "podMetricsEndpoints": []any{object{
				"port": r.container().Ports[0].Name, "relabelings": []any{
					object{"sourceLabels": []any{"__meta_kubernetes_pod_node_name"}, "targetLabel": "node"},
				},
			}}}
		}
		if diff := cmp.Diff(want, at(r.objects["PodMonitor nft-masq-agent"], "spec")); diff != "" {
			t.Errorf("%s: PodMonitor (-want +got):\n%s", name, diff)
		}
	}
}

func TestPrometheusRuleHasTheAlerts(t *testing.T) {
	r := read(t, "prometheus-operator")
	var want any
	readYAML(t, "prometheus/rules.yaml", &want)
	if diff := cmp.Diff(want, at(r.objects["PrometheusRule nft-masq-agent"], "spec")); diff != "" {
		t.Errorf("make manifests (-rules.yaml +PrometheusRule):\n%s", diff)
	}
}

// make uninstall deletes the objects of all overlays by this label.
func TestObjectsHaveTheLabelThatUninstallSelects(t *testing.T) {
	everyManifest(t, func(t *testing.T, _ string, r rendered) {
		for name, o := range r.objects {
			if labels, _ := at(o, "metadata.labels").(object); labels["app.kubernetes.io/name"] != "nft-masq-agent" {
				t.Errorf("%s: labels %v", name, labels)
			}
		}
	})
}

// The API server denies other changes: TestInstallPolicyLetsOneGroupChangeTheConfig.
func TestAdmissionPolicyGuardsTheConfigMapOfTheBase(t *testing.T) {
	first, second, found := strings.Cut(readFile(t, "admission.yaml"), "\n---\n")
	if !found {
		t.Fatal("admission.yaml has no two objects")
	}
	var policy admissionv1.ValidatingAdmissionPolicy
	must(t, yaml.UnmarshalStrict([]byte(first), &policy))
	var binding admissionv1.ValidatingAdmissionPolicyBinding
	must(t, yaml.UnmarshalStrict([]byte(second), &binding))
	if binding.Spec.PolicyName != policy.Name {
		t.Errorf("the binding is of %q, the policy is %q", binding.Spec.PolicyName, policy.Name)
	}
	base := read(t, "base")
	guarded := policy.Spec.MatchConditions[0].Expression
	if name := base.pod().Volumes[0].ConfigMap.Name; !strings.Contains(guarded, "metadata.name in ['"+name+"']") {
		t.Errorf("guards %s, not %s", guarded, name)
	}
	namespaces := policy.Spec.MatchConstraints.NamespaceSelector.MatchLabels
	if got := namespaces[corev1.LabelMetadataName]; got != base.daemonSet.Namespace {
		t.Errorf("namespace %q, want %q", got, base.daemonSet.Namespace)
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
	text := readFile(t, "agent-config/config")
	got, problems := config.Parse(config.Defaults{}, config.Source{Name: "config", Data: []byte(text)})
	if len(problems) > 0 {
		t.Fatal(problems)
	}
	want := config.Default(config.Defaults{})
	noPlaces := cmp.Transformer("text", func(c config.CIDR) string { return c.Prefix.String() })
	if diff := cmp.Diff(want, got, noPlaces, cmpopts.IgnoreUnexported(config.Config{})); diff != "" {
		t.Errorf("-defaults +sample:\n%s", diff)
	}
}
