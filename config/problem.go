package config

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// A Position is a place in a file. Line and Col count from 1, Col in characters.
// The zero Position denotes a built-in default.
type Position struct {
	file      string
	Line, Col int
}

// At returns a position in a file; without a line it denotes the whole file.
func At(file string, line, col int) Position { return Position{file, line, col} }

// File returns the name of the file.
func (p Position) File() string { return p.file }

// String returns FILE:LINE:COL, or FILE if the position has no line.
func (p Position) String() string {
	switch {
	case p == (Position{}):
		return "built-in default"
	case p.Line == 0:
		return p.file
	}
	return fmt.Sprintf("%s:%d:%d", p.file, p.Line, p.Col)
}

// A Level is how serious a problem is.
type Level uint8

// The levels. Files with an error or a mistake are rejected.
const (
	Error   Level = iota // the older agents reject it, too, or it is a key of this agent that cannot be done
	Mistake              // the older agents ignore it, or read something else than is written
	Warning
	Note // needs no action
)

// String returns the level in lower case.
func (l Level) String() string { return [...]string{"error", "mistake", "warning", "note"}[l] }

// A Problem is a remark about a config, usually about one place in a file.
type Problem struct {
	ID    string // stable, for programs
	Level Level
	Pos   Position // zero: none
	Msg   string

	source string // the line; empty if too long or if nothing of the file may be quoted
}

// Error returns FILE:LINE:COL: message, or the message alone without a position.
func (p Problem) Error() string {
	if p.Pos == (Position{}) {
		return p.Msg
	}
	return p.Pos.String() + ": " + p.Msg
}

// Caret returns the source line and, below it, a caret pointing at the problem,
// or "" without a line. Unprintable characters are replaced.
func (p Problem) Caret() string {
	if p.source == "" {
		return ""
	}
	line := []rune(unprintable.ReplaceAllString(string([]rune(p.source)), "\uFFFD"))
	before := line[:min(p.Pos.Col-1, len(line))]
	return string(line) + "\n" + notTab.ReplaceAllString(string(before), " ") + "^"
}

var (
	unprintable = regexp.MustCompile(`[^\t \pL\pM\pN\pP\pS]`)
	notTab      = regexp.MustCompile(`[^\t]`)
)

// Problems are ordered by file and position. As an error they are those of which
// at least one is a fault.
type Problems []Problem

// Error returns the problems, one per line.
func (p Problems) Error() string {
	lines := make([]string, len(p))
	for i := range p {
		lines[i] = p[i].Error()
	}
	return strings.Join(lines, "\n")
}

// Faults returns the errors and mistakes: files are accepted if there are none.
func (p Problems) Faults() Problems {
	return slices.DeleteFunc(slices.Clone(p), func(p Problem) bool { return p.Level > Mistake })
}

// Remarks returns the warnings and notes.
func (p Problems) Remarks() Problems {
	return slices.DeleteFunc(slices.Clone(p), func(p Problem) bool { return p.Level <= Mistake })
}

// Worst returns the most serious level, or Note if there are none.
func (p Problems) Worst() Level {
	level := Note
	for _, problem := range p {
		level = min(level, problem.Level)
	}
	return level
}

// Err returns the faults as an error, or nil.
func (p Problems) Err() error {
	if faults := p.Faults(); len(faults) > 0 {
		return faults
	}
	return nil
}

// most is how many problems of each level one Parse reports. The rest is counted.
const most = 100

// A report collects problems.
type report struct {
	kept  Problems
	found [Note + 1]int // by level
}

func (r *report) add(level Level, id string, at Position, format string, args ...any) {
	if r.found[level]++; r.found[level] <= most {
		r.kept = append(r.kept, Problem{ID: id, Level: level, Pos: at, Msg: fmt.Sprintf(format, args...)})
	}
}

// sorted returns the problems, ordered by file and position, with their source
// lines, and without the duplicates that come from a mapping merged twice. Those not
// kept are counted at the end.
func (p *parser) sorted() Problems {
	order := map[string]int{}
	for i, f := range p.files {
		order[f.name] = i
	}
	key := func(p Problem) []int { return []int{order[p.Pos.file], p.Pos.Line, p.Pos.Col, int(p.Level)} }
	slices.SortStableFunc(p.kept, func(a, b Problem) int { return slices.Compare(key(a), key(b)) })
	all := slices.Compact(p.kept)
	for i, problem := range all {
		if problem.Pos.Line > 0 {
			all[i] = p.files[order[problem.Pos.file]].show(problem)
		}
	}
	for i, n := range p.found {
		if level := Level(i); n > most {
			all = append(all, Problem{ID: "more", Level: level, Msg: fmt.Sprintf("and %d more %ss", n-most, level)})
		}
	}
	return all
}
