package config

import (
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"
)

func TestConfigMapIsUnwrapped(t *testing.T) {
	const head = "apiVersion: v1\nkind: ConfigMap\n"
	const one = "f:1:16: masqLinkLocal is the number 1, want true or false"
	tests := []struct {
		name, manifest string
		note           string // "": it is not a ConfigMap
		problem        string // of the unwrapped config, or the error
	}{
		{"not a manifest", "masqLinkLocal: 1\n", "", one},
		{"another kind", "kind: Secret\ndata: {config: ConfigMap}\n", "", `f:1:1: unknown key "kind" is ignored`},
		{
			"invalid YAML", head + "data: [\n", "",
			"f:3:7: syntax: did not find expected node content: close the bracket, or put the value in quotes",
		},
		{"kind is a list", "kind: [ConfigMap]\n", "", `f:1:1: unknown key "kind" is ignored`},
		{"no data", head, "", "config: f: none of the 0 entries of the ConfigMap is named config or ip-masq-agent"},
		{
			"half an entry", head + "data: [config]\n", "",
			"config: f: none of the 0 entries of the ConfigMap is named config or ip-masq-agent",
		},
		{
			"other entries", head + "data: {a: b, c: d}\n", "",
			"config: f: none of the 2 entries of the ConfigMap is named config or ip-masq-agent",
		},
		{"the only entry", head + "data:\n  any: 'masqLinkLocal: 1'\n", "f:4:8: the entry any of a ConfigMap is read", one},
		{
			"config is read first", head + "data:\n  ip-masq-agent: 'masqLinkLocal: 2'\n  config: 'masqLinkLocal: 1'\n  z: ''\n",
			"f:5:11: the entry config of a ConfigMap is read", one,
		},
		{
			"also if it is the first", head + "data:\n  config: 'masqLinkLocal: 1'\n  ip-masq-agent: 'masqLinkLocal: 2'\n",
			"f:4:11: the entry config of a ConfigMap is read", one,
		},
		{
			"the name of the agent",
			head + "data:\n  a: b\n  ip-masq-agent: |-\n    masqLinkLocal: 1\n    resyncInterval: 2m",
			"f:5:18: the entry ip-masq-agent of a ConfigMap is read",
			"f:6:20: masqLinkLocal is the number 1, want true or false",
		},
		{
			"a block ends with its indentation",
			head + "data:\n  config: |\n\n    masqLinkLocal: true\n\n    masqLinkLocalIPv6: 1\n  z: masq\nmasqLinkLocal: 2\n",
			"f:4:11: the entry config of a ConfigMap is read", "f:8:24: masqLinkLocalIPv6 is the number 1, want true or false",
		},
		{
			"JSON", `{"kind": "ConfigMap", "data": {"config": "masqLinkLocal: 1"}}`,
			"f:1:42: the entry config of a ConfigMap is read", one,
		},
		{
			"too many values", head + "data: [" + strings.Repeat(",", maxNodes) + "]", "",
			"f: too many values: a config may have at most 100,000",
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s, note, err := Unwrap(Source{Name: "f", Data: []byte(tt.manifest)})
			got := ""
			if note != nil {
				got = note.Error()
			}
			if got != tt.note || note != nil && note.Level != Note {
				t.Errorf("note %v, want %s", note, tt.note)
			}
			_, problems := Parse(Defaults{}, s)
			if got = ""; err != nil {
				got = err.Error()
			} else if len(problems) > 0 {
				got = problems[0].Error()
			}
			if got != tt.problem {
				t.Errorf("%s, want %s", got, tt.problem)
			}
		})
	}
}

func TestStandardInputIsRead(t *testing.T) {
	sources, err := ReadFrom(strings.NewReader("a: b"), "in")
	if err != nil || len(sources) != 1 || sources[0].Name != "in" || string(sources[0].Data) != "a: b" {
		t.Error(sources, err)
	}
	large := io.LimitReader(strings.NewReader(strings.Repeat("#", 2*maxSize)), 2*maxSize)
	if sources, err = ReadFrom(large, "in"); err != nil || len(sources[0].Data) != maxSize+1 {
		t.Error(len(sources), err)
	}
	if _, err := ReadFrom(iotest.ErrReader(io.ErrUnexpectedEOF), "in"); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Error(err)
	}
}
