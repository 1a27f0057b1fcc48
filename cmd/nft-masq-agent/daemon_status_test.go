package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
	"nft-masq-agent/cmd/nft-masq-agent/internal/reply"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfttest"
)

// status returns the report of status -o json, and the exit code.
func (n *testNode) status(args ...string) (r answer.Status, code int) {
	n.t.Helper()
	got := n.run(append([]string{"status", "-o", "json"}, args...)...)
	d := json.NewDecoder(strings.NewReader(got.stdout))
	d.DisallowUnknownFields()
	if err := d.Decode(&r); err != nil || got.stderr != "" {
		n.t.Fatalf("status: %+v: %v", got, err)
	}
	return r, got.code
}

// problems returns the problems of a kind that status reports.
func problems(r answer.Status, id string) (texts []string) {
	for _, p := range r.Problems() {
		if strings.HasPrefix(p.ID, id) {
			texts = append(texts, p.Error())
		}
	}
	return texts
}

func TestForeignChainIsRejected(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "iptables-nft-restore")
	n := newNode(t)
	const rules = "*nat\n:KUBE-POSTROUTING - [0:0]\n-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN\nCOMMIT\n"
	if _, err := n.Output(rules, "iptables-nft-restore", "--noflush"); err != nil {
		t.Fatal(err)
	}
	flags, before := []string{"--mode=iptables-nft", "--masq-chain=KUBE-POSTROUTING"}, n.kernelText()
	r, code := n.status(flags...)
	want := `chain "KUBE-POSTROUTING" in table ip nat: the chain has rules that no masquerade agent wrote`
	if code != exitFailed || len(r.Counters) > 0 || !slices.Equal(r.Kernel.Differences, []string{want}) {
		t.Errorf("exit code %d: %+v", code, r)
	}
	got := n.run(append([]string{"run", "--config", n.path}, flags...)...)
	want = "nft-masq-agent run: --masq-chain: " + want + " (see nft-masq-agent run --help)\n"
	if got.code != exitUsage || got.stderr != want || n.kernelText() != before {
		t.Errorf("%+v, want exit code %d and %s", got, exitUsage, want)
	}
}

func TestStatusReportsSyncInOneLine(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	want := wants(t, "")
	d := n.start("--resync-interval=3600")
	d.began(want)
	got := n.run("status")
	first, _, _ := strings.Cut(got.stdout, "\n")
	says := fmt.Sprintf("in sync: %s is installed, mode nftables", want.Hash())
	if got.code != exitDone || first != says || !strings.Contains(got.stdout, fmt.Sprintf(
		"\nagent           ok     the agent runs, pid %d\n", d.Pid)) || !strings.Contains(got.stdout, fmt.Sprintf(
		"\nconfig          ok     %s, from built-in defaults (no config at %s)\n", want.Hash(), n.path)) {
		t.Errorf("status: %+v, want %q", got, says)
	}
	r, code := n.status()
	if code != exitDone || r.Agent == nil || r.Agent.PID != d.Pid ||
		!strings.Contains(r.Notes.Error(), fmt.Sprintf("with the flags of the running agent (pid %d)", d.Pid)) ||
		!slices.Contains(r.Agent.Flags, "--resync-interval=3600") {
		t.Errorf("exit code %d: %+v", code, r)
	}
	if len(r.Counters) != 3 || len(r.Kernel.Differences)+len(r.Legacy)+len(r.Others)+len(r.Errors)+len(r.Warnings) > 0 {
		t.Errorf("%+v", r)
	}
	d.silent() // reading changes nothing
}

// unwrap joins wrapped lines.
func unwrap(text string) string { return strings.Join(strings.Fields(text), " ") }

// The verdict of a policy needs the config that led to the kernel's rules.
func TestExplainHasVerdictsOnlyOfThePolicyInTheKernel(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	inEachMode(t, func(t *testing.T, _ nft.Mode, flag string) {
		n := newNode(t)
		n.swap(exempting("10.1.0.0/16"))
		d := n.start(flag)
		held := wants(t, exempting("10.1.0.0/16"), flag)
		d.began(held)
		d.stop()
		n.check(os.Rename(n.path, n.path+"-old"))
		n.swap(exempting("10.2.0.0/16"))
		for args, want := range map[string]nft.Verdict{
			"10.1.2.3 --live":                      "",
			"10.1.2.3 --config " + n.path:          "",
			"10.1.2.3 --config " + n.path + "-old": nft.Exempt,
			"10.2.2.3 --config " + n.path + "-old": nft.Masqueraded,
		} {
			got := n.run(append([]string{"explain", "-o", "json", flag, "--from", "10.244.1.2"}, strings.Fields(args)...)...)
			var x answer.Explanation
			n.check(json.Unmarshal([]byte(got.stdout), &x))
			var verdict nft.Verdict
			if len(x.Answers) > 0 {
				verdict = x.Answers[0].Verdict
			}
			if got.code != exitDone || verdict != want || x.Live != (want == "") ||
				cmp.Or(x.Config.Enforced, x.Config.Hash) != held.Hash() {
				t.Errorf("%s: %+v, want %q", args, got, want)
			}
		}
		nfttest.NFT(t, n.NS, "", "flush", "ruleset")
		if got := n.run("explain", "10.1.2.3", "--live"); got.code != exitFailed ||
			!strings.Contains(got.stderr, "no rules of this agent") {
			t.Errorf("without rules: %+v", got)
		}
	})
}

// A failure is an answer, too.
func TestFailuresAreAnswersInJSON(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.swap(badText)
	for args, want := range map[string]struct {
		code int
		id   string
	}{
		"status --config " + n.path:         {exitFailed, "config-rejected"},
		"diff --config " + n.path:           {exitUsage, "invalidEntry"},
		"explain 10.1.2.3 --config /nosuch": {exitFailed, "failed"},
		"explain 10.1.2":                    {exitUsage, "usage"},
		"connections --stale":               {exitFailed, "failed"},
		"connections --seen-as 192.0.2.9":   {exitFailed, "no-match"},
		"check --nosuch":                    {exitUsage, "usage"},
	} {
		got := n.run(append(strings.Fields(args), "-o", "json")...) // which validates it
		var head reply.Head
		if err := json.Unmarshal([]byte(got.stdout), &head); err != nil || got.code != want.code || len(head.Errors) == 0 ||
			head.Errors[0].ID != want.id || got.stderr != "" {
			t.Errorf("%s: %+v, want %+v", args, got, want)
		}
	}
}
