package config

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// A Position is a place in a file. Line and Col count from 1, Col in characters.
// The zero Position denotes a built-in default.
type Position struct {
	// File is a path.
	File string `json:"file,omitempty"`
	// Line counts from 1.
	Line int `json:"line,omitempty"`
	// Col counts characters from 1.
	Col int `json:"column,omitempty"`
}

// String returns FILE:LINE:COL, or FILE if the position has no line.
func (p Position) String() string {
	switch {
	case p == (Position{}):
		return "built-in default"
	case p.Line == 0:
		return p.File
	}
	return fmt.Sprintf("%s:%d:%d", p.File, p.Line, p.Col)
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

var levels = []string{"error", "mistake", "warning", "note"}

// String returns the level in lower case.
func (l Level) String() string { return levels[l] }

// MarshalText returns the name of the level.
func (l Level) MarshalText() ([]byte, error) { return []byte(l.String()), nil }

// UnmarshalText parses the name of a level.
func (l *Level) UnmarshalText(text []byte) error {
	i := slices.Index(levels, string(text))
	if i < 0 {
		return fmt.Errorf("unknown level %q", text)
	}
	*l = Level(i)
	return nil
}

// A Problem is what is wrong with a config or on a node, and what to do. Usually it is
// about one place in a file.
type Problem struct {
	// ID is stable, for programs.
	ID string `json:"id"`
	// Level is how serious it is.
	Level Level `json:"severity"`
	Pos         // zero: none
	// Msg is for people: what is wrong, and what to do.
	Msg string `json:"message"`
	// Details are the reason and what to do, one per line, if the message does not have them.
	Details string `json:"details,omitempty"`
}

// Pos is the position of a [Problem], whose JSON has the same fields.
type Pos = Position

// String returns what Error returns.
func (p Problem) String() string { return p.Error() }

// Error returns FILE:LINE:COL: message, or the message alone without a position, and the
// details.
func (p Problem) Error() string {
	text := p.Msg
	if p.Pos != (Position{}) {
		text = p.Pos.String() + ": " + p.Msg
	}
	if p.Details != "" {
		text += "; " + strings.ReplaceAll(p.Details, "\n", "; ")
	}
	return text
}

// Problems are ordered by file and position. As an error, they have at least one fault.
type Problems []Problem

// Error returns the problems, one per line.
func (p Problems) Error() string {
	lines := make([]string, len(p))
	for i := range p {
		lines[i] = p[i].Error()
	}
	return strings.Join(lines, "\n")
}

// WithLevel returns the problems of these levels, never nil.
func (p Problems) WithLevel(levels ...Level) Problems {
	return slices.DeleteFunc(append(Problems{}, p...), func(p Problem) bool { return !slices.Contains(levels, p.Level) })
}

// Faults returns the errors and mistakes: files are accepted if there are none.
func (p Problems) Faults() Problems { return p.WithLevel(Error, Mistake) }

// Remarks returns the warnings and notes.
func (p Problems) Remarks() Problems { return p.WithLevel(Warning, Note) }

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

// ProblemsOf returns the faults of which an error consists, one for another error, and none
// without an error.
func ProblemsOf(err error) Problems {
	faults := Problems{}
	if err != nil && !errors.As(err, &faults) {
		return Problems{{ID: "config", Msg: err.Error()}}
	}
	return faults
}

// maxReported is how many problems of each level one Parse reports. The rest is counted.
const maxReported = 100

// A report collects problems.
type report struct {
	kept  Problems
	found [Note + 1]int // by level
}

func (r *report) add(level Level, id string, position Position, format string, args ...any) {
	r.found[level]++
	if r.found[level] <= maxReported {
		r.kept = append(r.kept, Problem{ID: id, Level: level, Pos: position, Msg: fmt.Sprintf(format, args...)})
	}
}

// sorted returns the problems, ordered by file and position, without the duplicates that
// come from a mapping merged twice. Those not kept are counted at the end.
func (p *parser) sorted() Problems {
	order := map[string]int{}
	for i, f := range p.files {
		order[f.name] = i
	}
	key := func(p Problem) []int { return []int{order[p.Pos.File], p.Pos.Line, p.Pos.Col, int(p.Level)} }
	slices.SortStableFunc(p.kept, func(a, b Problem) int { return slices.Compare(key(a), key(b)) })
	problems := slices.Compact(p.kept)
	for i, problem := range problems {
		if problem.Pos.Line > 0 {
			problems[i].Pos = p.files[order[problem.Pos.File]].clamp(problem.Pos)
		}
	}
	for i, n := range p.found {
		if level := Level(i); n > maxReported {
			msg := fmt.Sprintf("and %d more %ss", n-maxReported, level)
			problems = append(problems, Problem{ID: "more", Level: level, Msg: msg})
		}
	}
	return problems
}
