// Release writes the files of a release that other programs do not: the image of all
// architectures, the chart, and what is known about all files. Each has the same bytes
// whenever and wherever it is written: modes, owners, times and order are fixed.
//
//	release [flags] image ARCH=DIRECTORY…   DIST/image, an OCI image layout; prints its digest
//	release [flags] chart DIRECTORY         the chart, with the image by digest
//	release [flags] plugin FILE LICENSE     the plugin of kubectl as an archive, and with a source a manifest for krew
//	release [flags] seal PROGRAM            DIST/provenance.json and DIST/SHA256SUMS
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	spec "github.com/opencontainers/image-spec/specs-go/v1"
)

// A release is what all of its files agree about.
type release struct {
	dist, version, commit, source, image string
	time                                 time.Time // of the commit
}

func main() {
	var r release
	var created int64
	flag.StringVar(&r.dist, "dist", "dist", "the directory to write")
	flag.StringVar(&r.version, "version", "", "of the release, such as v1.0.0")
	flag.StringVar(&r.commit, "commit", "", "of the source")
	flag.StringVar(&r.source, "source", "", "URL of the source")
	flag.StringVar(&r.image, "image", "nft-masq-agent", "name of the image, with its registry")
	flag.Int64Var(&created, "time", 0, "of the commit, in seconds since 1970")
	flag.Parse()
	r.time = time.Unix(created, 0).UTC()
	if err := r.run(flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

func (r release) run(args []string) error {
	if len(args) < 2 || args[0] == "plugin" && len(args) != 3 {
		return errors.New("usage: release [flags] image ARCH=DIRECTORY… | chart DIRECTORY | plugin FILE LICENSE | " +
			"seal PROGRAM")
	}
	switch args[0] {
	case "image":
		digest, err := r.writeImage(args[1:])
		if err == nil {
			fmt.Println(digest)
		}
		return err
	case "chart":
		return r.writeChart(args[1])
	case "plugin":
		return r.writePlugin(args[1], args[2])
	case "seal":
		return r.seal(args[1])
	}
	return fmt.Errorf("unknown part %q", args[0])
}

// digest returns the digest of the image that writeImage wrote.
func (r release) digest() (string, error) {
	text, err := os.ReadFile(filepath.Join(r.dist, "image/index.json"))
	if err != nil {
		return "", err
	}
	var i spec.Index
	if err := json.Unmarshal(text, &i); err != nil {
		return "", err
	}
	if len(i.Manifests) != 1 {
		return "", fmt.Errorf("%d images", len(i.Manifests))
	}
	return i.Manifests[0].Digest.String(), nil
}

// writeChart writes the chart of a directory as helm package does, but for the times
// in the archive.
func (r release) writeChart(dir string) error {
	digest, err := r.digest()
	if err != nil {
		return err
	}
	version := strings.TrimPrefix(r.version, "v")
	files, err := tree(dir, "nft-masq-agent/")
	if err != nil {
		return err
	}
	for i, f := range files {
		var edits []string
		switch f.name {
		case "nft-masq-agent/Chart.yaml":
			edits = []string{"\nversion: 1.0.0\n", "\nversion: " + version + "\n", "\nappVersion: v1.0.0\n", "\nappVersion: " +
				r.version + "\n"}
		case "nft-masq-agent/values.yaml":
			edits = []string{
				"\n  repository: nft-masq-agent\n", "\n  repository: " + r.image + "\n", "\n  tag: \"\"\n",
				"\n  tag: " + r.version + "@" + digest + "\n",
			}
		}
		if f.data, err = edit(f.name, f.data, edits...); err != nil {
			return err
		}
		files[i] = f
	}
	archive, err := pack(files, r.time)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(r.dist, "nft-masq-agent-"+version+".tgz"), compress(archive), 0o644)
}

// edit replaces texts of a file, each followed by what it becomes.
func edit(name string, data []byte, edits ...string) ([]byte, error) {
	for texts := range slices.Chunk(edits, 2) {
		if !bytes.Contains(data, []byte(texts[0])) {
			return nil, fmt.Errorf("%s has no %q", name, strings.TrimSpace(texts[0]))
		}
		data = bytes.ReplaceAll(data, []byte(texts[0]), []byte(texts[1]))
	}
	return data, nil
}

// writePlugin writes the archive of the plugin, and the manifest next to it with the archive's
// address at a source like GitHub's and its checksum.
func (r release) writePlugin(program, license string) error {
	files := []file{{name: "LICENSE", mode: 0o644}, {name: filepath.Base(program), mode: 0o755}}
	for i, name := range []string{license, program} {
		var err error
		if files[i].data, err = os.ReadFile(name); err != nil {
			return err
		}
	}
	archive, err := pack(files, r.time)
	if err != nil {
		return err
	}
	archive = compress(archive)
	err = os.WriteFile(filepath.Join(r.dist, "kubectl-masq.tar.gz"), archive, 0o644)
	if err != nil || r.source == "" {
		return err
	}
	const name = "krew.yaml"
	manifest, err := os.ReadFile(filepath.Join(filepath.Dir(program), name))
	if err != nil {
		return err
	}
	comment, _, _ := strings.Cut(string(manifest), "\n")
	manifest, err = edit(name, manifest, comment+"\n", "", "https://git.example/nft-masq-agent", r.source,
		"v1.0.0", r.version, strings.Repeat("0", 64), strings.TrimPrefix(sum(archive), "sha256:"))
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(r.dist, name), manifest, 0o644)
}
