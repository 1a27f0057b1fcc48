package manifests_test

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/santhosh-tekuri/jsonschema/v6"
	"sigs.k8s.io/yaml"

	"nft-masq-agent/config"
)

var update = flag.Bool("update", false, "write schema/config.json")

const schemaFile = "schema/config.json"

// Patterns of values that the agent accepts, as far as a pattern can tell: not host bits,
// for example.
const (
	ipv4 = `((25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])\.){3}(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])`
	ipv6 = `[0-9a-fA-F]*:[0-9a-fA-F:]*:[0-9a-fA-F:]*`
	cidr = `(` + ipv4 + `/0*(3[0-2]|[12]?[0-9])|` + ipv6 + `/0*(12[0-8]|1[01][0-9]|[1-9]?[0-9]))`
	unit = `(ns|us|µs|ms|s|m|h)`
	term = `([0-9]+(\.[0-9]*)?|\.[0-9]+)` + unit

	port = `0*([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])`
	span = port + `(-` + port + `)?`

	cidrPattern      = `^` + cidr + `$`
	addressPattern   = `^(` + ipv4 + `|` + ipv6 + `|` + cidr + `)$`
	interfacePattern = `^[^\s/:*"\\]([^\s/:*"\\]{0,13}[^\s/:"\\])?$`
	durationPattern  = `^\+?(` + term + `)*([0-9]*[1-9][0-9]*(\.[0-9]*)?|[0-9]*\.[0-9]*[1-9][0-9]*)` + unit + `(` + term +
		`)*$`
)

// What editors show for the keys that are not in config.Conditions.
var otherKeys = map[string]object{
	"masqLinkLocal":     boolean("Masquerade traffic to 169.254.0.0/16 too.", false),
	"masqLinkLocalIPv6": boolean("Masquerade traffic to fe80::/10 too.", false),
	"enableIPv6":        boolean("Masquerade IPv6 too. Without it the flag --enable-ipv6 applies.", false),
	"linkLocal": {
		"description": "Use masqLinkLocal, which is the inverse.", "type": []string{"boolean", "null"}, "deprecated": true,
	},
	"enforceNonMasquerade": boolean("Pods keep their address to exempt destinations even if another program would "+
		"translate it. Needs masqueradeSrcCIDRs or masqueradeSrcInterfaces.", false),
	"dropInvalid": boolean("Drop packets of pods that would leave untranslated, because they belong to no connection, "+
		"where connections are masqueraded. "+
		"Needs masqueradeSrcCIDRs or masqueradeSrcInterfaces.", false),
	"portsPerPod": {
		"description": "Masqueraded connections of a pod get their source ports, and ICMP ids, from a block of this " +
			"size, by " +
			"the low bits of its IP. 0: off. Needs masqueradeSrcCIDRs or masqueradeSrcInterfaces. Not together with snatRules.",
		"type":    []string{"integer", "null"},
		"default": 0,
		"maximum": 2000,
		"not":     object{"type": "integer", "minimum": 1, "maximum": 15},
		"minimum": 0,
	},
	"snatRules": {
		"description": "Masqueraded connections of pods leave from an address of the first entry that matches and has one " +
			"on the node.",
		"type": []string{"array", "null"}, "maxItems": 64,
		"items": object{
			"type": "object", "additionalProperties": false, "required": []string{"addresses"}, "minProperties": 2,
			"properties": object{
				"from":      field(list("Sources.", cidrPattern, "10.244.8.0/24")),
				"to":        field(list("Destinations.", cidrPattern, "203.0.113.0/24")),
				"out":       field(list("Interfaces by which connections leave.", interfacePattern, "eth1", "eth*")),
				"addresses": field(list("Connections leave from one of these that the node has.", addressPattern, "198.51.100.21")),
			},
		},
	},
	"toPorts": {
		"description": "Masquerade tcp, udp and sctp to these port ranges only. Without it the flag --to-ports applies.",
		"type":        []string{"string", "integer", "null"}, "pattern": `^(` + span + `(,` + span + `)*)?$`,
		"minimum": 1, "maximum": 65535,
	},
	"randomFully": {
		"description": "Choose source ports at random. Without it the flag --random-fully applies.",
		"type":        []string{"boolean", "null"},
	},
	"resyncInterval": {
		"description": "How often the agent re-checks file and kernel without being notified: a Go duration.",
		"type":        []string{"string", "null"}, "pattern": durationPattern, "default": "60s",
		"examples": []string{"30s", "5m"},
	},
	"staleConnections": {
		"description": "What happens to connections whose translation contradicts a changed config: the kernel keeps " +
			"them, or forgets those of UDP, or all.",
		"enum": []any{"keep", "udp", "all", nil}, "default": "keep",
	},
	"cidrLimit": {
		"description": "A file with more entries in nonMasqueradeCIDRs is rejected.", "type": []string{"integer", "null"},
		"minimum": 0, "examples": []int{64},
	},
}

// field makes a list one that must have entries.
func field(of object) object {
	of["type"], of["minItems"] = "array", 1
	return of
}

func boolean(description string, value bool) object {
	return object{"description": description, "type": []string{"boolean", "null"}, "default": value}
}

// list is a schema of a list of strings.
func list(description, pattern string, examples ...string) object {
	return object{
		"description": description, "type": []string{"array", "null"},
		"items": object{"type": "string", "pattern": pattern}, "examples": [][]string{examples},
	}
}

// schema returns the JSON Schema of the config file. Its keys are case-sensitive,
// as documented; the agent accepts any case.
func schema(t *testing.T) []byte {
	t.Helper()
	properties := object{}
	for _, c := range config.Conditions() {
		description := strings.ToUpper(c.Means[:1]) + c.Means[1:] + "."
		switch {
		case c.Asks == config.ReceivedOn, c.Asks == config.LeavingBy:
			properties[c.Key] = list(description, interfacePattern, "eth0", "veth*")
			properties[c.Key].(object)["items"].(object)["not"] = object{"enum": []string{".", ".."}}
		case c.Asks == config.SentByNode:
			properties[c.Key] = boolean("If false: "+c.Means+".", true)
		case c.Asks == config.SourceAddress, c.Asks == config.DestinationAddress:
			properties[c.Key] = list(description, cidrPattern, "10.0.0.0/8", "fd00::/8")
		default:
			t.Errorf("which type has %s, a condition about %s?", c.Key, c.Asks)
		}
	}
	for _, row := range config.Translations() {
		if row.Set != "" {
			properties[row.Key] = list(strings.ToUpper(row.Means[:1])+row.Means[1:]+".",
				addressPattern, "198.51.100.11", "198.51.100.64/29")
		}
	}
	defaults := config.Default(config.Defaults{})
	properties["nonMasqueradeCIDRs"].(object)["default"] = config.Texts(defaults.NonMasqueradeCIDRs)
	for _, key := range config.Keys() {
		if properties[key] != nil {
			continue
		}
		if otherKeys[key] == nil {
			t.Fatalf("%s is not in otherKeys of manifests/schema_test.go", key)
		}
		properties[key] = otherKeys[key]
	}
	text, err := json.MarshalIndent(object{
		"$schema":              "http://json-schema.org/draft-07/schema#",
		"$id":                  "urn:nft-masq-agent:schema:config",
		"title":                "config file of nft-masq-agent",
		"type":                 []string{"object", "null"},
		"additionalProperties": false,
		"properties":           properties,
		"examples": []object{{
			"nonMasqueradeCIDRs": []string{"10.0.0.0/8", "192.168.0.0/16"}, "masqLinkLocal": true, "resyncInterval": "60s",
		}},
	}, "", "  ")
	must(t, err)
	return append(text, '\n')
}

func TestSchemaHasAllKeys(t *testing.T) {
	want := schema(t)
	if *update {
		must(t, os.WriteFile(schemaFile, want, 0o644))
	}
	if diff := cmp.Diff(string(want), readFile(t, schemaFile)); diff != "" {
		t.Errorf("make golden (-config +schema):\n%s", diff)
	}
}

// examples returns the sample config and all examples, by file.
func examples(t *testing.T) map[string][]byte {
	t.Helper()
	files, err := filepath.Glob("examples/*/*")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	all := map[string][]byte{}
	for _, file := range append(files, "agent-config/config") {
		if filepath.Base(file) == "kustomization.yaml" {
			continue
		}
		if all[file], err = os.ReadFile(file); err != nil {
			t.Fatal(err)
		}
	}
	return all
}

func TestExamplesNameTheSchema(t *testing.T) {
	for file, text := range examples(t) {
		first, _, _ := strings.Cut(string(text), "\n")
		relative, found := strings.CutPrefix(first, "# yaml-language-server: $schema=")
		if _, err := os.Stat(filepath.Join(filepath.Dir(file), relative)); !found || err != nil {
			t.Errorf("%s: %q, %v", file, first, err)
		}
	}
}

func TestExamplesParseAsDescribed(t *testing.T) {
	cidrs := func(list []config.CIDR) string {
		return strings.Join(slices.Sorted(slices.Values(config.Texts(list))), " ")
	}
	gke := cidrs(config.Default(config.Defaults{AllReservedRanges: true}).NonMasqueradeCIDRs)
	for dir, want := range map[string]struct {
		exempt, sources string
		linkLocal       bool // masqueraded
		warnings        int
		snatRules       int // entries
	}{
		"agent-config":                   {exempt: cidrs(config.Default(config.Defaults{}).NonMasqueradeCIDRs)},
		"examples/pods-only":             {exempt: "10.0.0.0/8", sources: "10.244.0.0/16"},
		"examples/fixed-addresses":       {exempt: "10.0.0.0/8"},
		"examples/calico-pools":          {exempt: "10.0.0.0/8", snatRules: 1},
		"examples/cilium-pools":          {exempt: "10.0.0.0/8 fd00::/8", snatRules: 2},
		"examples/two-uplinks":           {exempt: "10.0.0.0/8", snatRules: 3},
		"examples/gke":                   {exempt: gke},
		"examples/azure":                 {exempt: "10.244.0.0/16 192.168.0.0/16", linkLocal: true},
		"examples/non-masquerade-daemon": {exempt: "10.0.0.0/8", warnings: 1}, // linkLocal is deprecated
		"examples/node-pool":             {exempt: "10.0.0.0/8 198.51.100.0/24"},
	} {
		var sources []config.Source
		for file, text := range examples(t) {
			if filepath.Dir(file) == dir {
				sources = append(sources, config.Source{Name: file, Data: text})
			}
		}
		c, problems := config.Parse(config.Defaults{}, sources...)
		if problems.Err() != nil || len(problems) != want.warnings {
			t.Errorf("%s: %v", dir, problems)
		}
		if got := cidrs(c.NonMasqueradeCIDRs); got != want.exempt {
			t.Errorf("%s exempts %s", dir, got)
		}
		if got := cidrs(c.MasqueradeSrcCIDRs); got != want.sources || c.MasqLinkLocal != want.linkLocal {
			t.Errorf("%s: sources %q, link-local %t", dir, got, c.MasqLinkLocal)
		}
		if len(c.SNATRules) != want.snatRules {
			t.Errorf("%s: entries of snatRules are %v", dir, c.SNATRules)
		}
	}
}

// Configs that the agent rejects and an editor should mark, too.
var invalidConfigs = []string{
	"nonMasqueradeCIDR: [10.0.0.0/8]",
	"nonMasqueradeCIDRs: 10.0.0.0/8",
	"nonMasqueradeCIDRs: [10.0.0.0]",
	"nonMasqueradeCIDRs: [10.0.0.0/8, null]",
	"nonMasqueradeCIDRs: [localhost/8]",
	"masqLinkLocal: maybe",
	"masqLinkLocal: 1",
	"toPorts: [1024-2047]",
	"toPorts: 1024-",
	"randomFully: 1024",
	"snatRules: [{from: [10.244.8.0/24]}]",
	"snatRules: [{addresses: [198.51.100.21]}]",
	"snatRules: [{to: [], addresses: [198.51.100.21]}]",
	"snatRules: [{form: [10.244.8.0/24], out: [eth1], addresses: [198.51.100.21]}]",
	"snatAddresses: 198.51.100.11",
	"snatAddresses: [node-1]",
	"snatAddresses: [198.51.100.0/333]",
	"resyncInterval: 60",
	"resyncInterval: soon",
	"toPorts: 0",
	"toPorts: 70000",
	"toPorts: 1-65536",
	"cidrLimit: -1",
	`nonMasqueradeCIDRs: [" 10.0.0.0/8"]`,
	"resyncInterval: 60sfoo",
	"resyncInterval: 60s 5m",
	"resyncInterval: 1d",
	"resyncInterval: -5s",
	"resyncInterval: 0s",
	"resyncInterval: 0h0.0s",
	"resyncInterval: .s",
	"nonMasqueradeCIDRs: [10.0.0.0/33]",
	"nonMasqueradeCIDRs: [10.0.0/8]",
	"nonMasqueradeCIDRs: [256.0.0.0/8]",
	"nonMasqueradeCIDRs: ['fd00::/129']",
	"nonMasqueradeCIDRs: [fd00/8]",
	"nonMasqueradeSrcCIDRs: ['010.0.0.0/8']",
	"snatAddresses: [198.51.100.256]",
	"snatAddresses: ['a:b']",
	"masqueradeOutInterfaces: [.]",
	"masqueradeOutInterfaces: ['..']",
	"masqueradeSrcInterfaces: ['*']",
	"masqueradeSrcInterfaces: ['a*b']",
	"masqueradeSrcInterfaces: [sixteen-letters-]",
	"masqueradeSrcInterfaces: ['eth0:1']",
	"staleConnections: tcp",
	"portsPerPod: 15",
	"portsPerPod: 2001",
	"portsPerPod: many",
	"cidrLimit: many",
	"cidrLimit: 1.5",
	"[nonMasqueradeCIDRs]",
}

// Configs that the agent accepts without a warning.
var validConfigs = []string{
	"",
	"{}",
	`{"nonMasqueradeCIDRs": ["fd00::/8"], "enableIPv6": true}`,
	"resyncInterval: 1m30s",
	"resyncInterval: .5h",
	"resyncInterval: 0h1m0.5s",
	"masqueradeSrcInterfaces: [cali*, .x, eth0.7]",
	"cidrLimit: 64",
	"masqLinkLocal: true\nmasqLinkLocalIPv6: true\nenableIPv6: true",
	"nonMasqueradeCIDRs: [0.0.0.0/0]\nforceMasqueradeCIDRs: [10.0.0.0/8]",
	`{"portsPerPod": 250, "masqueradeSrcCIDRs": ["10.244.0.0/16"]}`,
	"portsPerPod: 0",
	`{"toPorts": "1024-29999,32768-65535", "randomFully": false}`,
	`{"toPorts": 40000}`,
	`{"snatRules": [{"from": ["10.244.8.0/24"], "to": ["203.0.113.0/24"], "out": ["eth*"], "addresses": ["198.51.100.21", "198.51.100.64/29"]}], "enableIPv6": true}`,
	`{"snatAddresses": ["198.51.100.11", "198.51.100.64/29", "2001:db8::11"], "enableIPv6": true}`,
}

// The agent and the schema judge the same values; make schema-test asks a validator whose patterns are those of
// editors.
func TestSchemaRejectsWhatTheAgentRejects(t *testing.T) {
	var s object
	must(t, json.Unmarshal([]byte(readFile(t, schemaFile)), &s))
	c := jsonschema.NewCompiler()
	must(t, c.AddResource("config.json", s))
	schema, err := c.Compile("config.json")
	must(t, err)
	contents := slices.Concat(validConfigs, invalidConfigs)
	for _, example := range s["examples"].([]any) {
		text, _ := json.Marshal(example)
		contents = append(contents, string(text))
	}
	for key, p := range s["properties"].(object) {
		all, _ := p.(object)["examples"].([]any)
		for _, example := range all {
			text, _ := json.Marshal(object{key: example, "enableIPv6": true})
			contents = append(contents, string(text))
		}
	}
	for _, text := range contents {
		var v any
		must(t, yaml.Unmarshal([]byte(text), &v))
		wrong := schema.Validate(v)
		_, problems := config.Parse(config.Defaults{}, config.Source{Name: "config", Data: []byte(text)})
		invalid := slices.Contains(invalidConfigs, text)
		if (wrong != nil) != invalid || (problems.Err() != nil) != invalid {
			t.Errorf("%s: the schema finds %v, the agent %v, want wrong: %t", text, wrong, problems.Err(), invalid)
		}
	}
}

// Needs a validator from npm, which make schema-test provides.
func TestSchemaAgreesWithTheAgent(t *testing.T) {
	validator := os.Getenv("SCHEMA_VALIDATOR")
	if validator == "" {
		t.Skip("runs a validator from npm: make schema-test")
	}
	valid, invalid := t.TempDir(), t.TempDir()
	all := validConfigs
	for _, text := range examples(t) {
		all = append(all, string(text))
	}
	for dir, texts := range map[string][]string{valid: all, invalid: invalidConfigs} {
		for i, text := range texts {
			// The editor's parser: YAML to JSON.
			out, err := yaml.YAMLToJSON([]byte(text))
			must(t, err)
			must(t, os.WriteFile(filepath.Join(dir, fmt.Sprintf("%d.json", i)), out, 0o600))
		}
	}
	for dir, want := range map[string]string{valid: "--valid", invalid: "--invalid"} {
		out, err := try(t, "cd manifests; "+validator+" test --strict=false -s "+schemaFile+" -d '"+
			filepath.Join(dir, "*.json")+"' "+want)
		if err != nil {
			t.Errorf("%s: %v\n%s", want, err, out)
		}
	}
}
