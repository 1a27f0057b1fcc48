package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"

	"nft-masq-agent/nft/nfttest"
)

const module = "nft-masq-agent"

// A goPackage is the output of go list for a package of ours.
type goPackage struct {
	ImportPath string
	Imports    []string // without those of tests
	Deps       []string // transitive, including other modules
}

// allPackages are those of the module.
func allPackages(t *testing.T) []goPackage {
	t.Helper()
	all, err := goList()
	nfttest.NoError(t, err)
	return all
}

var goList = sync.OnceValues(func() (all []goPackage, err error) {
	cmd := exec.Command("go", "list", "-json=ImportPath,Imports,Deps", "./...")
	cmd.Dir, cmd.Stderr = root, os.Stderr
	text, err := cmd.Output()
	for d := json.NewDecoder(bytes.NewReader(text)); err == nil; {
		var p goPackage
		if err = d.Decode(&p); err == nil {
			p.ImportPath = strings.TrimPrefix(p.ImportPath, module+"/")
			all = append(all, p)
		}
	}
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return all, err
})

// ours returns the packages of this module among imports.
func ours(imports []string) []string {
	var out []string
	for _, i := range imports {
		if name, ok := strings.CutPrefix(i, module+"/"); ok {
			out = append(out, name)
		}
	}
	return out
}

func under(name string, trees ...string) bool {
	return slices.ContainsFunc(trees, func(tree string) bool { return name == tree || strings.HasPrefix(name, tree+"/") })
}

func TestPackagesDependOneWay(t *testing.T) {
	t.Parallel()
	// A package that is not listed may import none of ours.
	mayImport := map[string][]string{
		"nft/node":          {"nft/nfnetlink"},
		"nft/routes":        {"nft/node"},
		"nft":               {"config", "nft/nfnetlink"},
		"nft/judge":         {"config", "nft", "nft/nfnetlink"},
		"nft/conntrack":     {"config", "nft", "nft/judge", "nft/nfnetlink", "nft/routes"},
		"nft/native":        {"config", "nft", "nft/nfnetlink"},
		"nft/xtables":       {"config", "nft", "nft/nfnetlink"},
		"nft/kernel":        {"nft", "nft/native", "nft/xtables", "nft/nfnetlink"},
		"nft/nftrace":       {"nft", "nft/conntrack", "nft/kernel", "nft/nfnetlink", "nft/xtables"},
		"nft/others":        {"config", "nft", "nft/nfnetlink", "nft/nftrace"},
		"nft/nfttest":       {"nft/nfttest/netns"},
		"nft/nfttest/agent": {"nft/nfttest"},
		"nft/nfttest/loop": {
			"config", "nft", "nft/kernel", "nft/nfnetlink", "nft/nfttest", "nft/nfttest/cases",
			"nft/nfttest/script", "nft/node", "nft/xtables",
		},
		"nft/nfttest/mutate": {"nft/nfttest"},
		"nft/nfttest/modes":  {"nft", "nft/nfnetlink", "nft/nfttest"},
		"nft/nfttest/cases":  {"config", "nft", "nft/xtables", "nft/native", "nft/nfnetlink", "nft/nfttest"},
		"manifests/cluster":  {"nft/nfttest", "nft/nfttest/netns"},
		"cmd/nft-masq-agent/internal/agent": {
			"cmd/nft-masq-agent/internal/running", "config", "nft", "nft/kernel", "nft/node",
		},
		"cmd/nft-masq-agent/internal/observe": {
			"cmd/nft-masq-agent/internal/agent", "cmd/nft-masq-agent/internal/answer", "cmd/nft-masq-agent/internal/cli",
			"cmd/nft-masq-agent/internal/health", "config", "nft", "nft/conntrack", "nft/judge", "nft/kernel",
			"nft/routes", "nft/xtables",
		},
		"cmd/nft-masq-agent/internal/cli":     {"config", "nft", "nft/native", "nft/xtables"},
		"cmd/nft-masq-agent/internal/running": {"config"},
		"cmd/nft-masq-agent/internal/answer": {
			"config", "nft", "nft/judge", "nft/conntrack", "nft/others",
			"nft/routes", "cmd/nft-masq-agent/internal/cli", "cmd/nft-masq-agent/internal/running",
			"nft/xtables", "cmd/nft-masq-agent/internal/health",
		},
		"cmd/nft-masq-agent/internal/health": {
			"config", "nft", "nft/judge", "nft/nfnetlink", "nft/conntrack", "nft/routes", "nft/xtables",
		},
	}
	all := allPackages(t)
	for _, p := range all {
		if under(p.ImportPath, "cmd") && mayImport[p.ImportPath] == nil {
			continue
		}
		for _, i := range ours(p.Imports) {
			if !slices.Contains(mayImport[p.ImportPath], i) {
				t.Errorf("%s imports %s", p.ImportPath, i)
			}
		}
	}
	for name := range mayImport {
		if !slices.ContainsFunc(all, func(p goPackage) bool { return p.ImportPath == name }) {
			t.Errorf("there is no package %s", name)
		}
	}
}

// looksAtTheNode is layer 2: the packages that look at the node beside our rules. Main alone
// imports both layers.
func looksAtTheNode() []string {
	return []string{
		"nft/judge", "nft/conntrack", "nft/routes", "nft/nftrace", "nft/others",
		"cmd/nft-masq-agent/internal/answer", "cmd/nft-masq-agent/internal/health", "cmd/nft-masq-agent/internal/observe",
	}
}

func TestAgentNeedsNothingThatLooksAtTheNode(t *testing.T) {
	t.Parallel()
	for _, p := range allPackages(t) {
		if p.ImportPath != "cmd/nft-masq-agent/internal/agent" && p.ImportPath != "nft/kernel" {
			continue
		}
		for _, d := range ours(p.Deps) {
			if under(d, looksAtTheNode()...) {
				t.Errorf("%s needs %s", p.ImportPath, d)
			}
		}
	}
}

func TestImportsAreRestricted(t *testing.T) {
	t.Parallel()
	tools := []string{"cmd/demo", "cmd/stress", "cmd/bench"}
	forTests := []string{"nft/nfttest", "manifests/cluster"}
	only := map[string][]string{
		"go.uber.org/zap":                     {"cmd", "nft/nfttest/loop"},
		"github.com/prometheus/client_golang": {"cmd"},
		"github.com/fsnotify/fsnotify":        {"watch"},
		"gopkg.in/yaml.v3":                    {"config"},
		"github.com/google/nftables":          slices.Concat(tools, []string{"nft"}),
		"github.com/mdlayher/netlink":         slices.Concat(tools, []string{"nft"}),
		"testing":                             forTests,
		"flag":                                {"cmd", "nft/nfttest", "manifests/release"},
		"log":                                 {"cmd"},
		"os/exec":                             slices.Concat(tools, forTests),
		"nft-masq-agent/nft/nfttest":          slices.Concat(tools, forTests),
	}
	for _, p := range allPackages(t) {
		for _, i := range p.Imports {
			for rule, may := range only {
				if under(i, rule) && !under(p.ImportPath, may...) {
					t.Errorf("%s imports %s", p.ImportPath, i)
				}
			}
		}
	}
}
