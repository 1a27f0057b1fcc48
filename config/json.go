package config

import (
	"encoding/json"
	"errors"
	"strings"
	"unicode/utf8"

	"gopkg.in/yaml.v3"
)

// parseJSON returns the value of a file that begins with "{", for which the older agents take it, too. It reads
// whatever encoding/json accepts, also what is no YAML. It returns nil if the file is invalid.
func (f *file) parseJSON() *yaml.Node {
	if err := json.Unmarshal([]byte(f.s), &struct{}{}); err != nil {
		f.invalidJSON(err)
		return nil
	}
	r := &jsonReader{Decoder: json.NewDecoder(strings.NewReader(f.s)), text: f.s, line: 1, column: 1, remaining: f.nodes}
	r.UseNumber()
	root := r.value()
	f.nodes = r.remaining
	if f.nodes < 0 {
		return f.tooMany()
	}
	return root
}

// A jsonReader makes nodes of valid JSON, with their places.
type jsonReader struct {
	*json.Decoder
	text         string
	offset       int // of the place
	line, column int
	remaining    int // values that may follow
}

// value reads the next value with all that it contains, nil if that is the end of a list or a mapping, or if no more
// values may follow.
func (r *jsonReader) value() *yaml.Node {
	start := int(r.InputOffset())
	for start < len(r.text) && strings.IndexByte(" \t\n,:", r.text[start]) >= 0 {
		start++
	}
	token, _ := r.Token() // of valid JSON
	r.remaining--
	if r.remaining < 0 {
		return nil
	}
	r.moveTo(start)
	n := &yaml.Node{Kind: yaml.ScalarNode, Line: r.line, Column: r.column}
	switch token := token.(type) {
	case json.Delim:
		return r.content(n, token)
	case string:
		n.Tag = "!!str"
		n.Style = yaml.DoubleQuotedStyle
		n.Value = token
	case json.Number:
		n.Tag = "!!int"
		n.Value = token.String()
		if strings.ContainsAny(n.Value, ".eE") {
			n.Tag = "!!float"
		}
	case bool:
		n.Tag = "!!bool"
		n.Value = map[bool]string{true: "true", false: "false"}[token]
	case nil:
		n.Tag = "!!null"
		n.Value = "null"
	}
	return n
}

// content reads what is between the delimiters of a list or a mapping.
func (r *jsonReader) content(n *yaml.Node, begin json.Delim) *yaml.Node {
	switch begin {
	case '{':
		n.Kind = yaml.MappingNode
		n.Tag = "!!map"
	case '[':
		n.Kind = yaml.SequenceNode
		n.Tag = "!!seq"
	default:
		return nil
	}
	for next := r.value(); next != nil; next = r.value() {
		n.Content = append(n.Content, next)
	}
	return n
}

// moveTo sets the place to that of an offset behind it.
func (r *jsonReader) moveTo(offset int) {
	passed := r.text[r.offset:offset]
	if i := strings.LastIndexByte(passed, '\n'); i >= 0 {
		r.line += strings.Count(passed, "\n")
		r.column = 1
		passed = passed[i+1:]
	}
	r.column += utf8.RuneCountInString(passed)
	r.offset = offset
}

// invalidJSON reports why the file is not JSON.
func (f *file) invalidJSON(err error) {
	offset := len(strings.TrimRight(f.s, " \t\n")) // if the end is unexpected
	var syntax *json.SyntaxError
	if errors.As(err, &syntax) {
		offset = min(offset, int(syntax.Offset)-1)
	}
	hint := ""
	preceding := strings.TrimRight(f.s[:offset], " \t\n")
	closing := offset < len(f.s) && strings.IndexByte("]}", f.s[offset]) >= 0
	switch {
	case closing && strings.HasSuffix(preceding, ","):
		offset = len(preceding) - 1
		hint = ": remove this comma, the last entry has none"
	case strings.Contains(err.Error(), "after object key:value pair"),
		strings.Contains(err.Error(), "after array element"):
		hint = ": put a comma before it"
	case strings.Contains(err.Error(), "escape"):
		hint = `: a backslash begins an escape; write "/" in a CIDR`
	}
	f.add(Error, "syntax", f.at(offset), `JSON, as the file begins with "{": %s%s`, err, hint) // quotes a character
}
