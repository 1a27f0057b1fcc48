package manifests_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
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

// plugin runs the plugin with a program in place of kubectl.
func plugin(t *testing.T, kubectl string, args ...string) (output string, code int) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "./kubectl-masq", args...)
	cmd.Env = append(os.Environ(), "KUBECTL="+kubectl)
	out, err := cmd.CombinedOutput()
	var failed *exec.ExitError
	if err != nil && !errors.As(err, &failed) {
		t.Fatalf("%v: %s", err, out)
	}
	return string(out), cmd.ProcessState.ExitCode()
}

// fleet runs the plugin's fleet with a kubectl that has these answers of pods by node. Without an
// answer, the program cannot be run; one word is why the pod has not started.
func fleet(t *testing.T, desired int, answers map[string]string) (output string, code int) {
	t.Helper()
	dir := t.TempDir()
	pods := ""
	for node, text := range answers {
		waits := "<none>"
		if text != "" && !strings.Contains(text, "{") {
			waits = text
			text = ""
		}
		pods += fmt.Sprintf("%-20s agent-%s %s\n", node, node, waits)
		writeFile(t, filepath.Join(dir, "agent-"+node), text)
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
	writeFile(t, kubectl, script)
	return plugin(t, kubectl, "fleet")
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
		"another policy": {
			3, map[string]string{"a": healthy, "b": healthy, "c": strings.ReplaceAll(healthy, "3f9a2c71", "11111111")}, `policy 11111111: 1 of 3 nodes
policy 3f9a2c71: 2 of 3 nodes
NODE  HASH      SINCE                 SYNC  WRONG
a     3f9a2c71  2026-01-02T03:04:05Z  yes   -
b     3f9a2c71  2026-01-02T03:04:05Z  yes   -
c     11111111  2026-01-02T03:04:05Z  yes   -
`, 1,
		},
		"nothing found": {
			0, nil, "kubectl masq: no pods with app.kubernetes.io/name=nft-masq-agent in the namespace kube-system\n", 1,
		},
		"no pod": {3, map[string]string{"node-1": healthy}, `no pod on 2 of 3 nodes
NODE    HASH      SINCE                 SYNC  WRONG
node-1  3f9a2c71  2026-01-02T03:04:05Z  yes   -
`, 1},
		"a rejected config": {1, map[string]string{"a": strings.ReplaceAll(rejected, `"id":"cidr"`,
			`"id":"config-rejected","severity":"error","message":"config rejected; none of our rules are installed"},
  {"id":"cidr","file":"/etc/config/ip-masq-agent"`)}, `something is wrong on 1 of 1 nodes; kubectl masq status NODE says what to do
NODE  HASH      SINCE                 SYNC  WRONG
a     -         -                     no    config rejected: /etc/config/ip-masq-agent:1: "10.0.0.0/33" has an invalid prefix length (and 1 more)
`, 1},
		"faults": {3, map[string]string{"a": rejected, "b": "", "c": "ImagePullBackOff"}, `something is wrong on 3 of 3 nodes; kubectl masq status NODE says what to do
NODE  HASH      SINCE                 SYNC  WRONG
a     -         -                     no    "10.0.0.0/33" has an invalid prefix length (and 1 more)
b     -         -                     ?     error: unable to upgrade connection: pod does not exist
c     -         -                     ?     the pod has not started: ImagePullBackOff
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

// An agent answers with times to the nanosecond, and has a policy while it rejects the file.
func TestFleetShowsWhatARealAgentEnforces(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
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

// theKubectl is kubectl next to one node: it knows pods, and runs commands in the agent's by running
// them here. What the plugin must not ask for is an error.
const theKubectl = `#!/bin/sh
case "$*" in
"-n kube-system get pods -l "*"spec.nodeName=node-1,"*) printf 'agent-0 2026-01-02T03:04:05Z\nagent-1 <none>\n' ;;
"-n kube-system get pods -l "*"spec.nodeName="*) ;;
"-n kube-system get pods -l "*NODE:*IPS:*) echo "node-1 agent-1 NODE4,NODE6" ;;
"-n kube-system get pods -l "*NODE:*) echo "node-1 agent-1" ;;
"-n kube-system get daemonsets "*) echo 1 ;;
"-n default get pods web "*NODE:*IPS:*) echo "node-1 POD4,POD6" ;;
"-n default get pods gone "*) echo 'Error from server (NotFound): pods "gone" not found' >&2; exit 1 ;;
"-n default get pods pending "*) echo "<none> <none>" ;;
"-n default get pods only-v6 "*) echo "node-1 POD6" ;;
"-n  get pods --all-namespaces "*"spec.nodeName=node-1 "*)
	printf '%s\n' "NODE4 kube-system agent-1 true" "POD4,POD6 default web <none>" ;;
"-n kube-system exec agent-1 -- /nft-masq-agent "*) shift 6 && exec nft-masq-agent "$@" </dev/null ;;
"-n kube-system exec -i agent-1 -- /nft-masq-agent "*) shift 7 && exec nft-masq-agent "$@" ;;
*) echo "unexpected: $*" >&2; exit 64 ;;
esac
`

func TestPluginAnswersByTheNamesOfNodesAndPods(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	top := nfttest.NewTopology(t)
	n := newDocumentNode(t, top.Node)
	kubectl := strings.NewReplacer("NODE4", top.NodeV4.String(), "NODE6", top.NodeV6.String(), "POD4",
		top.PodV4.String(), "POD6", top.PodV6.String()).Replace(theKubectl)
	writeFile(t, filepath.Join(n.dir, "kubectl"), kubectl)
	writeFile(t, filepath.Join(n.dir, "proposed.yaml"), "nonMasqueradeCIDRs: [10.0.0.0/8, 203.0.113.0/24]\n")
	for _, name := range []string{"udp_timeout", "udp_timeout_stream"} { // a user namespace may lack them
		_ = top.Node.Sysctl("net.netfilter.nf_conntrack_"+name, "3600")
	}
	seen4 := nfttest.MustSend(t, top, nfttest.Flow{
		Proto: nfttest.UDP, From: top.Pod, Dst: netip.MustParseAddrPort("203.0.113.9:443"),
	}).Seen.String()
	seen6 := nfttest.MustSend(t, top, nfttest.Flow{
		Proto: nfttest.UDP, From: top.Pod, Dst: netip.MustParseAddrPort("[2001:db8:1::1]:443"),
	}).Seen.String()
	const web4, web6 = "10.244.1.2 is the pod default/web\n", "fd00:10:244:1::2 is the pod default/web\n"
	type question struct {
		args string
		code int
		want []string
	}
	questions := []question{
		{"status node-1", 0, []string{"in sync: "}},
		{"status", 0, []string{"all 1 nodes are in sync with "}},
		{"fleet", 0, []string{"\nnode-1  "}},
		{"status --pod default/web", 0, []string{"in sync: "}},
		{"-n kube-system -l app.kubernetes.io/name=nft-masq-agent status node-1", 0, []string{"in sync: "}},
		{"explain --pod default/web 203.0.113.9", 0, []string{"203.0.113.9 should see " + top.NodeV4.String(), web4}},
		{"explain 10.9.0.9 --pod=default/web", 0, []string{
			"10.9.0.9 should see 10.244.1.2", web4, "  kubectl masq explain node-1 10.9.0.9 --from 10.244.1.2 --trace names ",
		}},
		{"explain 2001:db8:1::1 --pod default/web", 0, []string{"2001:db8:1::1 should see " + top.NodeV6.String(), web6}},
		{"explain 203.0.113.9 --pod default/web -o json", 0, []string{`"command":"explain"`}},
		{
			"explain --pod default/web 203.0.113.9:443 --trace=1ms", 1,
			[]string{"kubectl -n default exec web -- nc -z -w 3 203.0.113.9 443\n"},
		},
		{
			"explain --pod default/web '[2001:db8:1::1]:443' --trace=1ms", 1,
			[]string{"kubectl -n default exec web -- nc -z -w 3 2001:db8:1::1 443\n", "did not come within 1ms"},
		},
		{"connections --seen-as " + seen4, 0, []string{"on the node node-1:\n", web4}},
		{"connections --seen-as='" + seen6 + "'", 0, []string{"on the node node-1:\n", web6}},
		{"connections --seen-as 198.51.100.77:1", 1, []string{"node-1: ", "198.51.100.77 is not an address of this node"}},
		{"connections --pod default/web", 0, []string{web4}},
		{"check node-1", 0, []string{"valid"}},
		{"diff node-1 - <proposed.yaml", 1, []string{"nonMasqueradeCIDRs: added 203.0.113.0/24"}},
		{"--help", 0, []string{"kubectl masq explain --pod"}},
		{"status node-2", 1, []string{
			"no pod with app.kubernetes.io/name=nft-masq-agent runs on the node node-2 (kubectl masq COMMAND NODE)\n",
		}},
		{"explain 10.9.0.9 --pod default/pending", 1, []string{"the pod default/pending is on no node yet\n"}},
		{"explain 10.9.0.9 --pod default/gone", 1, []string{`Error from server (NotFound): pods "gone" not found`}},
		{"explain 10.9.0.9 --pod default/only-v6", 1, []string{"has no address of the same family as 10.9.0.9\n"}},
		{"", 2, []string{"kubectl masq fleet"}},
		{"explain", 2, []string{"explain needs a node, or --pod NAMESPACE/NAME"}},
		{"explain --pod web 10.9.0.9", 2, []string{"--pod needs NAMESPACE/NAME"}},
		{"explain 10.9.0.9 --pod", 2, []string{"--pod needs NAMESPACE/NAME"}},
		{"--unknown status", 2, []string{"unknown flag --unknown"}},
		{"-n", 2, []string{"-n needs a value"}},
		{"fleet node-1", 2, []string{"fleet asks all nodes: omit what follows it"}},
		{"status node-1 --unknown", 2, []string{"--unknown"}},
	}
	examples := strings.NewReplacer("NAMESPACE/NAME", "default/web", "NODE", "node-1", "ADDRESS:PORT", seen4, "ADDRESS",
		"203.0.113.9", "COMMAND", "status", "FILE", "/etc/config/ip-masq-agent")
	for _, d := range by(t, "plugin") {
		line := examples.Replace(strings.TrimPrefix(d.line, "kubectl masq "))
		if trace, ok := strings.CutSuffix(line, " --trace"); ok { // nobody sends a packet
			questions = append(questions, question{trace + " --trace 1ms", 1, []string{"did not come within"}})
			continue
		}
		questions = append(questions, question{line, 0, []string{""}})
	}
	for _, tt := range questions {
		out, err := n.run("KUBECTL=./kubectl manifests/kubectl-masq " + tt.args + " 2>&1")
		code := 0
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			code = exit.ExitCode()
		} else if err != nil {
			t.Fatal(err)
		}
		for _, want := range tt.want {
			if !strings.Contains(out, want) || code != tt.code {
				t.Errorf("kubectl masq %s: exit code %d, want %d and %q:\n%s", tt.args, code, tt.code, want, out)
			}
		}
	}
}

func TestPluginTracesAPacketOfAPod(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	top := nfttest.NewTopology(t)
	n := newDocumentNode(t, top.Node)
	kubectl := strings.NewReplacer("NODE4", top.NodeV4.String(), "NODE6", top.NodeV6.String(), "POD4",
		top.PodV4.String(), "POD6", top.PodV6.String()).Replace(theKubectl)
	writeFile(t, filepath.Join(n.dir, "kubectl"), kubectl)
	ctx, cancel := context.WithCancel(t.Context())
	var sender sync.WaitGroup
	sender.Go(func() {
		for ctx.Err() == nil {
			_, _ = top.Send(nfttest.Flow{
				Proto: nfttest.UDP, From: top.Pod, Dst: netip.MustParseAddrPort("203.0.113.9:443"),
			})
		}
	})
	out, err := n.run("KUBECTL=./kubectl manifests/kubectl-masq explain --pod default/web 203.0.113.9 --trace 1m 2>&1")
	cancel()
	sender.Wait()
	if err != nil || !strings.Contains(out, "this agent's rule with handle ") ||
		!strings.Contains(out, "10.244.1.2 is the pod default/web\n") {
		t.Errorf("%v:\n%s", err, out)
	}
}
