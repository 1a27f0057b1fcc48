package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"nft-masq-agent/nft/nfttest"
)

func TestConfigOnADeadMountKeepsTheLastGoodRules(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t) // it waits for five seconds
	n := newNode(t)
	dead, fail := nfttest.DeadMount(t, n.NS)
	good := filepath.Join(t.TempDir(), "good")
	n.linkTo(good)
	n.check(os.WriteFile(good, []byte(exempting("10.1.0.0/16")), 0o644))
	want := wants(t, exempting("10.1.0.0/16"))
	d := n.start("--http-address", httpAddress)
	d.began(want)
	n.linkTo(filepath.Join(dead, "config"))
	line := d.awaitRejection("last good config (" + want.Hash() + ") stays enforced")
	// It restores rules in the meantime.
	d.rejected(line, fileStep{name: "dead", err: "config: PATH: its file system has not answered since "}, want)

	// Once calls return, the path is followed again.
	n.check(os.WriteFile(good, []byte(exempting("10.2.0.0/16")), 0o644))
	n.linkTo(good)
	fail()
	for {
		line := d.await("config_rejected", "config_applied")
		if line.Event() == "config_applied" {
			break
		}
		if !strings.Contains(line.Text("error"), "not connected") {
			t.Errorf("logged: %v", line)
		}
	}
	n.holds(wants(t, exempting("10.2.0.0/16")))
	if code, body := n.get("/readyz"); code != 200 {
		t.Errorf("readyz returned %d %s", code, body)
	}
	d.silent()
	d.stop()
}

// linkTo makes the config a link.
func (n *testNode) linkTo(path string) {
	n.t.Helper()
	n.check(os.Symlink(path, n.path+".new"))
	n.check(os.Rename(n.path+".new", n.path))
}
