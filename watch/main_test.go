package watch

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// ownNamespaces is the environment variable that lists the namespaces created for
// the test process: "user mount", or "mount".
const ownNamespaces = "WATCH_TEST_IN_OWN"

// TestMain re-executes the tests in new namespaces, so that their mounts and
// limits affect nothing else. If that is not permitted, the tests run without,
// and those that need a namespace are skipped.
func TestMain(m *testing.M) {
	if os.Getenv(ownNamespaces) == "" {
		code, err := runInNamespaces("user mount", unix.CLONE_NEWUSER|unix.CLONE_NEWNS)
		if err != nil {
			code, err = runInNamespaces("mount", unix.CLONE_NEWNS)
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
	dir, err := inMemory()
	if err != nil {
		fmt.Fprintln(os.Stderr, "file system in memory: ", err)
		os.Exit(1)
	}
	flag.Parse()
	_ = flag.Set("test.parallel", "32") // most of the time they wait
	code := m.Run()
	_ = unix.Unmount(dir, unix.MNT_DETACH)
	_ = os.Remove(dir)
	os.Exit(code)
}

// inMemory mounts a file system in which other programs' writes do not delay those of
// the tests, and makes it the one of temporary files.
func inMemory() (dir string, err error) {
	if dir, err = os.MkdirTemp("", "watch-"); err != nil {
		return "", err
	}
	return dir, errors.Join(unix.Mount("tmpfs", dir, "tmpfs", 0, ""), os.Setenv("TMPDIR", dir))
}

// runInNamespaces runs this test binary in new namespaces. It returns its exit
// code, or an error if the namespaces cannot be created.
func runInNamespaces(names string, flags uintptr) (int, error) {
	runtime.LockOSThread() // the child dies with this thread
	defer runtime.UnlockOSThread()
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), ownNamespaces+"="+names)
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
		return 1, nil // the tests ran and failed
	}
	return cmd.ProcessState.ExitCode(), nil
}

// needNamespace skips a test that needs its own namespace if none could be
// created, or fails it if the kernel tests are required.
func needNamespace(t testing.TB, name string) {
	t.Helper()
	switch {
	case strings.Contains(os.Getenv(ownNamespaces), name):
	case os.Getenv("REQUIRE_KERNEL") == "1":
		t.Fatalf("cannot create a %s namespace, and REQUIRE_KERNEL=1", name)
	default:
		t.Skipf("cannot create a %s namespace", name)
	}
}
