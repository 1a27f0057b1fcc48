// Release writes the files of a release that other programs do not: the image of all
// architectures, the chart, and what is known about all files. Each has the same bytes
// whenever and wherever it is written: modes, owners, times and order are fixed.
//
//	release [flags] image ARCH=DIRECTORY…   DIST/image, an OCI image layout; prints its digest
//	release [flags] chart DIRECTORY         the chart, with the image by digest
//	release [flags] seal PROGRAM            DIST/provenance.json and DIST/SHA256SUMS
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"
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
	if len(args) < 2 {
		return errors.New("usage: release [flags] image ARCH=DIRECTORY… | chart DIRECTORY | seal PROGRAM")
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
	var i index
	if err := json.Unmarshal(text, &i); err != nil {
		return "", err
	}
	if len(i.Manifests) != 1 {
		return "", fmt.Errorf("%d images", len(i.Manifests))
	}
	return i.Manifests[0].Digest, nil
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
		for ; len(edits) > 0; edits = edits[2:] {
			if !strings.Contains(string(f.data), edits[0]) {
				return fmt.Errorf("%s has no line %q", f.name, strings.TrimSpace(edits[0]))
			}
			f.data = []byte(strings.Replace(string(f.data), edits[0], edits[1], 1))
		}
		files[i] = f
	}
	archive, err := pack(files, r.time)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(r.dist, "nft-masq-agent-"+version+".tgz"), compress(archive), 0o644)
}
