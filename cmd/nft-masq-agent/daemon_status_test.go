package main

import (
	"bytes"
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
	"nft-masq-agent/nft/layout"
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

func TestStatusNamesEachTampering(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	inEachMode(t, func(t *testing.T, mode nft.Mode, flag string) {
		n := newNode(t)
		n.swap(slash24s(10))
		flags := []string{"--config", n.path, flag}
		d := n.start(flag)
		want := wants(t, slash24s(10), flag)
		d.began(want)
		d.stop()
		all := tamperings(mode)
		if mode == nft.ModeIPTables {
			all = append(all, tampering{
				name: "rules of the other mode", finds: "leftover table inet nft-masq-agent",
				do: nftScript("table TABLE { chain postrouting { type nat hook postrouting priority 110; masquerade; }; }"),
			})
		}
		for _, a := range all {
			t.Run(a.name, func(t *testing.T) {
				if r, _ := n.status(flags...); len(r.Errors) != 1 || r.Errors[0].ID != "no-agent" || !r.Kernel.InSync ||
					r.Kernel.Hash != want.Hash() {
					t.Errorf("in sync, but: %+v", r)
				}
				a.do(n)
				r, code := n.status(flags...)
				found := strings.Join(r.Kernel.Differences, "\n")
				if code != exitFailed || r.Kernel.InSync || !strings.Contains(found, a.finds) {
					t.Errorf("exit code %d: %+v, want %q", code, r, a.finds)
				}
				k := n.kernel()
				defer k.Close()
				_, err := k.Apply(t.Context(), want, layout.Everything)
				n.check(err)
			})
		}
	})
}

func TestStatusDoesNotCountForeignChains(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "iptables-nft-restore")
	n := newNode(t)
	const rules = "*nat\n:KUBE-POSTROUTING - [0:0]\n-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN\nCOMMIT\n"
	if _, err := n.Output(rules, "iptables-nft-restore", "--noflush"); err != nil {
		t.Fatal(err)
	}
	r, code := n.status("--mode=iptables-nft", "--masq-chain=KUBE-POSTROUTING")
	want := `chain "KUBE-POSTROUTING" in table ip nat: the chain has rules that no masquerade agent wrote`
	if code != exitFailed || len(r.Counters) > 0 || !slices.Equal(r.Kernel.Differences, []string{want}) {
		t.Errorf("exit code %d: %+v", code, r)
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

func TestStatusDistinguishesABadFileFromDifferences(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	inEachMode(t, func(t *testing.T, _ nft.Mode, flag string) {
		n := newNode(t)
		n.swap(exempting("10.1.0.0/16"))
		flags := []string{"--config", n.path, flag}
		r, code := n.status(flags...)
		if code != exitFailed || r.Kernel.InSync || r.Kernel.Hash != "" || r.Agent != nil {
			t.Errorf("on an empty node: exit code %d: %+v", code, r)
		}
		d := n.start(flag)
		held := wants(t, exempting("10.1.0.0/16"), flag)
		d.began(held)
		n.swap(badText)
		d.await("config_rejected")
		r, code = n.status()
		if code != exitFailed || r.Config.Accepted || len(r.Errors) != 2 || r.Errors[1].Error() != n.path+badProblem ||
			r.Kernel.Hash != held.Hash() || len(r.Kernel.Differences) > 0 || r.Config.Enforced != held.Hash() ||
			!strings.HasPrefix(r.Errors[0].Msg, "config rejected; an earlier config ("+held.Hash()+")") {
			t.Errorf("with a bad file: exit code %d: %+v", code, r)
		}
		d.stop()
		n.swap(exempting("10.2.0.0/16"))
		r, code = n.status(flags...)
		if code != exitFailed || !r.Config.Accepted || r.Kernel.InSync || r.Kernel.Hash != held.Hash() ||
			r.Config.Hash != wants(t, exempting("10.2.0.0/16"), flag).Hash() || len(r.Kernel.Differences) == 0 {
			t.Errorf("with another file: exit code %d: %+v", code, r)
		}
	})
}

func TestStatusNamesForeignRules(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	inEachMode(t, func(t *testing.T, _ nft.Mode, flag string) {
		n := newNode(t)
		loadLegacy(n)
		d := n.start(flag)
		d.await("config_applied")
		r, code := n.status()
		if code != exitFailed || len(r.Legacy) != 1 || r.Legacy[0].Chain != "MY-MASQ" ||
			len(r.With(answer.Conflicting)) != 1 || len(r.Others) != 1 ||
			r.Others[0].Table != "ip nat" || r.Others[0].Chain != "MY-MASQ" || r.Others[0].Priority != 100 {
			t.Errorf("exit code %d: %+v", code, r)
		}
		text := n.run("status").stdout
		for _, line := range []string{
			"run this one with --takeover, or nft-masq-agent cleanup --legacy-only",
			"Other rules that masquerade what the config exempts:",
		} {
			if !strings.Contains(text, line) {
				t.Errorf("no %q in:\n%s", line, text)
			}
		}
		if first, _, _ := strings.Cut(text, "\n"); first != "rules of an iptables-based agent are also active" {
			t.Errorf("the first line is %q", first)
		}
	})
}

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

// TestCommandsForTheFileNeedNoPrivilege checks that commands that only read the
// file work without access to the kernel.
func TestCommandsForTheFileNeedNoPrivilege(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.swap(exempting("10.1.0.0/16"))
	for args, want := range map[string]int{
		"check --config " + n.path:            exitDone,
		"render --config " + n.path:           exitDone,
		"explain 10.1.2.3 --config " + n.path: exitDone,
		"status --config " + n.path:           exitFailed,
		"cleanup":                             exitFailed,
	} {
		cmd := n.command([]string{withCaps + "=[]"}, strings.Fields(args)...)
		var stdout, stderr bytes.Buffer
		cmd.Stdout, cmd.Stderr = &stdout, &stderr
		_ = n.Run(cmd)
		got := result{stdout.String(), stderr.String(), cmd.ProcessState.ExitCode()}
		if got.code != want || want == exitFailed != strings.Contains(got.stderr, "NET_ADMIN") {
			t.Errorf("%s: %+v, want exit code %d", args, got, want)
		}
	}
}

func TestStatusCountsNothingThatAFlushHasDeleted(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.swap("")
	d := n.start()
	d.began(wants(t, ""))
	d.stop()
	nfttest.NFT(t, n.NS, "", "flush", "ruleset")
	got := n.run("status", "--config", n.path)
	first, _, _ := strings.Cut(got.stdout, "\n")
	if got.code != exitFailed || !strings.HasPrefix(first, "out of sync: ") ||
		!strings.Contains(first, "none of our rules are installed") ||
		!strings.Contains(got.stdout, "\n  start it") || strings.Contains(got.stdout, "Connections since") {
		t.Errorf("%+v", got)
	}
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
