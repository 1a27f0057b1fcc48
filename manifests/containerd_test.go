package manifests_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
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

// The commands of the section, without the build of all architectures: what make release calls writes the image.
func TestImageOfAReleaseIsImportedFromADirectory(t *testing.T) {
	programs := os.Getenv("CONTAINERD")
	if programs == "" {
		t.Skip("runs containerd: make container-test")
	}
	dir, err := os.MkdirTemp("", "containerd-") //nolint:usetesting // the name of a socket has room for 107 characters
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	config := filepath.Join(dir, "config.toml")
	content := t.TempDir()
	writeFile(t, config, fmt.Sprintf(containerdConfig, dir))
	writeFile(t, filepath.Join(content, "nft-masq-agent"), "program")
	must(t, os.Mkdir(filepath.Join(dir, "bin"), 0o700))
	server := exec.CommandContext(t.Context(), filepath.Join(programs, "containerd"), "--config", config)
	must(t, server.Start())
	defer func() {
		_ = server.Process.Kill()
		_ = server.Wait()
	}()
	digest := run(t, "go run ./manifests/release -dist "+filepath.Join(dir, "dist")+" -version v1.0.0 -image "+
		"registry.example/nft-masq-agent image amd64="+content+" arm64="+content)
	ctr := filepath.Join(programs, "ctr") + " --address " + filepath.Join(dir, "containerd.sock") + " "
	run := func(line string) (string, error) { return try(t, "cd "+dir+"; "+strings.Replace(line, "ctr ", ctr, 1)) }
	for { // until the server listens, or the test times out
		if _, err := run("ctr version"); err == nil {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	lines := 0
	for _, line := range commands(t, "README.md", "Without a registry") {
		if strings.HasPrefix(line, "make ") {
			continue
		}
		lines++
		// Not mounted, so that a file system of any kind will do.
		line = strings.Replace(line, "images import", "images import --snapshotter native", 1)
		if out, err := run(line); err != nil {
			t.Fatalf("%s: %v\n%s", line, err, out)
		}
	}
	out, err := run("ctr --namespace k8s.io images list")
	want := "registry.example/nft-masq-agent:v1.0.0 application/vnd.oci.image.index.v1+json " +
		strings.TrimSpace(digest)
	if err != nil || lines != 2 || !strings.Contains(strings.Join(strings.Fields(out), " "), want) {
		t.Errorf("%d lines, %v, want %q in\n%s", lines, err, want, out)
	}
}
