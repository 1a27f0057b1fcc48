package running_test

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/nft-masq-agent/internal/running"
	"nft-masq-agent/nft/nfttest"
)

func TestMain(m *testing.M) { os.Exit(nfttest.Main(m)) }

// asNobody does something as another user. It must be called on a locked thread.
func asNobody[T any](do func() (T, error)) (T, error) {
	const keep, nobody = ^uintptr(0), 65534
	become := func(uid uintptr) error {
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, keep, uid, keep); errno != 0 {
			return errno
		}
		return nil
	}
	if err := become(nobody); err != nil {
		return *new(T), err
	}
	v, err := do()
	return v, errors.Join(err, become(0))
}

func listenAsNobody(address string) (net.Listener, error) {
	return asNobody(func() (net.Listener, error) { return net.Listen("unix", address) })
}

// checkHolderAsNobody checks that another user finds the process that has the lock.
func checkHolderAsNobody(t *testing.T, whose string) {
	t.Helper()
	pid, err := asNobody(func() (int, error) {
		pid, _ := running.Holder()
		return pid, nil
	})
	if err != nil || pid != os.Getpid() {
		t.Errorf("another user finds holder %d of the lock of %s: %v", pid, whose, err)
	}
}

func TestOneAgentOfANetworkNamespaceHasTheLock(t *testing.T) {
	err := nfttest.NewNS(t, "agent").Do(func() error {
		if pid, ok := running.Holder(); ok {
			t.Errorf("nobody has it, but %d", pid)
		}
		lock, err := running.Lock()
		if err != nil {
			return err
		}
		if pid, ok := running.Holder(); !ok || pid != os.Getpid() {
			t.Errorf("holder %d, %v", pid, ok)
		}
		if pid, ok := running.Agent(); !ok || pid != os.Getpid() {
			t.Errorf("agent %d, %v", pid, ok)
		}
		checkHolderAsNobody(t, "root")
		if _, err := running.Lock(); err == nil {
			t.Error("taken twice")
		}
		if err := lock.Close(); err != nil {
			return err
		}
		l, err := listenAsNobody("@nft-masq-agent")
		if err != nil {
			return err
		}
		defer l.Close()
		if _, err := running.Lock(); err == nil {
			t.Error("another user does not have it")
		}
		checkHolderAsNobody(t, "that user")
		if pid, ok := running.Holder(); ok {
			t.Errorf("another user's process %d counts as an agent", pid)
		}
		if pid, ok := running.Agent(); ok {
			t.Errorf("an agent runs: process %d", pid)
		}
		later, err := running.Announce()
		if err != nil {
			return err
		}
		defer later.Close()
		if pid, ok := running.Agent(); !ok || pid != os.Getpid() {
			t.Errorf("agent next to another user's process: %d, %v, want %d", pid, ok, os.Getpid())
		}
		return nil
	})
	nfttest.NoError(t, err)
}

func TestAnotherUserCannotAnswerForTheAgent(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "socket")
	err := nfttest.NewNS(t, "agent").Do(func() error { // on a locked thread
		if err := errors.Join(os.Chmod(dir, 0o777), os.Chmod(filepath.Dir(dir), 0o755)); err != nil {
			return err
		}
		l, err := listenAsNobody(path)
		if err == nil {
			t.Cleanup(func() { _ = l.Close() })
		}
		return err
	})
	nfttest.NoError(t, err)
	const want = "a process of user 65534 listens there"
	if _, err := running.Ask(path); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("report: %v", err)
	}
	if _, err := running.Probe("unix", path, "/readyz"); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("probe: %v", err)
	}
}
