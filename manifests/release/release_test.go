package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/go-digest"
	spec "github.com/opencontainers/image-spec/specs-go/v1"
	"sigs.k8s.io/yaml"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// unpacked returns what was compressed.
func unpacked(t *testing.T, packed string) []byte {
	t.Helper()
	r, err := gzip.NewReader(strings.NewReader(packed))
	must(t, err)
	text, err := io.ReadAll(r)
	must(t, err)
	return text
}

// write writes files that are as old as the test, with the modes of a umask.
func write(t *testing.T, umask os.FileMode, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		path := filepath.Join(dir, name)
		must(t, os.MkdirAll(filepath.Dir(path), 0o777&^umask))
		mode := os.FileMode(0o666)
		if filepath.Base(name) == "nft-masq-agent" {
			mode = 0o777
		}
		must(t, os.WriteFile(path, []byte(text), mode&^umask))
	}
	return dir
}

// read returns the files below a directory.
func read(t *testing.T, dir string) map[string]string {
	t.Helper()
	all := map[string]string{}
	must(t, filepath.WalkDir(dir, func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		data, err := os.ReadFile(name)
		all[strings.TrimPrefix(name, dir+"/")] = string(data)
		return err
	}))
	return all
}

func make1(t *testing.T, umask os.FileMode) (string, release) {
	t.Helper()
	r := release{
		dist: t.TempDir(), version: "v1.2.3", commit: strings.Repeat("a", 40), image: "registry.example/nft-masq-agent",
		source: "https://git.example/nft-masq-agent", time: time.Unix(1700000000, 0).UTC(),
	}
	content := func(arch string) string {
		return arch + "=" + write(t, umask, map[string]string{
			"nft-masq-agent": "program for " + arch, "sbom.cdx.json": "{}", "licenses/go/LICENSE": "licence",
		})
	}
	digest, err := r.writeImage([]string{content("amd64"), content("arm")})
	must(t, err)
	chart := write(t, umask, map[string]string{
		"Chart.yaml":  "name: nft-masq-agent\nversion: 1.0.0\nappVersion: v1.0.0\n",
		"values.yaml": "image:\n  # comment\n  repository: nft-masq-agent\n  tag: \"\"\n",
	})
	must(t, r.writeChart(chart))
	return digest, r
}

func TestFilesHaveTheSameBytesWhereverTheyAreWritten(t *testing.T) {
	firstDigest, first := make1(t, 0o022)
	secondDigest, second := make1(t, 0o077)
	if diff := cmp.Diff(read(t, first.dist), read(t, second.dist)); diff != "" || firstDigest != secondDigest {
		t.Errorf("%s and %s:\n%s", firstDigest, secondDigest, diff)
	}
}

func TestImageIsALayoutWithTheContentOfEachArchitecture(t *testing.T) {
	want, r := make1(t, 0o022)
	files := read(t, filepath.Join(r.dist, "image"))
	if files["oci-layout"] != `{"imageLayoutVersion":"1.0.0"}` {
		t.Errorf("oci-layout: %s", files["oci-layout"])
	}
	get := func(d spec.Descriptor) string {
		text := files["blobs/sha256/"+d.Digest.Encoded()]
		if d.Digest != digest.FromString(text) || int64(len(text)) != d.Size {
			t.Errorf("%+v is\n%s", d, text)
		}
		return text
	}
	decode := func(text string, into any) { must(t, json.Unmarshal([]byte(text), into)) }
	var top, all spec.Index
	decode(files["index.json"], &top)
	if len(top.Manifests) != 1 || top.Manifests[0].Digest.String() != want ||
		top.Manifests[0].Annotations["org.opencontainers.image.ref.name"] != "v1.2.3" ||
		top.Manifests[0].Annotations["io.containerd.image.name"] != "registry.example/nft-masq-agent:v1.2.3" {
		t.Errorf("index.json: %+v", top)
	}
	decode(get(top.Manifests[0]), &all)
	blobs := 1
	for i, arch := range []string{"amd64", "arm"} {
		d := all.Manifests[i]
		var m spec.Manifest
		var c spec.Image
		decode(get(d), &m)
		decode(get(m.Config), &c)
		platform := spec.Platform{Architecture: arch, OS: "linux", Variant: map[string]string{"arm": "v7"}[arch]}
		if !cmp.Equal(*d.Platform, platform) || !cmp.Equal(c.Platform, platform) {
			t.Errorf("platform %+v, in the config %+v, want %+v", *d.Platform, c.Platform, platform)
		}
		if strings.Join(append(c.Config.Entrypoint, c.Config.User), " ") != "/nft-masq-agent 0:0" ||
			c.Config.Labels["org.opencontainers.image.version"] != "v1.2.3" {
			t.Errorf("config %+v", c.Config)
		}
		layer := unpacked(t, get(m.Layers[0]))
		if c.RootFS.DiffIDs[0] != digest.FromBytes(layer) {
			t.Fatalf("the layer is not %v", c.RootFS.DiffIDs)
		}
		wantContent := "-rwxr-xr-x nft-masq-agent, drwxr-xr-x licenses/, drwxr-xr-x licenses/go/, -rw-r--r-- " +
			"licenses/go/LICENSE"
		for _, name := range strings.Split(wantContent, ", ") {
			if list := listing(t, layer); !strings.Contains(list, name+"\n") {
				t.Errorf("no %q in\n%s", name, list)
			}
		}
		blobs += 3
	}
	if len(files) != 2+blobs {
		t.Errorf("%d files, want %d blobs", len(files), blobs)
	}
}

// listing lists an archive.
func listing(t *testing.T, archive []byte) string {
	t.Helper()
	var out strings.Builder
	for r := tar.NewReader(bytes.NewReader(archive)); ; {
		h, err := r.Next()
		if err == io.EOF {
			return out.String()
		}
		must(t, err)
		if h.Uid != 0 || h.Gid != 0 || !h.ModTime.Equal(time.Unix(1700000000, 0)) {
			t.Errorf("%s: owner %d:%d, %s", h.Name, h.Uid, h.Gid, h.ModTime)
		}
		fmt.Fprintln(&out, h.FileInfo().Mode(), h.Name)
	}
}

func TestChartHasTheVersionAndTheImageByDigest(t *testing.T) {
	digest, r := make1(t, 0o022)
	archive := unpacked(t, read(t, r.dist)["nft-masq-agent-1.2.3.tgz"])
	for _, want := range []string{
		"\nversion: 1.2.3\nappVersion: v1.2.3\n",
		"\n  repository: registry.example/nft-masq-agent\n  tag: v1.2.3@" + digest + "\n",
	} {
		if !bytes.Contains(archive, []byte(want)) {
			t.Errorf("no %q in\n%s", want, archive)
		}
	}
}

// The files that the chart has must have the lines that are replaced.
func TestChartOfTheRepositoryCanBeWritten(t *testing.T) {
	_, r := make1(t, 0o022)
	must(t, r.writeChart("../helm"))
}

func TestPluginHasItsChecksumAndAddressInTheManifestForKrew(t *testing.T) {
	_, r := make1(t, 0o022)
	must(t, r.writePlugin("../kubectl-masq", "../../LICENSE"))
	files := read(t, r.dist)
	archive := unpacked(t, files["kubectl-masq.tar.gz"])
	if diff := cmp.Diff("-rw-r--r-- LICENSE\n-rwxr-xr-x kubectl-masq\n", listing(t, archive)); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	var got, want struct {
		Spec struct {
			Version, Homepage string
			Platforms         []struct{ URI, Sha256, Bin string }
		}
	}
	want.Spec.Version, want.Spec.Homepage = "v1.2.3", "https://git.example/nft-masq-agent"
	want.Spec.Platforms = append(want.Spec.Platforms, struct{ URI, Sha256, Bin string }{
		"https://git.example/nft-masq-agent/releases/download/v1.2.3/kubectl-masq.tar.gz",
		strings.TrimPrefix(sum([]byte(files["kubectl-masq.tar.gz"])), "sha256:"), "kubectl-masq",
	})
	must(t, yaml.Unmarshal([]byte(files["krew.yaml"]), &got))
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}

	r.source, r.dist = "", t.TempDir()
	must(t, r.writePlugin("../kubectl-masq", "../../LICENSE"))
	if files := read(t, r.dist); len(files) != 1 {
		t.Errorf("without an address: %v", files)
	}
}

// digest finds the hash in what the program links; a test links more.
func TestHashOfDigestsIsLinked(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", ".").Output()
	if err != nil || !strings.Contains(string(out), "\ncrypto/sha256\n") {
		t.Errorf("crypto/sha256 is not linked: %v", err)
	}
}
