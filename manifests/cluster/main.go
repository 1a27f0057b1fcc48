package cluster

import (
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// inChild marks the process that runs the tests.
const inChild = "CLUSTER_TESTS_IN_CHILD"

// Main is the body of TestMain. It runs the tests in a child process, whose files
// and cgroups it removes however that process ends: interrupted, too, or killed by
// the timeout of the tests. What runs on nodes ends with that process.
func Main(m *testing.M) int {
	if os.Getenv(inChild) != "" || os.Getenv("CLUSTER_PROGRAMS") == "" {
		return m.Run()
	}
	code, err := runInChild()
	if err != nil {
		_, _ = fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}

func runInChild() (code int, err error) {
	dir, err := os.MkdirTemp("", "cluster-")
	if err != nil {
		return 0, err
	}
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	defer signal.Stop(signals)
	cmd := exec.Command(os.Args[0], os.Args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), inChild+"=1", "TMPDIR="+dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	go func() {
		for s := range signals {
			_ = cmd.Process.Signal(s)
		}
	}()
	_ = cmd.Wait()
	_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // commands that it ran
	if left := removeCgroups(cgroupName(dir)); left != "" {
		err = fmt.Errorf("cgroups are left: %s", left)
	}
	if removed := os.RemoveAll(dir); err == nil {
		err = removed
	}
	return cmd.ProcessState.ExitCode(), err
}

// cgroupName is the sub-tree for a directory; that of a directory in it begins
// with the same name.
func cgroupName(dir string) string {
	return "/" + strings.ReplaceAll(strings.Trim(dir, "/"), "/", "-")
}

// removeCgroups removes the sub-trees that begin with a name, from their leaves
// up, and returns what cannot be removed. Their processes have been killed; they
// leave them a moment later.
func removeCgroups(name string) string {
	var left []string
	for range 600 {
		left = nil
		for _, root := range cgroupRoots() {
			trees, _ := filepath.Glob(root + name + "*")
			for _, tree := range trees {
				var dirs []string
				_ = filepath.WalkDir(tree, func(path string, d os.DirEntry, err error) error {
					if err == nil && d.IsDir() {
						dirs = append(dirs, path)
					}
					return nil
				})
				for i := len(dirs) - 1; i >= 0; i-- {
					if err := os.Remove(dirs[i]); err != nil {
						left = append(left, err.Error())
					}
				}
			}
		}
		if len(left) == 0 {
			return ""
		}
		time.Sleep(50 * time.Millisecond)
	}
	return strings.Join(left, ", ")
}
