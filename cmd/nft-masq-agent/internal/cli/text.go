package cli

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"

	"nft-masq-agent/config"
)

// An Answer is what a command answers.
type Answer interface {
	// Begin returns what all answers begin with.
	Begin() *Head
	// Print writes the answer for people.
	Print(t Text)
}

// A Text is written line by line. An error, if any, is that of the last flush.
type Text struct{ out *bufio.Writer }

// Print writes a text, which is wrapped at 80 columns for a terminal.
func Print(w io.Writer, terminal bool, text func(Text)) error {
	var whole strings.Builder
	out := bufio.NewWriter(w)
	if terminal {
		out = bufio.NewWriter(&whole)
	}
	text(Text{out})
	err := out.Flush()
	if terminal {
		_, err = io.WriteString(w, Fit(whole.String()))
	}
	if err != nil {
		return fmt.Errorf("output: %w", err)
	}
	return nil
}

// Line writes a line.
func (t Text) Line(format string, args ...any) {
	_, _ = fmt.Fprintf(t.out, format+"\n", args...)
}

// Texts returns the text of each value of a list.
func Texts[T fmt.Stringer](list []T) []string {
	words := make([]string, len(list))
	for i, v := range list {
		words[i] = v.String()
	}
	return words
}

// Lines writes texts as a line each.
func Lines[T fmt.Stringer](t Text, indent string, list []T) {
	for _, v := range list {
		t.Line("%s%s", indent, v)
	}
}

// List writes problems below a title, and nothing if there are none.
func (t Text) List(title string, list config.Problems) {
	if len(list) > 0 {
		t.Line("\n%s", title)
		Lines(t, "  ", list)
	}
}

// Problems writes each problem as a line, and below it its details.
func (t Text) Problems(list config.Problems) {
	for _, p := range list {
		details := p.Details
		p.Details = ""
		t.Line("%s", p)
		for line := range strings.Lines(details) {
			t.Line("  %s", strings.TrimSuffix(line, "\n"))
		}
	}
}

// Table writes rows whose columns tabs separate.
func Table[T fmt.Stringer](t Text, header string, rows []T) {
	w := tabwriter.NewWriter(t.out, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(w, header)
	for _, row := range rows {
		_, _ = fmt.Fprintln(w, row)
	}
	_ = w.Flush()
}

// Fit wraps the lines of a text at 80 columns, for a terminal. Continuation lines are aligned with the
// beginning.
func Fit(text string) string {
	const width = 80
	var b strings.Builder
	for line := range strings.Lines(text) {
		line = strings.TrimSuffix(line, "\n")
		indent := len(line) - len(strings.TrimLeft(line, " "))
		for len(line) > width {
			end := strings.LastIndex(line[indent:width+1], " ") + indent
			if end < indent { // a long word
				end = strings.Index(line[indent:], " ") + indent
			}
			if end < indent {
				break
			}
			b.WriteString(strings.TrimRight(line[:end], " ") + "\n")
			line = line[:indent] + strings.TrimLeft(line[end:], " ")
		}
		b.WriteString(line + "\n")
	}
	return b.String()
}

// JSON writes an answer as one line of JSON. Characters that a terminal does not show are escaped, as JSON
// escapes control characters: all of them are in strings.
func JSON(w io.Writer, answer any) error {
	out := bufio.NewWriter(w)
	encoder := json.NewEncoder(printable{out})
	encoder.SetEscapeHTML(false)
	err := encoder.Encode(answer)
	if err == nil {
		err = out.Flush()
	}
	if err != nil {
		return fmt.Errorf("output: %w", err)
	}
	return nil
}

// A printable writer escapes what a terminal does not show. Nobody writes a part of a character to it.
type printable struct{ out *bufio.Writer }

func (p printable) Write(text []byte) (int, error) {
	written := len(text)
	for len(text) > 0 {
		r, size := utf8.DecodeRune(text)
		text = text[size:]
		if r < 0x7f || unicode.IsPrint(r) {
			_, _ = p.out.WriteRune(r)
			continue
		}
		for _, unit := range utf16.AppendRune(nil, r) {
			_, _ = fmt.Fprintf(p.out, `\u%04x`, unit)
		}
	}
	return written, nil
}
