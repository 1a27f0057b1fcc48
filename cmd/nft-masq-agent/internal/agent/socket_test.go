package agent

import (
	"bytes"
	"context"
	"errors"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"

	"nft-masq-agent/cmd/nft-masq-agent/internal/running"
	"nft-masq-agent/config"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/loop"
)

func TestSocketAnswersProbesAndCommandsDespiteIdleClients(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "probe.sock")
	a := New(Inputs{}, &loop.World{}, testSettings(), zap.NewNop())
	large := []byte("# " + strings.Repeat("x", 4<<20-2))
	good := rulesetOf("10.0.0.0/8")
	bad := config.Problems{{ID: "syntax", Pos: config.Position{File: "config", Line: 2, Col: 3}, Msg: "bad"}}
	inForce := content{files: []config.Source{{Name: "a", Data: large, Joined: true}}}
	a.publish(view{
		read: true, content: content{
			err:     bad,
			remarks: config.Problems{{ID: "emptyList", Level: config.Warning, Msg: "empty"}},
		},
		policy:    policy{source: FromLenient, want: good, content: inForce},
		addresses: []netip.Addr{netip.MustParseAddr("192.0.2.1")},
		installed: good, history: running.Policy{Hash: "3f9a2c71", Change: "rules installed"},
		failure: errors.New("broken"),
	})
	a.second.hasLock.Store(true)
	a.ServeOnSocket("GET /more", probe(a.Alive))
	ctx, cancel := context.WithCancel(t.Context())
	ended := Serve(ctx, ListenSocket, path, a.SocketHandler(), zap.NewNop())
	for range 200 { // none of them sends a request
		c, err := net.Dial("unix", path)
		nfttest.NoError(t, err)
		defer c.Close()
	}
	got, err := running.Ask(path)
	nfttest.NoError(t, err)
	if len(got.Files) != 1 || !bytes.Equal(got.Files[0].Data, large) {
		t.Fatalf("the report has %d files, want the large one as it is", len(got.Files))
	}
	got.Files[0].Data = nil // comparing it takes long
	want := running.Report{
		PID: os.Getpid(), Args: []string{"--v=4"}, ConfigPath: "/etc/config/ip-masq-agent",
		Ready:  "config rejected: config:2:3: bad\nthe older agents' reading of it (" + good.Hash() + ") is enforced",
		Source: "lenient", Compiled: true, Files: []config.Source{{Name: "a", Joined: true}},
		Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.1")},
		Policy:    &running.Policy{Hash: "3f9a2c71", Change: "rules installed"},
		Rejected:  config.Problems{{ID: "syntax", Pos: config.Position{File: "config", Line: 2, Col: 3}, Msg: "bad"}},
		Warnings:  config.Problems{{ID: "emptyList", Level: config.Warning, Msg: "empty"}},
		Failure:   "cannot read nftables: broken", HasLock: true,
	}
	if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
		cmp.Comparer(func(a, b config.Problem) bool { return a == b })); diff != "" {
		t.Errorf("report (-want +got):\n%s", diff)
	}
	for probe, yes := range map[string]bool{"/readyz": false, "/healthz": true, "/more": true} {
		if reason, err := running.Probe("unix", path, probe); err != nil || (reason == "") != yes {
			t.Errorf("%s: %q, %v", probe, reason, err)
		}
	}
	if code, _ := loop.Get(t, a, "/agent"); code != http.StatusNotFound {
		t.Errorf("the network gets %d, and maybe the config", code)
	}
	cancel()
	<-ended
	if _, err := running.Ask(path); err == nil || !strings.Contains(err.Error(), "no agent answers at "+path) {
		t.Errorf("after shutdown: %v", err)
	}
}

func TestFileInTheSocketsPlaceStaysAndIsNamed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "probe.sock")
	nfttest.NoError(t, os.WriteFile(path, []byte("text"), 0o600))
	if _, err := ListenSocket(path); err == nil || !strings.Contains(err.Error(), path+": is not a socket") {
		t.Errorf("error is %v", err)
	}
	if text, err := os.ReadFile(path); err != nil || string(text) != "text" {
		t.Errorf("it has %q, %v", text, err)
	}
}

func TestLeftoverSocketIsReplacedUnlessInUse(t *testing.T) {
	path := filepath.Join(t.TempDir(), "probe.sock")
	left, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
	nfttest.NoError(t, err)
	left.SetUnlinkOnClose(false)
	nfttest.NoError(t, left.Close())
	if _, err := os.Lstat(path); err != nil {
		t.Fatal(err)
	}
	l, err := ListenSocket(path)
	nfttest.NoError(t, err)
	defer l.Close()
	if _, err := ListenSocket(path); err == nil || !strings.Contains(err.Error(), "another agent uses it") {
		t.Errorf("second listener: %v", err)
	}
}
