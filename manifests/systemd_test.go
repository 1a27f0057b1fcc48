package manifests_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/agent"
)

const (
	unitFile  = "systemd/nft-masq-agent.service"
	staticPod = "static-pod/nft-masq-agent.yaml"
)

// setting returns the value of a line of the unit.
func setting(t *testing.T, unit, name string) string {
	t.Helper()
	m := regexp.MustCompile("(?m)^" + name + "=(.*)$").FindStringSubmatch(unit)
	if m == nil {
		t.Fatalf("%s has no %s", unitFile, name)
	}
	return m[1]
}

func TestSystemdFindsNothingInTheUnit(t *testing.T) {
	if os.Getenv("SYSTEMD_ANALYZE") == "" {
		t.Skip("runs systemd-analyze: make systemd-test")
	}
	path := filepath.Join(t.TempDir(), filepath.Base(unitFile))
	writeFile(t, path, strings.ReplaceAll(readFile(t, unitFile), "/usr/local/bin/nft-masq-agent", agent.Program(t)))
	run(t, os.Getenv("SYSTEMD_ANALYZE")+" verify --man=no "+path)
}

func TestAgentOfTheUnitInstallsRules(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	nfttest.Require(t, "setpriv", "nft")
	program, dir := agent.Program(t), t.TempDir()
	unit := strings.ReplaceAll(readFile(t, unitFile), "/usr/local/bin/nft-masq-agent", program)
	// With the privileges of the unit, and its flags, in a namespace.
	args := strings.Fields(strings.ReplaceAll(setting(t, unit, "ExecStart"), "/run/nft-masq-agent/", dir+"/"))
	capability := strings.ToLower(strings.TrimPrefix(setting(t, unit, "CapabilityBoundingSet"), "CAP_"))
	if setting(t, unit, "NoNewPrivileges") != "yes" {
		t.Error("the unit allows new privileges")
	}
	limited := append([]string{"--bounding-set=-all,+" + capability, "--no-new-privs"}, args...)
	limited = append(limited, "--config="+filepath.Join(dir, "ip-masq-agent"))
	n := nfttest.NewNS(t, "machine")
	a := agent.Run(t, n, nfttest.Command("setpriv", limited...))
	if _, err := a.Await(t.Context(), "config_applied"); err != nil {
		t.Fatal(err)
	}
	if list := nfttest.NFT(t, n, "", "list", "table", "inet", "nft-masq-agent"); !strings.Contains(list, "masquerade") {
		t.Error(list)
	}
}

// A static pod has no account, and no ConfigMap: its config is a directory of the node. All else is the
// pod of the DaemonSet.
func TestStaticPodIsThePodOfTheDaemonSet(t *testing.T) {
	t.Parallel()
	var pod corev1.Pod
	must(t, yaml.UnmarshalStrict([]byte(readFile(t, staticPod)), &pod))
	r := read(t, "base")
	want := *r.daemonSet.Spec.Template.Spec.DeepCopy()
	want.NodeSelector, want.Tolerations = nil, nil // a scheduler's
	want.ServiceAccountName = ""                   // the API server's
	for i, v := range want.Volumes {
		if v.ConfigMap != nil {
			kind := corev1.HostPathDirectoryOrCreate
			want.Volumes[i].VolumeSource = corev1.VolumeSource{
				HostPath: &corev1.HostPathVolumeSource{Path: "/etc/nft-masq-agent", Type: &kind},
			}
		}
	}
	if diff := cmp.Diff(want, pod.Spec); diff != "" {
		t.Errorf("spec (-DaemonSet +static pod):\n%s", diff)
	}
	if diff := cmp.Diff(r.daemonSet.Spec.Template.Labels, pod.Labels); diff != "" {
		t.Errorf("labels (-DaemonSet +static pod):\n%s", diff)
	}
}
