package main

import (
	_ "crypto/sha256" // digest looks it up
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	spec "github.com/opencontainers/image-spec/specs-go/v1"
)

// version2 is that of the schemas.
var version2 = specs.Versioned{SchemaVersion: 2}

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
	all := spec.Index{Versioned: version2, MediaType: spec.MediaTypeImageIndex, Annotations: labels}
	for _, context := range contexts {
		arch, dir, _ := strings.Cut(context, "=")
		p := spec.Platform{Architecture: arch, OS: "linux"}
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
	image, err := r.blob(spec.MediaTypeImageIndex, all)
	if err != nil {
		return "", err
	}
	digest := image.Digest.String()
	// containerd imports the image under its whole name, which the first of these cannot hold.
	image.Annotations = map[string]string{
		spec.AnnotationRefName: r.version, "io.containerd.image.name": r.image + ":" + r.version,
	}
	top, err := json.Marshal(spec.Index{
		Versioned: version2, MediaType: spec.MediaTypeImageIndex, Manifests: []spec.Descriptor{image},
	})
	if err != nil {
		return "", err
	}
	if err := os.WriteFile(filepath.Join(r.dist, "image/index.json"), top, 0o644); err != nil {
		return "", err
	}
	return digest, os.WriteFile(filepath.Join(r.dist, "image/oci-layout"), []byte(`{"imageLayoutVersion":"1.0.0"}`), 0o644)
}

func (r release) writePlatform(p spec.Platform, dir string, labels map[string]string) (d spec.Descriptor, err error) {
	files, err := tree(dir, "")
	if err != nil {
		return d, err
	}
	content, err := pack(files, r.time)
	if err != nil {
		return d, err
	}
	layer, err := r.write(spec.MediaTypeImageLayerGzip, compress(content))
	if err != nil {
		return d, err
	}
	config, err := r.blob(spec.MediaTypeImageConfig, spec.Image{
		Created: &r.time, Platform: p, History: []spec.History{{Created: &r.time, CreatedBy: "COPY . /"}},
		Config: spec.ImageConfig{User: "0:0", Entrypoint: []string{"/nft-masq-agent"}, Labels: labels},
		RootFS: spec.RootFS{Type: "layers", DiffIDs: []digest.Digest{digest.FromBytes(content)}},
	})
	if err != nil {
		return d, err
	}
	return r.blob(spec.MediaTypeImageManifest, spec.Manifest{
		Versioned: version2, MediaType: spec.MediaTypeImageManifest, Config: config,
		Layers: []spec.Descriptor{layer}, Annotations: labels,
	})
}

// blob writes a value as JSON.
func (r release) blob(mediaType string, value any) (spec.Descriptor, error) {
	text, err := json.Marshal(value)
	if err != nil {
		return spec.Descriptor{}, err
	}
	return r.write(mediaType, text)
}

func (r release) write(mediaType string, data []byte) (spec.Descriptor, error) {
	d := spec.Descriptor{MediaType: mediaType, Digest: digest.FromBytes(data), Size: int64(len(data))}
	dir := filepath.Join(r.dist, "image/blobs/sha256")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return d, err
	}
	return d, os.WriteFile(filepath.Join(dir, d.Digest.Encoded()), data, 0o644)
}

func sum(data []byte) string { return digest.FromBytes(data).String() }
