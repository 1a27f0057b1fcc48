package config

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "regenerate the golden files")

const corpus = "../testdata/config"

// inputs returns the entries of a corpus directory that are not golden files.
func inputs(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(corpus, dir))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		if ext := filepath.Ext(e.Name()); ext != ".err" && ext != ".txt" {
			names = append(names, e.Name())
		}
	}
	if len(names) == 0 {
		t.Fatalf("no inputs in %s", dir)
	}
	return names
}

// sourcesOf reads an input; positions show its name without the path.
func sourcesOf(t *testing.T, dir, name string) []Source {
	t.Helper()
	sources, err := Read(filepath.Join(corpus, dir, name))
	if err != nil {
		t.Fatal(err)
	}
	for i := range sources {
		sources[i].Name = strings.TrimPrefix(sources[i].Name, filepath.Join(corpus, dir)+"/")
	}
	return sources
}

func golden(t *testing.T, path, got string) {
	t.Helper()
	path = filepath.Join(corpus, path)
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", path, diff)
	}
}

func stem(name string) string { return strings.TrimSuffix(name, filepath.Ext(name)) }

func TestInvalidFilesReportExactErrors(t *testing.T) {
	for _, name := range inputs(t, "bad") {
		t.Run(name, func(t *testing.T) {
			c, problems := Parse(Defaults{}, sourcesOf(t, "bad", name)...)
			if problems.Err() == nil {
				t.Fatalf("accepted as\n%s", meaning(c, problems))
			}
			golden(t, filepath.Join("bad", stem(name)+".err"), lines(problems)+rejectedMeaning(c, problems))
		})
	}
}

// The older agents accept every file in the corpus "older": TestFilesOfOlderAgentsKeepTheirMeaning.
func TestValidFilesParseAsExpected(t *testing.T) {
	for _, dir := range []string{"good", "older"} {
		for _, name := range inputs(t, dir) {
			t.Run(dir+"/"+name, func(t *testing.T) {
				c, problems := Parse(Defaults{EnableIPv6: dir == "older"}, sourcesOf(t, dir, name)...)
				if err := problems.Err(); err != nil {
					t.Fatal(err)
				}
				golden(t, filepath.Join(dir, stem(name)+".txt"), meaning(c, problems))
			})
		}
	}
}

// rejectedMeaning prints what the older agents make of rejected sources, as far as
// it differs from the defaults.
func rejectedMeaning(c Config, problems Problems) string {
	if problems.Worst() != Error {
		return "the older agents read:\n" + meaning(c, nil)
	}
	return ""
}

// meaning prints a Config and its problems.
func meaning(c Config, problems Problems) string {
	var b strings.Builder
	for _, row := range slices.Backward(Conditions()) {
		list := row.Entries(c)
		if row.Key != KeyNonMasqueradeCIDRs && len(list) == 0 {
			continue
		}
		fmt.Fprintf(&b, "%s:\n", row.Key)
		for _, c := range list {
			fmt.Fprintf(&b, "  %-18s %s\n", c.Prefix, c.Pos)
		}
	}
	for _, t := range Translations() {
		for i, given := range t.Values(c) {
			if i == 0 {
				fmt.Fprintf(&b, "%s:\n", t.Key)
			}
			fmt.Fprintf(&b, "  %-18s %s\n", given.Text, given.Pos)
		}
	}
	fmt.Fprintf(&b, "masqLinkLocal: %t\nmasqLinkLocalIPv6: %t\nenableIPv6: %t\nresyncInterval: %s\n",
		c.MasqLinkLocal, c.MasqLinkLocalIPv6, c.EnableIPv6, c.ResyncInterval)
	return b.String() + lines(problems)
}

// lines prints problems as check does: each with its level, unless that is error.
func lines(problems Problems) string {
	var b strings.Builder
	for _, p := range problems {
		if p.Level != Error {
			b.WriteString(p.Level.String() + ": ")
		}
		b.WriteString(p.Error() + "\n")
	}
	return b.String()
}
