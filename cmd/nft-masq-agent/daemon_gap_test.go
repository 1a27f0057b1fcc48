package main

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfttest"
)

// absences are ways in which a config can be missing at a path.
var absences = []struct {
	name string
	make func(path string) error
}{
	{"nothing", func(string) error { return nil }},
	{"empty file", func(path string) error { return os.WriteFile(path, nil, 0o644) }},
	{"blank file", func(path string) error { return os.WriteFile(path, []byte(" \n\n"), 0o644) }},
	{"empty directory", func(path string) error { return os.Mkdir(path, 0o755) }},
	{"directory without a config", func(path string) error {
		return os.MkdirAll(filepath.Join(path, "ip-masq-agent.d", "a.yaml"), 0o755)
	}},
	{"FIFO", func(path string) error { return unix.Mkfifo(path, 0o644) }},
	{"device", func(path string) error { return os.Symlink("/dev/zero", path) }},
	{"dangling link", func(path string) error { return os.Symlink("nowhere", path) }},
	{"link loop", func(path string) error { return os.Symlink(filepath.Base(path), path) }},
	{"link through a file", func(path string) error { return os.Symlink("/proc/version/x", path) }},
}

// It is the same whether --config names the file or its directory, and whether the file or
// the directory is what is gone.
func TestVanishedConfigIsAProblemUntilItIsBack(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	config := exempting("10.1.0.0/16")
	kinds := map[string]func(n *testNode) (flag, gone string){
		"the file":                  func(n *testNode) (string, string) { return n.path, n.path },
		"the file of a directory":   func(n *testNode) (string, string) { return filepath.Dir(n.path), n.path },
		"the directory of the file": func(n *testNode) (string, string) { return n.path, filepath.Dir(n.path) },
		"the directory":             func(n *testNode) (string, string) { return filepath.Dir(n.path), filepath.Dir(n.path) },
	}
	for k, name := range slices.Sorted(maps.Keys(kinds)) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			kind := kinds[name]
			n := newNode(t)
			flag, gone := kind(n)
			flags := []string{"--http-address", httpAddress, "--config", flag}
			restore := func() {
				n.check(os.RemoveAll(gone))
				n.check(os.MkdirAll(filepath.Dir(n.path), 0o755))
				n.swap(config)
			}
			restore()
			good, defaults := wants(t, config, flags...), wants(t, "", flags...)
			d := n.start(flags...)
			d.began(good)
			for i, absence := range absences {
				if i%len(kinds) != k && !nfttest.Long() {
					continue // with one of the others
				}
				if testing.Short() && i >= len(kinds) {
					break
				}
				n.check(os.RemoveAll(gone))
				n.check(absence.make(gone))
				line := d.await("config_file_vanished")
				if line["level"] != "warn" || line["hash"] != defaults.Hash() {
					t.Errorf("%s: %v", absence.name, line)
				}
				d.applied("config", defaults)
				d.signal(unix.SIGHUP)
				status := n.run("status", "-o", "json")
				text := n.run("status")
				code, ready := n.get("/readyz")
				vanished := "the config vanished (no config file at "
				if strings.HasSuffix(absence.name, " file") && name != "the directory of the file" {
					vanished = "the config vanished (" + flag + ": the file is empty)"
				}
				for what, wrong := range map[string]bool{
					"status":          status.code != exitFailed || !strings.Contains(status.stdout, `"id":"config-vanished"`),
					"the first line":  text.code != exitFailed || !strings.Contains(firstLine(text.stdout), vanished),
					"/readyz":         code != 503 || !strings.HasPrefix(ready, vanished),
					"ready":           n.run("ready", "--probe-socket", n.socket).code != exitFailed,
					"config_vanished": n.metric("nft_masq_agent_config_vanished") != "1",
				} {
					if wrong {
						t.Errorf("%s: %s says otherwise:\n%s\n%d %s", absence.name, what, text.stdout, code, ready)
					}
				}
				restore()
				d.await("config_file_appeared")
				d.applied("config", good)
				if code, ready := n.get("/readyz"); code != 200 || n.metric("nft_masq_agent_config_vanished") != "0" {
					t.Errorf("%s: when it is back: %s", absence.name, ready)
				}
			}
			d.stop()
		})
	}
}

func firstLine(text string) string {
	line, _, _ := strings.Cut(text, "\n")
	return line
}

// Programs that do not rename leave a file missing or empty for up to half a second.
func TestNothingChangesWhileTheConfigIsReplacedInSteps(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	const gap = 400 * time.Millisecond // the agent looks within 50 ms
	for name, replace := range map[string]func(n *testNode, text string){
		"removed and written": func(n *testNode, text string) {
			n.check(os.Remove(n.path))
			time.Sleep(gap)
			n.write(text)
		},
		"moved away": func(n *testNode, text string) {
			n.check(os.Rename(n.path, n.path+".old"))
			time.Sleep(gap)
			n.write(text)
		},
		"truncated and written": func(n *testNode, text string) {
			n.write("")
			time.Sleep(gap)
			n.write(text)
		},
		"linked anew": func(n *testNode, text string) {
			n.check(os.Remove(n.path))
			n.check(os.Symlink("target", n.path))
			time.Sleep(gap)
			n.check(os.WriteFile(filepath.Join(filepath.Dir(n.path), "target"), []byte(text), 0o644))
			time.Sleep(gap)
			n.swap(text)
			n.check(os.Remove(filepath.Join(filepath.Dir(n.path), "target")))
		},
		"the directory emptied": func(n *testNode, text string) {
			n.check(os.RemoveAll(filepath.Dir(n.path)))
			time.Sleep(gap)
			n.check(os.Mkdir(filepath.Dir(n.path), 0o755))
			time.Sleep(gap)
			n.write(text)
		},
		"a directory for a moment": func(n *testNode, text string) {
			n.check(os.Remove(n.path))
			n.check(os.Mkdir(n.path, 0o755))
			time.Sleep(gap)
			n.check(os.Remove(n.path))
			n.write(text)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for range 10 {
				if staysWhileReplaced(t, replace) {
					return
				}
			}
			t.Error("this machine is too slow: each time the file was away for as long as one that is gone")
		})
	}
}

// staysWhileReplaced replaces the config of a new node in steps, and reports false if one of them took too long.
func staysWhileReplaced(t *testing.T, replace func(n *testNode, text string)) bool {
	const longest = 2 * time.Second // a config has vanished after three
	good, bad, other := exempting("10.1.0.0/16"), exempting("10.1.0.1/16"), exempting("10.2.0.0/16")
	n := newNode(t)
	n.swap(good)
	flags := []string{"--http-address", httpAddress}
	d := n.start(flags...)
	d.began(wants(t, good, flags...))
	generation := n.generation()
	for _, step := range []struct {
		text string
		then func()
	}{
		{good, func() {}},
		{bad, func() {
			d.await("config_rejected")
			d.signal(unix.SIGHUP)
		}},
		{bad, func() {}},
		{good, func() {
			d.await("config_accepted")
			if got := n.generation(); got != generation {
				t.Errorf("the rules were written: generation %d, before %d", got, generation)
			}
			d.holds(wants(t, good, flags...))
		}},
		{other, func() { d.applied("config", wants(t, other, flags...)) }},
	} {
		begin := time.Now()
		replace(n, step.text)
		if time.Since(begin) > longest {
			d.stop()
			return false
		}
		step.then()
	}
	d.stop()
	d.silent()
	return true
}
