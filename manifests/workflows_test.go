package manifests_test

import (
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"nft-masq-agent/nft/nfttest"
)

// A workflow is the part of a workflow of GitHub that the tests judge.
type workflow struct {
	Permissions map[string]string
	Jobs        map[string]struct {
		Permissions map[string]string
		Strategy    struct{ Matrix struct{ Target []string } }
		Steps       []struct{ Uses, Run string }
	}
}

// Anybody can run what a workflow runs, and no action changes under its name.
func TestWorkflowsOnlyReadAndCallTargetsOfMake(t *testing.T) {
	nfttest.SkipIfShort(t)
	t.Parallel()
	pinned := regexp.MustCompile(`(?m)^ +- uses: [^@ ]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$`)
	files, err := filepath.Glob("../.github/workflows/*.yml")
	if err != nil || len(files) != 3 {
		t.Fatalf("%v %v", files, err)
	}
	var lines []string
	for _, file := range files {
		var w workflow
		readYAML(t, file, &w)
		text := readFile(t, file)
		if all := strings.Count(text, "uses:"); len(pinned.FindAllString(text, -1)) != all {
			t.Errorf("%s: some of %d actions are not pinned to a commit", file, all)
		}
		if w.Permissions == nil || len(w.Permissions) > 0 {
			t.Errorf("%s: permissions %v of all jobs", file, w.Permissions)
		}
		for name, job := range w.Jobs {
			if len(job.Permissions) != 1 || job.Permissions["contents"] != "read" {
				t.Errorf("%s: %s: permissions %v", file, name, job.Permissions)
			}
			runs := 0
			for _, step := range job.Steps {
				if step.Run == "" {
					continue
				}
				_, target, ok := strings.Cut(step.Run, "make ")
				if !ok || strings.ContainsAny(step.Run, ";&|\n") {
					t.Errorf("%s: %s: %q is more than a target of make", file, name, step.Run)
				}
				targets := []string{target}
				if target == "${{ matrix.target }}" {
					targets = job.Strategy.Matrix.Target
				}
				for _, target := range targets {
					runs++
					lines = append(lines, "make "+target)
				}
			}
			if runs == 0 {
				t.Errorf("%s: %s runs nothing", file, name)
			}
		}
	}
	wantTargets(t, lines...)
}
