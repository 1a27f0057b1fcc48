package config

import (
	"fmt"
	"strings"
)

// A Position is a place in a file. Line and Col count from 1, Col in
// characters. The zero Position is that of a built-in default.
type Position struct {
	File string
	Line int
	Col  int
}

// String returns FILE:LINE:COL.
func (p Position) String() string {
	if p == (Position{}) {
		return "built-in default"
	}
	return fmt.Sprintf("%s:%d:%d", p.File, p.Line, p.Col)
}

// A Problem is an error or a warning about one place of a file.
type Problem struct {
	Pos  Position
	Msg  string
	Text string // the source line; empty where it is too long to be shown

	// PassedOver marks an error that the older agents ignore: see Lenient.
	PassedOver bool
}

// Error returns FILE:LINE:COL: message.
func (p Problem) Error() string { return p.Pos.String() + ": " + p.Msg }

// Caret returns the source line and below it a caret that points at the
// problem, or "" without a line. What a terminal would obey is replaced.
func (p Problem) Caret() string {
	if p.Text == "" {
		return ""
	}
	line := []rune(p.Text)
	pad := make([]rune, min(p.Pos.Col-1, len(line)))
	for i := range pad {
		pad[i] = ' '
		if line[i] == '\t' {
			pad[i] = '\t'
		}
	}
	for i, r := range line {
		if r < ' ' && r != '\t' || 0x7f <= r && r < 0xa0 {
			line[i] = '\uFFFD'
		}
	}
	return string(line) + "\n" + string(pad) + "^"
}

// Problems is an error that holds all errors of all files, in the order of the
// files and of the places in them.
type Problems []Problem

// Error returns the problems, one per line.
func (p Problems) Error() string {
	lines := make([]string, len(p))
	for i := range p {
		lines[i] = p[i].Error()
	}
	return strings.Join(lines, "\n")
}
