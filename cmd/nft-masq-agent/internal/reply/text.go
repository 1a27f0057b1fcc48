package reply

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"regexp"
	"slices"
	"strconv"
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

// JSON writes an answer as JSON. It may be large: entries are written one by one.
func JSON(w io.Writer, v any) error {
	out := bufio.NewWriter(w)
	p := printer{to: escaper{out}, parts: map[reflect.Type][]reflect.StructField{}}
	p.print(reflect.ValueOf(v), "\n")
	p.write("\n")
	return output(errors.Join(p.err, out.Flush()))
}

func output(err error) error {
	if err != nil {
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

// A printer writes what [json.Encoder] would, without a copy of the lists.
type printer struct {
	to    io.Writer
	err   error
	parts map[reflect.Type][]reflect.StructField // see partsOf
}

// partsOf returns the fields of a type if one of them may have a list.
func (p *printer) partsOf(t reflect.Type) []reflect.StructField {
	fields, known := p.parts[t]
	if !known {
		fields = reflect.VisibleFields(t)
		if !slices.ContainsFunc(fields, func(f reflect.StructField) bool {
			return f.Type.Kind() == reflect.Slice || f.Type.Kind() == reflect.Pointer
		}) {
			fields = nil
		}
		p.parts[t] = fields
	}
	return fields
}

func (p *printer) write(text string) {
	_, err := io.WriteString(p.to, text)
	p.err = cmp.Or(p.err, err)
}

// print writes a value. line begins another one of the same depth.
func (p *printer) print(v reflect.Value, line string) {
	for v.Kind() == reflect.Pointer && !v.IsNil() {
		v = v.Elem()
	}
	before, end, next := "[", "]", line+"  "
	part := func(name string, v reflect.Value) {
		p.write(before + next + name)
		p.print(v, next)
		before = ","
	}
	switch v.Kind() {
	case reflect.Slice:
		for i := range v.Len() {
			part("", v.Index(i))
		}
	case reflect.Struct:
		before, end = "{", "}"
		for _, f := range p.partsOf(v.Type()) {
			name, omit, _ := strings.Cut(f.Tag.Get("json"), ",")
			value := v.FieldByIndex(f.Index)
			empty := value.IsZero() || value.Kind() == reflect.Slice && value.Len() == 0
			if name != "" && !(omit != "" && empty) {
				part(strconv.Quote(name)+": ", value)
			}
		}
	}
	if before == "," {
		p.write(line + end)
		return
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	enc.SetIndent(line[1:], "  ")
	p.err = cmp.Or(p.err, enc.Encode(v.Interface()))
	p.write(strings.TrimSuffix(b.String(), "\n"))
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
