package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
	"nft-masq-agent/cmd/nft-masq-agent/internal/running"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfttest"
)

// kernelText returns the ruleset, to compare later that it has not changed.
func (n *testNode) kernelText() string {
	n.t.Helper()
	return nfttest.NFT(n.t, n.NS, "", "-a", "list", "ruleset")
}

// tamper removes our rules.
func tamper(n *testNode, mode nft.Mode) {
	n.t.Helper()
	if mode == nft.ModeNFTables {
		nfttest.NFT(n.t, n.NS, "", "delete", "table", "inet", nft.TableName)
		return
	}
	nfttest.NFT(n.t, n.NS, "", "flush", "chain", "ip", "nat", "IP-MASQ-AGENT")
}

func TestSecondAgentIsReported(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	first := n.start()
	first.began(wants(t, ""))
	other := &testNode{n.NS, t, n.path, n.socket + "-second"}
	second := other.start("--resync-interval=1", "--http-address", httpAddress)
	line := second.await("second_agent")
	if line["pid"] != float64(first.Pid) || line["own_pid"] != float64(second.Pid) {
		t.Errorf("named: %v, want pid %d and own_pid %d", line, first.Pid, second.Pid)
	}
	second.await("starting")
	second.await("rules_in_place")
	second.silent()
	first.signal(unix.SIGHUP) // so that it looks now
	if line := first.await("second_agent"); line["pid"] != float64(second.Pid) {
		t.Errorf("the first one names %v, want pid %d", line, second.Pid)
	}
	first.silent()
	for of, pids := range map[*testNode][2]int{ // whichever is asked, or none of them
		n:                                     {first.Pid, second.Pid},
		other:                                 {second.Pid, first.Pid},
		{n.NS, t, n.path, n.socket + "-none"}: {first.Pid, second.Pid},
	} {
		want := fmt.Sprintf("2 agents run here (pid %d, pid %d) and overwrite each other", pids[0], pids[1])
		if got := of.run("status"); got.code != exitFailed || !strings.Contains(unwrap(got.stdout), want) {
			t.Errorf("status: %+v, want exit code %d and %q", got, exitFailed, want)
		}
	}
	if got := n.metric("nft_masq_agent_second_agent"); got != "1" {
		t.Errorf("metric: %q", got)
	}
	first.stop()
	second.await("second_agent_gone")
	if got := n.metric("nft_masq_agent_second_agent"); got != "0" {
		t.Errorf("metric: %q after its end", got)
	}
	if got := other.run("status"); got.code != exitDone {
		t.Errorf("status after its end: %+v", got)
	}
	n.start().await("second_agent") // the second one has the lock now
}

// As kubectl exec POD -- /nft-masq-agent does.
func TestNameAloneNextToAnAgentIsAnError(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	for name, tt := range map[string]struct {
		socket, stopped, hidden bool
	}{
		"answers":                     {socket: true},
		"has no socket":               {},
		"is stopped":                  {socket: true, stopped: true},
		"is in another PID namespace": {hidden: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			args := []string{"run", "--config", n.path}
			if tt.socket {
				args = append(args, "--probe-socket", n.socket)
			}
			d := n.startCommand(n.command(nil, args...))
			d.await("config_applied")
			process := fmt.Sprintf("pid %d", d.Pid)
			ask := n.command
			if tt.hidden {
				process = "pid unknown"
				ask = func(env []string, args ...string) *exec.Cmd {
					cmd := n.command(env, args...)
					wrapper := nfttest.Command("unshare", append([]string{"--pid", "--fork"}, cmd.Args...)...)
					wrapper.Env = cmd.Env
					return wrapper
				}
			}
			if tt.stopped {
				d.signal(unix.SIGSTOP)
				defer d.signal(unix.SIGCONT)
			}
			before := n.kernelText()
			names := [][]string{nil}
			if name == "answers" {
				names = append(names, []string{""}, []string{"--"}, []string{"/ip-masq-agent"})
			}
			for _, args := range names {
				want := "nft-masq-agent: an agent already runs here (" + process
				if got := n.runCommand(ask(nil, args...)); got.code != exitUsage || !strings.HasPrefix(got.stderr, want) {
					t.Errorf("%q: %+v, want exit code %d and %q", args, got, exitUsage, want)
				}
			}
			for _, args := range [][]string{{"cleanup"}, {"cleanup", "--legacy"}} {
				want := "nft-masq-agent cleanup: an agent runs here (" + process
				if got := n.runCommand(ask(nil, args...)); got.code != exitFailed || !strings.HasPrefix(got.stderr, want) {
					t.Errorf("%q: %+v, want exit code %d and %q", args, got, exitFailed, want)
				}
			}
			nfttest.Same(t, "the ruleset changed (-before +after)", before, n.kernelText())
			if !tt.stopped { // flags are the command line of an older agent
				n.startCommand(n.command(nil, "--v=2", "--config", n.path)).await("second_agent")
			}
		})
	}
}

// The command line of an older agent, as it starts that in its image.
func TestCommandLineOfAnOlderAgentIsAccepted(t *testing.T) {
	t.Parallel()
	for _, first := range []string{"", "/usr/bin/ip-masq-agent-v2", "non-masquerade-daemon"} {
		n := newNode(t)
		n.swap("forceMasqueradeCIDRs: [10.1.0.0/16]\n")
		args := []string{
			"--config=" + n.path, "--masq-chain=IP-MASQ", "--nomasq-all-reserved-ranges", "--enable-ipv6=true",
			"--random-fully=false", "--to-ports=1024-29999,32768-65535", "--v=2", "--logtostderr=false",
			"--log_file=/var/log/x", "--probe-socket=" + n.socket,
		}
		d := n.startCommand(n.command(nil, append([]string{first}, args...)...))
		d.began(wants(t, "forceMasqueradeCIDRs: [10.1.0.0/16]\n", args...))
		if got := n.run("status", "-v=1"); !strings.Contains(got.stdout, "the running agent (pid ") ||
			!strings.Contains(got.stdout, "--masq-chain=IP-MASQ") {
			t.Errorf("%q: status does not follow the flags of the agent: %+v", first, got)
		}
		listing := nfttest.NFT(t, n.NS, "", "list", "table", "inet", nft.TableName)
		nfttest.NFT(t, n.NS, listing, "-c", "-f", "-") // it loads again
		d.signal(unix.SIGTERM)
		<-d.Done()
		want := fmt.Sprintf("warning: the first argument %q is no command: it is skipped\n", first)
		if got := d.Stderr(); got != want {
			t.Errorf("stderr %q, want %q", got, want)
		}
	}
}

// exempting returns a config that exempts only these CIDRs.
func exempting(cidrs ...string) string {
	return "masqLinkLocal: true\nnonMasqueradeCIDRs:\n  - " + strings.Join(cidrs, "\n  - ") + "\n"
}

// inEachMode runs a test in both modes, with the flag for it.
func inEachMode(t *testing.T, test func(t *testing.T, mode nft.Mode, flag string)) {
	t.Helper()
	for _, mode := range modes {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			test(t, mode, "--mode="+string(mode))
		})
	}
}

func TestWaitForRulesDoesNotWaitForAValidConfig(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.swap("nonMasqueradeCIDRs: [10.0.0.1]\n")
	cmd := n.command(nil, "ready", "--wait-for", "[127.0.0.1]:9717")
	read, write := io.Pipe()
	cmd.Stdout = write
	p, err := n.Start(cmd)
	n.check(err)
	t.Cleanup(func() {
		_ = p.Kill()
		_ = read.Close()
		<-p.Done()
	})
	lines := bufio.NewScanner(read)
	if lines.Scan(); !strings.HasPrefix(lines.Text(), "waiting: ") ||
		!strings.Contains(lines.Text(), "connection refused") {
		t.Fatal(lines.Text())
	}
	n.start("--http-address", httpAddress)
	reasons := []string{"waiting: no rules are installed yet", "waiting: no answer from the agent within 1s"}
	for lines.Scan() && lines.Text() != "rules are installed" {
		if !slices.Contains(reasons, lines.Text()) {
			t.Errorf("printed %q, want one of %q", lines.Text(), reasons)
		}
	}
	if err := p.Wait(); err != nil {
		t.Error(err)
	}
	got := n.runCommand(n.command(nil, "ready", "--wait-for", "127.0.0.1:9717", "-o", "json"))
	if got.code != exitDone || !strings.Contains(got.stdout, `"asked":"started"`) {
		t.Errorf("as JSON: %+v", got)
	}
	if out, _ := n.Output("", "nft", "list", "tables"); !strings.Contains(out, nft.TableName) {
		t.Errorf("the node has %q", out)
	}
}

// The second of two signals kills it at once: both are pending when it continues. Its successor finds the rules.
func TestRulesStayWhenTheAgentExits(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	inEachMode(t, func(t *testing.T, _ nft.Mode, flag string) {
		n := newNode(t)
		d := n.start(flag)
		d.began(wants(t, "", flag))
		before := n.kernelText()
		for i, signals := range [][]unix.Signal{
			{unix.SIGTERM},
			{unix.SIGINT},
			{unix.SIGSTOP, unix.SIGTERM, unix.SIGINT, unix.SIGCONT},
			{unix.SIGKILL},
			{unix.SIGTERM},
		} {
			if i > 0 {
				d = n.start(flag)
				d.await("starting")
				d.await("rules_in_place")
			}
			for _, s := range signals {
				d.signal(s)
			}
			<-d.Done()
			err := d.Wait()
			var ended *exec.ExitError
			killed := errors.As(err, &ended) && ended.ExitCode() < 0 && (i == 2 || i == 3)
			if err != nil && !killed || d.Stderr() != "" {
				t.Errorf("%v: ended with %v: %s", signals, err, d.Stderr())
			}
			if diff := cmp.Diff(before, n.kernelText()); diff != "" {
				t.Errorf("%v: the kernel (-before +after):\n%s", signals, diff)
			}
			d.silent()
		}
		n.holds(wants(t, "", flag))
	})
}

func TestSocketOfAnAgentKeepsCleanupFromItsRules(t *testing.T) {
	t.Parallel()
	n, elsewhere := newNode(t), newNode(t)
	n.start()
	if got := elsewhere.run("cleanup", "--probe-socket", n.socket); got.code != exitFailed || got.stdout != "" {
		t.Errorf("%+v", got)
	}
}

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

// unwrap joins wrapped lines.
func unwrap(text string) string { return strings.Join(strings.Fields(text), " ") }

// A policy is enforced since it was applied, whatever was restored after that.
func TestStatusSaysSinceWhenAPolicyIsEnforced(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	d := n.start()
	d.await("config_applied")
	policy := func() running.Policy {
		r, _ := n.status()
		return *r.Agent.Policy
	}
	started := policy()
	n.swap(exempting("10.2.0.0/16"))
	d.await("config_applied")
	changed := policy()
	tamper(n, nft.ModeNFTables)
	d.await("rules_restored")
	restored := policy()
	if !changed.Since.After(started.Since) || !restored.Since.Equal(changed.Since) ||
		!restored.Changed.After(changed.Changed) {
		t.Errorf("%+v, then %+v, then %+v", started, changed, restored)
	}
}
