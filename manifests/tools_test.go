package manifests_test

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"
)

// tools returns the directory of kustomize and helm, which make manifests-check
// builds. Without it, the tests that need them are skipped.
func tools(t *testing.T) string {
	t.Helper()
	dir := os.Getenv("MANIFEST_TOOLS")
	if dir == "" {
		t.Skip("runs kustomize and helm: make manifests-check")
	}
	return dir
}

// An object is a decoded YAML manifest.
type object = map[string]any

// objects returns the objects in a listing, by kind and name.
func objects(t *testing.T, listing string) map[string]object {
	t.Helper()
	all := map[string]object{}
	for document := range strings.SplitSeq(listing, "---\n") {
		var o object
		must(t, yaml.Unmarshal([]byte(document), &o))
		if o != nil {
			all[o["kind"].(string)+" "+o["metadata"].(object)["name"].(string)] = o
		}
	}
	return all
}

// helm renders the chart; the error has what helm prints.
func helm(t *testing.T, args ...string) (map[string]object, error) {
	t.Helper()
	line := filepath.Join(tools(t), "helm") + " template any manifests/helm --namespace=kube-system"
	for _, arg := range args {
		line += " '" + arg + "'"
	}
	out, err := try(t, line, "HELM_CACHE_HOME="+t.TempDir())
	if err != nil {
		return nil, fmt.Errorf("%w: %s", err, out)
	}
	return objects(t, out), nil
}

func mustHelm(t *testing.T, args ...string) map[string]object {
	t.Helper()
	all, err := helm(t, args...)
	must(t, err)
	return all
}

// at returns the value at a path of keys and indices, nil if there is none.
func at(o any, path string) any {
	for key := range strings.SplitSeq(path, ".") {
		switch within := o.(type) {
		case object:
			o = within[key]
		case []any:
			i, _ := strconv.Atoi(key)
			o = within[i]
		default:
			return nil
		}
	}
	return o
}

func TestToolsChartRendersTheBaseAndEachOverlay(t *testing.T) {
	values := map[string][]string{
		"base":                  nil,
		"iptables-nft":          {"--set=mode=iptables-nft"},
		"labelled-nodes":        {`--set-string=nodeSelector.node\.kubernetes\.io/masq-agent-ds-ready=true`},
		"non-masquerade-daemon": {"--set=nonMasqueradeDaemon=true"},
		"prometheus":            {"--set=prometheus.enabled=true"},
		"prometheus-operator":   {"--set=prometheus.enabled=true,podMonitor.enabled=true,prometheusRule.enabled=true"},
		"removal":               {"--set=removal=true"},
		"takeover":              {"--set=takeover=true"},
	}
	everyManifest(t, func(t *testing.T, name string, _ rendered) {
		args, ok := values[name]
		if !ok {
			t.Fatal("the chart has no values for this overlay")
		}
		chart := mustHelm(t, args...)
		for name, o := range chart {
			withoutLabelsOfTheChart(t, name, o)
		}
		if diff := cmp.Diff(objects(t, readFile(t, fileOf(name))), chart); diff != "" {
			t.Errorf("-kustomize +helm:\n%s", diff)
		}
	})
}

// withoutLabelsOfTheChart removes the standard labels that only the chart has, which must be complete.
func withoutLabelsOfTheChart(t *testing.T, name string, o object) {
	t.Helper()
	labels := at(o, "metadata.labels").(object)
	all := map[string]string{
		"app.kubernetes.io/instance": "any", "app.kubernetes.io/version": "v1.0.0", "app.kubernetes.io/managed-by": "Helm",
		"helm.sh/chart": "nft-masq-agent-1.0.0",
	}
	for key, want := range all {
		if labels[key] != want {
			t.Errorf("%s: label %s=%v, want %s", name, key, labels[key], want)
		}
		delete(labels, key)
	}
	for _, path := range []string{"spec.selector", "spec.selector.matchLabels", "spec.template.metadata.labels"} {
		if labels, ok := at(o, path).(object); ok {
			if labels["app.kubernetes.io/name"] != nil && labels["app.kubernetes.io/instance"] != "any" {
				t.Errorf("%s: %s does not tell releases apart: %v", name, path, labels)
			}
			delete(labels, "app.kubernetes.io/instance")
		}
	}
}

func TestToolsChartUsesConfigVerbatim(t *testing.T) {
	for _, text := range []string{
		"nonMasqueradeCIDRs: [10.0.0.0/8]\n",
		"# a comment\nnonMasqueradeCIDRs:\n- 10.0.0.0/8\n\n# {{ .Values }} \"quoted\" \\ 'ü'\t\n",
		`{"nonMasqueradeCIDRs": []}`,
		"a:\r\n  - b  ",
	} {
		file := filepath.Join(t.TempDir(), "config")
		writeFile(t, file, text)
		all := mustHelm(t, "--set-file=config="+file)
		if got := at(all["ConfigMap nft-masq-agent"], "data.config"); got != text {
			t.Errorf("%q became %q", text, got)
		}
		volume := at(all["DaemonSet nft-masq-agent"], "spec.template.spec.volumes.0.configMap.name")
		if volume != "nft-masq-agent" {
			t.Errorf("the pod mounts %v", volume)
		}
	}
}

func TestToolsChartValuesChangeWhatTheyName(t *testing.T) {
	const annotations, template = "DaemonSet spec.template.metadata.annotations", "DaemonSet spec.template."
	own := object{"app.kubernetes.io/name": "nft-masq-agent", "app.kubernetes.io/instance": "any"}
	for _, tt := range []struct {
		name, values string         // of the objects
		want         map[string]any // by kind and path
	}{
		{
			"masq-gpu", "name=masq-gpu,nodeSelector.pool=gpu,existingConfigMap=masq-gpu,image.tag=v1.0.0," +
				"prometheus.enabled=true,podMonitor.enabled=true", map[string]any{
				"DaemonSet spec.selector.matchLabels": own, template + "metadata.labels": own,
				"Service spec.selector": own, "PodMonitor spec.selector.matchLabels": own,
				template + "spec.volumes.0.configMap.name": "masq-gpu",
				template + "spec.containers.0.image":       "nft-masq-agent:v1.0.0",
			},
		},
		{"nft-masq-agent", "podAnnotations.example=set,prometheus.enabled=true", map[string]any{annotations: object{
			"example": "set", "prometheus.io/scrape": "true", "prometheus.io/port": "9717", "prometheus.io/path": "/metrics",
		}}},
		{"nft-masq-agent", "podAnnotations.example=set", map[string]any{annotations: object{"example": "set"}}},
		{
			"nft-masq-agent", "serviceAccount.create=false,serviceAccount.name=other,podLabels.team=net," +
				"priorityClassName=mine,minReadySeconds=1,readinessProbe.periodSeconds=10," +
				"livenessProbe.failureThreshold=9", map[string]any{
				"ServiceAccount metadata": nil, template + "spec.serviceAccountName": "other",
				template + "metadata.labels.team": "net", template + "spec.priorityClassName": "mine",
				"DaemonSet spec.minReadySeconds":                               1.0,
				template + "spec.containers.0.readinessProbe.periodSeconds":    10.0,
				template + "spec.containers.0.readinessProbe.failureThreshold": 1.0,
				template + "spec.containers.0.livenessProbe.periodSeconds":     60.0,
				template + "spec.containers.0.livenessProbe.failureThreshold":  9.0,
			},
		},
	} {
		all := mustHelm(t, "--set="+tt.values)
		for where, want := range tt.want {
			kind, path, _ := strings.Cut(where, " ")
			if diff := cmp.Diff(want, at(all[kind+" "+tt.name], path)); diff != "" {
				t.Errorf("%s: %s (-want +got):\n%s", tt.values, where, diff)
			}
		}
	}
}

// A patch by index that meets something else is an error, not another agent.
func TestPatchesByIndexTestWhatTheyMeet(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("*/*/kustomization.yaml")
	if err != nil || len(files) < 10 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		var k struct{ Patches []struct{ Patch string } }
		readYAML(t, file, &k)
		for _, p := range k.Patches {
			text, changed := p.Patch, regexp.MustCompile(`op: (?:add|replace|remove)\n *path: (\S*?/\d+)/`)
			for _, element := range changed.FindAllStringSubmatch(text, -1) {
				if !strings.Contains(text, "op: test\n  path: "+element[1]+"/") {
					t.Errorf("%s: %s is not tested", file, element[1])
				}
			}
		}
	}
}

func TestToolsChartRejectsConflictingAndUnknownValues(t *testing.T) {
	for values, want := range map[string]string{
		"config=a,existingConfigMap=b":            "not both",
		"takeover=true,nonMasqueradeDaemon=true":  "not both",
		"podMonitor.enabled=true":                 "prometheus.enabled=true",
		"mode=iptables":                           "/mode",
		"prometheusRules.enabled=true":            "prometheusRules",
		"takeover=yes":                            "/takeover",
		"waitForRules=yes":                        "/waitForRules",
		"config.nonMasqueradeCIDRs[0]=10.0.0.0/8": "/config",
		"maxUnavailable=ten":                      "/maxUnavailable",
		"image.repository=":                       "/image/repository",
		"name=UPPER":                              "/name",
		"extraArgs[0]=status":                     "/extraArgs/0",
		"readinessProbe.exec=x":                   "/readinessProbe",
		"podLabels.a=true":                        "/podLabels",
		"goMemLimit=96Mi":                         "/goMemLimit",
	} {
		if _, err := helm(t, "--set="+values); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", values, err, want)
		}
	}
}

func TestToolsNodePoolsHaveSeparateAgents(t *testing.T) {
	pool, err := build(t, "examples/node-pool")
	must(t, err)
	others, err := build(t, "examples/other-nodes")
	must(t, err)
	gpu, rest := pool["DaemonSet masq-gpu"], others["DaemonSet nft-masq-agent"]
	if gpu == nil || rest == nil || pool["ConfigMap masq-gpu"] == nil {
		t.Fatalf("%v\n%v", pool, others)
	}
	selector := at(gpu, "spec.selector.matchLabels").(object)
	for key, value := range selector {
		if at(gpu, "spec.template.metadata.labels").(object)[key] != value {
			t.Errorf("the selector %s=%s does not match the pod", key, value)
		}
		if at(rest, "spec.template.metadata.labels").(object)[key] == value {
			t.Errorf("the selector %s=%s matches pods of the other DaemonSet", key, value)
		}
	}
	value := at(gpu, "spec.template.spec.nodeSelector.pool")
	want := []any{object{"key": "pool", "operator": "NotIn", "values": []any{value}}}
	terms := at(rest, "spec.template.spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution."+
		"nodeSelectorTerms.0.matchExpressions")
	if diff := cmp.Diff(want, terms); diff != "" {
		t.Errorf("the other nodes (-want +got):\n%s", diff)
	}
	if name := at(gpu, "spec.template.spec.volumes.0.configMap.name"); pool["ConfigMap "+fmt.Sprint(name)] == nil {
		t.Errorf("no ConfigMap %s", name)
	}
}

// kustomization builds a directory with these files. HERE is that of the manifests; kustomize accepts no absolute
// paths.
func kustomization(t *testing.T, files map[string]string) (map[string]object, error) {
	t.Helper()
	dir := t.TempDir()
	here, err := filepath.Abs(".")
	must(t, err)
	here, err = filepath.Rel(dir, here)
	must(t, err)
	for name, text := range files {
		writeFile(t, filepath.Join(dir, name), strings.ReplaceAll(text, "HERE", here))
	}
	return build(t, dir)
}

// kustomize builds the base with components in the given order.
func kustomize(t *testing.T, components ...string) (map[string]object, error) {
	t.Helper()
	text := "resources: [HERE/base]\ncomponents:\n"
	for _, c := range components {
		text += "  - HERE/components/" + c + "\n"
	}
	return kustomization(t, map[string]string{"kustomization.yaml": text})
}

// build returns the objects that kustomize builds from a directory; the error has what it prints.
func build(t *testing.T, dir string) (map[string]object, error) {
	t.Helper()
	if !filepath.IsAbs(dir) {
		dir = filepath.Join("manifests", dir)
	}
	out, err := try(t, filepath.Join(tools(t), "kustomize")+" build "+dir)
	if err != nil {
		return nil, fmt.Errorf("%w: %s", err, out)
	}
	return objects(t, out), nil
}

const someWorkload = `apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec: {template: {spec: {initContainers: [{name: other, image: other}], containers: [{name: web, image: web}]}}}
`

func TestToolsWorkloadWaitsForRulesBeforeAnythingElse(t *testing.T) {
	all, err := kustomization(t, map[string]string{
		"web.yaml": someWorkload,
		"kustomization.yaml": "resources: [web.yaml]\ncomponents: [HERE/components/wait-for-rules]\n" +
			"images: [{name: nft-masq-agent, newName: a, newTag: b}]\n",
	})
	must(t, err)
	first := at(all["Deployment web"], "spec.template.spec.initContainers.0")
	if at(first, "name") != "wait-for-rules" || at(first, "image") != "a:b" {
		t.Errorf("the first init container is %v", first)
	}
	if other := at(all["Deployment web"], "spec.template.spec.initContainers.1.name"); other != "other" {
		t.Errorf("the second is %v", other)
	}
	agent, err := kustomize(t, "wait-for-rules")
	must(t, err)
	if at(agent["DaemonSet nft-masq-agent"], "spec.template.spec.initContainers") != nil {
		t.Error("the agent waits for itself")
	}
}

// The agent listens at the address that the init container of a workload asks;
// nothing else of its pod changes.
func TestToolsChartServesWorkloadsThatWaitForRules(t *testing.T) {
	var component struct{ Patches []struct{ Patch string } }
	readYAML(t, "components/wait-for-rules/kustomization.yaml", &component)
	var patch object
	must(t, yaml.Unmarshal([]byte(component.Patches[0].Patch), &patch))
	waiting := at(patch, "spec.template.spec.initContainers.0")
	address, ok := strings.CutPrefix(at(waiting, "args.1").(string), "--wait-for=")
	if !ok {
		t.Fatalf("arguments %v", at(waiting, "args"))
	}
	want := mustHelm(t)
	container := at(want["DaemonSet nft-masq-agent"], "spec.template.spec.containers.0").(object)
	container["args"] = append(container["args"].([]any), "--http-address="+address)
	container["env"] = append(container["env"].([]any), at(waiting, "env.0"))
	if diff := cmp.Diff(want, mustHelm(t, "--set=waitForRules=true")); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if diff := cmp.Diff(mustHelm(t, "--set=prometheus.enabled=true"),
		mustHelm(t, "--set=prometheus.enabled=true,waitForRules=true")); diff != "" {
		t.Errorf("-prometheus +prometheus and waitForRules:\n%s", diff)
	}
}

// Pairs that cannot be combined, with the error message.
var conflictingPairs = map[string]string{
	"non-masquerade-daemon takeover": "/containers/0/name",
	"prometheus prometheus-operator": "already registered id: Service",
}

func TestToolsComponentsCombineInAnyOrderOrFail(t *testing.T) {
	tools(t)
	found, err := filepath.Glob("components/*")
	if err != nil || len(found) < 2 {
		t.Fatal(found, err)
	}
	for i, first := range found {
		for _, second := range found[i+1:] {
			a, b := filepath.Base(first), filepath.Base(second)
			ab, abError := kustomize(t, a, b)
			ba, baError := kustomize(t, b, a)
			want := conflictingPairs[a+" "+b]
			for _, err := range []error{abError, baError} {
				if want == "" && err != nil || want != "" && !strings.Contains(fmt.Sprint(err), want) {
					t.Errorf("%s and %s, want %q: %v", a, b, want, err)
				}
			}
			if diff := cmp.Diff(normalized(ab), normalized(ba)); diff != "" {
				t.Errorf("-%s, %[2]s +%[2]s, %[1]s:\n%s", a, b, diff)
			}
		}
	}
}

// normalized sorts the arguments, whose order does not matter, and drops
// duplicates.
func normalized(all map[string]object) map[string]object {
	for key, o := range all {
		if !strings.HasPrefix(key, "DaemonSet ") {
			continue
		}
		container := at(o, "spec.template.spec.containers.0").(object)
		var args []string
		for _, arg := range container["args"].([]any) {
			args = append(args, arg.(string))
		}
		slices.Sort(args)
		container["args"] = slices.Compact(args)
	}
	return all
}

func TestToolsMakeManifestHasImageAndComponents(t *testing.T) {
	tools(t)
	out := run(t, "make -s manifest IMAGE=registry.example:5000/a/nft-masq-agent TAG=v1.0.0 "+
		"COMPONENTS='prometheus takeover'")
	if !strings.Contains(out, "image: registry.example:5000/a/nft-masq-agent:v1.0.0\n") {
		t.Errorf("make manifest does not write the image that it was given:\n%s", out)
	}
}
