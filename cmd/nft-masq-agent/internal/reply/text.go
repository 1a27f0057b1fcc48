package reply

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"regexp"
	"strings"
	"unicode"
	"unicode/utf16"
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

func special(r rune) bool { return r >= 0x7f && !unicode.IsPrint(r) }

// escaped escapes unprintable characters as JSON does with control characters.
// Everything non-ASCII is in strings.
func escaped(text string) string {
	var b strings.Builder
	for _, r := range text {
		if !special(r) {
			b.WriteRune(r)
			continue
		}
		for _, unit := range utf16.AppendRune(nil, r) {
			fmt.Fprintf(&b, `\u%04x`, unit)
		}
	}
	return b.String()
}

// JSON writes an answer as JSON. It may be large: there is no further copy of it.
func JSON(w io.Writer, v any) error { return encode(w, v, "  ") }

// JSONLine writes an answer as one line of JSON.
func JSONLine(w io.Writer, v any) error { return encode(w, v, "") }

func encode(w io.Writer, v any, indent string) error {
	enc := json.NewEncoder(escaper{w})
	enc.SetEscapeHTML(false)
	enc.SetIndent("", indent)
	if err := enc.Encode(v); err != nil {
		return fmt.Errorf("output: %w", err)
	}
	return nil
}

// An escaper writes JSON without characters that a terminal does not show.
type escaper struct{ to io.Writer }

func (e escaper) Write(text []byte) (int, error) {
	if bytes.IndexFunc(text, special) < 0 {
		return e.to.Write(text)
	}
	_, err := io.WriteString(e.to, escaped(string(text)))
	return len(text), err
}

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
