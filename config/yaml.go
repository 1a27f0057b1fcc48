package config

import (
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
	if f.json {
		return f.parseJSON()
	}
	if strings.HasPrefix(f.s, byteOrderMark) { // the older agents read the first line alone, or all, as its content is
		f.add(Error, "syntax", Position{f.name, 1, 1}, "the file begins with two byte order marks: remove them")
		return nil
	}
	if match := noDocument.FindStringSubmatchIndex(f.s); match != nil {
		f.add(Error, "syntax", f.at(match[2]), "a document ends here before it begins: remove this line")
		return nil
	}
	source := withoutComments(f.firstDocument())
	if strings.Contains(source, "!") { // the expression takes as long as all of yaml.v3
		if match := bareTag.FindStringSubmatchIndex(source); match != nil {
			f.add(Error, "syntax", f.at(match[2]),
				`the tag "!" makes a text of any value: remove it, or write the value in quotes`)
			return nil
		}
	}
	f.nodes -= countNodes(source, f.nodes)
	if f.nodes < 0 {
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

// bareTag matches the tag "!" where a value may begin. The older agents make a text of the value, and yaml.v3
// ignores the tag.
var bareTag = regexp.MustCompile(`(?m)(?:^|: |- |[\[{,?]|&[^ \n]+)[ \t]*(!(?:<!>)?)(?:[ \t]|$)`)

// noDocument matches a beginning in which a document ends.
var noDocument = regexp.MustCompile(`^(?:[ \t]*(?:#.*)?\n)*(\.\.\.)(?:$|[ \t\n])`)

func (f *file) tooMany() *yaml.Node {
	f.add(Error, "tooMany", Position{File: f.name}, "too many values: a config may have at most %d", maxNodes)
	return nil
}

// withoutComments removes the comments of a YAML text, each of which takes as much memory as a value if it stands
// next to one. Those behind a block scalar, or a quote that a line does not close, may be a part of a text: they stay.
func withoutComments(s string) string {
	if !strings.Contains(s, "#") {
		return s
	}
	var b strings.Builder
	for len(s) > 0 {
		line, remaining, _ := strings.Cut(s, "\n")
		content := line
		if i := comment.FindStringIndex(line); i != nil && !strings.ContainsAny(line[:i[0]], `"'`) {
			content = line[:i[0]]
		}
		if strings.ContainsAny(content, "|>") || strings.Count(content, `"`)%2 > 0 || strings.Count(content, "'")%2 > 0 {
			break
		}
		b.WriteString(content)
		b.WriteString(s[len(line) : len(s)-len(remaining)])
		s = remaining
	}
	b.WriteString(s)
	return b.String()
}

var comment = regexp.MustCompile(`(^|[ \t])[ \t]*#`)

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
		err = dec.Decode(&doc)
		if err == nil && root == nil {
			root = doc.Content[0]
		}
	}
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return root, err
}
