package config

import (
	"fmt"
	"regexp"
	"sort"
	"strings"
	"unicode/utf8"
)

// maxSearched is the longest text, in bytes, that is parsed again and again to find
// an error.
const maxSearched = 64 << 10

// syntaxError returns the position of an error of yaml.v3, and a message. yaml.v3
// reports a line at best, and often that in which something begins. The error is in
// the line with which the text first has it; the column is that of its first character.
func (t *text) syntaxError(err error, source string) (Position, string) {
	msg := messageOf(err)
	if strings.Contains(msg, "UTF-8") || strings.Contains(msg, "control characters") {
		return t.forbidden()
	}
	lines := strings.SplitAfter(source, "\n")
	broken := func(n int, end string) bool {
		_, err := parseYAML(strings.NewReader(strings.Join(lines[:n], "") + end))
		return messageOf(err) == msg
	}
	first := func(end string) int {
		return sort.Search(len(lines)-1, func(n int) bool { return broken(n+1, end) })
	}
	line := 0
	_, _ = fmt.Sscanf(err.Error(), "yaml: line %d", &line) // from 0 in the parser, from 1 in the scanner
	line = min(line, len(lines)-1)
	if len(source) <= maxSearched {
		line = first("")
		if value := first("\n]"); strings.Contains(msg, "node content") && colonValue.MatchString(lines[value]) {
			line = value // not the bracket, which is just not closed yet
		}
	} else if broken(line, "") {
		line--
	}
	content := strings.TrimLeft(lines[line], " \t")
	indent := strings.TrimSuffix(lines[line], content)
	return Position{t.name, line + 1, len(indent) + 1}, explain(msg, indent, content)
}

// messageOf returns the message of "yaml: line 3: message".
func messageOf(err error) string {
	text := fmt.Sprint(err)
	return text[strings.LastIndex(text, ": ")+2:]
}

// explain returns a message, with a hint for a line of that indent and content.
func explain(msg, indent, content string) string {
	text := "syntax: " + msg
	switch {
	case strings.HasPrefix(msg, "unknown anchor"):
		return "the alias has no anchor before it"
	case strings.Contains(indent, "\t"):
		return text + ": indent with spaces, not with tabs"
	case strings.Contains(msg, "node content") && colonValue.MatchString(content):
		return text + ": inside [ ] write the value in quotes"
	case strings.HasPrefix(content, "- ") && strings.HasPrefix(msg, "did not find expected"):
		return text + `: align the "-" of all entries of a list`
	}
	for _, h := range hints {
		if strings.Contains(msg, h.msg) {
			return text + h.hint
		}
	}
	return text
}

// hints are for messages of yaml.v3.
var hints = []struct{ msg, hint string }{
	{"node content", ": close the bracket, or put the value in quotes"},
	{"cannot start any token", ": put the value in quotes"},
	{"mapping values are not allowed", ": fix the indentation, or put the value in quotes"},
	{"could not find expected ':'", ": write a key as KEY: VALUE, an entry of a list as - VALUE"},
	{"expected key", ": fix the indentation"},
	{"'-' indicator", ": fix the indentation"},
	{"',' or", ": close the bracket, and put commas between the entries"},
	{"unexpected end of stream", ": close the quote"},
	{"escape", `: write the character itself, "/" in a CIDR`},
	{"incompatible YAML", ": remove the line %YAML"},
}

// colonValue matches a value that begins with a colon, such as ::/0, which YAML
// takes for the end of a key inside [ ].
var colonValue = regexp.MustCompile(`(?:^|[ \t[,])(:[^ \t,\]}]+)`)

// forbidden returns the first byte or character that YAML does not allow.
func (t *text) forbidden() (Position, string) {
	i := max(0, strings.IndexFunc(t.s, func(r rune) bool {
		return r < ' ' && r != '\t' && r != '\n' || 0x7f <= r && r < 0xa0 || r >= utf8.RuneError && r <= 0xffff
	}))
	r, size := utf8.DecodeRuneInString(t.s[i:])
	if size == 1 && r == utf8.RuneError {
		return t.at(i), fmt.Sprintf("byte 0x%02x is not UTF-8", t.s[i])
	}
	return t.at(i), fmt.Sprintf("control character %U is not allowed", r)
}
