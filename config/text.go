package config

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// text is the content of one file in UTF-8, without a byte order mark. In YAML
// every line ends in LF.
type text struct {
	name  string
	s     string
	json  bool
	split []string // filled by lines
	ours  *bool    // filled by echoes
}

func newText(s Source) *text {
	t := &text{name: Printable(s.Name)}
	// What begins with "{", white space aside, has always gone to a JSON
	// decoder, without a byte order mark only.
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
		// By these breaks of YAML 1.1 yaml.v3 counts lines.
		for _, br := range []string{"\r\n", "\r", "\u0085", "\u2028", "\u2029"} {
			t.s = strings.ReplaceAll(t.s, br, "\n")
		}
	}
	return t
}

// fromUTF16 reads what some Windows editors and shells write.
func fromUTF16(b []byte, order binary.ByteOrder) string {
	units := make([]uint16, len(b)/2)
	for i := range units {
		units[i] = order.Uint16(b[2*i:])
	}
	return string(utf16.Decode(units))
}

// lines returns the lines. Only what has to be reported needs them.
func (t *text) lines() []string {
	if t.split == nil {
		t.split = strings.Split(t.s, "\n")
	}
	return t.split
}

// maxLine bounds a line, in bytes, that a Problem shows: many problems of a
// long one are to cost no more than linear time.
const maxLine = 500

// problem returns a Problem at a line and column. It moves them into the text:
// yaml.v3 places what is missing at the end behind the last line.
func (t *text) problem(line, col int, msg string) Problem {
	line = min(line, len(t.lines()))
	p := Problem{Pos: Position{File: t.name, Line: line, Col: col}, Msg: msg}
	if l := strings.TrimSuffix(t.lines()[line-1], "\r"); len(l) <= maxLine {
		if t.echoes() {
			p.Text = l
		}
		p.Pos.Col = min(col, utf8.RuneCountInString(l)+1)
	}
	return p
}

// echoes reports whether the text looks like a config. Of any other nothing is
// shown: it may be a Secret, mounted by mistake.
func (t *text) echoes() bool {
	if t.ours == nil {
		lower := strings.ToLower(t.s)
		ours := slices.ContainsFunc([]string{"masq", "cidr", "linklocal", "resync", "ipv6"}, func(word string) bool {
			return hasKey(lower, word)
		})
		t.ours = &ours
	}
	return *t.ours
}

// hasKey reports whether a text has a key with a word in it.
func hasKey(s, word string) bool {
	for {
		_, after, found := strings.Cut(s, word)
		if !found {
			return false
		}
		s = after
		rest := strings.TrimLeft(after[:min(len(after), len(KeyNonMasqueradeSrcCIDRs))], "abcdefghijklmnopqrstuvwxyz0123456789")
		if rest = strings.TrimLeft(rest, `"' `); strings.HasPrefix(rest, ":") {
			return true
		}
	}
}

// problemAt returns a Problem at an offset.
func (t *text) problemAt(offset int, msg string) Problem {
	before := t.s[:offset]
	start := strings.LastIndexByte(before, '\n') + 1
	return t.problem(strings.Count(before, "\n")+1, utf8.RuneCountInString(before[start:])+1, msg)
}

// What a message quotes of a value, and of an unknown key, in bytes. Something
// else can be mounted by mistake, even a Secret: nothing of a long text is
// quoted, nor of one of several lines.
const (
	maxQuoted    = 64
	maxQuotedKey = 40
)

// quote returns a short text in quotes, or how long it is.
func quote(s string) string {
	if !quotable(s) {
		return fmt.Sprintf("a text of %d bytes", len(s))
	}
	return strconv.Quote(s)
}

func quotable(s string) bool {
	return len(s) <= maxQuoted && !strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) })
}

// named returns what has a name, with the name if that looks like one.
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
