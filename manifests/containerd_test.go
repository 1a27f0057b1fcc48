package manifests_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// Nothing but a directory: its own state, and no plugin that needs more of the machine.
const containerdConfig = `version = 2
root = "%[1]s/root"
state = "%[1]s/state"
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.snapshotter.v1.aufs",
	"io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs"]
[grpc]
address = "%[1]s/containerd.sock"
[ttrpc]
address = "%[1]s/ttrpc.sock"
`

// The commands of README.md that bring the image to a node without a registry.
func TestImageIsImportedWithoutARegistry(t *testing.T) {
	programs := os.Getenv("CONTAINERD")
	if programs == "" {
		t.Skip("runs containerd: make container-test")
	}
	dir, err := os.MkdirTemp("", "containerd-") //nolint:usetesting // the name of a socket has room for 107 characters
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	config := filepath.Join(dir, "config.toml")
	writeFile(t, config, fmt.Sprintf(containerdConfig, dir))
	server := exec.CommandContext(t.Context(), filepath.Join(programs, "containerd"), "--config", config)
	must(t, server.Start())
	defer func() {
		_ = server.Process.Kill()
		_ = server.Wait()
	}()
	ctr := filepath.Join(programs, "ctr") + " --address " + filepath.Join(dir, "containerd.sock") + " "
	node := func(line string) (string, error) { return try(t, strings.Replace(line, "ctr ", ctr, 1)) }
	for { // until the server listens, or the test times out
		if _, err := node("ctr version"); err == nil {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	run(t, "make image")
	// Not mounted, so that a file system of any kind will do.
	const line = "ctr --namespace k8s.io images import bin/image.tar"
	out, err := node(strings.Replace(line, "images import", "images import --snapshotter native", 1))
	if err != nil || !slices.Contains(shellLines(readFile(t, "../README.md")), line) {
		t.Fatalf("%s, as in README.md: %v\n%s", line, err, out)
	}
	out, err = node("ctr --namespace k8s.io images list --quiet")
	must(t, err)
	if image := strings.TrimSpace(out); image == "" || !strings.Contains(run(t, "make -s manifest"), "image: "+image) {
		t.Errorf("make install names another image than %q", image)
	}
}
