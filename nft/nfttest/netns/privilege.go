package netns

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// inUserNS is the environment variable that marks a program started by InUserNS.
const inUserNS = "NFTTEST_IN_USER_NAMESPACE"

// InUserNS re-executes the running program, with the same arguments, in a new
// user namespace, waits for it and returns its exit code. It does nothing and
// returns false if the program has the privileges to create network namespaces,
// if it is already the re-executed one, or if there are no user namespaces.
func InUserNS() (code int, ran bool) {
	if Privileged() == nil || os.Getenv(inUserNS) != "" {
		return 0, false
	}
	runtime.LockOSThread() // Pdeathsig refers to the thread
	defer runtime.UnlockOSThread()
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Args[0] = os.Args[0]
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), inUserNS+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  unix.CLONE_NEWUSER | unix.CLONE_NEWNET | unix.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}},
		Pdeathsig:   unix.SIGKILL,
	}
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		return 0, false
	}
	return cmd.ProcessState.ExitCode(), true
}

// Privileged returns an error that names the capabilities missing to create and
// use network namespaces.
func Privileged() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return fmt.Errorf("capabilities: %w", err)
	}
	var missing []string
	for name, bit := range map[string]int{
		"CAP_NET_ADMIN": unix.CAP_NET_ADMIN, "CAP_NET_RAW": unix.CAP_NET_RAW, "CAP_SYS_ADMIN": unix.CAP_SYS_ADMIN,
	} {
		if data[0].Effective&(1<<bit) == 0 {
			missing = append(missing, name)
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("missing %s, and user namespaces are not available", strings.Join(missing, ", "))
	}
	return nil
}
