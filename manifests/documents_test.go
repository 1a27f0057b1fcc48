package manifests_test

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/agent"
)

// Commands in documents are the lines of the blocks ```sh, and the code in the text that is
// a command line. Each of them is run as written: on a node, by make, or in a cluster. Those
// that are not are listed below with the reason; a command that is nowhere fails the test.

// A documented is a command line of a document.
type documented struct {
	document, section, line string
}

// mentions are names of commands in the text, and a message of the program: no command lines.
var mentions = []string{
	"kubectl apply", "kubectl exec", "kubectl create configmap --from-file", "helm install", "helm uninstall",
	"promtool test rules", "conntrack -D", "nft -f", "ip address", "ip nat",
	"ready --wait-for", "go test -short", "nft list table", "cleanup --legacy",
	"connections N", // a verb of test scripts
	"nft-masq-agent cleanup: an agent runs here (pid PID) and would restore its rules: stop it first",
}

// elsewhere are command lines that no test of this file runs, with the reason.
var elsewhere = map[string]string{
	"systemctl daemon-reload && systemctl enable --now nft-masq-agent": "needs systemd as the first process; " +
		"TestAgentOfTheUnitInstallsRules starts the agent as it does",
	"kubectl -n kube-system exec POD -- /nft-masq-agent COMMAND": "needs a kubelet: the tests of make test-cluster " +
		"run it",
	"kubectl -n kube-system edit configmap ip-masq-agent": "opens an editor",
	"kubectl exec POD -- nc -z -w 3 10.9.0.9 80":          "needs a kubelet",
	"make fleet":  "runs kubectl masq fleet",
	"nft monitor": "does not end by itself: TestNFTMonitorAnswersWhoDeletesOurRules runs it",
	"git tag --sign --message 'First release' v1.0.0": "needs the maintainer's " +
		"key",
	"skopeo copy --all oci:dist/image:v1.0.0 docker://registry.example/nft-masq-agent:v1.0.0": "needs a registry",
	"helm push dist/nft-masq-agent-1.0.0.tgz oci://registry.example/charts":                   "needs a registry",
	"cosign sign-blob --yes --bundle SHA256SUMS.sigstore.json dist/SHA256SUMS":                "needs an identity",
	"cosign sign --yes registry.example/nft-masq-agent@$(jq -r '.manifests[0].digest' dist/image/index.json)": "needs " +
		"an identity",
	"ctr --namespace k8s.io images import bin/image.tar":      "TestImageIsImportedWithoutARegistry runs it",
	`(cd "$RELEASE" && sha256sum --check --quiet SHA256SUMS)`: "TestReleaseIsReproducibleAndVerifiable runs it",
	`diff -r "$RELEASE" dist`:                                 "TestReleaseIsReproducibleAndVerifiable runs it",
}

// byHand are targets of make that neither .ci/run nor ci-full runs.
var byHand = map[string]string{
	"":             "prints the targets; the test runs it",
	"golden":       "writes the files that the tests compare",
	"manifests":    "writes the files that manifests-check compares",
	"demo":         "TestDemoRunsAndShowsItsProgress starts the program",
	"stress":       "loads the machine for minutes",
	"plots":        "needs gnuplot; TestPlotsAreThoseOfTheTable compares what they were drawn from",
	"dashboard":    "draws a picture in a minute and a half, which TestPictureShowsThePanelsOfTheDashboard compares",
	"bench":        "needs a quiet machine",
	"test-kernels": "downloads Debian's kernels, and needs qemu",
	"test-arch":    "downloads Debian's kernels, and needs qemu",
	"mutate":       "takes about an hour",
	"push":         "needs a registry",
	"all-push":     "needs a registry",
	"container":    "container-test makes it",
	"image":        "container-test makes it",
	"vuln":         "needs the vulnerability database",
}

// shellLines returns the commands in the blocks ```sh of a text, without comments.
func shellLines(text string) []string {
	var all []string
	for _, m := range regexp.MustCompile("(?ms)^ *```sh\n(.*?)^ *```$").FindAllStringSubmatch(text, -1) {
		for line := range strings.Lines(strings.ReplaceAll(m[1], "\\\n", "")) {
			line, _, _ = strings.Cut(line, "  # ")
			if line = strings.Join(strings.Fields(line), " "); line != "" {
				all = append(all, line)
			}
		}
	}
	return all
}

// program matches the beginning of a command line.
var program = regexp.MustCompile(
	`^(make|kubectl|helm|nft|ip (route|address)|ip6?tables\S*|conntrack|nft-masq-agent|go|git|promtool|` +
		`systemctl|sha256sum|skopeo|cosign|manifests/\S+\.sh|check|diff|render|status|explain|connections|cleanup|` +
		`ready) \S`,
)

// allCommands returns the commands of all documents.
func allCommands(t *testing.T) []documented {
	t.Helper()
	var all []documented
	err := fs.WalkDir(os.DirFS(".."), ".", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && slices.Contains([]string{"bin", "dist", ".git"}, path):
			return fs.SkipDir
		case !strings.HasSuffix(path, ".md") || strings.HasSuffix(path, "CHANGELOG.md"):
			return nil
		}
		text := readFile(t, filepath.Join("..", path))
		for line := range strings.Lines(text) {
			if strings.Contains(line, "```") &&
				!regexp.MustCompile("^ *```[a-z]*$").MatchString(strings.TrimSuffix(line, "\n")) {
				t.Errorf("%s: not the beginning or end of a block: %s", path, line)
			}
		}
		for _, section := range strings.Split("\n"+text, "\n## ") {
			title, _, _ := strings.Cut(section, "\n")
			for _, line := range shellLines(section) {
				all = append(all, documented{path, title, line})
			}
			prose := regexp.MustCompile("(?s)```.*?```").ReplaceAllString(section, "")
			for line := range strings.Lines(prose) {
				if code := strings.TrimSpace(line); strings.HasPrefix(line, "    ") && program.MatchString(code) {
					t.Errorf("%s: %q is a command: put it into a block ```sh", path, code)
				}
			}
			for _, m := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(prose, -1) {
				line := strings.Join(strings.Fields(m[1]), " ")
				if (program.MatchString(line) || line == "make") && !slices.Contains(mentions, line) {
					all = append(all, documented{path, title, line})
				}
			}
		}
		return nil
	})
	must(t, err)
	return all
}

// runner returns which test runs a command.
func runner(line string) string {
	first, _, _ := strings.Cut(line, " ")
	switch {
	case elsewhere[line] != "":
		return "elsewhere"
	case strings.HasPrefix(line, "kubectl masq "):
		return "plugin"
	case first == "kubectl", first == "helm",
		regexp.MustCompile(`^make (-s )?(install|uninstall|manifest|fleet)( |$)`).MatchString(line):
		return "cluster"
	case first == "make":
		return "make"
	case first == "go":
		return "go"
	case first == "install", first == "sed", program.MatchString(line):
		return "node"
	}
	return ""
}

// by returns the commands that a test runs, each line once.
func by(t *testing.T, name string) []documented {
	t.Helper()
	all := slices.DeleteFunc(allCommands(t), func(d documented) bool { return runner(d.line) != name })
	seen := map[string]bool{}
	all = slices.DeleteFunc(all, func(d documented) bool {
		defer func() { seen[d.line] = true }()
		return seen[d.line]
	})
	if len(all) < 2 {
		t.Fatalf("%s: %v", name, all)
	}
	return all
}

func TestEachCommandOfTheDocumentsIsRun(t *testing.T) {
	t.Parallel()
	left := maps.Clone(elsewhere)
	for _, d := range allCommands(t) {
		if runner(d.line) == "" {
			t.Errorf("%s, %s: nothing runs %q", d.document, d.section, d.line)
		}
		delete(left, d.line)
	}
	for line := range left {
		t.Errorf("no document has %q", line)
	}
}

func TestMakeKnowsTheTargetsOfTheDocuments(t *testing.T) {
	nfttest.SkipIfShort(t)
	t.Parallel()
	var checked string
	for file, pattern := range map[string]string{"../Makefile": `(?m)^ci-full: .*`, "../.ci/run": `(?m)^make .*`} {
		checked += strings.Join(regexp.MustCompile(pattern).FindAllString(readFile(t, file), -1), " ") + " "
	}
	targets := append(strings.Fields(checked), "ci-full", "build", "deps", "release") // which those need
	var lines []string
	for _, d := range by(t, "make") {
		target := ""
		for _, word := range strings.Fields(d.line)[1:] {
			if !strings.ContainsAny(word, "=-'") || slices.Contains(targets, word) || byHand[word] != "" {
				target = word
				break
			}
		}
		if !slices.Contains(targets, target) && byHand[target] == "" {
			t.Errorf("%s: nothing runs the target %q of %q", d.document, target, d.line)
		}
		lines = append(lines, d.line)
	}
	wantTargets(t, lines...)
}

// make golden runs the tests whose own bodies read the flag.
func TestMakeGoldenKnowsEachTestThatWritesGoldenFiles(t *testing.T) {
	t.Parallel()
	packages := strings.Fields(run(t, `make --eval='golden-packages: ; @echo $(GOLDEN)' golden-packages`))
	for i := range packages {
		packages[i] = filepath.Clean(packages[i])
	}
	function := regexp.MustCompile(`(?ms)^func (\([^)]*\) )?(\w+).*?^}$`)
	flagged := regexp.MustCompile(`[*]update\b`)
	writers := 0
	err := fs.WalkDir(os.DirFS(".."), ".", func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		text := readFile(t, filepath.Join("..", path))
		if !strings.Contains(text, `Bool("update"`) && !flagged.MatchString(text) || strings.Contains(path, "cluster/") {
			return nil
		}
		if !slices.Contains(packages, filepath.Dir(path)) {
			t.Errorf("%s writes golden files, and GOLDEN in the Makefile is without its package: %q", path, packages)
		}
		for _, m := range function.FindAllStringSubmatch(text, -1) {
			if !flagged.MatchString(m[0]) {
				continue
			}
			writers++
			if !strings.HasPrefix(m[2], "Test") {
				t.Errorf("%s: %s reads the flag: give it the value, so that make golden finds the test", path, m[2])
			}
		}
		return nil
	})
	must(t, err)
	if writers < 10 {
		t.Errorf("%d tests write golden files, want at least 10: does the pattern still find them?", writers)
	}
}

// wantTargets has make read a command line, but for targets whose lines call make: those run in a dry run, too.
func wantTargets(t *testing.T, lines ...string) {
	t.Helper()
	together := "make --dry-run"
	for _, line := range lines {
		arguments := strings.TrimPrefix(line, "make")
		switch {
		case regexp.MustCompile(`^ (ci-full|reproducible)`).MatchString(arguments):
		case regexp.MustCompile(`^( [a-z0-9-]+)+$`).MatchString(arguments):
			together += arguments
		case arguments != "":
			run(t, "make --dry-run"+arguments)
		default:
			run(t, line)
		}
	}
	run(t, together)
}

// A tag may be moved, the digest of what was pushed is what it is. Files that were edited since then have another version,
// of which there is no image.
func TestInstallNamesThePushedImageByItsDigest(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	digest := "sha256:" + strings.Repeat("0123456789abcdef", 4)
	for tool, script := range map[string]string{
		"docker": "echo 'v1: digest: " + digest + " size: 527'\n",
		"podman": "for arg; do case \"$last\" in --digestfile) printf %s " + digest +
			" >\"$arg\" ;; esac; last=\"$arg\"; done\n",
	} {
		dir := t.TempDir()
		writeFile(t, filepath.Join(dir, tool), "#!/bin/sh\n"+script)
		makes := func(args string) string {
			return run(t, "make --old-file=container --old-file=all-container CONTAINER_TOOL="+tool+
				" IMAGE=registry.example/a TAG=v1 PUSHED="+filepath.Join(dir, "pushed")+" "+args,
				"PATH="+dir+":"+os.Getenv("PATH"))
		}
		wants := func(args, want string) {
			t.Helper()
			if out := makes("--dry-run manifest" + args); !strings.Contains(out, want) {
				t.Errorf("%s: no %s in\n%s", tool, want, out)
			}
		}
		wants("", `newTag: "v1"`) // nothing was pushed
		for _, push := range []string{"push", "all-push"} {
			makes(push)
			wants("", `newName: "registry.example/a", digest: "`+digest+`"`)
		}
		wants(" TAG=v2", `newTag: "v2"`)
		wants(" TAG=", digest)
		writeFile(t, filepath.Join(dir, "pushed"), "registry.example/a:v3\n") // as make image writes it
		wants(" TAG=", `newTag: "v3"`)
	}
}

func TestGoKnowsThePackagesOfTheDocuments(t *testing.T) {
	nfttest.SkipIfShort(t)
	t.Parallel()
	for _, d := range by(t, "go") {
		packages := slices.DeleteFunc(strings.Fields(d.line)[2:],
			func(word string) bool { return !strings.HasPrefix(word, "./") })
		out, err := try(t, "go list "+strings.Join(packages, " ")+" 2>&1")
		if err != nil || len(packages) == 0 || strings.Contains(out, "matched no") {
			t.Errorf("%s: %s: %v\n%s", d.document, d.line, err, out)
		}
	}
}

// A documentNode is a node with an agent, in whose mount namespace the config, the
// socket, and what the commands of the documents write are where the documents say.
type documentNode struct {
	*nfttest.NS
	dir   string
	agent *agent.Agent
}

const ownDirectories = `set -e
mount --make-rprivate /
mkdir "$1/etc" "$1/opt"
cp -a /etc/. "$1/etc" 2>/dev/null || true
for path in /etc /run /usr/local/bin; do
	case $path in /etc) mount --bind "$1/etc" /etc ;; *) mount -t tmpfs none $path ;; esac
done
mkdir -p /etc/config /etc/nft-masq-agent /etc/kubernetes/manifests /etc/systemd/system /run/nft-masq-agent
chmod 700 /run/nft-masq-agent
cp "$1/ip-masq-agent" /etc/config/ip-masq-agent
ln -s "$2" /usr/local/bin/nft-masq-agent.test
ln -s nft-masq-agent.test /usr/local/bin/nft-masq-agent
shift 2
exec "$@"`

// run runs a command line in the directory of the node, as a reader would.
func (n documentNode) run(line string) (string, error) {
	return n.Output("", "nsenter", "--mount=/proc/"+fmt.Sprint(n.agent.Pid)+"/ns/mnt", "bash", "-c",
		`cd "$0" && export PATH="/usr/local/bin:$PATH:/usr/sbin:/sbin" && `+line, n.dir)
}

// newDocumentNode starts the agent with more flags.
func newDocumentNode(t *testing.T, n *nfttest.NS, args ...string) documentNode {
	t.Helper()
	nfttest.Require(t, "nft", "iptables-nft", "unshare", "nsenter")
	dir := t.TempDir()
	sample, program := readFile(t, "agent-config/config"), agent.Program(t)
	here, err := filepath.Abs(".")
	must(t, err)
	for name, text := range map[string]string{
		"ip-masq-agent": sample, "ip-masq-agent.yaml": sample,
		"proposed": "nonMasqueradeCIDRs: [10.0.0.0/8]\n",
	} {
		writeFile(t, filepath.Join(dir, name), text)
	}
	for link, to := range map[string]string{"manifests": here, "bin/nft-masq-agent": program} {
		must(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, link)), 0o755))
		must(t, os.Symlink(to, filepath.Join(dir, link)))
	}
	cmd := nfttest.Command("unshare", append([]string{
		"--mount", "bash", "-c", ownDirectories, "bash", dir, program, program, "run", "--enable-ipv6",
		"--http-address=127.0.0.1:9717", "--probe-socket=/run/nft-masq-agent/probe.sock",
	}, args...)...)
	a := agent.Run(t, n, cmd)
	_, err = a.Await(t.Context(), "config_applied")
	must(t, err)
	return documentNode{NS: n, dir: dir, agent: a}
}

// What a node has on which the documents have somebody run commands.
const nodeOfTheDocuments = `table ip flannel-ipv4 { chain postrtg { }; }
table ip6 flannel-ipv6 { chain postrtg { }; }
`

func TestCommandsOfTheDocumentsRunOnANode(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	top := nfttest.NewTopology(t)
	n := newDocumentNode(t, top.Node)
	nfttest.NFT(t, top.Node, nodeOfTheDocuments, "-f", "-")
	for _, setup := range []string{"iptables -t nat -N FLANNEL-POSTRTG", "ip6tables -t nat -N FLANNEL-POSTRTG"} {
		if out, err := n.run(setup); err != nil {
			t.Fatalf("%s: %v\n%s", setup, err, out)
		}
	}
	iptablesMode := newDocumentNode(t, nfttest.NewNS(t, "iptables"), "--mode=iptables-nft")
	empty := nfttest.NewNS(t, "empty")
	examples := strings.NewReplacer("[ADDRESS]", "203.0.113.9", "ADDRESS[:PORT]", "203.0.113.9:443",
		"ADDRESS", "203.0.113.9",
		"DESTINATION", "203.0.113.9", "POD", "10.244.1.2", "FILE", "ip-masq-agent", "NEW", "proposed", "CHAIN",
		"IP-MASQ-AGENT",
		"COMMAND", "status", "$(HOST_IP)", "127.0.0.1")
	names := regexp.MustCompile(`^(check|diff|render|status|explain|connections|cleanup|ready) `)
	for _, d := range by(t, "node") {
		line := d.line
		if strings.Contains(line, "ADDRESS:PORT") { // of a connection that conntrack knows
			seen := nfttest.MustSend(t, top, nfttest.Flow{
				Proto: nfttest.UDP, From: top.Pod, Dst: netip.MustParseAddrPort("203.0.113.9:443"),
			}).Seen
			line = strings.ReplaceAll(line, "ADDRESS:PORT", seen.String())
		}
		line = examples.Replace(line)
		if names.MatchString(line) {
			line = "nft-masq-agent " + line
		}
		on := n
		switch {
		case strings.Contains(line, "IP-MASQ-AGENT") || strings.HasPrefix(line, "iptables-save"):
			on = iptablesMode
		case strings.HasSuffix(line, " cleanup"): // next to a running agent it refuses
			on.NS = empty
			line = "unshare --mount bash -c 'mount -t tmpfs none /run && " + line + "'"
		case strings.HasSuffix(line, " --trace"):
			line += "=1ms"
		}
		out, err := on.run(line)
		var exit *exec.ExitError
		if errors.As(err, &exit) && exit.ExitCode() == 1 &&
			(strings.Contains(line, " diff ") || strings.Contains(line, " --trace")) {
			err = nil // there are changes, and no packet came
		}
		if err != nil {
			t.Errorf("%s: %s: %v\n%s", d.document, d.line, err, out)
		} else {
			t.Logf("%s: %s\n%s", d.document, line, out)
		}
		if strings.HasPrefix(line, "nft delete table inet nft-masq-agent") {
			_, err := n.agent.Await(t.Context(), "rules_restored")
			must(t, err)
		}
	}
}

// readmeShows checks that each line of README.md's part of the demo's output is in it. README.md has more line breaks, and
// the kernel chooses the port of each connection.
func readmeShows(t *testing.T, printed string) {
	t.Helper()
	document := readFile(t, "../README.md")
	_, shown, _ := strings.Cut(document, "saw:\n\n")
	shown, _, _ = strings.Cut(shown, "\n\n")
	ports := regexp.MustCompile(`:\d{4,}`)
	normal := func(text string) string {
		return ports.ReplaceAllString(strings.Join(strings.Fields(text), " "), ":PORT")
	}
	output := normal(printed)
	lines := strings.Split(shown, "\n")
	if len(lines) < 10 {
		t.Errorf("README.md shows %q", lines)
	}
	for _, line := range lines {
		if !strings.Contains(output, normal(line)) {
			t.Errorf("the demo does not print README.md's line %q", line)
		}
	}
}

// On a terminal, because there the demo also shows its progress during the reloads.
func TestDemoRunsAndShowsItsProgress(t *testing.T) {
	nfttest.SkipIfShort(t)
	t.Parallel()
	nfttest.Require(t, "nft", "iptables-nft", "script")
	reloads := nfttest.FullRounds(20, 200)
	program := filepath.Join(t.TempDir(), "demo")
	run(t, "go build -o "+program+" ./cmd/demo")
	demo := fmt.Sprintf("%s %s manifests/agent-config/config %d", program, agent.Program(t), reloads)
	for _, line := range []string{program + " -h", demo} {
		printed := run(t, "script --quiet --return --command '"+line+"' /dev/null")
		if line == demo {
			if lines := regexp.MustCompile(`(\d+) reloads, (\d+) connections\r`).FindAllString(printed, -1); len(lines) < 2 {
				t.Errorf("progress: %q", lines)
			}
			readmeShows(t, printed)
		}
	}
}
