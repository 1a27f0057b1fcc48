package main

import (
	"context"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/agent"
)

// withoutLooking copies the repository, without the packages that look at the node and without
// the files of this one that import them: the wiring and the commands. The tests of this
// package go as well, because they are about the whole program.
func withoutLooking(t *testing.T) (dir string) {
	t.Helper()
	const here = "cmd/nft-masq-agent"
	gone := map[string]bool{".git": true, "bin": true, "dist": true}
	for _, p := range looksAtTheNode() {
		gone[p] = true
	}
	dir = t.TempDir()
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(root, path)
		switch {
		case err != nil:
			return err
		case gone[name] && d.IsDir():
			return fs.SkipDir
		case d.IsDir():
			return os.MkdirAll(filepath.Join(dir, name), 0o755)
		case !d.Type().IsRegular():
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if filepath.Dir(name) == here && (strings.HasSuffix(name, "_test.go") || looks(string(text))) {
			return nil
		}
		return os.WriteFile(filepath.Join(dir, name), text, 0o644)
	})
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// looks reports whether a file of Go imports what looks at the node.
func looks(text string) bool {
	for _, p := range looksAtTheNode() {
		if strings.Contains(text, "\t\""+module+"/"+p+"\"\n") {
			return true
		}
	}
	return false
}

// What is left without the packages that look at the node is an agent, and with LONG=1 its
// tests are run: they take minutes.
func TestAgentIsWholeWithoutWhatLooksAtTheNode(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	dir := withoutLooking(t)
	program := filepath.Join(dir, "program")
	commands := []string{"build -tags agentonly -o program ./cmd/nft-masq-agent"}
	if nfttest.Long() {
		// The tests of the other packages word rules as package rule does.
		commands = append(commands, "test -short ./cmd/nft-masq-agent/internal/... ./config ./watch "+
			"./nft ./nft/iprange ./nft/nfnetlink ./nft/node")
	}
	for _, args := range commands {
		// Without -trimpath, the cache has nothing for this directory.
		command, rest, _ := strings.Cut(args, " ")
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
		cmd := exec.CommandContext(ctx, "go", append([]string{command, "-trimpath"}, strings.Fields(rest)...)...)
		cmd.Dir = dir
		out, err := cmd.CombinedOutput()
		cancel()
		if err != nil {
			t.Fatalf("go %s: %v\n%s", args, err, out)
		}
	}
	for _, mode := range []string{"nftables", "iptables-nft"} {
		t.Run(mode, func(t *testing.T) { healsAndTakesOver(t, program, mode) })
	}
}

// healsAndTakesOver runs a program next to rules of an older agent, flushes the ruleset, changes
// the config, and removes its rules.
func healsAndTakesOver(t *testing.T, program, mode string) {
	t.Helper()
	n := newNode(t)
	older := loadOlder(t, "ip-masq-agent-custom-chain")
	nfttest.Run(t, n.NS, older.rules, older.xt+"-restore")
	n.write("nonMasqueradeCIDRs: [10.0.0.0/8]\n")
	a := agent.Run(t, n.NS, exec.CommandContext(t.Context(), program, "run", "--mode", mode, "--config", n.path,
		"--probe-socket", n.socket, "--http-address", httpAddress, "--takeover"))
	await := func(event string) {
		t.Helper()
		_, err := a.Await(t.Context(), event)
		n.check(err)
	}
	await("config_applied")
	if rules := nfttest.ListRuleset(t, n.NS); strings.Contains(rules, "CUSTOM") {
		t.Errorf("it does not take over:\n%s", rules)
	}
	nfttest.NFT(t, n.NS, "", "flush", "ruleset")
	await("rules_restored")
	n.write("nonMasqueradeCIDRs: [10.0.0.0/8, 192.0.2.0/24]\n")
	await("config_applied")
	if rules := nfttest.ListRuleset(t, n.NS); !strings.Contains(rules, "192.0.2.0/24") {
		t.Errorf("the change is not in the kernel:\n%s", rules)
	}
	nfttest.Run(t, n.NS, "", program, "ready", "--probe-socket", n.socket)
	if code, text := n.get("/healthz"); code != http.StatusOK {
		t.Errorf("health is %d: %s", code, text)
	}
	counter := `nft_masq_agent_connections_total{family="ipv4",verdict="masqueraded"}`
	if n.metric(counter) != "0" || n.metric("nft_masq_agent_ready") != "1" {
		_, text := n.get("/metrics")
		t.Errorf("metrics are\n%s", text)
	}
	n.check(a.Stop())
	nfttest.Run(t, n.NS, "", program, "cleanup", "--probe-socket", n.socket)
	if rules := nfttest.ListRuleset(t, n.NS); strings.Contains(rules, "192.0.2.0/24") {
		t.Errorf("cleanup leaves\n%s", rules)
	}
}
