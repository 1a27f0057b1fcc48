package main

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/nft-masq-agent/internal/report"
	"nft-masq-agent/config"
	"nft-masq-agent/nft/nfttest"
)

// runInProcess runs the program as runProgram does, but on a thread of this process.
func runInProcess(t *testing.T, node *nfttest.NS, dir string, args ...string) (got result) {
	t.Helper()
	var stdout, stderr strings.Builder
	e := thisProcess(t, &stdout, &stderr)
	err := node.Do(func() error { // which ends the thread, because it cannot switch back
		none := [2]unix.CapUserData{}
		err := errors.Join(unix.Unshare(unix.CLONE_FS), unix.Chdir(dir),
			unix.Capset(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &none[0]))
		if err == nil {
			got.code = dispatch(t.Context(), commands(), args, e)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return result{stdout.String(), stderr.String(), got.code}
}

// thisProcess is the environment of a program that sees no other processes.
func thisProcess(t testing.TB, stdout, stderr *strings.Builder) environment {
	t.Helper()
	e := theEnvironment()
	e.proc = t.TempDir()
	for _, name := range []string{"thread-self", "sys"} {
		if err := os.Symlink("/proc/"+name, filepath.Join(e.proc, name)); err != nil {
			t.Fatal(err)
		}
	}
	e.stdout, e.stderr, e.socket = stdout, stderr, filepath.Join(e.proc, "none")
	e.terminal, e.fit, e.color, e.person = false, false, false, false
	return e
}

// inProcess is run without another process. It does not see other processes.
func (n *testNode) inProcess(args ...string) (got result) {
	n.t.Helper()
	var stdout, stderr strings.Builder
	e := thisProcess(n.t, &stdout, &stderr)
	e.socket = n.socket
	ctx, cancel := context.WithTimeout(n.t.Context(), timeout)
	defer cancel()
	n.check(n.Do(func() error {
		got.code = dispatch(ctx, commands(), args, e)
		return ctx.Err()
	}))
	validate(n.t, args, stdout.String())
	return result{stdout.String(), stderr.String(), got.code}
}

// standIn answers as an agent that has just applied its config, until the function that it returns is called.
func (n *faultyNode) standIn(args []string) (stop func()) {
	n.t.Helper()
	text, err := os.ReadFile(n.path)
	r := report.Report{Args: args, ConfigPath: n.path, Compiled: true, Source: "file"}
	if err == nil {
		r.Files = []config.Source{{Name: n.path, Data: text}}
	} else if !errors.Is(err, fs.ErrNotExist) {
		n.t.Fatal(err)
	}
	want := n.applied(string(text), args...)
	r.Policy = &report.Policy{Hash: want.Hash()}
	for _, f := range want.Policy.Families {
		r.Addresses = append(r.Addresses, f.Sources()...)
	}
	l, err := net.Listen("unix", n.socket)
	n.check(err)
	answer := func(w http.ResponseWriter, q *http.Request) {
		if q.URL.Path == "/agent" {
			_ = json.NewEncoder(w).Encode(r)
		}
	}
	go func() { _ = http.Serve(l, http.HandlerFunc(answer)) }()
	n.t.Cleanup(func() { _ = l.Close() })
	return func() { n.check(l.Close()) }
}
