package main

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfttest"
)

// diff runs the command on the node.
func (n *testNode) diff(args ...string) (d answer.Diff, code int) {
	n.t.Helper()
	got := n.run(append([]string{"diff", "-o", "json"}, args...)...)
	decoder := json.NewDecoder(strings.NewReader(got.stdout))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&d); err != nil || got.stderr != "" {
		n.t.Fatalf("diff: %+v: %v", got, err)
	}
	return d, got.code
}

func TestDiffComparesTheKernelWithAFile(t *testing.T) {
	t.Parallel()
	n := newTrafficNode(t)
	nfttest.NFT(t, n.top.Node, service, "-f", "-")
	n.swap("nonMasqueradeCIDRs: [10.0.0.0/8]")
	d := n.start("--enable-ipv6", "--resync-interval=3600")
	d.began(wants(t, "nonMasqueradeCIDRs: [10.0.0.0/8]", "--enable-ipv6"))
	for i, dst := range []string{"10.9.0.9", "10.9.0.9", "203.0.113.9", "198.18.0.11", "192.168.9.9", "[fd00:9::9]"} {
		n.open(nfttest.UDP, fmt.Sprintf("%s:%d", dst, 5000+i))
	}
	n.open(nfttest.TCP, "10.9.0.9:6000")
	n.open(nfttest.SCTP, "[2001:db8:1::1]:6001")

	proposed := testNode{NS: n.NS, t: t, path: n.path + "-proposed"}
	proposed.write("nonMasqueradeCIDRs: [10.0.0.0/8]\nenableIPv6: true\n")
	if d, code := n.diff("--config", proposed.path); code != exitDone || d.Changed() {
		t.Errorf("the same: exit code %d, %+v", code, d)
	}
	proposed.write("nonMasqueradeCIDRs: [10.128.0.0/9, 192.168.0.0/16, 'fd00::/8']\nenableIPv6: true\n")
	want := map[string]answer.Change{
		"10.0.0.0/9":     {Before: nft.Exempt, After: nft.Masqueraded, Open: &answer.Open{Connections: 4, Pods: 1}},
		"192.168.0.0/16": {Before: nft.Masqueraded, After: nft.Exempt, Open: &answer.Open{Connections: 1, Pods: 1}},
		"fd00::/8":       {Before: nft.Masqueraded, After: nft.Exempt, Open: &answer.Open{Connections: 1, Pods: 1}},
	}
	changes, code := n.diff("--config", proposed.path)
	if code != exitFailed || len(changes.Changes) != len(want) {
		t.Errorf("exit code %d, %+v", code, changes)
	}
	for _, c := range changes.Changes {
		w := want[strings.Trim(fmt.Sprint(c.Destinations), "[]")]
		if c.Before != w.Before || c.After != w.After || fmt.Sprint(c.Open) != fmt.Sprint(w.Open) {
			t.Errorf("%+v, want %+v", c, w)
		}
	}
	got := n.run("diff", "--config", proposed.path)
	if !strings.Contains(got.stdout, "10.0.0.0/9: exempt → masqueraded; 4 open connections of 1 pod\n") {
		t.Errorf("%+v", got)
	}

	// An entry does not contain its interfaces, and what the node sends is not counted.
	proposed.write("nonMasqueradeCIDRs: [10.0.0.0/8]\nenableIPv6: true\nmasqueradeHost: " +
		"false\nmasqueradeOutInterfaces: [wg*]\n")
	const v4 = "any IPv4 address except 10.0.0.0/8, 169.254.0.0/16"
	for _, line := range []string{
		"sent by this node itself: " + v4 + ": masqueraded → exempt\n",
		"received on any interface: leaving by any interface except wg*: " + v4 +
			": masqueraded → exempt; at most 2 open connections of 1 pod\n",
	} {
		if got := n.run("diff", "--config", proposed.path); !strings.Contains(got.stdout, line) {
			t.Errorf("no %q in %+v", line, got)
		}
	}
}

// Without the file that led to them, the policy of the kernel's rules is unknown.
func TestDiffNamesTheHashOfAnotherPolicyInTheKernel(t *testing.T) {
	t.Parallel()
	n := newTrafficNode(t)
	held := n.enforce("nonMasqueradeCIDRs: [10.1.0.0/16]")
	if got, code := n.diff("--config", n.path); code != exitDone || got.Changed() {
		t.Errorf("the same policy: exit code %d, %+v", code, got)
	}
	n.swap("nonMasqueradeCIDRs: [10.2.0.0/16]")
	want := fmt.Sprintf("The kernel enforces %s, neither %s of the config (%s) nor the policy of a running agent: "+
		"name two files, OLD and NEW", held.Hash(), wants(t, "nonMasqueradeCIDRs: [10.2.0.0/16]").Hash(), n.path)
	for _, args := range [][]string{{"diff", "--config", n.path}, {"diff", n.path}} {
		if got := n.run(args...); got.code != exitUsage || got.stdout != "" || !strings.Contains(unwrap(got.stderr), want) {
			t.Errorf("want %q in %+v", want, got)
		}
	}
}

func TestDiffUsesTheFlagsOfTheRunningAgent(t *testing.T) {
	nfttest.SkipIfShort(t)
	t.Parallel()
	n := newNode(t)
	n.swap("nonMasqueradeCIDRs: [10.0.0.0/8]\n")
	d := n.start("--enable-ipv6", "--to-ports=2000-2999", "--resync-interval=3600")
	d.began(wants(t, "nonMasqueradeCIDRs: [10.0.0.0/8]\n", "--enable-ipv6", "--to-ports=2000-2999"))
	proposed := n.path + "-proposed"
	other := testNode{NS: n.NS, t: t, path: proposed}
	other.write("nonMasqueradeCIDRs: [10.0.0.0/8]\n")
	got, code := n.diff("--config", proposed)
	if code != exitDone || got.Changed() || !strings.Contains(got.Notes.Error(), "with the flags of the running agent") {
		t.Errorf("the same file: exit code %d, %+v", code, got)
	}
	if got, code := n.diff(); code != exitDone || got.Changed() {
		t.Errorf("the agent's own file: exit code %d, %+v", code, got)
	}
	other.write("nonMasqueradeCIDRs: [10.0.0.0/9]\n")
	got, code = n.diff("--config", proposed)
	if code != exitFailed || len(got.Changes) != 1 || fmt.Sprint(got.Changes[0].Destinations) != "[10.128.0.0/9]" ||
		len(got.Other) > 0 {
		t.Errorf("another file: exit code %d, %+v", code, got)
	}
	got, code = n.diff("--config", proposed, "--enable-ipv6=false")
	if code != exitFailed || len(got.Notes) == 0 || len(got.Changes) < 2 || len(got.Other) != 0 {
		t.Errorf("with another flag: exit code %d, %+v", code, got)
	}
	if got := n.run("diff", "--config", n.path+"-nowhere"); got.code != exitUsage ||
		!strings.Contains(got.stderr, "does not exist") {
		t.Errorf("no file: %+v", got)
	}
}

func TestDiffWithoutRulesReportsIt(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	d, code := n.diff()
	if code != exitFailed || d.Before.Hash != "" || len(d.Changes) != 1 || d.Changes[0].After != nft.Masqueraded ||
		len(d.Notes) != 2 {
		t.Errorf("exit code %d, %+v", code, d)
	}
}

// The agent reports the content that it accepted last, whatever the file is now.
func TestCommandsKnowThePolicyInForceNextToABadFile(t *testing.T) {
	t.Parallel()
	inEachMode(t, func(t *testing.T, _ nft.Mode, flag string) {
		n := newNode(t)
		n.swap(exempting("10.0.0.0/8"))
		d := n.start(flag)
		held := wants(t, exempting("10.0.0.0/8"), flag)
		d.began(held)
		n.swap(badText)
		d.await("config_rejected")
		proposed := testNode{NS: n.NS, t: t, path: n.path + "-proposed"}
		proposed.write(exempting("10.0.0.0/9"))
		got, code := n.diff("--config", proposed.path)
		if code != exitFailed || got.Before.Hash != held.Hash() || len(got.Changes) != 1 || len(got.Other) > 0 {
			t.Errorf("diff: exit code %d, %+v", code, got)
		}
		if r, _ := n.status(); r.Stale == nil || problems(r, "stale-unknown") != nil {
			t.Errorf("status: %+v", r)
		}
		if got := n.run("explain", "10.1.2.3", "--from", "10.244.1.2"); !strings.Contains(got.stdout, n.path+":3:5\n") ||
			!strings.Contains(got.stdout, "kernel "+held.Hash()) {
			t.Errorf("explain: %+v", got)
		}
		d.stop() // now the file alone is left
		if r, _ := n.status("--config", n.path, flag); r.Stale != nil || len(problems(r, "stale-unknown")) != 1 {
			t.Errorf("status without the agent: %+v", r)
		}
	})
}
