package watch

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// inOwn is the variable that tells the test process which namespaces are its
// own: "user mount", or "mount".
const inOwn = "WATCH_TEST_IN_OWN"

// TestMain runs the tests again in namespaces of their own, so that no mount
// and no limit they set concerns anybody else. Where that may not be done they
// run as they are, and those that need it are skipped.
func TestMain(m *testing.M) {
	if os.Getenv(inOwn) == "" {
		code, err := runInOwn("user mount", unix.CLONE_NEWUSER|unix.CLONE_NEWNS)
		if err != nil {
			code, err = runInOwn("mount", unix.CLONE_NEWNS)
		}
		if err != nil {
			code = m.Run()
		}
		os.Exit(code)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		fmt.Fprintln(os.Stderr, "keep mounts private: ", err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// runInOwn runs this test binary in new namespaces. It returns its exit code,
// or an error where the namespaces could not be made.
func runInOwn(names string, flags uintptr) (int, error) {
	runtime.LockOSThread() // the child dies with this thread
	defer runtime.UnlockOSThread()
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), inOwn+"="+names)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: flags, Pdeathsig: unix.SIGKILL}
	if flags&unix.CLONE_NEWUSER != 0 {
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{HostID: os.Geteuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{HostID: os.Getegid(), Size: 1}}
	}
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	var exit *exec.ExitError
	if err := cmd.Wait(); err != nil && !errors.As(err, &exit) {
		return 1, nil // the tests ran; that they did not end well is the answer
	}
	return cmd.ProcessState.ExitCode(), nil
}

// needOwn skips a test that needs a namespace of its own where none could be
// made, and fails it where the kernel's tests are required.
func needOwn(t testing.TB, name string) {
	t.Helper()
	switch {
	case strings.Contains(os.Getenv(inOwn), name):
	case os.Getenv("REQUIRE_KERNEL") == "1":
		t.Fatalf("cannot make a %s namespace, and REQUIRE_KERNEL=1", name)
	default:
		t.Skipf("cannot make a %s namespace", name)
	}
}
