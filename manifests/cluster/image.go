package cluster

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"testing"
)

// An Image is what a test makes of programs of the machine.
type Image struct {
	Names      []string
	Files      map[string]string // path in the image to path here
	Entrypoint []string
	Cmd        []string
	Env        []string
}

// AddProgram adds a program with the libraries that it is linked to.
func (i *Image) AddProgram(t testing.TB, path, from string) {
	t.Helper()
	i.Files[path] = from
	out, err := exec.Command("ldd", from).Output()
	if err != nil {
		t.Fatalf("ldd %s: %v", from, err)
	}
	for _, m := range regexp.MustCompile(`(/\S+) \(0x`).FindAllSubmatch(out, -1) {
		i.Files[string(m[1])] = string(m[1])
	}
}

// Archive writes the image as docker save does.
func (i *Image) Archive(t testing.TB, file string) {
	t.Helper()
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	add := func(w *tar.Writer, name string, mode int64, content []byte) {
		t.Helper()
		must(w.WriteHeader(&tar.Header{Name: name, Mode: mode, Size: int64(len(content)), Typeflag: tar.TypeReg}))
		_, err := w.Write(content)
		must(err)
	}
	must(w.WriteHeader(&tar.Header{Name: "tmp/", Mode: 0o1777, Typeflag: tar.TypeDir}))
	for path, from := range i.Files {
		content, err := os.ReadFile(from)
		must(err)
		add(w, path[1:], 0o755, content)
	}
	must(w.Close())
	config, err := json.Marshal(map[string]any{
		"architecture": runtime.GOARCH, "os": "linux",
		"config": map[string]any{
			"Entrypoint": i.Entrypoint, "Cmd": i.Cmd,
			"Env": append([]string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin:/"}, i.Env...),
		},
		"rootfs": map[string]any{
			"type":     "layers",
			"diff_ids": []string{fmt.Sprintf("sha256:%x", sha256.Sum256(layer.Bytes()))},
		},
	})
	must(err)
	manifest, err := json.Marshal([]map[string]any{{
		"Config": "config.json", "RepoTags": i.Names,
		"Layers": []string{"layer.tar"},
	}})
	must(err)
	must(os.MkdirAll(filepath.Dir(file), 0o755))
	out, err := os.Create(file)
	must(err)
	archive := tar.NewWriter(out)
	add(archive, "manifest.json", 0o644, manifest)
	add(archive, "config.json", 0o644, config)
	add(archive, "layer.tar", 0o644, layer.Bytes())
	must(archive.Close())
	must(out.Close())
}
