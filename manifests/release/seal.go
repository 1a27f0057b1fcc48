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

type object = map[string]any

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
	// A statement of in-toto, v1, with SLSA's provenance, v1, as the predicate.
	of := func(name, hex string) object { return object{"name": name, "digest": object{"sha256": hex}} }
	subjects := []object{of(r.image, strings.TrimPrefix(digest, "sha256:"))}
	var sums strings.Builder
	for _, f := range files {
		hex := strings.TrimPrefix(sum(f.data), "sha256:")
		subjects = append(subjects, of(f.name, hex))
		fmt.Fprintf(&sums, "%s  %s\n", hex, f.name)
	}
	dependencies := []object{
		{"name": "source", "uri": r.source, "digest": object{"gitCommit": r.commit}},
		{"name": "go", "annotations": object{"version": info.GoVersion}},
	}
	for _, m := range info.Deps {
		if m.Replace != nil {
			m = m.Replace
		}
		purl := "pkg:golang/" + m.Path + "@" + strings.ReplaceAll(m.Version, "+", "%2B")
		dependencies = append(dependencies, object{"uri": purl, "annotations": object{"go:sum": m.Sum}})
	}
	text, err := json.MarshalIndent(object{
		"_type": "https://in-toto.io/Statement/v1", "subject": subjects,
		"predicateType": "https://slsa.dev/provenance/v1",
		"predicate": object{
			"buildDefinition": object{
				"buildType": "urn:nft-masq-agent:make-release",
				"externalParameters": object{"command": fmt.Sprintf(
					"GOTOOLCHAIN=%s make release VERSION=%s IMAGE=%s SOURCE=%s", info.GoVersion, r.version, r.image, r.source)},
				"resolvedDependencies": dependencies,
			},
			"runDetails": object{"builder": object{"id": "urn:nft-masq-agent:unsigned"}},
		},
	}, "", "  ")
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
