// Package script reads the texts of tests, which have one format: testdata/README.md.
package script

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
)

// A Case is what a line "== NAME" begins.
type Case struct {
	Name string
	*Step
	Steps []*Step
}

// A Step is a line of a case, with the data and the expectations that follow it. That of a Case itself has those that
// follow its name.
type Step struct {
	Place string // FILE:LINE
	Line  string // without its end
	Data  string // the text of lines "| "
	Wants []Want

	data []string // as it is written
	said []string
	rest []string // comments and empty lines behind it
}

// A Want is what a line with a mark expects.
type Want struct {
	Mark byte // one of ">~!"
	Text string
}

// Words returns the verb of a step, and what follows it.
func (s *Step) Words() (verb, operands string) {
	verb, operands, _ = strings.Cut(s.Line, " ")
	return verb, strings.TrimSpace(operands)
}

// Expects returns what the lines with a mark expect.
func (s *Step) Expects(mark byte) (texts []string) {
	for _, w := range s.Wants {
		if w.Mark == mark {
			texts = append(texts, w.Text)
		}
	}
	return texts
}

// Say adds the lines that Golden expects with the mark ">".
func (s *Step) Say(text string) {
	for line := range strings.Lines(text) {
		s.said = append(s.said, strings.TrimSuffix(line, "\n"))
	}
}

// Last returns the last step of a case, or the case's own.
func (c *Case) Last() *Step {
	if len(c.Steps) == 0 {
		return c.Step
	}
	return c.Steps[len(c.Steps)-1]
}

// Text returns the lines of all steps: those of a case that has no verbs, but a text.
func (c *Case) Text() string {
	var b strings.Builder
	for _, s := range c.Steps {
		b.WriteString(s.Line + "\n")
	}
	return b.String()
}

// All returns what all lines of a case with a mark expect.
func (c *Case) All(mark byte) []string {
	texts := c.Expects(mark)
	for _, s := range c.Steps {
		texts = append(texts, s.Expects(mark)...)
	}
	return texts
}

// Read reads the cases of a file.
func Read(t testing.TB, file string) []*Case {
	t.Helper()
	_, all := read(t, file)
	return all
}

// read returns also what is before the first case.
func read(t testing.TB, file string) (preamble string, all []*Case) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	number := 0
	for line := range strings.Lines(string(text)) {
		number++
		place := fmt.Sprintf("%s:%d", filepath.Base(file), number)
		line = strings.TrimSuffix(line, "\n")
		if name, begins := strings.CutPrefix(line, "== "); begins {
			all = append(all, &Case{Name: strings.TrimSpace(name), Step: &Step{Place: place}})
			continue
		}
		if len(all) == 0 {
			if line != "" && line[0] != '#' {
				t.Fatalf(`%s: %q is before the first "== NAME", where only comments may be`, place, line)
			}
			preamble += line + "\n"
			continue
		}
		if err := all[len(all)-1].add(place, line); err != nil {
			t.Fatal(err)
		}
	}
	if len(all) == 0 {
		t.Fatalf(`%s: it has no case, which a line "== NAME" begins`, file)
	}
	return preamble, all
}

// add adds a line to a case.
func (c *Case) add(place, line string) error {
	last := c.Last()
	switch {
	case line == "" || line[0] == '#':
		last.rest = append(last.rest, line)
	case strings.IndexByte(">~!", line[0]) >= 0 && (len(line) == 1 || line[1] == ' '):
		last.Wants = append(last.Wants, Want{line[0], line[min(2, len(line)):]})
	case strings.HasPrefix(line, `|"`):
		text, err := strconv.Unquote(line[1:])
		if err != nil {
			return fmt.Errorf("%s: %q is no string of Go: %w", place, line[1:], err)
		}
		last.Data += text
		last.data = append(last.data, line)
	case line[0] == '|' && (len(line) == 1 || line[1] == ' '):
		last.Data += line[min(2, len(line)):] + "\n"
		last.data = append(last.data, line)
	default:
		c.Steps = append(c.Steps, &Step{Place: place, Line: line})
	}
	return nil
}

// Data writes a text as the lines that a step with this Data has.
func Data(text string) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		plain, ends := strings.CutSuffix(line, "\n")
		invisible := !ends || strings.HasSuffix(plain, " ") || !utf8.ValidString(plain) ||
			strings.ContainsFunc(plain, func(r rune) bool { return !unicode.IsPrint(r) })
		switch {
		case invisible:
			b.WriteString("|" + strconv.Quote(line) + "\n")
		case plain == "":
			b.WriteString("|\n")
		default:
			b.WriteString("| " + plain + "\n")
		}
	}
	return b.String()
}

// text writes a case as it is read: with what it expects, or with what was said.
func (c *Case) text(said bool) string {
	var b strings.Builder
	b.WriteString("== " + c.Name + "\n")
	for i, s := range append([]*Step{c.Step}, c.Steps...) {
		if i > 0 {
			b.WriteString(s.Line + "\n")
		}
		for _, line := range s.data {
			b.WriteString(line + "\n")
		}
		for _, w := range s.Wants {
			if w.Mark != '>' || !said {
				b.WriteString(string(w.Mark) + " " + w.Text + "\n")
			}
		}
		if said {
			for _, line := range s.said {
				b.WriteString("> " + line + "\n")
			}
		}
		for _, line := range s.rest {
			b.WriteString(line + "\n")
		}
	}
	return b.String()
}

// Golden compares what test says in each case of a file with what the lines with the mark ">" expect. With update, they
// are written anew.
func Golden(t *testing.T, file string, update bool, test func(t *testing.T, c *Case)) {
	t.Helper()
	all, cases := read(t, file)
	for _, c := range cases {
		t.Run(c.Name, func(t *testing.T) {
			test(t, c)
			if diff := cmp.Diff(c.text(false), c.text(true)); diff != "" && !update {
				t.Errorf("%s (-want +got):\n%s", c.Place, diff)
			}
		})
		all += c.text(true)
	}
	if !update {
		return
	}
	if err := os.WriteFile(file, []byte(all), 0o644); err != nil {
		t.Error(err)
	}
}

// Unknown ends a test whose script has a step with an unknown verb, and says which verbs there are: those of the section
// of testdata/README.md that names the file.
func (s *Step) Unknown(t testing.TB) {
	t.Helper()
	file, _, _ := strings.Cut(s.Place, ":")
	verb, _ := s.Words()
	t.Fatalf("%s: no verb %q; testdata/README.md has:\n%s", s.Place, verb, verbs(t, file))
}

// IsDocumented fails the test if testdata/README.md has verbs for the file of a step, but not that of the step.
func (s *Step) IsDocumented(t testing.TB) {
	t.Helper()
	file, _, _ := strings.Cut(s.Place, ":")
	verb, _ := s.Words()
	documented, found := false, false
	for line := range strings.Lines(verbs(t, file)) {
		if !strings.HasPrefix(line, "| `") {
			continue
		}
		documented = true
		verbs, _, _ := strings.Cut(line, " | ")
		for _, m := range regexp.MustCompile("[|,] `(\\S+?)[` ]").FindAllStringSubmatch(verbs, -1) {
			found = found || m[1] == verb
		}
	}
	if documented && !found {
		s.Unknown(t)
	}
}

// verbs returns the section of testdata/README.md that names a file in its heading.
func verbs(t testing.TB, file string) string {
	t.Helper()
	for dir := "."; ; dir = filepath.Join("..", dir) {
		text, err := os.ReadFile(filepath.Join(dir, "testdata", "README.md"))
		if err == nil && strings.HasPrefix(string(text), "# Texts of the tests\n") {
			for _, section := range strings.Split(string(text), "\n## ")[1:] {
				heading, table, _ := strings.Cut(section, "\n")
				if strings.Contains(heading, "`"+file+"`") {
					return strings.TrimSpace(table)
				}
			}
			return "no section for " + file
		}
		if abs, err := filepath.Abs(dir); err != nil || abs == "/" {
			t.Fatal("no testdata/README.md above this directory")
		}
	}
}
