package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/agent"
)

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

func TestCommandLineOfAnOlderAgentIsAccepted(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	args := []string{
		"--config=" + n.path, "--masq-chain=IP-MASQ", "--nomasq-all-reserved-ranges", "--enable-ipv6=true",
		"--random-fully=false", "--to-ports=1024-29999,32768-65535", "--v=2", "--logtostderr=false", "--log_file=/var/log/x",
	}
	n.swap("forceMasqueradeCIDRs: [10.1.0.0/16]\n")
	d := n.startCommand(n.command(nil, args...))
	d.await("log_file_ignored")
	d.began(wants(t, "forceMasqueradeCIDRs: [10.1.0.0/16]\n", args...))
	d.silent()
	listing := nfttest.NFT(t, n.NS, "", "list", "table", "inet", nft.TableName)
	if !strings.Contains(listing, "10.1.0.0/16") || !strings.Contains(listing, "fe80::/10") {
		t.Errorf("listing:\n%s", listing)
	}
	nfttest.NFT(t, n.NS, listing, "-c", "-f", "-") // it loads again
}

// A fileStep is a change of the config, and the agent's reaction.
type fileStep struct {
	name string
	do   func(*testNode)
	logs string // the event
	want string // the config that applies then
	err  string // the error if the config is rejected; PATH stands for its path
}

// fileSteps are run in sequence.
func fileSteps() []fileStep {
	const typo = "nonMasqueradeCIDRs:\n  - 10.0.0.0/8\n  - 10.0.0.1/8\n"
	return []fileStep{
		{
			"created by a rename", func(n *testNode) { n.swap(exempting("10.1.0.0/16")) }, "config_applied",
			exempting("10.1.0.0/16"), "",
		},
		{
			"swapped", func(n *testNode) { n.swap(exempting("10.2.0.0/16", "fd00::/8")) }, "config_warning",
			exempting("10.2.0.0/16"), "",
		},
		{
			"written in place", func(n *testNode) { n.overwrite(exempting("10.3.0.0/16")) }, "config_applied",
			exempting("10.3.0.0/16"), "",
		},
		{
			"broken", func(n *testNode) { n.swap(typo) }, "config_rejected", exempting("10.3.0.0/16"),
			`PATH:3:5: "10.0.0.1/8" has host bits set: write "10.0.0.0/8"`,
		},
		{
			"broken otherwise", func(n *testNode) { n.swap("resyncInterval: 60\nmasqLinklLocal: true\n") },
			"config_rejected", exempting("10.3.0.0/16"), "PATH:1:17: ",
		},
		{"repaired", func(n *testNode) { n.swap(exempting("10.4.0.0/16")) }, "config_applied", exempting("10.4.0.0/16"), ""},
		{"deleted", func(n *testNode) { n.check(os.Remove(n.path)) }, "config_applied", "", ""},
		{
			"written anew", func(n *testNode) { n.write(exempting("10.5.0.0/16")) }, "config_applied", exempting("10.5.0.0/16"),
			"",
		},
		{"its directory gone", func(n *testNode) { n.check(os.RemoveAll(filepath.Dir(n.path))) }, "config_applied", "", ""},
		{
			"its directory back", func(n *testNode) {
				n.check(os.MkdirAll(filepath.Dir(n.path), 0o755))
				n.swap(exempting("10.6.0.0/16"))
			}, "config_applied", exempting("10.6.0.0/16"), "",
		},
		{
			"its directory replaced by another", func(n *testNode) {
				dir := filepath.Dir(n.path)
				n.check(os.Mkdir(dir+".new", 0o755))
				n.check(os.WriteFile(filepath.Join(dir+".new", "ip-masq-agent"), []byte(exempting("10.7.0.0/16")), 0o644))
				n.check(unix.Renameat2(unix.AT_FDCWD, dir+".new", unix.AT_FDCWD, dir, unix.RENAME_EXCHANGE))
			}, "config_applied", exempting("10.7.0.0/16"), "",
		},
		{
			"a directory of two files", func(n *testNode) {
				n.check(os.Mkdir(n.path+".d", 0o755))
				for name, cidr := range map[string]string{
					"a.yaml": "10.8.0.0/16", "ip-masq-b": "10.9.0.0/16",
					".hidden": "10.10.0.0/16", "ip-masq-b.bak": "10.11.0.0/16",
				} {
					n.check(os.WriteFile(filepath.Join(n.path+".d", name), []byte(exempting(cidr)), 0o644))
				}
				n.check(unix.Renameat2(unix.AT_FDCWD, n.path+".d", unix.AT_FDCWD, n.path, unix.RENAME_EXCHANGE))
			}, "config_applied", exempting("10.8.0.0/16", "10.9.0.0/16"), "",
		},
		{
			"one of two files broken", func(n *testNode) {
				n.check(os.WriteFile(filepath.Join(n.path, "ip-masq-b"), []byte("nonMasqueradeCIDRs: 10.0.0.0/8\n"), 0o644))
			}, "config_rejected", exempting("10.8.0.0/16", "10.9.0.0/16"), "PATH/ip-masq-b:1:21: ",
		},
		{
			"the broken one of two files gone", func(n *testNode) { n.check(os.Remove(filepath.Join(n.path, "ip-masq-b"))) },
			"config_applied", exempting("10.8.0.0/16"), "",
		},
		{
			"a file again", func(n *testNode) {
				n.check(os.WriteFile(n.path+".f", []byte("{\"nonMasqueradeCIDRs\": [\"10.12.0.0/16\"], \"masqLinkLocal\": true}"),
					0o644))
				n.check(unix.Renameat2(unix.AT_FDCWD, n.path+".f", unix.AT_FDCWD, n.path, unix.RENAME_EXCHANGE))
			}, "config_applied", exempting("10.12.0.0/16"), "",
		},
		{"empty", func(n *testNode) { n.write("") }, "config_applied", "", ""},
	}
}

func TestFileIsFollowed(t *testing.T) {
	t.Parallel()
	inEachMode(t, func(t *testing.T, mode nft.Mode, flag string) {
		n := newNode(t)
		d := n.start(flag, "--http-address", httpAddress)
		line := d.await("starting")
		of := map[string]any{"nftables": "inet nft-masq-agent", "iptables-nft": "IP-MASQ-AGENT"}[string(mode)]
		if line["path"] != n.path || line["mode"] != string(mode) || line["version"] != "devel" ||
			line["table"] != of && line["chain"] != of ||
			line.Message() != "starting without a config file: the built-in defaults apply" {
			t.Errorf("%v", line)
		}
		d.answers()
		if line = d.applied("start", wants(t, "", flag)); line["cidrs"] != 4.0 { // three of RFC 1918, and link-local
			t.Errorf("%v", line)
		}
		for _, s := range fileSteps() {
			want := wants(t, s.want, flag)
			before := n.hasConfig()
			s.do(n)
			switch now := n.hasConfig(); {
			case now && !before:
				d.await("config_file_appeared")
			case before && !now:
				d.await("config_file_vanished")
			}
			if s.name == "a directory of two files" || s.name == "empty" {
				d.await("config_warning") // Azure's agent reads only one of them; and that it is empty
			}
			line := d.await(s.logs)
			if s.logs == "config_warning" {
				line = d.await("config_applied")
			}
			if s.err == "" {
				if line["reason"] != "config" || line["hash"] != want.Hash() {
					t.Errorf("%s: %v, want %s", s.name, line, want.Hash())
				}
			} else {
				d.rejected(line, s, want)
			}
			n.holds(want)
			if t.Failed() {
				t.Fatal(s.name)
			}
		}
		d.silent()
		d.stop()
	})
}

func (n *testNode) hasConfig() bool {
	_, err := os.Stat(n.path)
	return err == nil
}

// rejected checks that an invalid config is reported, and that the previous rules
// are still enforced.
func (d *daemon) rejected(line agent.Line, s fileStep, want nft.Ruleset) {
	d.t.Helper()
	problem := strings.ReplaceAll(s.err, "PATH", d.path)
	if line["level"] != "error" || line.Message() != "config rejected; last good config ("+want.Hash()+
		") stays enforced" || !strings.HasPrefix(line.Text("error"), problem) {
		d.t.Errorf("%s: %v, want %q", s.name, line, problem)
	}
	code, body := d.get("/readyz")
	if code != 503 || !strings.HasPrefix(body, "config rejected: "+problem) ||
		!strings.HasSuffix(body, "\nlast good config ("+want.Hash()+") stays enforced\n") {
		d.t.Errorf("%s: readyz returned %d %s", s.name, code, body)
	}
	nfttest.NFT(d.t, d.NS, "", "flush", "ruleset")
	d.await("rules_restored")
	d.holds(want)
}

func TestEquivalentEditIsSilentAndWritesNothing(t *testing.T) {
	t.Parallel()
	inEachMode(t, func(t *testing.T, mode nft.Mode, flag string) {
		n := newNode(t)
		text := exempting("10.1.0.0/16", "10.2.0.0/16")
		edits := []string{"# a comment\n" + text, "resyncInterval: 1h\n" + text}
		if mode == nft.ModeNFTables {
			// The other mode has the CIDRs in file order.
			edits = append(edits, exempting("10.2.0.0/16", "10.1.0.0/16"),
				exempting("10.1.0.0/16", "10.2.0.0/16", "10.1.0.0/16", "10.2.3.0/24"))
		}
		n.swap(text)
		d := n.start(flag, "--http-address", httpAddress)
		want := wants(t, text, flag)
		d.began(want)
		before := n.generation()
		for i, same := range edits {
			n.swap(same)
			d.until("the check of the new file", func() bool { return n.checks("config") == fmt.Sprint(i+1) })
		}
		if after := n.generation(); after != before {
			t.Errorf("generation %d, was %d", after, before)
		}
		n.holds(want)
		d.silent()
	})
}
