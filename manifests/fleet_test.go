package manifests_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"nft-masq-agent/nft/nfttest"
)

// healthy is the answer of an agent, with values between which a parser must tell apart.
const healthy = `{
  "version": 1, "command": "status",
  "errors": [], "warnings": [{"id": "x", "message": "a \"} , [ warning"}], "notes": [],
  "config": {"path": "/etc/config/ip-masq-agent", "hash": "3f9a2c71", "accepted": true, "files": ["a", "b"]},
  "agent": {"pid": 7, "flags": ["--v=2"], "policy": {"hash": "3f9a2c71", "since": "2026-01-02T03:04:05Z"}},
  "kernel": {"inSync": true, "hash": "00000000", "differences": []}
}
`

const rejected = `{"version":1,"command":"status","errors":[
  {"id":"cidr","severity":"error","message":"\"10.0.0.0/33\" has an invalid prefix length","line":1},
  {"id":"other","severity":"error","message":"another"}],"warnings":[],"notes":[],
  "config":{"path":"x","accepted":false},"agent":{"pid":7,"flags":[]},"kernel":{"inSync":false}}`

// fleet runs the script with a kubectl that has these answers of pods by node. Without an
// answer, the program cannot be run.
func fleet(t *testing.T, desired int, answers map[string]string) (output string, code int) {
	t.Helper()
	dir := t.TempDir()
	pods := ""
	for node, text := range answers {
		pods += fmt.Sprintf("%-20s agent-%s\n", node, node)
		if err := os.WriteFile(filepath.Join(dir, "agent-"+node), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	script := fmt.Sprintf(`#!/bin/sh
case "$*" in
"-n kube-system get pods -l app.kubernetes.io/name=nft-masq-agent "*) printf '%%s' '%s' ;;
"-n kube-system get daemonsets -l app.kubernetes.io/name=nft-masq-agent "*) echo %d ;;
"-n kube-system exec agent-"*" -- /nft-masq-agent status -o json")
	test -s "%[3]s/$4" || { echo 'error: unable to upgrade connection: pod does not exist' >&2; exit 1; }
	cat "%[3]s/$4"; ! grep -q '"severity": *"error"' "%[3]s/$4" ;;
*) echo "unexpected: $*" >&2; exit 64 ;;
esac
`, pods, desired, dir)
	kubectl := filepath.Join(dir, "kubectl")
	if err := os.WriteFile(kubectl, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "./fleet.sh")
	cmd.Env = append(os.Environ(), "KUBECTL="+kubectl)
	var out, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &stderr
	var failed *exec.ExitError
	if err := cmd.Run(); err != nil && !errors.As(err, &failed) || stderr.Len() > 0 {
		t.Fatalf("%v: %s", err, &stderr)
	}
	return out.String(), cmd.ProcessState.ExitCode()
}

func TestFleetHasARowForEachNodeAndSaysFirstWhatIsWrong(t *testing.T) {
	for name, tt := range map[string]struct {
		desired int
		answers map[string]string
		want    string
		code    int
	}{
		"all in sync": {2, map[string]string{"node-1": healthy, "node-2": healthy}, `all 2 nodes are in sync with 3f9a2c71
NODE    HASH      SINCE                 SYNC  WRONG
node-1  3f9a2c71  2026-01-02T03:04:05Z  yes   -
node-2  3f9a2c71  2026-01-02T03:04:05Z  yes   -
`, 0},
		"nothing found": {0, nil, "no pods with app.kubernetes.io/name=nft-masq-agent in the namespace kube-system\n", 1},
		"no pod": {3, map[string]string{"node-1": healthy}, `no pod on 2 of 3 nodes
NODE    HASH      SINCE                 SYNC  WRONG
node-1  3f9a2c71  2026-01-02T03:04:05Z  yes   -
`, 1},
		"faults": {3, map[string]string{"a": rejected, "b": "", "node-3": rejected}, `something is wrong on 3 of 3 nodes
NODE    HASH      SINCE                 SYNC  WRONG
a       -         -                     no    "10.0.0.0/33" has an invalid prefix length (and 1 more)
b       -         -                     ?     error: unable to upgrade connection: pod does not exist
node-3  -         -                     no    "10.0.0.0/33" has an invalid prefix length (and 1 more)
`, 1},
	} {
		t.Run(name, func(t *testing.T) {
			got, code := fleet(t, tt.desired, tt.answers)
			if diff := cmp.Diff(tt.want, got); diff != "" || code != tt.code {
				t.Errorf("exit code %d (-want +got):\n%s", code, diff)
			}
		})
	}
}

func TestFleetShowsWhichNodesHaveAnotherPolicy(t *testing.T) {
	other := bytes.ReplaceAll([]byte(healthy), []byte("3f9a2c71"), []byte("11111111"))
	got, code := fleet(t, 3, map[string]string{"a": healthy, "b": healthy, "c": string(other)})
	for _, want := range []string{
		"policy 3f9a2c71: 2 of 3 nodes\n", "policy 11111111: 1 of 3 nodes\n",
		"\nc     11111111  ",
	} {
		if !bytes.Contains([]byte(got), []byte(want)) {
			t.Errorf("%q is missing in:\n%s", want, got)
		}
	}
	if code != 1 {
		t.Errorf("exit code %d", code)
	}
}

// An agent answers with times to the nanosecond, and has a policy while it rejects the file.
func TestFleetShowsWhatARealAgentEnforces(t *testing.T) {
	t.Parallel()
	n := newDocumentNode(t, nfttest.NewNS(t, "node"))
	const status = "nft-masq-agent status -o json"
	before, err := n.run(status)
	if err != nil {
		t.Fatal(err, before)
	}
	const change = "echo 'nonMasqueradeCIDRs: [10.0.0.1]' >next && mv next /etc/config/ip-masq-agent"
	if out, err := n.run(change); err != nil {
		t.Fatal(err, out)
	}
	if _, err := n.agent.Await(t.Context(), "config_rejected"); err != nil {
		t.Fatal(err)
	}
	after, _ := n.run(status) // exit code 1
	row := regexp.MustCompile(`(?m)^(good|bad) +([0-9a-f]{8})  \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ  (yes|no )   (\S+)`)
	got, code := fleet(t, 2, map[string]string{"good": before, "bad": after})
	rows := row.FindAllStringSubmatch(got, -1)
	if len(rows) != 2 || rows[0][2] != rows[1][2] || rows[0][4] != "config" || rows[1][4] != "-" || code != 1 ||
		strings.Contains(got, "no policy") {
		t.Errorf("exit code %d:\n%s", code, got)
	}
}
