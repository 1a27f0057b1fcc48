package cli

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// Line returns an indented text as one line.
func Line(text, indent string) string {
	return indent + strings.Join(strings.Fields(text), " ") + "\n"
}

// Fit wraps the lines of a text at 80 columns, for a terminal. Continuation lines
// are aligned with the beginning.
func Fit(text string) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		line = strings.TrimSuffix(line, "\n")
		if len(line) <= 80 {
			b.WriteString(line + "\n")
			continue
		}
		words := strings.TrimLeft(line, " ")
		b.WriteString(fill(words, line[:len(line)-len(words)]))
	}
	return b.String()
}

func fill(text, indent string) string {
	var b strings.Builder
	column := 0
	for _, word := range strings.Fields(text) {
		if column > 0 && column+1+len(word) > 80 {
			b.WriteString("\n")
			column = 0
		}
		if column == 0 {
			b.WriteString(indent + word)
			column = len(indent) + len(word)
			continue
		}
		b.WriteString(" " + word)
		column += 1 + len(word)
	}
	b.WriteString("\n")
	return b.String()
}

// JSON writes an answer as JSON.
func JSON(w io.Writer, v any) error {
	out := bufio.NewWriter(w)
	enc := json.NewEncoder(&indenter{out: out})
	enc.SetEscapeHTML(false)
	if err := errors.Join(enc.Encode(v), out.Flush()); err != nil {
		return fmt.Errorf("output: %w", err)
	}
	return nil
}

// An indenter writes compact JSON as [json.Indent] would, because that needs twice the memory of
// a large answer. Characters that a terminal does not show are escaped, as JSON escapes control
// characters: all of them are in strings.
type indenter struct {
	out     *bufio.Writer
	depth   int
	opened  bool // the last character opened an object or a list
	quoted  bool // in a string
	escaped bool // after a backslash in a string
}

// Write writes whole characters. The error, if any, is that of the next Flush.
func (p *indenter) Write(text []byte) (int, error) {
	for i := 0; i < len(text); {
		r, size := utf8.DecodeRune(text[i:])
		if p.quoted {
			p.inString(r)
		} else {
			p.betweenStrings(r)
		}
		i += size
	}
	return len(text), nil
}

func (p *indenter) inString(r rune) {
	p.quoted = r != '"' || p.escaped
	p.escaped = r == '\\' && !p.escaped
	if r < 0x7f || unicode.IsPrint(r) {
		_, _ = p.out.WriteRune(r)
		return
	}
	for _, unit := range utf16.AppendRune(nil, r) {
		_, _ = fmt.Fprintf(p.out, `\u%04x`, unit)
	}
}

func (p *indenter) betweenStrings(r rune) {
	closes := r == '}' || r == ']'
	if closes {
		p.depth--
	}
	if p.opened != closes { // An empty object or list has no lines of its own.
		p.newLine()
	}
	p.opened = r == '{' || r == '['
	_, _ = p.out.WriteRune(r)
	switch r {
	case '"':
		p.quoted = true
	case '{', '[':
		p.depth++
	case ',':
		p.newLine()
	case ':':
		_, _ = p.out.WriteString(" ")
	}
}

func (p *indenter) newLine() { _, _ = p.out.WriteString("\n" + strings.Repeat("  ", p.depth)) }

var areaLine = regexp.MustCompile(`(?m)^([a-z][a-z ]{14} )(?:(ok)|(wrong))( +)`)

// Color makes the first line of a text bold, and the state of each area green or red.
func Color(text string) string {
	first, rest, _ := strings.Cut(text, "\n")
	rest = areaLine.ReplaceAllStringFunc(rest, func(line string) string {
		m := areaLine.FindStringSubmatch(line)
		if m[2] != "" {
			return m[1] + "\x1b[32m" + m[2] + "\x1b[0m" + m[4]
		}
		return m[1] + "\x1b[31m" + m[3] + "\x1b[0m" + m[4]
	})
	return "\x1b[1m" + first + "\x1b[0m\n" + rest
}
