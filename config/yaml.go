package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"

	"gopkg.in/yaml.v3"
)

// root returns the value of the file's first document, or nil if it is invalid. That of
// an empty file is null.
func (f *file) root() *yaml.Node {
	if strings.Count(f.s, "\n") > maxLines {
		return f.tooMany()
	}
	source := f.firstDocument()
	if f.json {
		if !f.validJSON() {
			return nil
		}
		source = asYAML.Replace(source)
	}
	if f.nodes -= countNodes(source, f.nodes); f.nodes < 0 {
		return f.tooMany()
	}
	root, err := parseYAML(strings.NewReader(source))
	if err != nil {
		at, msg := f.syntaxError(err, source)
		if root == nil {
			f.add(Error, "syntax", at, "%s", msg)
		} else { // the document ends without a line "---"
			f.add(Mistake, "secondDocument", at, errSecondDocument)
		}
	}
	if root == nil && err == nil {
		root = &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!null"}
	}
	return root
}

// asYAML replaces what YAML reads otherwise than JSON: tabs, which valid JSON has only
// between values, and in texts the characters that YAML takes for line breaks. No value
// that is accepted has any of these.
var asYAML = strings.NewReplacer("\t", " ", "\u0085", "\u00a0", "\u2028", "\u00a0", "\u2029", "\u00a0")

func (f *file) tooMany() *yaml.Node {
	f.add(Error, "tooMany", At(f.name, 0, 0), "too many values: a config may have at most 100,000")
	return nil
}

const errSecondDocument = "a second document begins here: a config file has one, merge them"

// firstDocument returns the text of the first document. The older agents read no
// further: whatever follows is a mistake, even if it is not YAML. A line that
// separates documents cannot be part of a quoted text or a block scalar.
func (f *file) firstDocument() string {
	end := len(prologue.FindString(f.s))
	for line := range strings.SplitAfterSeq(f.s[end:], "\n") {
		if (strings.HasPrefix(line, "---") || strings.HasPrefix(line, "...")) && blank(line, 3) {
			break
		}
		end += len(line)
	}
	if next := end + len(nothing.FindString(f.s[end:])); next < len(f.s) {
		f.add(Mistake, "secondDocument", f.at(next), errSecondDocument)
	}
	return f.s[:end]
}

// What may be before the content of the first document, and after it.
var (
	prologue = regexp.MustCompile(`^(([ \t]*(#.*)?|%.*)\n)*(---)?`)
	nothing  = regexp.MustCompile(`^((---|\.\.\.)?[ \t]*(#.*)?(\n|$))*((---|\.\.\.)?[ \t]+)?`)
)

// parseYAML returns the value of a document, also with an error if that is after
// the value. yaml.v3 panics in cases it does not expect.
func parseYAML(r io.Reader) (root *yaml.Node, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("yaml: %v", p)
		}
	}()
	dec := yaml.NewDecoder(r)
	for err == nil {
		var doc yaml.Node
		if err = dec.Decode(&doc); err == nil && root == nil {
			root = doc.Content[0]
		}
	}
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return root, err
}

// validJSON reports whether a file that begins with "{" is JSON, for which the
// older agents take it. As YAML it means the same.
func (f *file) validJSON() bool {
	err := json.Unmarshal([]byte(f.s), &struct{}{})
	if err == nil {
		return true
	}
	offset := len(strings.TrimRight(f.s, " \t\n")) // if the end is unexpected
	var syntax *json.SyntaxError
	if errors.As(err, &syntax) {
		offset = min(offset, int(syntax.Offset)-1)
	}
	hint, before := "", strings.TrimRight(f.s[:offset], " \t\n")
	closing := offset < len(f.s) && strings.IndexByte("]}", f.s[offset]) >= 0
	switch {
	case closing && strings.HasSuffix(before, ","):
		offset, hint = len(before)-1, ": remove this comma, the last entry has none"
	case strings.Contains(err.Error(), "after object key:value pair"),
		strings.Contains(err.Error(), "after array element"):
		hint = ": put a comma before it"
	case strings.Contains(err.Error(), "escape"):
		hint = `: a backslash begins an escape; write "/" in a CIDR`
	}
	f.add(Error, "syntax", f.at(offset), `JSON, as the file begins with "{": %s%s`, err, hint) // quotes a character
	return false
}
