package answer

import (
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/nfttest/script"
	"nft-masq-agent/nft/routes"
)

var update = flag.Bool("update", false, "regenerate testdata/answers.txt")

// A row is a config, and what is asked about it.
type row struct {
	*testing.T
	cli.Options
	Loaded
	err    error
	policy nft.Policy
	said   strings.Builder
}

// questions are those of testdata/answers.txt. Each is a word in a row, with what it is about.
var questions = map[string]func(r *row, about string){
	"hints": func(r *row, _ string) { r.problems(hints(r.policy)) },
	"check": func(r *row, _ string) {
		if r.err != nil {
			r.Fatal(r.err)
		}
		c := NewCheck(cli.NewHead("check"), r.Options, r.Loaded, nil)
		r.say(text(r, &c))
	},
	"win-bridge": func(r *row, _ string) {
		text, omitted, err := WinBridge(r.Config, r.policy)
		r.say(strings.TrimSpace(text), omitted, err)
	},
	"seen-as": func(r *row, about string) { // ADDRESS:PORT and pods of this node
		words := strings.Fields(about)
		c := Connections{Head: cli.NewHead("connections")}
		var pods []routes.Pod
		for _, pod := range cases.Addrs(words[1:]...) {
			pods = append(pods, routes.Pod{Address: pod})
		}
		r.say(c.SetBlock(r.policy, netip.MustParseAddrPort(words[0]), pods))
		r.say(text(r, &c))
	},
}

// text is what an answer says to people.
func text(t testing.TB, a cli.Answer) string {
	t.Helper()
	var b strings.Builder
	nfttest.NoError(t, cli.Print(&b, false, a.Print))
	return b.String()
}

func (r *row) say(what ...any) {
	r.said.WriteString(strings.TrimRight(fmt.Sprintln(what...), "\n") + "\n")
}

func (r *row) problems(all config.Problems) {
	for _, p := range all {
		r.say(p.Level.String(), p.ID+":", p.Error())
	}
}

func TestNoEntryIsListedTwice(t *testing.T) {
	list := entries(testPolicy(t, "enableIPv6: true\nmasqueradeHost: false\nmasqueradeSrcInterfaces: [eth0]\n"+
		"masqueradeSrcCIDRs: [10.244.0.0/16, 'fd00::/8']\nenforceNonMasquerade: true\nsnatAddresses: [192.0.2.7]\n"))
	found := map[Entry]bool{}
	for _, e := range list {
		e.title = ""
		if found[e] {
			t.Errorf("%+v", e)
		}
		found[e] = true
	}
}

// Each case of testdata/answers.txt is a config, then questions, each followed by its answer.
func TestAnswersAreThoseOfTheirRows(t *testing.T) {
	script.Golden(t, "testdata/answers.txt", *update, func(t *testing.T, c *script.Case) {
		file, asked := "", c.Steps
		for len(asked) > 0 {
			if verb, _ := asked[0].Words(); questions[verb] != nil {
				break
			}
			file += asked[0].Line + "\n"
			asked = asked[1:]
		}
		if len(asked) == 0 {
			c.Last().Unknown(t)
		}
		r := &row{T: t, Options: *cli.AddRunFlags(flag.NewFlagSet("status", flag.ContinueOnError))}
		r.ConfigPath, r.Input = "-", strings.NewReader(file)
		if r.Loaded, r.err = Load(r.Options); r.Ruleset != nil {
			r.policy = r.Ruleset.Policy
		}
		for _, s := range asked {
			verb, about := s.Words()
			question := questions[verb]
			if question == nil {
				s.Unknown(t)
			}
			r.said.Reset()
			question(r, about)
			s.Say(r.said.String())
		}
	})
}

func TestConfigsAreReadFromFilesManifestsAndStandardInput(t *testing.T) {
	const file = "nonMasqueradeCIDRs: [10.1.0.0/16]\n"
	const manifest = "kind: ConfigMap\ndata:\n  config: |\n    " + file
	dir := t.TempDir()
	path := filepath.Join(dir, "config")
	nfttest.NoError(t, os.WriteFile(path, []byte(file), 0o600))
	for _, tt := range []struct {
		path, input         string
		mustExist, manifest bool
		files               string // "": the defaults
		problems            int
		fails               bool
	}{
		{path: path, files: path},
		{path: path, input: "neverRead: 1", files: path},
		{path: filepath.Join(dir, "missing")},
		{path: filepath.Join(dir, "missing"), mustExist: true, fails: true},
		{path: "-", input: file, files: "standard input"},
		{path: "-", input: "\n", problems: 1},
		{path: "-"}, // a daemon waits for that file
		{path: "/dev/stdin", input: file, files: "standard input"},
		{path: "-", input: manifest, fails: true},
		{path: "-", input: manifest, manifest: true, files: "standard input", problems: 1},
		{path: "-", input: file, manifest: true, fails: true},
	} {
		o := *cli.AddRunFlags(flag.NewFlagSet("status", flag.ContinueOnError))
		o.ConfigPath = tt.path
		o.MustExist = tt.mustExist
		o.Manifest = tt.manifest
		if tt.input != "" {
			o.Input = strings.NewReader(tt.input)
		}
		l, err := Load(o)
		read := tt.fails || len(l.Ruleset.Policy.Families[0].List(config.KeyNonMasqueradeCIDRs).CIDRs) == 2
		right := strings.Join(l.Files, " ") == tt.files && read == (tt.files != "") && len(l.Problems) == tt.problems
		check := NewCheck(cli.NewHead("check"), o, l, err)
		if (err != nil) != tt.fails || (len(check.Errors) > 0) != tt.fails || err == nil && !right {
			t.Errorf("%+v: %v, %v: %v", tt, l.Files, l.Problems, err)
		}
	}
}

func TestLongListsAreCounted(t *testing.T) {
	words := strings.Fields("a b c d e f g h i j")
	for n, want := range map[int]string{
		0: "", 1: "a", 8: "a, b, c, d, e, f, g, h", 9: "a, b, c, d, e, f, g, h and 1 more",
	} {
		if got := listed(words[:n]); got != want {
			t.Errorf("%d: %q, want %q", n, got, want)
		}
	}
}
