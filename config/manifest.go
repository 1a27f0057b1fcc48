package config

import (
	"bytes"
	"fmt"
	"io"
	"strings"

	"gopkg.in/yaml.v3"
)

// ReadFrom reads a source from r, such as standard input.
func ReadFrom(r io.Reader, name string) ([]Source, error) {
	data, err := io.ReadAll(io.LimitReader(r, maxSize+1)) // Parse reports that it is too large
	if err != nil {
		return nil, fmt.Errorf("config: %s: %w", name, err)
	}
	return []Source{{Name: name, Data: data}}, nil
}

// Unwrap returns the config in a ConfigMap manifest: its entry config or
// ip-masq-agent, or else its only entry. The note reports this; anything other
// than a ConfigMap is returned unchanged, without a note. If the entry is a block
// scalar, positions refer to the manifest.
func Unwrap(s Source) (out Source, note *Problem, err error) {
	if !bytes.Contains(s.Data, []byte("ConfigMap")) || countNodes(string(s.Data), maxNodes) > maxNodes {
		return s, nil, nil
	}
	var manifest struct {
		Kind string
		Data yaml.Node
	}
	root, err := parseYAML(bytes.NewReader(s.Data))
	if err != nil || root == nil || root.Decode(&manifest) != nil || manifest.Kind != "ConfigMap" {
		return s, nil, nil //nolint:nilerr // Parse reports the error
	}
	entries := manifest.Data.Content
	var name, value *yaml.Node
	for i := 0; i+1 < len(entries); i += 2 {
		key := entries[i]
		if len(entries) == 2 || key.Value == "config" || key.Value == "ip-masq-agent" && name == nil {
			name, value = key, entries[i+1]
		}
	}
	if name == nil {
		return s, nil, fmt.Errorf("config: %s: none of the %d entries of the ConfigMap is named config or ip-masq-agent",
			s.Name, len(entries)/2)
	}
	out = Source{Name: s.Name, Data: []byte(value.Value)}
	if value.Style&(yaml.LiteralStyle|yaml.FoldedStyle) != 0 {
		out.Data = block(string(s.Data), value.Line, name.Column)
	}
	return out, &Problem{
		ID: "configMap", Level: Note, Pos: At(s.Name, value.Line, value.Column),
		Msg: fmt.Sprintf("the entry %s of a ConfigMap is read", Printable(name.Value)),
	}, nil
}

// block returns the text with every line blanked except those of the block scalar
// that begins after a line and is indented by at least so many spaces, so that
// positions stay the same.
func block(text string, after, indent int) []byte {
	lines := strings.Split(text, "\n")
	ended := false
	for i, l := range lines {
		content := strings.TrimLeft(l, " ")
		ended = ended || i >= after && strings.TrimSpace(content) != "" && len(l)-len(content) < indent
		if i < after || ended {
			lines[i] = ""
		}
	}
	return []byte(strings.Join(lines, "\n"))
}
