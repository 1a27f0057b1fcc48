package manifests_test

import (
	"encoding/json"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// releaseFile reads the files below a directory.
func releaseFiles(t *testing.T, dir string) map[string][]byte {
	t.Helper()
	all := map[string][]byte{}
	err := fs.WalkDir(os.DirFS(dir), ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		all[name], err = os.ReadFile(filepath.Join(dir, name))
		return err
	})
	must(t, err)
	return all
}

// cloned runs commands of a document in a clone of the last commit.
func cloned(t *testing.T, env []string, lines ...string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "clone")
	run(t, "git clone -q --no-hardlinks . "+dir)
	for _, line := range lines {
		run(t, "cd "+dir+"; "+line, append(env, "KUSTOMIZE="+filepath.Join(tools(t), "kustomize"))...)
	}
	return dir
}

// The command that writes a release is the one of CONTRIBUTING.md, and what verifies it,
// which writes it again in another directory, is in SECURITY.md.
func TestReleaseIsReproducibleAndVerifiable(t *testing.T) {
	if os.Getenv("RELEASE_TEST") != "1" {
		t.Skip("builds all architectures twice: make release-test")
	}
	write := slices.DeleteFunc(commands(t, "../.github/CONTRIBUTING.md", "Release"), func(line string) bool {
		return !strings.HasPrefix(line, "make release ")
	})
	verify := commands(t, "../.github/SECURITY.md", "Verify a release")
	if len(write) != 1 || len(verify) < 3 {
		t.Fatalf("%q, %q", write, verify)
	}
	dist := filepath.Join(cloned(t, nil, write...), "dist")
	files := releaseFiles(t, dist)
	again := releaseFiles(t, filepath.Join(cloned(t, []string{"RELEASE=" + dist}, verify...), "dist"))
	if diff := cmp.Diff(files, again); diff != "" {
		t.Errorf("-first +second:\n%s", diff)
	}
	t.Log(slices.Sorted(maps.Keys(files)))

	var layout struct{ Manifests []struct{ Digest string } }
	must(t, json.Unmarshal(files["image/index.json"], &layout))
	image := "registry.example/nft-masq-agent@" + layout.Manifests[0].Digest
	manifests := 0
	for name, text := range files {
		if strings.HasPrefix(name, "manifests/") {
			manifests++
			for _, m := range regexp.MustCompile(`image: (.*)`).FindAllSubmatch(text, -1) {
				if string(m[1]) != image {
					t.Errorf("%s has the image %s, not %s", name, m[1], image)
				}
			}
		}
	}
	if manifests < 8 {
		t.Errorf("%d manifests of the release have an image, want at least 8", manifests)
	}
	wantProvenance(t, files)

	helm := filepath.Join(tools(t), "helm")
	chart := objects(t, run(t, helm+" template any "+filepath.Join(dist, "nft-masq-agent-1.0.0.tgz")))
	got := at(chart["DaemonSet nft-masq-agent"], "spec.template.spec.containers.0.image")
	if got != strings.Replace(image, "@", ":v1.0.0@", 1) {
		t.Errorf("the chart has the image %v", got)
	}
}

// wantProvenance compares the subjects of the provenance with the files.
func wantProvenance(t *testing.T, files map[string][]byte) {
	t.Helper()
	var s struct {
		Type    string `json:"_type"`
		Subject []struct{ Name string }
	}
	must(t, json.Unmarshal(files["provenance.json"], &s))
	if s.Type != "https://in-toto.io/Statement/v1" {
		t.Errorf("the provenance is a %q, want a statement of in-toto", s.Type)
	}
	got := []string{"SHA256SUMS", "provenance.json"}
	for _, subject := range s.Subject {
		if subject.Name != "registry.example/nft-masq-agent" {
			got = append(got, subject.Name)
		}
	}
	slices.Sort(got)
	if diff := cmp.Diff(slices.Sorted(maps.Keys(files)), got); diff != "" {
		t.Errorf("subjects (-files +provenance):\n%s", diff)
	}
	for _, arch := range []string{"amd64", "arm", "arm64", "ppc64le", "s390x"} {
		for _, name := range []string{"nft-masq-agent-linux-" + arch, "nft-masq-agent-linux-" + arch + ".cdx.json"} {
			if files[name] == nil {
				t.Errorf("no file %s", name)
			}
		}
	}
}
