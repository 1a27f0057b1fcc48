package config

import (
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"
	"unicode/utf8"
)

// syntaxError turns an error of yaml.v3 into a problem with a position. yaml.v3
// reports a line at best: that of the context, minus one for an error of its
// parser, and none at all for the first line. So the source, which is what was
// parsed, is parsed once more after an empty line, and line by line.
func (t *text) syntaxError(err error, source string) Problem {
	msg := strings.TrimPrefix(err.Error(), "yaml: ")
	if strings.Contains(msg, "UTF-8") || strings.Contains(msg, "control characters") {
		return t.forbidden()
	}
	lines := strings.Split(source, "\n")
	feed := lineFeed{lines: lines}
	_, _ = parseYAML(&feed)
	if name, ok := strings.CutPrefix(msg, "unknown anchor '"); ok {
		name = "*" + strings.TrimSuffix(name, "' referenced")
		read := strings.Join(t.lines()[:feed.read], "\n")
		return t.problemAt(max(strings.LastIndex(read, name), 0), t.called("alias", name)+" has no anchor before it")
	}
	if _, err := parseYAML(strings.NewReader("\n" + source)); err != nil {
		msg = strings.TrimPrefix(err.Error(), "yaml: ")
	}
	line, msg := lineOf(msg)
	line = min(max(line, 1), len(t.lines()))
	switch {
	case msg == "did not find expected key", msg == "did not find expected '-' indicator":
		line = brokenLine(lines, line, feed.read)
	case strings.Contains(msg, "violates indentation"):
		for line < len(t.lines()) && !strings.HasPrefix(strings.TrimLeft(t.lines()[line-1], " "), "\t") {
			line++
		}
	}
	offset, hint := t.explain(msg, t.lines()[line-1])
	return t.problem(line, utf8.RuneCountInString(t.lines()[line-1][:offset])+1, "syntax: "+msg+hint)
}

// called returns what, followed by its content if that may be quoted.
func (t *text) called(what, content string) string {
	if t.config && quotable(content) {
		return what + " " + strconv.Quote(content)
	}
	return what
}

// lineOf splits "line 3: message", which counts the extra empty line before the text.
func lineOf(s string) (int, string) {
	rest, _ := strings.CutPrefix(s, "line ")
	number, msg, _ := strings.Cut(rest, ": ")
	n, err := strconv.Atoi(number)
	if err != nil {
		return 1, s
	}
	for _, parser := range []string{
		"did not find expected <", "did not find expected node", "did not find expected key", "did not find expected '-'",
		"did not find expected ','", "found duplicate %", "found incompatible", "found undefined tag",
	} {
		if strings.HasPrefix(msg, parser) {
			return n, msg
		}
	}
	return n - 1, msg
}

// brokenLine returns the line, between two others, from which on the text is no
// longer YAML. It is for errors in which yaml.v3 names only the line where a list
// or mapping begins. The parser reads a little ahead.
func brokenLine(lines []string, from, read int) int {
	for n := read; n > from && n > read-8 && n < 10_000; n-- {
		if _, err := parseYAML(strings.NewReader(strings.Join(lines[:n-1], "\n"))); err == nil {
			return n
		}
	}
	return from
}

// lineFeed feeds a parser one line at a time, to find out how far it gets.
type lineFeed struct {
	lines []string
	read  int    // lines consumed
	rest  string // of the last one
}

func (f *lineFeed) Read(p []byte) (int, error) {
	if f.rest == "" {
		if f.read == len(f.lines) {
			return 0, io.EOF
		}
		f.rest = f.lines[f.read] + "\n"
		f.read++
	}
	n := copy(p, f.rest)
	f.rest = f.rest[n:]
	return n, nil
}

// explain returns the offset of an error within its line, and a hint.
func (t *text) explain(msg, line string) (int, string) {
	start := len(line) - len(strings.TrimLeft(line, " \t"))
	has := func(s string) bool { return strings.Contains(msg, s) }
	last := func(chars string) int { return max(start, strings.LastIndexAny(line, chars)) }
	switch i := strings.IndexByte(line[:start], '\t'); {
	case i >= 0:
		return i, ": indent with spaces, not with tabs"
	case has("node content"):
		if value := colonValue.FindStringSubmatchIndex(line); value != nil {
			return value[2], fmt.Sprintf(": inside [ ] write %s in quotes", t.called("the value", line[value[2]:value[3]]))
		}
		return last("[{"), ": close the bracket, or put the value in quotes"
	case has("cannot start any token"):
		return max(start, strings.IndexAny(line, "@`%")), ": put the value in quotes"
	case has("mapping values are not allowed"):
		return start, ": fix the indentation, or put the value in quotes"
	case has("could not find expected ':'"):
		return start, ": write a key as KEY: VALUE, an entry of a list as - VALUE"
	case has("expected key"), has("'-' indicator"):
		return start, ": fix the indentation"
	case has("',' or"):
		return last("[{"), ": close the bracket, and put commas between the entries"
	case has("unexpected end of stream"):
		return last(`"'`), ": close the quote"
	case has("incompatible YAML"):
		return start, ": remove the line %YAML"
	}
	return start, ""
}

// colonValue matches a value that begins with a colon, such as ::/0, which YAML
// takes for the end of a key inside [ ].
var colonValue = regexp.MustCompile(`(?:^|[ \t[,])(:[^ \t,\]}]+)`)

// forbidden reports the first byte or character that YAML does not allow.
func (t *text) forbidden() Problem {
	for i, r := range t.s {
		switch {
		case r == utf8.RuneError && !strings.HasPrefix(t.s[i:], "\uFFFD"):
			return t.problemAt(i, fmt.Sprintf("byte 0x%02x is not UTF-8", t.s[i]))
		case r < ' ' && r != '\t' && r != '\n', 0x7f <= r && r < 0xa0, r == 0xfffe, r == 0xffff:
			return t.problemAt(i, fmt.Sprintf("control character %U is not allowed", r))
		}
	}
	return t.problemAt(0, "characters that YAML does not allow")
}
