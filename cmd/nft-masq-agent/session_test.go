package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
	"nft-masq-agent/cmd/nft-masq-agent/internal/running"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/nfttest"
)

// follow is what a command line makes of an agent's report.
func follow(t *testing.T, r running.Report, args string) *session {
	t.Helper()
	fs := flag.NewFlagSet("diff", flag.ContinueOnError)
	s := &session{nodeFlags: addNodeFlags(fs), agent: &r}
	if _, err := cli.Parse(fs, strings.Fields(args)); err != nil {
		t.Fatal(err)
	}
	s.follow()
	return s
}

// The rules that an agent has compiled are those of its own flags, file and addresses, not of the command line.
func TestCommandsUseTheFlagsOfTheAgentExceptThoseThatAreGiven(t *testing.T) {
	const snat = "snatAddresses: [192.0.2.7, 192.0.2.8]\n"
	agent := running.Report{
		PID: 7, Args: []string{"--enable-ipv6", "--to-ports", "20000-29999"}, ConfigPath: "/its/config", Compiled: true,
		Files:     []config.Source{{Name: "/its/config", Data: []byte(snat)}},
		Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.8")},
	}
	compiled := wants(t, snat, agent.Args...)
	compiled = compiled.WithAddresses(agent.Addresses)
	const with = "with the flags of the running agent (pid 7: --enable-ipv6 --to-ports 20000-29999), unless others are " +
		"given"
	for args, want := range map[string]string{
		"":                             "",
		"-v 0":                         "",
		"-v 1":                         with,
		"-v":                           with,
		"--enable-ipv6":                "",
		"--config x --to-ports 99-100": "",
	} {
		s := follow(t, agent, args)
		if s.whose != want || (s.ConfigPath == "x") != strings.Contains(args, " x") {
			t.Errorf("%q: %q, config %s; want %q", args, s.whose, s.ConfigPath, want)
		}
		if got := s.enforced(); got == nil || !got.Same(compiled) {
			t.Errorf("%q: the agent has compiled %v", args, got)
		}
	}
	found, rejected, later := agent, agent, agent
	found.Compiled = false
	rejected.Files = []config.Source{{Name: "/its/config", Data: []byte("nonMasqueradeCIDRs: 5")}}
	later.Args = []string{"--of-a-later-version"}
	for _, r := range []running.Report{found, rejected, later} {
		if got := follow(t, r, "").enforced(); got != nil {
			t.Errorf("%+v has compiled %v", r, got)
		}
	}
	const want = "without the flags of the running agent (pid 7: --of-a-later-version): flag provided but not defined: " +
		"-of-a-later-version"
	if got := follow(t, later, "").whose; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// For three seconds, a config that is missing means nothing: commands answer about the one that the agent has.
func TestCommandsAnswerAboutTheConfigThatTheAgentHasUntilItVanished(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config")
	const content = "nonMasqueradeCIDRs: [10.1.0.0/16]\n"
	has := running.Report{ConfigPath: path, Compiled: true, Files: []config.Source{{Name: path, Data: []byte(content)}}}
	vanished := has
	vanished.Vanished = "the config vanished"
	never := has
	never.Files = nil
	for _, tt := range []struct {
		agent running.Report
		args  string
		empty bool
		want  string
	}{
		{agent: has, want: content},
		{agent: has, empty: true, want: content},
		{agent: has, args: "--config " + path},
		{agent: vanished},
		{agent: vanished, empty: true},
		{agent: never},
	} {
		_ = os.Remove(path)
		if tt.empty {
			nfttest.NoError(t, os.WriteFile(path, nil, 0o600))
		}
		s := follow(t, tt.agent, tt.args)
		if err := s.load(); err != nil || s.rejected != nil {
			t.Fatal(err, s.rejected)
		}
		if want := wants(t, tt.want); s.Ruleset.Hash() != want.Hash() {
			t.Errorf("%+v: %s, want %s of %q", tt, s.Ruleset.Hash(), want.Hash(), tt.want)
		}
	}
}

func TestAddressesAreNetworksOfOne(t *testing.T) {
	for text, want := range map[string]string{
		"10.1.2.3": "10.1.2.3/32", "10.1.2.3/8": "10.0.0.0/8", "2001:db8::1": "2001:db8::1/128",
		"2001:db8::1/32": "2001:db8::/32",
	} {
		if got, err := parsePrefix(text); err != nil || got.String() != want {
			t.Errorf("%s is %v, want %s; %v", text, got, want, err)
		}
	}
}

func TestDiffReadsOneOfItsFilesFromStandardInput(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config")
	nfttest.NoError(t, os.WriteFile(path, []byte("nonMasqueradeCIDRs: [10.0.0.0/8]\n"), 0o644))
	for operands, want := range map[[2]string]string{
		{"-", path}: "nonMasqueradeCIDRs: added 10.0.0.0/8\n", {path, "-"}: "nonMasqueradeCIDRs: added 10.0.0.0/9\n",
	} {
		var stdout, stderr strings.Builder
		e := testEnvironment(t, &stdout, &stderr)
		e.stdin = strings.NewReader("nonMasqueradeCIDRs: [10.0.0.0/9]\n")
		code := dispatch(t.Context(), commands(), append([]string{"diff"}, operands[:]...), e)
		if code != exitFailed || !strings.HasPrefix(stdout.String(), want) {
			t.Errorf("%q: exit code %d: %s%s; want %s", operands, code, &stdout, &stderr, want)
		}
	}
}

// A canceler cancels a context some time after it is written to.
type canceler context.CancelFunc

func (c canceler) Write(b []byte) (int, error) {
	go func() {
		for range 20_000 {
			runtime.Gosched()
		}
		c()
	}()
	return len(b), nil
}

func TestCleanupAnswersAndWaitsForTheSignal(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.swap("")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var stderr strings.Builder
	e := thisProcess(n.socket, nil, &stderr)
	e.stdout = canceler(cancel)
	n.check(n.Do(func() error {
		args := []string{"cleanup", "--wait", "--config", n.path}
		if code := dispatch(ctx, commands(), args, e); code != exitDone || ctx.Err() == nil {
			t.Errorf("exit code %d, %v: %s", code, ctx.Err(), &stderr)
		}
		return nil
	}))
}

func TestCleanupRemovesWhatItIsAskedFor(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "iptables-nft")
	n := newNode(t)
	n.swap("")
	const ours = "table inet nft-masq-agent"
	const older = "another agent's chain IP-MASQ in table ip nat: 0 rules, to which no other rule leads"
	for _, tt := range []struct {
		flag    string
		removed []string
	}{
		{"--legacy", []string{older, ours}},
		{"--legacy-only", []string{older}},
		{"--legacy=false", []string{ours}},
	} {
		_, err := n.kernel().Apply(t.Context(), wants(t, ""), nft.Contents)
		n.check(err)
		nfttest.Run(t, n.NS, "", "iptables-nft", "-t", "nat", "-N", "IP-MASQ")
		for _, dryRun := range []bool{true, false} {
			var answered cleanupAnswer
			got := n.here(&answered, "cleanup", tt.flag, fmt.Sprintf("--dry-run=%t", dryRun))
			if got.code != exitDone || answered.DryRun != dryRun || !slices.Equal(answered.Removed, tt.removed) {
				t.Errorf("%s: %+v", tt.flag, got)
			}
		}
		nfttest.NFT(t, n.NS, "", "flush", "ruleset")
	}
}

// Rules in legacy ip_tables stay, and are named with the command that shows them.
func TestCleanupNamesWhatItCannotRemove(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "iptables-legacy", "iptables-legacy-restore", "iptables-legacy-save")
	n := newNode(t)
	n.swap("")
	loadOlder(t, "ip-masq-agent-v2.11"+inLegacy).install(n)
	const want = "legacy ip_tables (table ip nat) has rules of an iptables-based agent, which this program does not " +
		"remove: iptables-legacy -t nat -S"
	for flag, named := range map[string]bool{"--legacy": true, "--legacy-only": true, "--legacy=false": false} {
		got := n.run("cleanup", flag)
		if got.code != exitDone || strings.Contains(got.stderr+got.stdout, want) != named {
			t.Errorf("%s: %+v, want %t: %q", flag, got, named, want)
		}
	}
}

// What cannot be read of other agents does not hide what was removed.
func TestCleanupSaysWhatItRemovedIfLegacyTablesAreUnreadable(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.swap("")
	_, err := n.kernel().Apply(t.Context(), wants(t, ""), nft.Contents)
	n.check(err)
	proc := t.TempDir()
	n.check(os.MkdirAll(filepath.Join(proc, "thread-self/net/ip_tables_names"), 0o700)) // it is no file
	got := n.runWith(proc, "cleanup", "--legacy")
	if got.code != exitDone || !strings.Contains(got.stdout, "nft-masq-agent") ||
		!strings.Contains(got.stdout+got.stderr, "ip_tables_names") {
		t.Errorf("%+v", got)
	}
}

// Next to an agent without a file, diff says that it is about the defaults.
func TestDiffWithoutAFileIsAboutTheDefaults(t *testing.T) {
	t.Parallel()
	n := &faultyNode{trafficNode: newTrafficNode(t)}
	defer n.standIn(nil)()
	var d answer.Diff
	got := n.here(&d, "diff")
	want := "There is no config at " + n.path + ": the built-in defaults apply."
	if got.code != exitDone || !d.Before.Accepted || len(d.Notes) == 0 || d.Notes[0].Msg != want {
		t.Errorf("%+v, want %q", got, want)
	}
}

// An agent that cannot have the lock, because a process of another user has it, takes the place of a second one.
func TestAnAgentWithoutTheLockIsNotASecondOneToItself(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.check(n.Do(func() error {
		place, err := running.Announce()
		if err != nil {
			return err
		}
		defer place.Close()
		r := new(session).runningAgent()
		if r == nil || r.PID != os.Getpid() || r.SecondAgent != 0 {
			t.Errorf("%+v", r)
		}
		return nil
	}))
}

// What is stale by then is not known without the rules.
func TestAFlushSaysWhyItDidNotDeleteConnections(t *testing.T) {
	var stdout, stderr strings.Builder
	fs := flag.NewFlagSet("connections", flag.ContinueOnError)
	f := &connectionsFlags{nodeFlags: addNodeFlags(fs), stale: true, yes: true}
	e := testEnvironment(t, &stdout, &stderr)
	s, err := f.open(e)
	nfttest.NoError(t, err)
	var c conntrack.Entry
	c.Original.Protocol = unix.IPPROTO_TCP
	err = f.delete(t.Context(), &answer.Connections{}, s, []conntrack.Entry{c, {}})
	if !errors.Is(err, errUnreadable) {
		t.Error(err)
	}
}

// On a terminal, only a yes deletes connections, after they are listed there.
func TestAFlushAsksOnATerminal(t *testing.T) {
	listed := &answer.Connections{
		Connections: []answer.Connection{{Protocol: "tcp", Source: "10.244.1.2:4000", Destination: "10.9.0.9:80"}}, Total: 1,
	}
	for _, tt := range []struct {
		reply, want string
		terminal    bool
	}{
		{"y\n", "", true},
		{"YES\n", "", true},
		{"\n", "nothing was deleted", true},
		{"n\n", "nothing was deleted", true},
		{"", "nothing was deleted", true},
		{strings.Repeat("y", 1000) + "\n", "nothing was deleted", true},
		{"y\n", "give --yes to delete 1 connection: the next packet of each begins a new one with the right source, and " +
			"destinations reset those of TCP", false},
	} {
		var stdout, stderr strings.Builder
		e := testEnvironment(t, &stdout, &stderr)
		e.stdin = strings.NewReader(tt.reply)
		e.asks = tt.terminal
		got := ""
		if err := (&connectionsFlags{}).confirm(listed, e); err != nil {
			got = err.Error()
		}
		shown := strings.Contains(stderr.String(), "10.244.1.2:4000") && strings.HasSuffix(stderr.String(), "[y/N] ")
		if got != tt.want || shown != tt.terminal || stdout.String() != "" {
			t.Errorf("%q: %q, want %q; asked %q", tt.reply, got, tt.want, &stderr)
		}
	}
}
