package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/santhosh-tekuri/jsonschema/v6"

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nftrace"
	"nft-masq-agent/nft/nfttest"
)

// schemas is the directory of the JSON Schemas of the answers.
const schemas = "../../manifests/schema"

// answers has the type of each command's answer.
var answers = map[string]any{
	"check": answer.Check{}, "connections": answer.Connections{}, "diff": answer.Diff{}, "explain": explanation{},
	"status": answer.Status{}, "version": buildInfo{}, "cleanup": cleanupAnswer{},
	"ready": readyAnswer{},
}

// An explanation is the answer of explain: with --trace, it has the trace alone.
type explanation struct {
	answer.Explanation
	// Trace is what the first packet of the next connection met, with --trace.
	Trace *nftrace.Trace `json:"trace,omitempty"`
}

// The values of properties with few of them, by name.
var (
	verdicts = []string{string(nft.Local), string(nft.Exempt), string(nft.Masqueraded), string(nft.Invalid)}
	closed   = map[string][]string{
		"family": {"ipv4", "ipv6"}, "verdict": verdicts, "from": verdicts, "to": verdicts,
		"mode": {string(nft.ModeNFTables), string(nft.ModeIPTables)}, "severity": {"error", "mistake", "warning", "note"},
		"kind": {"added", "removed", "moved", "changed"},
	}
)

// descriptions of the properties, by package, type and field.
func descriptions(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{}
	for name, dir := range map[string]string{
		"main": ".", "answer": "internal/answer", "cli": "internal/cli", "running": "internal/running",
		"config": "../../config", "nftrace": "../../nft/nftrace", "others": "../../nft/others",
	} {
		files, err := filepath.Glob(dir + "/*.go")
		nfttest.NoError(t, err)
		for _, file := range files {
			parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ParseComments)
			nfttest.NoError(t, err)
			ast.Inspect(parsed, func(n ast.Node) bool {
				spec, is := n.(*ast.TypeSpec)
				if !is {
					return true
				}
				if s, is := spec.Type.(*ast.StructType); is {
					for _, f := range s.Fields.List {
						for _, field := range f.Names {
							text := f.Doc.Text()
							if text == "" {
								text = f.Comment.Text()
							}
							all[name+"."+spec.Name.Name+"."+field.Name] = strings.Join(strings.Fields(text), " ")
						}
					}
				}
				return true
			})
		}
	}
	return all
}

type schema map[string]any

// schemaOf returns the schema of a type. Embedded structs are a part of those around them.
func schemaOf(t *testing.T, typ reflect.Type, docs map[string]string) schema {
	t.Helper()
	switch {
	case typ == reflect.TypeFor[config.Level](), typ == reflect.TypeFor[netip.Addr](),
		typ == reflect.TypeFor[netip.Prefix]():
		return schema{"type": "string"}
	case typ == reflect.TypeFor[time.Time]():
		return schema{"type": "string", "format": "date-time"}
	}
	switch typ.Kind() {
	case reflect.Pointer:
		return schemaOf(t, typ.Elem(), docs)
	case reflect.String:
		return schema{"type": "string"}
	case reflect.Bool:
		return schema{"type": "boolean"}
	case reflect.Float64:
		return schema{"type": "number"}
	case reflect.Slice:
		return schema{"type": "array", "items": schemaOf(t, typ.Elem(), docs)}
	case reflect.Struct:
		s := schema{"type": "object", "additionalProperties": false}
		properties, required := schema{}, []string{}
		for _, f := range reflect.VisibleFields(typ) {
			name, options, _ := strings.Cut(f.Tag.Get("json"), ",")
			if f.Anonymous || name == "" {
				continue
			}
			of := schemaOf(t, f.Type, docs)
			if values := closed[name]; values != nil {
				of["enum"] = values
			}
			owner := typ
			for _, i := range f.Index[:len(f.Index)-1] {
				owner = owner.Field(i).Type
			}
			described := docs[owner.String()+"."+f.Name]
			if described == "" {
				t.Errorf("%s.%s has no description", owner, f.Name)
			}
			of["description"] = described
			properties[name] = of
			if options == "" {
				required = append(required, name)
			}
		}
		s["properties"], s["required"] = properties, required
		return s
	default: // numbers
		return schema{"type": "integer"}
	}
}

func TestSchemasDescribeTheAnswers(t *testing.T) {
	docs := descriptions(t)
	for command, value := range answers {
		s := schemaOf(t, reflect.TypeOf(value), docs)
		s["$schema"] = "https://json-schema.org/draft/2020-12/schema"
		s["title"] = "answer of " + program + " " + command + " -o json, version 1"
		s["required"] = []string{"version", "command", "errors", "warnings", "notes"} // of a command that failed
		s["properties"].(schema)["version"].(schema)["const"] = 1
		s["properties"].(schema)["command"].(schema)["const"] = command
		want, err := json.MarshalIndent(s, "", "  ")
		nfttest.NoError(t, err)
		want = append(want, '\n')
		path := filepath.Join(schemas, command+".json")
		if *update {
			nfttest.NoError(t, os.WriteFile(path, want, 0o644))
		}
		got, err := os.ReadFile(path)
		nfttest.NoError(t, err)
		if diff := cmp.Diff(string(want), string(got)); diff != "" {
			t.Errorf("make golden (-types +%s):\n%s", path, diff)
		}
	}
}

// A name has one type in all answers.
func TestNamesOfAnswersHaveOneType(t *testing.T) {
	types := map[string]string{}
	var visit func(where string, of any)
	visit = func(where string, of any) {
		s, is := of.(map[string]any)
		if !is {
			return
		}
		properties, _ := s["properties"].(map[string]any)
		for name, p := range properties {
			if !regexp.MustCompile(`^[a-z][a-zA-Z0-9]*$`).MatchString(name) {
				t.Errorf("%s: %s is not in lowerCamelCase", where, name)
			}
			property := p.(map[string]any)
			typ := fmt.Sprint(property["type"])
			if inner, is := property["properties"].(map[string]any); is && name != "why" {
				for key := range inner {
					typ = max(typ, "object with "+key)
				}
			}
			if other := types[name]; other != "" && other != typ {
				t.Errorf("%s: %s is %s, elsewhere %s", where, name, typ, other)
			}
			types[name] = typ
			visit(where+"."+name, p)
		}
		visit(where, s["items"])
	}
	for command := range answers {
		text, err := os.ReadFile(filepath.Join(schemas, command+".json"))
		nfttest.NoError(t, err)
		var s map[string]any
		nfttest.NoError(t, json.Unmarshal(text, &s))
		visit(command, s)
	}
}

// validate checks output of a command with -o json: one object, by the schema.
func validate(t testing.TB, args []string, output string) {
	t.Helper()
	if len(args) == 0 || answers[args[0]] == nil || !asksForJSON.MatchString(strings.Join(args[1:], "\x00")) {
		return
	}
	all, err := compiled()
	nfttest.NoError(t, err)
	decoder := json.NewDecoder(strings.NewReader(output))
	decoder.UseNumber()
	var value any
	if err := decoder.Decode(&value); err != nil {
		t.Errorf("%q is not JSON: %v: %q", args, err, output)
	}
	if err := all[args[0]].Validate(value); err != nil {
		t.Errorf("%q: %v", args, err)
	}
	var remaining bytes.Buffer
	if _, err := remaining.ReadFrom(decoder.Buffered()); err != nil || strings.TrimSpace(remaining.String()) != "" {
		t.Errorf("%q: more than one object: %q", args, &remaining)
	}
}

// compiled returns the schemas of the commands. Times are in UTC.
var compiled = sync.OnceValues(func() (map[string]*jsonschema.Schema, error) {
	c := jsonschema.NewCompiler()
	c.AssertFormat()
	c.RegisterFormat(&jsonschema.Format{Name: "date-time", Validate: func(v any) error {
		text, is := v.(string)
		if _, err := time.Parse(time.RFC3339, text); is && (err != nil || !strings.HasSuffix(text, "Z")) {
			return fmt.Errorf("%q is not a time in UTC", text)
		}
		return nil
	}})
	all := map[string]*jsonschema.Schema{}
	for command := range answers {
		var err error
		if all[command], err = c.Compile(filepath.Join(schemas, command+".json")); err != nil {
			return nil, err
		}
	}
	return all, nil
})
