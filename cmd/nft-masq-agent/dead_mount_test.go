package main

import (
	"bytes"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"nft-masq-agent/nft/nfttest"
)

func TestCommandsEndWhereTheConfigCannotBeRead(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		return // it takes the five seconds of a read; package config has a shorter test of that
	}
	commands := []string{"check", "status", "explain 10.1.2.3", "diff", "render"}
	n := newNode(t)
	path := filepath.Join(nfttest.DeadMount(t), "config")
	type running struct {
		*nfttest.Process
		output bytes.Buffer
	}
	all := map[string]*running{}
	for _, args := range commands {
		r := &running{}
		cmd := n.command(nil, append(strings.Fields(args), "--config", path)...)
		cmd.Stdout, cmd.Stderr = &r.output, &r.output
		var err error
		r.Process, err = n.Start(cmd)
		n.check(err)
		t.Cleanup(func() { _ = r.Kill() })
		all[args] = r
	}
	late := time.After(patience)
	for args, r := range all {
		select {
		case <-r.Done():
			if text := r.output.String(); r.Wait() == nil || !strings.Contains(text, "has not answered for 5s") {
				t.Errorf("%s: %v: %s", args, r.Wait(), text)
			}
		case <-late:
			t.Fatalf("%s does not end", args)
		}
	}
}
