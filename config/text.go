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

	// Whether there is a key of a config, or a misspelled one. Nothing is quoted
	// from any other text: it may be a Secret, mounted by mistake.
	hasKey bool
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
	t.hasKey = hasKey(t.s)
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

// maxLine is the longest line, in bytes, that a Problem shows, so that many
// problems in one long line take no more than linear time.
const maxLine = 500

// show adds the source line to a problem, and clamps its position to the text:
// yaml.v3 reports something missing at the end as after the last line.
func (t *text) show(p Problem) Problem {
	p.Pos.Line = min(p.Pos.Line, len(t.lines()))
	if l := t.lines()[p.Pos.Line-1]; len(l) <= maxLine {
		if t.hasKey {
			p.source = l
		}
		p.Pos.Col = min(p.Pos.Col, utf8.RuneCountInString(l)+1)
	}
	return p
}

// hasKey reports whether there is a key of a config, or a misspelled one, before
// one of the first thousand colons of a text.
func hasKey(s string) bool {
	for range 1000 {
		name := keyName.FindStringSubmatchIndex(s)
		if name == nil {
			return false
		}
		if likelyKey(s[name[2]:name[3]]) != "" {
			return true
		}
		s = s[name[1]:]
	}
	return false
}

var keyName = regexp.MustCompile(`([A-Za-z0-9_-]+)["' ]*:`)

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
