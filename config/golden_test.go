package config

import (
	"flag"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/script"
)

var update = flag.Bool("update", false, "regenerate the golden files")

const corpus = "../testdata/config"

// tables are the files of testdata/config whose cases are named for a file, and have its bytes, or for a directory, and
// have files.
var tables = []string{"good", "bad"}

func corpusFile(name string) string { return filepath.Join(corpus, name+".txt") }

// filesOf writes the files of a case, and reads them; positions show their name without the path.
func filesOf(t *testing.T, c *script.Case) []Source {
	t.Helper()
	dir := t.TempDir()
	for _, s := range c.Steps {
		verb, name := s.Words()
		if verb != "file" {
			s.Unknown(t)
		}
		write(t, filepath.Join(dir, c.Name, name), s.Data)
	}
	if len(c.Steps) == 0 {
		write(t, filepath.Join(dir, c.Name), c.Data)
	}
	all, err := Read(filepath.Join(dir, c.Name))
	nfttest.NoError(t, err)
	for i := range all {
		all[i].Name = strings.TrimPrefix(all[i].Name, dir+"/")
	}
	return all
}

func TestInvalidFilesReportExactErrors(t *testing.T) {
	script.Golden(t, corpusFile("bad"), *update, func(t *testing.T, c *script.Case) {
		got, problems := Parse(Defaults{}, filesOf(t, c)...)
		if problems.Err() == nil {
			t.Fatalf("accepted as\n%s", meaning(got, problems))
		}
		c.Last().Say(lines(problems) + rejectedMeaning(got, problems))
	})
}

func TestValidFilesParseAsExpected(t *testing.T) {
	script.Golden(t, corpusFile("good"), *update, func(t *testing.T, c *script.Case) {
		got, problems := Parse(Defaults{}, filesOf(t, c)...)
		nfttest.NoError(t, problems.Err())
		c.Last().Say(changed(got) + lines(problems))
	})
}

// rejectedMeaning prints what the older agents make of rejected sources, as far as
// it differs from the defaults.
func rejectedMeaning(c Config, problems Problems) string {
	if problems.Worst() != Error {
		return "the older agents read:\n" + changed(c)
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
		for i, given := range valuesOf(t, c) {
			if i == 0 {
				fmt.Fprintf(&b, "%s:\n", t.Key)
			}
			fmt.Fprintf(&b, "  %-18s %s\n", given.text, given.pos)
		}
	}
	fmt.Fprintf(&b, "masqLinkLocal: %t\nmasqLinkLocalIPv6: %t\nenableIPv6: %t\nresyncInterval: %s\n",
		c.MasqLinkLocal, c.MasqLinkLocalIPv6, c.EnableIPv6, c.ResyncInterval)
	return b.String() + lines(problems)
}

// A given is an entry of a key's list in a config, or another value that is set.
type given struct {
	text string
	pos  Position
}

// valuesOf returns the key's values in a config.
func valuesOf(r Row, c Config) (values []given) {
	switch field := r.in(&c).(type) {
	case *[]CIDR:
		for _, entry := range *field {
			values = append(values, given{entry.Text(), entry.Pos})
		}
	case *[]SNATRule:
		for _, entry := range *field {
			values = append(values, given{entryText(entry), entry.Pos})
		}
	case *bool:
		if *field {
			values = append(values, given{"true", c.Given(r.Key)})
		}
	case *PodPorts:
		if *field > 0 {
			values = append(values, given{fmt.Sprint(*field), c.Given(r.Key)})
		}
	}
	return values
}

// entryText returns an entry of snatRules as flow-style YAML.
func entryText(r SNATRule) string {
	var parts []string
	add := func(name string, texts []string) {
		if len(texts) > 0 {
			parts = append(parts, name+": ["+strings.Join(texts, ", ")+"]")
		}
	}
	add("from", Texts(r.From))
	add("to", Texts(r.To))
	add("out", Names(r.Out))
	add("addresses", Texts(r.Addresses))
	return "{" + strings.Join(parts, ", ") + "}"
}

// changed prints the keys of a Config that differ from the defaults.
func changed(c Config) string {
	defaults, _ := Parse(Defaults{})
	before := paragraphs(meaning(defaults, nil))
	after := paragraphs(meaning(c, nil))
	return strings.Join(slices.DeleteFunc(after, func(p string) bool { return slices.Contains(before, p) }), "")
}

// paragraphs returns what meaning prints of each key.
func paragraphs(text string) (all []string) {
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, " ") {
			all[len(all)-1] += line
		} else {
			all = append(all, line)
		}
	}
	return all
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
