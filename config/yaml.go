package config

import (
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"

	"gopkg.in/yaml.v3"
)

// maxTagDirectives bounds the directives, which yaml.v3 compares pairwise.
const maxTagDirectives = 100

const errSecondDocument = "a second document begins here: a config file has one, merge them"

// readYAML returns the single value of the file, or nil if it is empty, and the
// long lists that were folded. The value may be usable even with problems, which
// are all errors.
func (t *text) readYAML(left *budget) (*yaml.Node, folds, []Problem) {
	if strings.Count(t.s, "%TAG") > maxTagDirectives {
		msg := fmt.Sprintf("more than %d %%TAG directives: a config file needs none", maxTagDirectives)
		return nil, nil, []Problem{t.problemAt(strings.Index(t.s, "%TAG"), msg)}
	}
	short, runs := t.fold()
	before := *left
	source, fits := left.take(short, runs)
	if !fits {
		return nil, nil, []Problem{t.tooMuch()}
	}
	docs, err := parseYAML(strings.NewReader(source))
	lists, found := unfold(&yaml.Node{Content: docs[:min(len(docs), 1)]}, runs)
	if !found {
		// A run turned out to be part of a block scalar, or there is an error
		// elsewhere: parse the whole text.
		if whole, fits := before.take(t.s, nil); fits {
			*left, lists, source = before, nil, whole
			docs, err = parseYAML(strings.NewReader(whole))
		} else if err == nil || len(docs) > 0 {
			return nil, nil, []Problem{t.tooMuch()}
		}
	}
	var problems []Problem
	if err != nil {
		p := t.syntaxError(err, source)
		if len(docs) == 0 {
			docs = firstDocument(source)
		}
		if len(docs) > 0 {
			p.Msg, p.Tolerated = errSecondDocument, true
		}
		problems = append(problems, p)
	}
	if len(docs) > 1 {
		p := t.problem(docs[1].Line, docs[1].Column, errSecondDocument)
		p.Tolerated = true
		problems = append(problems, p)
	}
	if len(docs) == 0 || isNull(docs[0]) {
		return nil, nil, problems
	}
	return docs[0], lists, problems
}

var documentEnd = regexp.MustCompile(`(?m)^\.\.\.( |$)`)

// firstDocument returns the value of the document that a line "..." ends, if it
// is valid YAML. yaml.v3 fails there because it looks for comments after the
// line.
func firstDocument(s string) []*yaml.Node {
	if end := documentEnd.FindStringIndex(s); end != nil {
		if docs, err := parseYAML(strings.NewReader(s[:end[0]] + "...")); err == nil {
			return docs
		}
	}
	return nil
}

// parseYAML returns the value of the first document, and of the next one that is
// not null. It reads no further, and returns them even with an error. yaml.v3
// panics in cases it does not expect.
func parseYAML(r io.Reader) (docs []*yaml.Node, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("yaml: %v", p)
		}
	}()
	dec := yaml.NewDecoder(r)
	for len(docs) < 2 {
		var doc yaml.Node
		if err := dec.Decode(&doc); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return docs, err
		}
		if root := doc.Content[0]; len(docs) == 0 || !isNull(root) {
			docs = append(docs, root)
		}
	}
	return docs, nil
}
