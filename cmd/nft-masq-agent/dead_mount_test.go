package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"nft-masq-agent/nft/nfttest"
)

// hungMounts are file systems that do not respond to one kind of request, or to any.
func hungMounts() map[string]func(testing.TB, *nfttest.NS) string {
	hung := func(at nfttest.FUSERequest) func(testing.TB, *nfttest.NS) string {
		return func(tb testing.TB, n *nfttest.NS) string { return nfttest.HungMount(tb, n, at) }
	}
	all := map[string]func(testing.TB, *nfttest.NS) string{
		"no request is taken": nfttest.DeadMount,
		"read":                hung(nfttest.FUSERead),
	}
	if nfttest.Long() {
		all["lookup"] = hung(nfttest.FUSELookup)
		all["getattr"] = hung(nfttest.FUSEGetattr)
		all["open"] = hung(nfttest.FUSEOpen)
	}
	return all
}

// onHungMounts calls a test with a node for each of them, and a config in it.
func onHungMounts(t *testing.T, test func(t *testing.T, n *node, name, hung string)) {
	t.Helper()
	t.Parallel()
	nfttest.SkipIfShort(t)
	for name, mount := range hungMounts() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			test(t, n, name, filepath.Join(mount(t, n.NS), "config"))
		})
	}
}

func TestCommandsExitIfTheConfigCannotBeRead(t *testing.T) {
	onHungMounts(t, func(_ *testing.T, n *node, _, hung string) {
		n.path = hung
		n.commandsEnd()
	})
}

func (n *node) commandsEnd() {
	n.t.Helper()
	commands := []string{"check", "status", "explain 10.1.2.3", "diff", "render"}
	type running struct {
		*nfttest.Process
		output bytes.Buffer
	}
	all := map[string]*running{}
	for _, args := range commands {
		r := &running{}
		cmd := n.command(nil, append(strings.Fields(args), "--config", n.path)...)
		cmd.Stdout, cmd.Stderr = &r.output, &r.output
		var err error
		r.Process, err = n.Start(cmd)
		n.check(err)
		n.t.Cleanup(func() { _ = r.Kill() })
		all[args] = r
	}
	late := time.After(timeout)
	for args, r := range all {
		select {
		case <-r.Done():
			if text := r.output.String(); r.Wait() == nil || !strings.Contains(text, "has not answered for 5s") {
				n.t.Errorf("%s: %v: %s", args, r.Wait(), text)
			}
		case <-late:
			n.t.Fatalf("%s does not end", args)
		}
	}
}

func TestAgentWithAnUnreadableConfigInstallsTheDefaultsAndExits(t *testing.T) {
	onHungMounts(t, func(t *testing.T, n *node, _, hung string) {
		n.path = hung
		want := wants(t, "")
		first := n.start("--http-address", httpAddress)
		first.await("config_rejected")
		first.applied("start", want)
		first.stop()
		second := n.start("--http-address", httpAddress)
		second.await("starting")
		second.answers()
		second.awaitRejection("config of a previous run (" + want.Hash() + ") stays enforced")
		second.silent()
		n.holds(want)
		r := n.run("status")
		if r.code != exitFailed || !strings.Contains(r.stdout, "has not answered for 5s") || strings.Contains(r.stdout, "agents run") {
			t.Errorf("status ends with %d: %s%s", r.code, r.stdout, r.stderr)
		}
		second.stop()
	})
}

func TestConfigIsFollowedIntoAHungMountAndOut(t *testing.T) {
	onHungMounts(t, func(t *testing.T, n *node, name, hung string) {
		good := filepath.Join(t.TempDir(), "good")
		n.linkTo(good)
		n.check(os.WriteFile(good, []byte(exempting("10.1.0.0/16")), 0o644))
		want := wants(t, exempting("10.1.0.0/16"))
		d := n.start("--http-address", httpAddress)
		d.began(want)
		n.linkTo(hung)
		line := d.awaitRejection("last good config (" + want.Hash() + ") stays enforced")
		d.rejected(line, fileStep{name: name, err: "config: PATH: " + os.ErrDeadlineExceeded.Error() + ": its file system has not answered for 5s"}, want)
		n.check(os.WriteFile(good, []byte(exempting("10.2.0.0/16")), 0o644))
		n.linkTo(good)
		d.applied("config", wants(t, exempting("10.2.0.0/16")))
		if code, body := n.get("/readyz"); code != 200 {
			t.Errorf("readyz returned %d %s", code, body)
		}
		d.silent()
		d.stop()
	})
}

// linkTo makes the config a link.
func (n *node) linkTo(path string) {
	n.t.Helper()
	n.check(os.Symlink(path, n.path+".new"))
	n.check(os.Rename(n.path+".new", n.path))
}
