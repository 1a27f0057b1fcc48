package config

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"gopkg.in/yaml.v3"
)

// seed adds every file of the corpus.
func seed(f *testing.F) {
	f.Helper()
	err := filepath.Walk(corpus, func(path string, info os.FileInfo, err error) error {
		if err != nil || !info.Mode().IsRegular() || info.Size() > 10_000 {
			return err
		}
		data, err := os.ReadFile(path)
		f.Add(data)
		return err
	})
	if err != nil {
		f.Fatal(err)
	}
}

func FuzzParse(f *testing.F) {
	seed(f)
	f.Fuzz(func(t *testing.T, data []byte) {
		source := Source{Name: "f", Data: data}
		c, warnings, err := Parse(Defaults{}, source)
		again, warningsAgain, errAgain := Parse(Defaults{}, source)
		if diff := cmp.Diff(outcome(c, warnings, err), outcome(again, warningsAgain, errAgain)); diff != "" {
			t.Fatalf("two reads differ (-first +second):\n%s", diff)
		}
		problems, _ := err.(Problems)
		if err != nil {
			if len(problems) == 0 || meaning(c, nil) != meaning(Config{}, nil) {
				t.Fatalf("error %#v with config %s", err, meaning(c, nil))
			}
		} else {
			checkConfig(t, newText(source), c)
		}
		for _, p := range append(problems, warnings...) {
			checkProblem(t, newText(source), p)
		}
		checkFold(t, newText(source))
	})
}

func outcome(c Config, warnings []Problem, err error) string {
	return fmt.Sprint(meaning(c, warnings), err)
}

func checkConfig(t *testing.T, text *text, c Config) {
	t.Helper()
	if c.ResyncInterval <= 0 {
		t.Errorf("interval %s", c.ResyncInterval)
	}
	for _, row := range Conditions() {
		for _, cidr := range row.Entries(c) {
			a := cidr.Addr()
			if !cidr.IsValid() || cidr.Masked() != cidr.Prefix || a.Is4In6() || a.Zone() != "" {
				t.Errorf("CIDR %v at %s", cidr.Prefix, cidr.Pos)
			}
			if cidr.Pos != (Position{}) {
				checkPosition(t, text, cidr.Pos)
			}
		}
	}
}

func checkProblem(t *testing.T, text *text, p Problem) {
	t.Helper()
	checkPosition(t, text, p.Pos)
	if p.Msg == "" || strings.ContainsRune(p.Msg, '\n') {
		t.Errorf("problem %#v", p)
	}
	if s := p.Caret(); strings.ContainsFunc(strings.Replace(s, "\n", "", 1), func(r rune) bool { return !unicode.IsPrint(r) && r != '\t' }) {
		t.Errorf("caret %q", s)
	}
}

func checkPosition(t *testing.T, text *text, p Position) {
	t.Helper()
	lines := text.lines()
	if line, col := int(p.Line), int(p.Col); p.File() != "f" || line < 1 || line > len(lines) || col < 1 || col > utf8.RuneCountInString(lines[line-1])+1 {
		t.Errorf("position %s is outside the file of %d lines", p, len(lines))
	}
}

// checkFold compares the folded lists with what yaml.v3 reads.
func checkFold(t *testing.T, text *text) {
	t.Helper()
	short, runs := text.fold()
	if len(runs) == 0 {
		return
	}
	docs, err := parseYAML(strings.NewReader(short))
	if err != nil || len(docs) == 0 {
		return
	}
	lists, ok := unfold(&yaml.Node{Content: docs[:1]}, runs)
	if !ok {
		return // then the whole text is parsed
	}
	whole, err := parseYAML(strings.NewReader(text.s))
	if err != nil {
		t.Fatalf("only the folded text is valid: %v", err)
	}
	if diff := cmp.Diff(scalars(whole[0], nil), scalars(docs[0], lists)); diff != "" {
		t.Errorf("(-whole +folded):\n%s", diff)
	}
}

// scalars lists the nodes of a tree, a CIDR in its canonical form.
func scalars(n *yaml.Node, lists folds) []string {
	value := n.Value
	if p, err := netip.ParsePrefix(value); err == nil {
		value = p.String()
	}
	all := []string{fmt.Sprintf("%d:%d %d %q", n.Line, n.Column, n.Kind, value)}
	for _, c := range n.Content {
		all = append(all, scalars(c, lists)...)
		for _, l := range lists.omitted(c) {
			all = append(all, fmt.Sprintf("%d:%d %d %q", l.Pos.Line, l.Pos.Col, yaml.ScalarNode, l.Prefix))
		}
	}
	return all
}
