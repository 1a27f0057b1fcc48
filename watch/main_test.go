package watch

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// inOwnMounts is set in the test process that has a mount namespace of its own.
const inOwnMounts = "WATCH_TEST_OWN_MOUNTS"

// TestMain runs the tests again in a mount namespace of their own, so that no
// mount they make is seen by anybody else. Where that may not be done they run
// as they are, and those that need mounts are skipped.
func TestMain(m *testing.M) {
	if os.Getenv(inOwnMounts) == "" {
		if code, err := runInOwnMounts(); err == nil {
			os.Exit(code)
		}
		os.Exit(m.Run())
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		fmt.Fprintln(os.Stderr, "mounts stay private: ", err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// runInOwnMounts returns the exit code of this test binary, or an error where
// the namespace could not be made.
func runInOwnMounts() (int, error) {
	runtime.LockOSThread() // the child dies with this thread
	defer runtime.UnlockOSThread()
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), inOwnMounts+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS, Pdeathsig: unix.SIGKILL}
	if os.Geteuid() != 0 {
		cmd.SysProcAttr.Cloneflags |= unix.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{HostID: os.Geteuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{HostID: os.Getegid(), Size: 1}}
	}
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	var exit *exec.ExitError
	if err := cmd.Wait(); err != nil && !errors.As(err, &exit) {
		return 1, nil
	}
	return cmd.ProcessState.ExitCode(), nil
}

// needMounts skips a test where no mount namespace could be made, and fails it
// where the kernel's tests are required.
func needMounts(t testing.TB) {
	t.Helper()
	if os.Getenv(inOwnMounts) != "" {
		return
	}
	if os.Getenv("REQUIRE_KERNEL") == "1" {
		t.Fatal("cannot make a mount namespace, and REQUIRE_KERNEL=1")
	}
	t.Skip("cannot make a mount namespace")
}
