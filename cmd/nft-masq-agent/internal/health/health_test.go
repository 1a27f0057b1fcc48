package health

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/routes"
)

// A kubelet replaces the files of a ConfigMap; a mount of one of them keeps the old one.
func TestSingleFileMountFollowsNothingOnceItsSourceIsReplaced(t *testing.T) {
	dir := t.TempDir()
	path, source := filepath.Join(dir, "mounted"), filepath.Join(dir, "source")
	steps := []struct {
		name string
		do   func() error
		want config.Level // Note: no problem
	}{
		{
			"a file",
			func() error { return errors.Join(os.WriteFile(path, nil, 0o644), os.WriteFile(source, nil, 0o644)) },
			config.Note,
		},
		{"a mounted file", func() error { return unix.Mount(source, path, "", unix.MS_BIND, "") }, config.Error},
		{"a replaced source", func() error {
			return errors.Join(os.WriteFile(source+".new", nil, 0o644), os.Rename(source+".new", source))
		}, config.Error},
	}
	done := make(chan struct{})
	go func() { // on a thread that ends with its mount namespace
		defer close(done)
		runtime.LockOSThread()
		if err := errors.Join(unix.Unshare(unix.CLONE_NEWNS|unix.CLONE_FS),
			unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")); err != nil {
			t.Error(err)
			return
		}
		for _, s := range steps {
			if err := s.do(); err != nil {
				t.Error(err)
				return
			}
			if found := files(path); found.Worst() != s.want || len(found) > 0 && found[0].ID != SingleFile {
				t.Errorf("%s: %v, want %s", s.name, found, s.want)
			}
		}
	}()
	<-done
}

func TestFullConnectionTrackingAndFailedInsertsAreFound(t *testing.T) {
	var stats conntrack.Stats
	n := Node{Stats: func() (conntrack.Stats, error) { return stats, nil }}
	for _, tt := range []struct {
		stats conntrack.Stats
		want  string
	}{
		{conntrack.Stats{Entries: 89, Limit: 100, InsertFailed: 7}, ""},
		{
			conntrack.Stats{Entries: 90, Limit: 100, InsertFailed: 7},
			"new connections fail, or will: 90 of 100 connections are tracked",
		},
		{conntrack.Stats{Entries: 5, Limit: 100, InsertFailed: 9}, "2 new connections failed since the last check"},
		{conntrack.Stats{Entries: 5, InsertFailed: 9}, ""}, // before Linux 4.19 there is no limit to read
	} {
		stats = tt.stats
		if got := n.conntrack().Error(); !strings.HasPrefix(got, tt.want) || (got == "") != (tt.want == "") {
			t.Errorf("%+v: %q, want %q", tt.stats, got, tt.want)
		}
	}
}

// What cannot be read is said, and claims nothing.
func TestWhatCannotBeReadIsAProblemOfItsOwn(t *testing.T) {
	broken := errors.New("broken")
	n := Node{
		Proc:       t.TempDir(),
		Pods:       func(bool) ([]netip.Addr, error) { return nil, broken },
		Interfaces: func() ([]routes.Interface, error) { return nil, broken },
		Stats:      func() (conntrack.Stats, error) { return conntrack.Stats{}, broken },
	}
	found := n.Check(nft.Policy{}, filepath.Join(n.Proc, "config"))
	if len(found) != 4 || found.Worst() != config.Warning {
		t.Errorf("%v", found)
	}
	for _, p := range found {
		if p.ID != Unchecked || !strings.HasPrefix(p.Msg, "cannot read ") {
			t.Errorf("%+v", p)
		}
	}
}
