package agent

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/zap"

	"nft-masq-agent/cmd/nft-masq-agent/internal/running"
)

func TestProbesGetTheReportDespiteIdleClients(t *testing.T) {
	path := filepath.Join(t.TempDir(), "probe.sock")
	want := running.Report{Ready: "config rejected: config:1:1: " + strings.Repeat("x", 10_000)}
	ctx, cancel := context.WithCancel(t.Context())
	ended := ServeProbes(ctx, path, func() running.Report { return want }, zap.NewNop())
	for range 200 { // none of them reads
		c, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
	}
	got, err := running.Ask(path)
	if err != nil || got != want {
		t.Errorf("%+v: %v", got, err)
	}
	cancel()
	<-ended
	if _, err := running.Ask(path); err == nil {
		t.Error("answered after shutdown")
	}
}

func TestLeftoverSocketIsReplacedUnlessInUse(t *testing.T) {
	path := filepath.Join(t.TempDir(), "probe.sock")
	left, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
	if err != nil {
		t.Fatal(err)
	}
	left.SetUnlinkOnClose(false)
	if err := left.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(path); err != nil {
		t.Fatal(err)
	}
	l, err := listenUnix(path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if _, err := listenUnix(path); err == nil || !strings.Contains(err.Error(), "another agent uses it") {
		t.Errorf("second listener: %v", err)
	}
}

func TestFileInPlaceOfTheProbeSocketStays(t *testing.T) {
	path := filepath.Join(t.TempDir(), "probe.sock")
	if err := os.WriteFile(path, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := listenUnix(path); err == nil {
		t.Error("listens despite the file")
	}
	if _, err := os.Stat(path); errors.Is(err, os.ErrNotExist) {
		t.Error("the file is gone")
	}
}
