package main

import (
	"context"
	"encoding/json"
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

// withoutLooking writes an overlay of go build: the repository without the packages that look at
// the node and without the files of this one that import them: the wiring and the commands. The
// tests of this package go as well, because they are about the whole program.
func withoutLooking(t *testing.T) (file string) {
	t.Helper()
	gone := map[string]string{}
	for _, p := range append(looksAtTheNode(), "cmd/nft-masq-agent") {
		dir := nfttest.Must(filepath.Abs(filepath.Join(root, p)))
		for _, path := range nfttest.Must(filepath.Glob(filepath.Join(dir, "*.go"))) {
			text := nfttest.Must(os.ReadFile(path))
			if p != "cmd/nft-masq-agent" || strings.HasSuffix(path, "_test.go") || looks(string(text)) {
				gone[path] = ""
			}
		}
	}
	file = filepath.Join(t.TempDir(), "overlay.json")
	nfttest.Check(os.WriteFile(file, nfttest.Must(json.Marshal(map[string]any{"Replace": gone})), 0o644))
	return file
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
	overlay, program := withoutLooking(t), filepath.Join(t.TempDir(), "program")
	const tags = "agentonly,nethttpomithttp2"
	commands := []string{"build -buildvcs=false -ldflags=-s -o " + program + " ./cmd/nft-masq-agent"}
	if nfttest.Long() {
		// The tests of the other packages word rules as package rule does.
		commands = append(commands, "test -short ./cmd/nft-masq-agent/internal/... ./config ./watch "+
			"./nft ./nft/nfnetlink ./nft/node")
	}
	for _, args := range commands {
		command, rest, _ := strings.Cut(args, " ")
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
		cmd := exec.CommandContext(ctx, "go",
			append([]string{command, "-overlay", overlay, "-tags", tags}, strings.Fields(rest)...)...)
		cmd.Dir = root
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
