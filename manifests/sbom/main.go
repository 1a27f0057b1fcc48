// Sbom prints a CycloneDX bill of materials for a Go program: the modules that
// the linker recorded in it, as go version -m lists them. The output is
// reproducible.
//
//	go run ./manifests/sbom VERSION PROGRAM
package main

import (
	"debug/buildinfo"
	"encoding/json"
	"fmt"
	"os"
	"runtime/debug"
	"strings"
)

type object = map[string]any

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: sbom VERSION PROGRAM")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, "sbom:", err)
		os.Exit(1)
	}
}

func run(version, program string) error {
	info, err := buildinfo.ReadFile(program)
	if err != nil {
		return err
	}
	components := []object{module("library",
		debug.Module{Path: "std", Version: strings.TrimPrefix(info.GoVersion, "go")})}
	for _, m := range info.Deps {
		if m.Replace != nil {
			m = m.Replace
		}
		components = append(components, module("library", *m))
	}
	e := json.NewEncoder(os.Stdout)
	e.SetIndent("", "  ")
	return e.Encode(object{
		"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "components": components,
		"metadata": object{"component": module("application", debug.Module{Path: info.Main.Path, Version: version})},
	})
}

// module returns the component for a module.
func module(kind string, m debug.Module) object {
	purl := "pkg:golang/" + m.Path + "@" + strings.ReplaceAll(m.Version, "+", "%2B")
	c := object{"type": kind, "bom-ref": purl, "name": m.Path, "version": m.Version, "purl": purl}
	if m.Sum != "" {
		c["properties"] = []object{{"name": "go:sum", "value": m.Sum}}
	}
	return c
}
