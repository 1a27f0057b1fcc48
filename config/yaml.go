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

// readYAML returns the single value of the file, or nil if it is empty. Long lists
// are folded. The value may be usable even with errors.
func (f *file) readYAML(left *budget) *yaml.Node {
	if strings.Count(f.s, "%TAG") > maxTagDirectives {
		msg := fmt.Sprintf("more than %d %%TAG directives: a config file needs none", maxTagDirectives)
		f.errors.add(f.problemAt(strings.Index(f.s, "%TAG"), msg), maxErrors)
		return nil
	}
	short, runs := f.fold()
	before := *left
	source, fits := left.take(short, runs)
	if !fits {
		f.tooMuch()
		return nil
	}
	docs, err := parseYAML(strings.NewReader(source))
	lists, found := unfold(&yaml.Node{Content: docs[:min(len(docs), 1)]}, runs)
	if !found {
		// A run turned out to be part of a block scalar, or there is an error
		// elsewhere: parse the whole text.
		if whole, fits := before.take(f.s, nil); fits {
			*left, lists, source = before, nil, whole
			docs, err = parseYAML(strings.NewReader(whole))
		} else if err == nil || len(docs) > 0 {
			f.tooMuch()
			return nil
		}
	}
	f.folded = lists
	if err != nil {
		p := f.syntaxError(err, source)
		if len(docs) == 0 {
			docs = firstDocument(source)
		}
		if len(docs) > 0 {
			p.Msg, p.Tolerated = errSecondDocument, true
		}
		f.errors.add(p, maxErrors)
	}
	if len(docs) > 1 {
		f.failTolerated(docs[1], errSecondDocument)
	}
	if len(docs) == 0 || isNull(docs[0]) {
		return nil
	}
	return docs[0]
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
