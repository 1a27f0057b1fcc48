package nfttest_test

import (
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/script"
)

func TestMain(m *testing.M) { os.Exit(nfttest.Main(m)) }

// judge records what Require does with a test.
type judge struct {
	testing.TB
	verdict string
}

func (j *judge) Helper()               {}
func (j *judge) Skipf(string, ...any)  { j.verdict = "skipped" }
func (j *judge) Fatalf(string, ...any) { j.verdict = "failed" }

func TestRequireFailsIfTheKernelIsRequired(t *testing.T) {
	for _, tt := range []struct{ env, program, want string }{
		{"1", "no-such-program", "failed"},
		{"", "no-such-program", "skipped"},
		{"1", "true", ""},
		{"", "true", ""},
	} {
		nfttest.Require(t)
		t.Setenv("REQUIRE_KERNEL", tt.env)
		var j judge
		nfttest.Require(&j, tt.program)
		if j.verdict != tt.want {
			t.Errorf("REQUIRE_KERNEL=%s, program %s: test %s, want %s", tt.env, tt.program, j.verdict, tt.want)
		}
	}
}

func TestKernelTestsRunWithoutRoot(t *testing.T) {
	nfttest.Require(t, "nft")
	if os.Getenv("NFTTEST_IN_USER_NAMESPACE") != "" {
		return // running at all is the proof
	}
	cmd := exec.Command("/proc/self/exe", "-test.run=^TestFarEndSeesSourceAccordingToRules$", "-test.v")
	cmd.Env = append(os.Environ(), "REQUIRE_KERNEL=1")
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "--- PASS: TestFarEnd") {
		t.Errorf("as nobody: %v\n%s", err, out)
	}
}

func TestRulesOfOtherProgramsHaveASource(t *testing.T) {
	var sources, rules []string
	for _, c := range script.Read(t, "../../testdata/foreign.txt") {
		if c.Text() != "" {
			sources = append(sources, c.Name)
		}
	}
	for _, dir := range nfttest.Must(os.ReadDir("../../testdata/foreign")) {
		rules = append(rules, dir.Name())
	}
	nfttest.Same(t, "rules of other programs (-in foreign.txt +in foreign)", sources, rules)
}
