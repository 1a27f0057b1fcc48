package main

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/nft-masq-agent/internal/running"
	"nft-masq-agent/config"
	"nft-masq-agent/nft/nfttest"
)

// runInProcess runs the program as runProgram does, but on a thread of this process.
func runInProcess(t *testing.T, node *nfttest.NS, dir string, args ...string) (got result) {
	t.Helper()
	var stdout, stderr strings.Builder
	e := thisProcess(filepath.Join(dir, "none"), &stdout, &stderr)
	err := node.Do(func() error { // which ends the thread, because it cannot switch back
		none := [2]unix.CapUserData{}
		err := errors.Join(unix.Unshare(unix.CLONE_FS), unix.Chdir(dir),
			unix.Capset(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &none[0]))
		if err == nil {
			got.code = dispatch(t.Context(), commands(), args, e)
		}
		return err
	})
	nfttest.NoError(t, err)
	return result{stdout.String(), stderr.String(), got.code}
}

// ownProc returns a directory in place of procfs, with the settings of the node, in which a test may put other files.
func ownProc(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range []string{"thread-self", "sys"} {
		nfttest.NoError(t, os.Symlink("/proc/"+name, filepath.Join(dir, name)))
	}
	return dir
}

// thisProcess is the environment of a program that is not started by a person.
func thisProcess(socket string, stdout, stderr *strings.Builder) environment {
	e := theEnvironment()
	e.socket = socket
	e.stdout = stdout
	e.stderr = stderr
	e.fit, e.person = false, false
	return e
}

// run runs a command on the node, in this process: nothing else than its thread is in the namespace.
func (n *testNode) run(args ...string) result {
	n.t.Helper()
	return n.runWith("/proc", args...)
}

// runWith is run with a directory in place of procfs.
func (n *testNode) runWith(proc string, args ...string) (got result) {
	n.t.Helper()
	var stdout, stderr strings.Builder
	e := thisProcess(n.socket, &stdout, &stderr)
	e.proc = proc
	ctx, cancel := context.WithTimeout(n.t.Context(), timeout)
	defer cancel()
	n.check(n.Do(func() error {
		got.code = dispatch(ctx, commands(), args, e)
		return ctx.Err()
	}))
	n.check(e.kernel.Close())
	validate(n.t, args, stdout.String())
	return result{stdout.String(), stderr.String(), got.code}
}

// standIn answers as an agent that has just applied its config, until the function that it returns is called.
func (n *faultyNode) standIn(args []string) (stop func()) {
	n.t.Helper()
	text, err := os.ReadFile(n.path)
	r := running.Report{Args: args, ConfigPath: n.path, Compiled: true, Source: "file"}
	if err == nil {
		r.Files = []config.Source{{Name: n.path, Data: text}}
	} else if !errors.Is(err, fs.ErrNotExist) {
		n.t.Fatal(err)
	}
	want := n.applied(string(text), args...)
	r.Policy = &running.Policy{Hash: want.Hash()}
	for _, f := range want.Policy.Families {
		r.Addresses = append(r.Addresses, f.PresentAddresses()...)
	}
	return n.answer(r)
}

// answer answers on the socket as an agent, until the function that it returns is called.
func (n *faultyNode) answer(r running.Report) (stop func()) {
	n.t.Helper()
	l, err := net.Listen("unix", n.socket)
	n.check(err)
	server := &httptest.Server{Listener: l, Config: &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, asked *http.Request) {
			reason := map[string]string{"/healthz": r.Alive, "/readyz": r.Ready}[asked.URL.Path]
			if reason != "" {
				http.Error(w, reason, http.StatusServiceUnavailable)
			} else if asked.URL.Path == "/agent" {
				_ = json.NewEncoder(w).Encode(r)
			}
		}),
	}}
	server.Start()
	n.t.Cleanup(server.Close)
	return server.Close
}
