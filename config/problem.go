package config

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unique"
)

// A Position is a place in a file. Line and Col count from 1, Col in characters.
// The zero Position denotes a built-in default. It is small because each CIDR of
// a config has one.
type Position struct {
	file      unique.Handle[string]
	Line, Col int32
}

// At returns a position in a file; without a line it denotes the whole file.
func At(file string, line, col int) Position { return at(unique.Make(file), line, col) }

func at(file unique.Handle[string], line, col int) Position {
	return Position{file: file, Line: int32(line), Col: int32(col)}
}

// File returns the name of the file.
func (p Position) File() string {
	if p.file == (unique.Handle[string]{}) {
		return ""
	}
	return p.file.Value()
}

// String returns FILE:LINE:COL, or FILE if the position has no line.
func (p Position) String() string {
	switch {
	case p == (Position{}):
		return "built-in default"
	case p.Line == 0:
		return p.File()
	}
	return p.File() + ":" + strconv.Itoa(int(p.Line)) + ":" + strconv.Itoa(int(p.Col))
}

// A Problem is an error or a warning about one place in a file.
type Problem struct {
	Pos  Position
	Msg  string
	Text string // the source line; empty if too long or if nothing of the file may be quoted

	// Tolerated marks an error that the older agents ignore; see Lenient.
	Tolerated bool
	// Note marks a warning that needs no action.
	Note bool
}

// Error returns FILE:LINE:COL: message.
func (p Problem) Error() string { return p.Pos.String() + ": " + p.Msg }

// Caret returns the source line and, below it, a caret pointing at the problem,
// or "" without a line. Unprintable characters are replaced.
func (p Problem) Caret() string {
	if p.Text == "" {
		return ""
	}
	before := []rune(p.Text)
	before = before[:min(int(p.Pos.Col)-1, len(before))]
	pad := strings.Map(func(r rune) rune {
		if r == '\t' {
			return r
		}
		return ' '
	}, string(before))
	line := strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) && r != '\t' {
			return '\uFFFD'
		}
		return r
	}, p.Text)
	return line + "\n" + pad + "^"
}

// Problems is an error made of all errors in all files, ordered by file and
// position.
type Problems []Problem

// Error returns the problems, one per line.
func (p Problems) Error() string {
	lines := make([]string, len(p))
	for i := range p {
		lines[i] = p[i].Error()
	}
	return strings.Join(lines, "\n")
}

// The most that one Parse reports. The rest is counted.
const (
	maxErrors   = 1000
	maxWarnings = 100
)

// A report collects problems. It keeps the first ones and counts the others.
type report struct {
	kept    []Problem
	total   int
	refused bool // at least one, kept or not, is not tolerated
}

func (r *report) add(p Problem, most int) {
	r.total++
	r.refused = r.refused || !p.Tolerated
	if len(r.kept) < most {
		r.kept = append(r.kept, p)
	}
}

// append adds the problems of the next file, ordered by position, without the
// duplicates that come from a mapping merged twice.
func (r *report) append(next report, most int) {
	slices.SortStableFunc(next.kept, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(a.Pos.Line, b.Pos.Line), cmp.Compare(a.Pos.Col, b.Pos.Col))
	})
	kept := slices.Compact(next.kept)
	r.total += next.total - len(next.kept) + len(kept)
	r.refused = r.refused || next.refused
	r.kept = append(r.kept, kept[:min(len(kept), most-len(r.kept))]...)
}

// all returns the kept problems, and one that counts the others.
func (r *report) all(what string) []Problem {
	more := r.total - len(r.kept)
	if more == 0 {
		return r.kept
	}
	file := r.kept[len(r.kept)-1].Pos.File()
	return append(r.kept, Problem{
		Pos: At(file, 0, 0), Msg: fmt.Sprintf("and %d more %s", more, what), Tolerated: !r.refused,
	})
}
