package main

import (
	"bufio"
	"io"
	"strings"
	"testing"

	"nft-masq-agent/nft"
)

func TestWaitForRulesDoesNotWaitForAValidConfig(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.swap(badText)
	cmd := n.command(nil, "ready", "--wait-for", "[127.0.0.1]:9717")
	read, write := io.Pipe()
	cmd.Stdout = write
	p, err := n.Start(cmd)
	n.check(err)
	t.Cleanup(func() { _ = p.Kill() })
	lines := bufio.NewScanner(read)
	if lines.Scan(); !strings.HasPrefix(lines.Text(), "waiting: ") ||
		!strings.Contains(lines.Text(), "connection refused") {
		t.Fatal(lines.Text())
	}
	n.start("--http-address", httpAddress)
	for lines.Scan() && lines.Text() != "rules are installed" {
		if want := "waiting: no rules are installed yet"; lines.Text() != want {
			t.Errorf("printed %q, want %q", lines.Text(), want)
		}
	}
	if err := p.Wait(); err != nil {
		t.Error(err)
	}
	got := n.run("ready", "--wait-for", "127.0.0.1:9717", "-o", "json")
	if got.code != exitDone || !strings.Contains(got.stdout, `"asked": "started"`) {
		t.Errorf("as JSON: %+v", got)
	}
	if out, _ := n.Output("", "nft", "list", "tables"); !strings.Contains(out, nft.TableName) {
		t.Errorf("the node has %q", out)
	}
}
