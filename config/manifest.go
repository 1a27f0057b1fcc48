package config

import (
	"bytes"
	"fmt"
	"io"
	"maps"
	"slices"
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

// manifestKeys are keys at the top of a Kubernetes manifest, which no config has.
var manifestKeys = []string{"apiVersion", "kind", "metadata", "data"}

// manifestKey returns the first such key of a file, or nil.
func manifestKey(root *yaml.Node) *yaml.Node {
	for i := 0; i < len(root.Content); i += 2 {
		if slices.Contains(manifestKeys, target(root.Content[i]).Value) {
			return root.Content[i]
		}
	}
	return nil
}

// isManifest reports whether the file is a manifest, which is an error: the older agents
// ignore all of it, and apply their defaults.
func (f *file) isManifest(root *yaml.Node) bool {
	key := manifestKey(root)
	if key == nil {
		return false
	}
	var manifest struct{ Kind string }
	if root.Decode(&manifest) == nil && (manifest.Kind == "ConfigMap" || manifest.Kind == "") {
		f.report(Error, "manifest", key, "this is a ConfigMap manifest: mount its data, or pass --manifest to check and "+
			"render")
		return true
	}
	f.report(Error, "manifest", key, "this is a Kubernetes manifest, not a config: mount the data of a ConfigMap")
	return true
}

// Unwrap returns the config in a ConfigMap manifest: its entry config or ip-masq-agent, or else its
// only entry, and a note about it. If the entry is a block scalar, positions refer to the manifest.
// Syntax errors are left to Parse.
func Unwrap(s Source) (config Source, note *Problem, err error) {
	root, err := parseYAML(bytes.NewReader(s.Data))
	if err != nil || root == nil {
		return s, nil, nil //nolint:nilerr // Parse reports the error
	}
	var manifest struct {
		Kind string
		Data map[string]yaml.Node
	}
	fail := func(n *yaml.Node, format string, args ...any) (Source, *Problem, error) {
		position := Position{s.Name, n.Line, n.Column}
		return s, nil, Problems{{ID: "manifest", Level: Error, Pos: position, Msg: fmt.Sprintf(format, args...)}}
	}
	if root.Decode(&manifest) != nil || manifest.Kind != "ConfigMap" {
		return fail(root, "this is no ConfigMap manifest: leave --manifest out")
	}
	for i := 0; i < len(root.Content); i += 2 {
		if key := root.Content[i]; knownKey(key.Value) != nil {
			return fail(key, `%s is outside of the data of the ConfigMap: indent all of the config below "config: |"`, key.Value)
		}
	}
	names := slices.Sorted(maps.Keys(manifest.Data))
	for _, name := range names {
		if value := manifest.Data[name]; value.Kind != yaml.ScalarNode || value.Tag != "!!str" {
			return fail(&value, `the entry %s of the ConfigMap is %s, want a text: indent all of the config below "config: |"`,
				Printable(name), kind(&value))
		}
	}
	if len(names) > 1 {
		names = []string{"config", "ip-masq-agent"}
	}
	for _, name := range names {
		value, found := manifest.Data[name]
		if !found {
			continue
		}
		config = Source{Name: s.Name, Data: []byte(value.Value)}
		if value.Style&yaml.LiteralStyle != 0 {
			config.Data = []byte(inPlace(value.Value, string(s.Data), value.Line))
		}
		note = &Problem{
			ID: "configMap", Level: Note, Pos: Position{s.Name, value.Line, value.Column},
			Msg: fmt.Sprintf("the entry %s of a ConfigMap is read", Printable(name)),
		}
		return config, note, nil
	}
	return fail(root, "none of the %d entries of the ConfigMap is named config or ip-masq-agent: "+
		"check the text of another without --manifest", len(manifest.Data))
}

// inPlace returns the value of a block scalar that begins after a line of a text, behind as many
// empty lines and indented as there, so that positions stay the same.
func inPlace(value, text string, line int) string {
	block := strings.Join(strings.Split(text, "\n")[line:], "\n")
	block = strings.TrimLeft(block, "\n")
	indent := block[:len(block)-len(strings.TrimLeft(block, " "))]
	return strings.Repeat("\n", line) + indent + strings.ReplaceAll(value, "\n", "\n"+indent)
}
