package cluster_test

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/agent"
)

// lastRelease is what runs on nodes before an update: the last commit before the daemon
// was written again. It has no tag.
const lastRelease = "9d8742c1566efb8b28727a786cfab64ad31793d5"

// olderProgram builds the last release.
func olderProgram(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	program := filepath.Join(dir, "older")
	cmd := exec.Command("bash", "-c", `set -euo pipefail
git -C ../.. archive "$1" | tar -x -C "$2"
cd "$2" && CGO_ENABLED=0 go build -trimpath -buildvcs=false -ldflags='-s -w' -o "$3" ./cmd/nft-masq-agent`,
		"build", lastRelease, dir, program)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("the last release, of which a shallow clone has no commit: %v\n%s", err, out)
	}
	return program
}

// An updater runs agents of two versions on a node.
type updater struct {
	t    *testing.T
	top  *nfttest.Topology
	dir  string
	args []string
	port int // of the last agent
}

// start starts an agent, and returns when its rules are in the kernel.
func (u *updater) start(program string) *agent.Agent {
	u.t.Helper()
	u.port++
	address := fmt.Sprintf("127.0.0.1:%d", 9700+u.port)
	args := append([]string{
		"run", "--config", filepath.Join(u.dir, "config"), "--http-address", address,
		"--probe-socket", filepath.Join(u.dir, fmt.Sprint(u.port)),
	}, u.args...)
	a, err := agent.Start(u.top.Node, exec.Command(program, args...))
	must(u.t, err)
	u.t.Cleanup(func() { _ = a.Kill(); _ = a.Wait() })
	client := http.Client{Transport: &http.Transport{
		DialContext: u.top.Node.DialContext, DisableKeepAlives: true,
	}}
	u.await("an agent that is ready", func() bool {
		select {
		case <-a.Done():
			u.t.Fatalf("%v: %v\n%s\n%s", args, a.Wait(), a.Log, a.Stderr())
		default:
		}
		response, err := client.Get("http://" + address + "/readyz")
		if err != nil {
			return false
		}
		_ = response.Body.Close()
		return response.StatusCode == http.StatusOK
	})
	return a
}

func (u *updater) await(what string, so func() bool) {
	u.t.Helper()
	nfttest.Until(u.t, what, so)
}

// rules are all rules of the node, with handles: what is written again has others.
func (u *updater) rules() string {
	u.t.Helper()
	return nfttest.NFT(u.t, u.top.Node, "", "-a", "-s", "list", "ruleset")
}

// configure changes the config as the kubelet does, and waits until the rules are others.
func (u *updater) configure(text string) {
	u.t.Helper()
	before := u.rules()
	file := filepath.Join(u.dir, "config")
	must(u.t, os.WriteFile(file+".new", []byte(text), 0o600))
	must(u.t, os.Rename(file+".new", file))
	u.await("the new policy", func() bool { return u.rules() != before })
}

func (w *world) upgrade(t *testing.T) {
	older, newer := olderProgram(t), agent.Program(t)
	const lists = "nonMasqueradeCIDRs: [10.0.0.0/8, fd00::/8%s]\n"
	for _, tt := range []struct {
		name, config, mode string
		same               bool // the rules of both versions; in mode iptables-nft the older one's lack the hash
	}{
		{"nftables", lists, "nftables", true},
		{
			"nftables, enforceNonMasquerade", lists + "enforceNonMasquerade: true\nmasqueradeSrcCIDRs: " +
				"[10.244.0.0/16, \"fd00:10:244::/56\"]\n", "nftables", false,
		},
		{"iptables-nft", lists, "iptables-nft", false},
	} {
		for name, both := range map[string]bool{"one after the other": false, "next to each other": true} {
			name := tt.name + ", " + name
			t.Run(name, func(t *testing.T) {
				u := &updater{
					t: t, top: nfttest.NewTopology(t), dir: t.TempDir(), args: []string{"--mode", tt.mode, "--enable-ipv6"},
				}
				must(t, os.WriteFile(filepath.Join(u.dir, "config"), fmt.Appendf(nil, tt.config, ""), 0o600))
				running := u.start(older)
				h := nfttest.StartHammer(t, u.top, nfttest.TargetsOfBothKinds()...)
				flows := uint64(50)
				more := func() {
					must(t, h.Wait(context.Background(), flows))
					flows += 50
				}
				more()
				updates := 0
				for range 3 {
					for _, program := range []string{newer, older} {
						before := u.rules()
						old := running
						if !both {
							must(t, old.Stop())
						}
						running = u.start(program)
						more()
						if both {
							must(t, old.Stop())
						}
						more()
						if now := u.rules(); tt.same && now != before {
							t.Errorf("update %d wrote rules: %s\nbefore:\n%s", updates, now, before)
						}
						updates++
						u.configure(fmt.Sprintf(tt.config, fmt.Sprintf(", 172.16.%d.0/24", updates)))
						more()
					}
				}
				tally, err := h.Stop()
				must(t, err)
				if err := tally.Err(); err != nil {
					t.Errorf("%v", err)
				}
				must(t, running.Stop())
				nfttest.Run(t, u.top.Node, "", newer, "cleanup")
				left := nfttest.NFT(t, u.top.Node, "", "list", "ruleset")
				if strings.Contains(left, "masq") || strings.Contains(left, "MASQ") {
					t.Errorf("left:\n%s", left)
				}
				w.rows = append(w.rows, fmt.Sprintf("| %s | %d | %d |", name, updates, tally.Seen()))
			})
		}
	}
}
