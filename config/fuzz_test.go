package config

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"nft-masq-agent/nft/nfttest/script"
)

// seed adds every file of the corpus.
func seed(f *testing.F) {
	f.Helper()
	for _, name := range append([]string{"rows"}, tables...) {
		for _, c := range script.Read(f, corpusFile(name)) {
			for _, s := range append([]*script.Step{c.Step}, c.Steps...) {
				if len(s.Data) < 10_000 {
					f.Add([]byte(s.Data))
				}
			}
		}
	}
	for _, fault := range faults(f) {
		f.Add([]byte(fault.text))
	}
}

func FuzzParse(f *testing.F) {
	seed(f)
	f.Fuzz(func(t *testing.T, data []byte) {
		source := Source{Name: "f", Data: data}
		c, problems := Parse(Defaults{}, source)
		again, problemsAgain := Parse(Defaults{}, source)
		if diff := cmp.Diff(meaning(c, problems), meaning(again, problemsAgain)); diff != "" {
			t.Fatalf("two reads differ (-first +second):\n%s", diff)
		}
		if problems.Worst() == Error {
			if meaning(c, nil) != meaning(Config{}, nil) {
				t.Fatalf("%s with config %s", problems, meaning(c, nil))
			}
		} else {
			checkConfig(t, newText(source), c)
		}
		for _, p := range problems {
			checkProblem(t, newText(source), p)
		}
	})
}

func checkConfig(t *testing.T, text *text, c Config) {
	t.Helper()
	if c.ResyncInterval <= 0 {
		t.Errorf("the interval is %s, want one above 0", c.ResyncInterval)
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
	if p.ID != "more" {
		checkPosition(t, text, p.Pos)
	}
	if p.ID == "" || p.Msg == "" || strings.ContainsRune(p.Msg, '\n') {
		t.Errorf("problem %#v", p)
	}
}

func checkPosition(t *testing.T, text *text, p Position) {
	t.Helper()
	lines := text.lines()
	within := p.File == "f" && 1 <= p.Line && p.Line <= len(lines)
	if !within || p.Col < 1 || p.Col > utf8.RuneCountInString(lines[p.Line-1])+1 {
		t.Errorf("position %s is outside the file of %d lines", p, len(lines))
	}
}
