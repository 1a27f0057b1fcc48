package main

import (
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"nft-masq-agent/cmd/nft-masq-agent/options"
	"nft-masq-agent/config"
)

const root = "../.." // of the repository

func readme(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// section gives what stands between <!-- name --> and <!-- /name -->.
func section(t *testing.T, name string) string {
	t.Helper()
	_, after, found := strings.Cut(readme(t), "<!-- "+name+" -->")
	text, _, ended := strings.Cut(after, "<!-- /"+name+" -->")
	if !found || !ended {
		t.Fatalf("README.md has no section %q", name)
	}
	return text
}

// firstColumn gives the code at the beginning of each row of a table.
func firstColumn(table string) []string {
	var out []string
	for _, m := range regexp.MustCompile("(?m)^\\| `(-*[A-Za-z0-9-]+)").FindAllStringSubmatch(table, -1) {
		out = append(out, strings.TrimLeft(m[1], "-"))
	}
	return out
}

func TestReadmeShowsTheListingsOfTheCases(t *testing.T) {
	found := regexp.MustCompile("(?s)<!-- listing: (\\S+) -->\n```\n(.*?)```").FindAllStringSubmatch(readme(t), -1)
	if len(found) < 2 {
		t.Fatalf("%d listings", len(found))
	}
	for _, m := range found {
		text, err := os.ReadFile(filepath.Join(root, m[1]))
		if err != nil {
			t.Fatal(err)
		}
		// The README leaves out the lines that replace the table.
		want := string(text)
		if _, table, ok := strings.Cut(want, "delete table inet nft-masq-agent\n"); ok {
			want = table
		}
		if diff := cmp.Diff(want, m[2]); diff != "" {
			t.Errorf("%s (-want +README):\n%s", m[1], diff)
		}
	}
}

func TestReadmeYAMLIsAcceptedWithoutAWarning(t *testing.T) {
	found := regexp.MustCompile("(?s)```yaml\n(.*?)```").FindAllStringSubmatch(readme(t), -1)
	if len(found) == 0 {
		t.Fatal("no YAML")
	}
	for _, m := range found {
		if strings.Contains(m[1], "apiVersion:") {
			continue
		}
		_, warnings, err := config.Parse(config.Defaults{}, config.Source{Name: "README.md", Data: []byte(m[1])})
		if err != nil || len(warnings) > 0 {
			t.Errorf("%v %v\n%s", err, warnings, m[1])
		}
	}
}

func TestReadmeListsTheCommands(t *testing.T) {
	want := make([]string, 0, len(commands()))
	for _, c := range commands() {
		want = append(want, c.name)
	}
	got := firstColumn(section(t, "commands"))
	slices.Sort(want)
	slices.Sort(got)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("commands (-program +README):\n%s", diff)
	}
}

func TestReadmeListsThePolicyFlags(t *testing.T) {
	want, got := options.PolicyFlags(), firstColumn(section(t, "flags"))
	slices.Sort(want)
	slices.Sort(got)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("flags (-program +README):\n%s", diff)
	}
}

func TestReadmeListsTheKeysOfTheFile(t *testing.T) {
	want, got := config.Keys(), firstColumn(section(t, "keys"))
	slices.Sort(want)
	slices.Sort(got)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("keys (-program +README):\n%s", diff)
	}
}

func TestReadmeNamesEachFlagOfRun(t *testing.T) {
	fs := flag.NewFlagSet("run", flag.ContinueOnError)
	options.AddRunFlags(fs)
	text := readme(t)
	fs.VisitAll(func(f *flag.Flag) {
		if !options.IsKlogFlag(f.Name) && !strings.Contains(text, "`--"+f.Name) {
			t.Errorf("--%s is not in README.md", f.Name)
		}
	})
}

func TestEachTestThatReadmeNamesExists(t *testing.T) {
	named := regexp.MustCompile("`(Test[A-Za-z0-9]+)`").FindAllStringSubmatch(readme(t), -1)
	if len(named) == 0 {
		t.Fatal("README.md names no test")
	}
	out, err := exec.CommandContext(t.Context(), "grep", "-rhoE", "--include=*_test.go", `^func Test[A-Za-z0-9]+\(`, root).Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range named {
		if !strings.Contains(string(out), "func "+m[1]+"(") {
			t.Errorf("there is no test %s", m[1])
		}
	}
}

func TestReadmeListsTheDirectDependencies(t *testing.T) {
	mod, err := os.ReadFile(filepath.Join(root, "go.mod"))
	if err != nil {
		t.Fatal(err)
	}
	listed := section(t, "dependencies")
	for _, m := range regexp.MustCompile(`(?m)^\t(\S+) v\S+$`).FindAllStringSubmatch(string(mod), -1) {
		if !strings.Contains(listed, "`"+m[1]+"`") {
			t.Errorf("%s is not in README.md", m[1])
		}
	}
}
