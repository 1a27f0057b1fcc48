package main

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// Media types of the OCI image specification, 1.1.
const (
	typeIndex    = "application/vnd.oci.image.index.v1+json"
	typeManifest = "application/vnd.oci.image.manifest.v1+json"
	typeConfig   = "application/vnd.oci.image.config.v1+json"
	typeLayer    = "application/vnd.oci.image.layer.v1.tar+gzip"
)

type descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int               `json:"size"`
	Platform    *platform         `json:"platform,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

type platform struct {
	Architecture string `json:"architecture"`
	OS           string `json:"os"`
	Variant      string `json:"variant,omitempty"`
}

type index struct {
	SchemaVersion int               `json:"schemaVersion"`
	MediaType     string            `json:"mediaType"`
	Manifests     []descriptor      `json:"manifests"`
	Annotations   map[string]string `json:"annotations,omitempty"`
}

type manifest struct {
	SchemaVersion int               `json:"schemaVersion"`
	MediaType     string            `json:"mediaType"`
	Config        descriptor        `json:"config"`
	Layers        []descriptor      `json:"layers"`
	Annotations   map[string]string `json:"annotations,omitempty"`
}

type imageConfig struct {
	Created time.Time `json:"created"`
	platform
	Config struct {
		User       string
		Entrypoint []string
		Labels     map[string]string
	} `json:"config"`
	RootFS struct {
		Type    string   `json:"type"`
		DiffIDs []string `json:"diff_ids"`
	} `json:"rootfs"`
	History []history `json:"history"`
}

type history struct {
	Created   time.Time `json:"created"`
	CreatedBy string    `json:"created_by"`
}

// writeImage writes the layout of an image for several architectures, whose content
// is that of the directories: what the Dockerfile makes of them.
func (r release) writeImage(contexts []string) (string, error) {
	labels := map[string]string{}
	for name, value := range map[string]string{
		"title": "nft-masq-agent", "licenses": "Apache-2.0", "version": r.version, "revision": r.commit,
		"created": r.time.Format(time.RFC3339), "source": r.source,
	} {
		if value != "" {
			labels["org.opencontainers.image."+name] = value
		}
	}
	all := index{SchemaVersion: 2, MediaType: typeIndex, Annotations: labels}
	for _, context := range contexts {
		arch, dir, _ := strings.Cut(context, "=")
		p := platform{Architecture: arch, OS: "linux"}
		if arch == "arm" {
			p.Variant = "v7" // GOARM's default
		}
		one, err := r.writePlatform(p, dir, labels)
		if err != nil {
			return "", fmt.Errorf("%s: %w", arch, err)
		}
		one.Platform = &p
		all.Manifests = append(all.Manifests, one)
	}
	image, err := r.blob(typeIndex, all)
	if err != nil {
		return "", err
	}
	digest := image.Digest
	// containerd imports the image under its whole name, which the first of these cannot hold.
	image.Annotations = map[string]string{
		"org.opencontainers.image.ref.name": r.version, "io.containerd.image.name": r.image + ":" + r.version,
	}
	top, err := json.Marshal(index{SchemaVersion: 2, MediaType: typeIndex, Manifests: []descriptor{image}})
	if err != nil {
		return "", err
	}
	if err := os.WriteFile(filepath.Join(r.dist, "image/index.json"), top, 0o644); err != nil {
		return "", err
	}
	return digest, os.WriteFile(filepath.Join(r.dist, "image/oci-layout"), []byte(`{"imageLayoutVersion":"1.0.0"}`), 0o644)
}

func (r release) writePlatform(p platform, dir string, labels map[string]string) (descriptor, error) {
	files, err := tree(dir, "")
	if err != nil {
		return descriptor{}, err
	}
	content, err := pack(files, r.time)
	if err != nil {
		return descriptor{}, err
	}
	c := imageConfig{Created: r.time, platform: p, History: []history{{r.time, "COPY . /"}}}
	c.Config.User, c.Config.Entrypoint, c.Config.Labels = "0:0", []string{"/nft-masq-agent"}, labels
	c.RootFS.Type, c.RootFS.DiffIDs = "layers", []string{sum(content)}
	layer, err := r.write(typeLayer, compress(content))
	if err != nil {
		return descriptor{}, err
	}
	config, err := r.blob(typeConfig, c)
	if err != nil {
		return descriptor{}, err
	}
	return r.blob(typeManifest, manifest{
		SchemaVersion: 2, MediaType: typeManifest, Config: config, Layers: []descriptor{layer}, Annotations: labels,
	})
}

// blob writes a value as JSON.
func (r release) blob(mediaType string, value any) (descriptor, error) {
	text, err := json.Marshal(value)
	if err != nil {
		return descriptor{}, err
	}
	return r.write(mediaType, text)
}

func (r release) write(mediaType string, data []byte) (descriptor, error) {
	d := descriptor{MediaType: mediaType, Digest: sum(data), Size: len(data)}
	dir := filepath.Join(r.dist, "image/blobs/sha256")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return d, err
	}
	return d, os.WriteFile(filepath.Join(dir, strings.TrimPrefix(d.Digest, "sha256:")), data, 0o644)
}

func sum(data []byte) string {
	s := sha256.Sum256(data)
	return "sha256:" + hex.EncodeToString(s[:])
}
