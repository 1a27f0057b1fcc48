package config

import (
	"fmt"
	"io"
	"regexp"
	"strings"

	"gopkg.in/yaml.v3"
)

var configMapKind = regexp.MustCompile(`(?m)^\s*"?kind"?\s*:\s*"?ConfigMap\b`)

// ReadFrom reads a source of at most 4 MiB from r, such as standard input.
func ReadFrom(r io.Reader, name string) ([]Source, error) {
	data, err := io.ReadAll(io.LimitReader(r, maxSize+1))
	if err != nil {
		return nil, fmt.Errorf("config: %s: %w", name, err)
	}
	if len(data) > maxSize {
		return nil, Problems{tooLarge(name, false)}
	}
	return []Source{{Name: name, Data: data}}, nil
}

// Unwrap returns the config in a ConfigMap manifest: its entry config or
// ip-masq-agent, or else its only entry. The note reports this; anything other
// than a ConfigMap is returned unchanged, without a note. If the entry is a block
// scalar, positions refer to the manifest.
func Unwrap(s Source) (out Source, note *Problem, err error) {
	if !configMapKind.Match(s.Data) || countNodes(string(s.Data), maxNodes) > maxNodes {
		return s, nil, nil
	}
	var manifest yaml.Node
	if err := yaml.Unmarshal(s.Data, &manifest); err != nil || len(manifest.Content) != 1 {
		return s, nil, nil //nolint:nilerr // Parse reports the error
	}
	root := manifest.Content[0]
	if kind := child(root, "kind"); kind == nil || kind.Value != "ConfigMap" {
		return s, nil, nil
	}
	entries := child(root, "data")
	if entries == nil || entries.Kind != yaml.MappingNode {
		return s, nil, fmt.Errorf("config: %s: the ConfigMap has no data", s.Name)
	}
	var name, value *yaml.Node
	for i := 0; i+1 < len(entries.Content); i += 2 {
		key := entries.Content[i]
		if len(entries.Content) == 2 || key.Value == "config" || key.Value == "ip-masq-agent" && (name == nil || name.Value == key.Value) {
			name, value = key, entries.Content[i+1]
		}
	}
	if name == nil {
		return s, nil, fmt.Errorf("config: %s: none of the %d entries of the ConfigMap is named config or ip-masq-agent", s.Name, len(entries.Content)/2)
	}
	out = s
	if out.Data = []byte(value.Value); value.Style&(yaml.LiteralStyle|yaml.FoldedStyle) != 0 {
		out.Data = block(string(s.Data), value.Line)
	}
	return out, &Problem{
		Pos: At(s.Name, value.Line, value.Column), Note: true,
		Msg: fmt.Sprintf("the entry %s of a ConfigMap is read", Printable(name.Value)),
	}, nil
}

// child returns the value of a key, or nil.
func child(n *yaml.Node, key string) *yaml.Node {
	for i := 0; n.Kind == yaml.MappingNode && i+1 < len(n.Content); i += 2 {
		if n.Content[i].Value == key {
			return n.Content[i+1]
		}
	}
	return nil
}

// block returns the text with every line blanked except those of the block scalar
// that begins after a line, so that positions stay the same.
func block(text string, after int) []byte {
	lines := strings.Split(text, "\n")
	after = min(after, len(lines))
	clear(lines[:after])
	indent := -1
	for i, l := range lines[after:] {
		content := strings.TrimLeft(l, " ")
		switch column := len(l) - len(content); {
		case strings.TrimSpace(content) == "":
		case indent < 0:
			indent = column
		case column < indent: // the block has ended
			return []byte(strings.Join(lines[:after+i], "\n"))
		}
	}
	return []byte(strings.Join(lines, "\n"))
}
