package cli

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
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

// JSON writes an answer as one line of JSON.
func JSON(w io.Writer, answer any) error {
	buffered := bufio.NewWriter(w)
	enc := json.NewEncoder(visible{buffered})
	enc.SetEscapeHTML(false)
	if err := errors.Join(enc.Encode(answer), buffered.Flush()); err != nil {
		return fmt.Errorf("output: %w", err)
	}
	return nil
}

// visible escapes characters that a terminal does not show, as JSON escapes control characters: all of them
// are in strings.
type visible struct{ *bufio.Writer }

// Write writes whole characters. The error, if any, is that of the next Flush.
func (v visible) Write(text []byte) (int, error) {
	for remaining := text; len(remaining) > 0; {
		r, size := utf8.DecodeRune(remaining)
		remaining = remaining[size:]
		if r < 0x7f || unicode.IsPrint(r) {
			_, _ = v.WriteRune(r)
			continue
		}
		for _, unit := range utf16.AppendRune(nil, r) {
			_, _ = fmt.Fprintf(v.Writer, `\u%04x`, unit)
		}
	}
	return len(text), nil
}
