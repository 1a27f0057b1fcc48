package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"strconv"
	"strings"
	"unicode/utf8"

	"gopkg.in/yaml.v3"
)

// readJSON returns the value of a JSON file as yaml.v3 nodes, so that one reader
// handles both formats. JSON is not quite a subset of YAML: tabs, escapes and
// scalar types differ.
func (f *file) readJSON(left *budget) *yaml.Node {
	data := []byte(f.s)
	if !json.Valid(data) {
		var value any
		err := json.Unmarshal(data, &value)
		offset := len(strings.TrimRight(f.s, " \t\r\n")) // if the end is unexpected
		var syntax *json.SyntaxError
		if errors.As(err, &syntax) && int(syntax.Offset) <= offset {
			offset = int(syntax.Offset) - 1
		}
		msg := "syntax error"
		if f.config {
			msg = err.Error() // quotes a character
		}
		f.errors.add(f.problemAt(offset, `JSON, as the file begins with "{": `+msg), maxErrors)
		return nil
	}
	b := jsonTree{s: f.s, dec: json.NewDecoder(bytes.NewReader(data)), line: 1, col: 1, left: left}
	b.dec.UseNumber()
	root := b.value()
	if left.nodes < 0 {
		f.tooMuch()
		return nil
	}
	return root
}

// jsonTree builds nodes from valid JSON, whose depth encoding/json has bounded.
type jsonTree struct {
	s    string // from the last node onward
	dec  *json.Decoder
	left *budget

	read      int // bytes before s
	line, col int // of the last node
}

// value reads one value. It returns nil at the end of a list or object, and when
// the budget is used up.
func (b *jsonTree) value() *yaml.Node {
	if b.left.nodes--; b.left.nodes < 0 {
		return nil
	}
	b.advance()
	n := &yaml.Node{Kind: yaml.ScalarNode, Line: b.line, Column: b.col}
	token, _ := b.dec.Token() // cannot fail: the text is valid
	switch v := token.(type) {
	case json.Delim:
		switch v {
		case '[':
			n.Kind, n.Tag, n.Style = yaml.SequenceNode, "!!seq", yaml.FlowStyle
		case '{':
			n.Kind, n.Tag, n.Style = yaml.MappingNode, "!!map", yaml.FlowStyle
		default:
			return nil
		}
		for c := b.value(); c != nil; c = b.value() {
			n.Content = append(n.Content, c)
		}
	case string:
		n.Tag, n.Value = "!!str", v
	case json.Number:
		n.Tag, n.Value = "!!int", v.String()
		if strings.ContainsAny(n.Value, ".eE") {
			n.Tag = "!!float"
		}
	case bool:
		n.Tag, n.Value = "!!bool", strconv.FormatBool(v)
	default:
		n.Tag = "!!null"
	}
	return n
}

// advance moves line and col to the next token.
func (b *jsonTree) advance() {
	skip := int(b.dec.InputOffset()) - b.read
	skip += len(b.s[skip:]) - len(strings.TrimLeft(b.s[skip:], " \t\r\n,:"))
	passed := b.s[:skip]
	if i := strings.LastIndexByte(passed, '\n'); i >= 0 {
		b.line += strings.Count(passed, "\n")
		b.col, passed = 1, passed[i+1:]
	}
	b.col += utf8.RuneCountInString(passed)
	b.s = b.s[skip:]
	b.read += skip
}
