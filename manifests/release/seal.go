package main

import (
	"debug/buildinfo"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

const provenanceFile = "provenance.json"

// A statement is in-toto's, v1, with SLSA's provenance, v1, as the predicate.
type statement struct {
	Type          string    `json:"_type"`
	Subject       []subject `json:"subject"`
	PredicateType string    `json:"predicateType"`
	Predicate     struct {
		BuildDefinition struct {
			BuildType            string            `json:"buildType"`
			ExternalParameters   map[string]string `json:"externalParameters"`
			ResolvedDependencies []resource        `json:"resolvedDependencies"`
		} `json:"buildDefinition"`
		RunDetails struct {
			Builder struct {
				ID string `json:"id"`
			} `json:"builder"`
		} `json:"runDetails"`
	} `json:"predicate"`
}

type subject struct {
	Name   string            `json:"name"`
	Digest map[string]string `json:"digest"`
}

type resource struct {
	URI         string            `json:"uri,omitempty"`
	Name        string            `json:"name,omitempty"`
	Digest      map[string]string `json:"digest,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

// seal writes which source and which Go the files have, with the command that makes
// them again, and the checksums of all files.
func (r release) seal(program string) error {
	info, err := buildinfo.ReadFile(program)
	if err != nil {
		return err
	}
	files, err := tree(r.dist, "")
	if err != nil {
		return err
	}
	digest, err := r.digest()
	if err != nil {
		return err
	}
	var s statement
	s.Type, s.PredicateType = "https://in-toto.io/Statement/v1", "https://slsa.dev/provenance/v1"
	s.Subject = []subject{{r.image, map[string]string{"sha256": strings.TrimPrefix(digest, "sha256:")}}}
	var sums strings.Builder
	for _, f := range files {
		hex := strings.TrimPrefix(sum(f.data), "sha256:")
		s.Subject = append(s.Subject, subject{f.name, map[string]string{"sha256": hex}})
		fmt.Fprintf(&sums, "%s  %s\n", hex, f.name)
	}
	build := &s.Predicate.BuildDefinition
	build.BuildType = "urn:nft-masq-agent:make-release"
	build.ExternalParameters = map[string]string{
		"command": fmt.Sprintf("GOTOOLCHAIN=%s make release VERSION=%s IMAGE=%s SOURCE=%s", info.GoVersion, r.version,
			r.image,
			r.source),
	}
	build.ResolvedDependencies = []resource{
		{Name: "source", URI: r.source, Digest: map[string]string{"gitCommit": r.commit}},
		{Name: "go", Annotations: map[string]string{"version": info.GoVersion}},
	}
	for _, m := range info.Deps {
		if m.Replace != nil {
			m = m.Replace
		}
		build.ResolvedDependencies = append(build.ResolvedDependencies, resource{
			URI:         "pkg:golang/" + m.Path + "@" + strings.ReplaceAll(m.Version, "+", "%2B"),
			Annotations: map[string]string{"go:sum": m.Sum},
		})
	}
	s.Predicate.RunDetails.Builder.ID = "urn:nft-masq-agent:unsigned"
	text, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return err
	}
	text = append(text, '\n')
	if err := os.WriteFile(filepath.Join(r.dist, provenanceFile), text, 0o644); err != nil {
		return err
	}
	fmt.Fprintf(&sums, "%s  %s\n", strings.TrimPrefix(sum(text), "sha256:"), provenanceFile)
	return os.WriteFile(filepath.Join(r.dist, "SHA256SUMS"), []byte(sums.String()), 0o644)
}
