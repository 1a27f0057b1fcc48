package config

import (
	"encoding/binary"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// text is the content of one file in UTF-8, without a byte order mark. Lines end in
// LF.
type text struct {
	name  string
	s     string
	json  bool
	split []string // filled by lines
}

func newText(s Source) *text {
	t := &text{name: Printable(s.Name), s: string(s.Data)}
	// The older agents, too, decode whatever begins with "{" after white space,
	// and has no byte order mark, as JSON.
	t.json = strings.HasPrefix(strings.TrimLeftFunc(t.s, unicode.IsSpace), "{")
	for mark, order := range map[string]binary.ByteOrder{"\xff\xfe": binary.LittleEndian, "\xfe\xff": binary.BigEndian} {
		if strings.HasPrefix(t.s, mark) { // some Windows editors and shells write UTF-16
			units := make([]uint16, len(s.Data)/2)
			_, _ = binary.Decode(s.Data, order, units) // cannot fail: they fit
			t.s = string(utf16.Decode(units))
		}
	}
	breaks := lineBreaks
	if t.json {
		breaks = jsonLineBreaks
	}
	t.s = breaks.Replace(strings.TrimPrefix(t.s, byteOrderMark))
	return t
}

const byteOrderMark = "\uFEFF"

// lineBreaks replaces those of YAML 1.1, by which yaml.v3 counts lines.
var (
	lineBreaks     = strings.NewReplacer("\r\n", "\n", "\r", "\n", "\u0085", "\n", "\u2028", "\n", "\u2029", "\n")
	jsonLineBreaks = strings.NewReplacer("\r\n", "\n", "\r", "\n")
)

// lines returns the lines, split on first use: only problems need them.
func (t *text) lines() []string {
	if t.split == nil {
		t.split = strings.Split(t.s, "\n")
	}
	return t.split
}

// clamp returns the position in the text that is nearest to one: yaml.v3 reports something
// missing at the end as after the last line.
func (t *text) clamp(p Position) Position {
	p.Line = min(p.Line, len(t.lines()))
	p.Col = min(p.Col, utf8.RuneCountInString(t.lines()[p.Line-1])+1)
	return p
}

func (t *text) at(offset int) Position {
	head := t.s[:offset]
	start := strings.LastIndexByte(head, '\n') + 1
	return Position{t.name, strings.Count(head, "\n") + 1, utf8.RuneCountInString(head[start:]) + 1}
}

// maxQuoted is the longest value that a message quotes, in bytes. The file may be
// something else mounted by mistake, even a Secret: long or multi-line text is never
// quoted.
const maxQuoted = 64

// quote returns a short text in quotes, or the length of a long one.
func quote(s string) string {
	if !quotable(s) {
		return fmt.Sprintf("a text of %d bytes", len(s))
	}
	return strconv.Quote(s)
}

func quotable(s string) bool {
	return len(s) <= maxQuoted && !strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) })
}

// named returns what, followed by the name if that looks like an identifier.
func named(what, name string) string {
	if identifier.MatchString(name) {
		what += " " + strconv.Quote(name)
	}
	return what
}

// identifier matches a key that a message may quote.
var identifier = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9_.-]{0,39}$`)
