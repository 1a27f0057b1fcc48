package config

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
	"unique"
)

// text is the content of one file in UTF-8, without a byte order mark. YAML lines
// end in LF.
type text struct {
	name  unique.Handle[string]
	s     string
	json  bool
	split []string // filled by lines

	// Whether there is a key of a config, or a misspelled one. Nothing is quoted
	// from any other text: it may be a Secret, mounted by mistake.
	config bool
}

func newText(s Source) *text {
	t := &text{name: unique.Make(Printable(s.Name))}
	// The older agents, too, decode whatever begins with "{" after white space,
	// and has no byte order mark, as JSON.
	t.json = bytes.HasPrefix(bytes.TrimLeftFunc(s.Data, unicode.IsSpace), []byte("{"))
	switch {
	case t.json:
		t.s = string(s.Data)
	case bytes.HasPrefix(s.Data, []byte("\xff\xfe")):
		t.s = fromUTF16(s.Data[2:], binary.LittleEndian)
	case bytes.HasPrefix(s.Data, []byte("\xfe\xff")):
		t.s = fromUTF16(s.Data[2:], binary.BigEndian)
	default:
		t.s = strings.TrimPrefix(string(s.Data), "\uFEFF")
	}
	if !t.json {
		// yaml.v3 counts lines by these YAML 1.1 line breaks.
		for _, br := range []string{"\r\n", "\r", "\u0085", "\u2028", "\u2029"} {
			t.s = strings.ReplaceAll(t.s, br, "\n")
		}
	}
	t.config = hasKey(t.s)
	return t
}

// fromUTF16 decodes UTF-16, which some Windows editors and shells write.
func fromUTF16(b []byte, order binary.ByteOrder) string {
	units := make([]uint16, len(b)/2)
	_, _ = binary.Decode(b, order, units) // cannot fail: they fit
	return string(utf16.Decode(units))
}

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

// problem returns a Problem at a line and column, clamped to the text: yaml.v3
// reports something missing at the end as after the last line.
func (t *text) problem(line, col int, msg string) Problem {
	line = min(line, len(t.lines()))
	p := Problem{Pos: at(t.name, line, col), Msg: msg}
	if l := strings.TrimSuffix(t.lines()[line-1], "\r"); len(l) <= maxLine {
		if t.config {
			p.Text = l
		}
		p.Pos.Col = int32(min(col, utf8.RuneCountInString(l)+1))
	}
	return p
}

// hasKey reports whether there is a key of a config, or a misspelled one, before
// one of the first thousand colons of a text.
func hasKey(s string) bool {
	keys := Keys()
	for range 1000 {
		before, after, found := strings.Cut(s, ":")
		if !found {
			return false
		}
		name := strings.TrimRight(before[max(0, len(before)-maxQuoted):], `"' `)
		name = name[1+strings.LastIndexFunc(name, func(r rune) bool { return !unicode.In(r, unicode.Letter, unicode.Digit) && r != '-' && r != '_' }):]
		if likelyKey(keys, name) != "" {
			return true
		}
		s = after
	}
	return false
}

// problemAt returns a Problem at an offset.
func (t *text) problemAt(offset int, msg string) Problem {
	before := t.s[:offset]
	start := strings.LastIndexByte(before, '\n') + 1
	return t.problem(strings.Count(before, "\n")+1, utf8.RuneCountInString(before[start:])+1, msg)
}

// The longest value, and the most of an unknown key, that a message quotes, in
// bytes. The file may be something else mounted by mistake, even a Secret: long
// or multi-line text is never quoted.
const (
	maxQuoted    = 64
	maxQuotedKey = 40
)

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
	if len(name) > maxName || !identifier.MatchString(name) {
		return what
	}
	if len(name) > maxQuotedKey {
		name = name[:maxQuotedKey] + "…"
	}
	return what + " " + strconv.Quote(name)
}

func unknownKey(name string) string { return named("unknown key", name) }

var identifier = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9_.-]*$`)
