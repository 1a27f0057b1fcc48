package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/google/go-cmp/cmp"
	sigsyaml "sigs.k8s.io/yaml"
)

// olderConfig is what the agents of the iptables generation unmarshal into.
type olderConfig struct {
	NonMasqueradeCIDRs []string      `json:"nonMasqueradeCIDRs"`
	CIDRLimit          int           `json:"cidrLimit"`
	MasqLinkLocal      bool          `json:"masqLinkLocal"`
	MasqLinkLocalIPv6  bool          `json:"masqLinkLocalIPv6"`
	ResyncInterval     olderDuration `json:"resyncInterval"`
}

// olderDuration unmarshals as metav1.Duration of k8s.io/apimachinery does.
type olderDuration time.Duration

func (d *olderDuration) UnmarshalJSON(b []byte) error {
	var s string
	if err := json.Unmarshal(b, &s); err != nil {
		return err
	}
	p, err := time.ParseDuration(s)
	*d = olderDuration(p)
	return err
}

// readAsOlderAgent reads a file as kubernetes-sigs/ip-masq-agent v2.12 does
// with IPv6 on: YAML to JSON, unless it looks like JSON, then encoding/json,
// then its own validation. It returns the meaning in one line.
func readAsOlderAgent(data []byte) (string, error) {
	if !bytes.HasPrefix(bytes.TrimLeftFunc(data, unicode.IsSpace), []byte("{")) {
		var err error
		if data, err = sigsyaml.YAMLToJSON(data); err != nil {
			return "", err
		}
	}
	c := olderConfig{
		NonMasqueradeCIDRs: strings.Fields(rfc1918),
		CIDRLimit:          1 << 30, // theirs is 64
		ResyncInterval:     olderDuration(time.Minute),
	}
	if err := json.Unmarshal(data, &c); err != nil {
		return "", err
	}
	if len(c.NonMasqueradeCIDRs) > c.CIDRLimit {
		return "", errors.New("too many CIDRs")
	}
	for i, s := range c.NonMasqueradeCIDRs {
		ip, network, err := net.ParseCIDR(s)
		if err != nil {
			return "", err
		}
		if !ip.Equal(network.IP) {
			return "", errors.New("not aligned")
		}
		c.NonMasqueradeCIDRs[i] = network.String()
	}
	interval := min(max(time.Duration(c.ResyncInterval), shortestInterval), longestInterval)
	return fmt.Sprint(c.NonMasqueradeCIDRs, c.MasqLinkLocal, c.MasqLinkLocalIPv6, interval), nil
}

// beyondBounds are the errors of files that the older agents accept: beyond what
// this package reads, or such that iptables-restore refuses them later.
var beyondBounds = regexp.MustCompile(`(?m)` + strings.Join([]string{
	`IPv4-mapped`,
	`larger than 4 MiB`,
	`more than \d+ %TAG`,
	`the aliases expand`,
}, "|"))

// agreeWithOlderAgent compares Parse and Lenient with an older agent: what that
// accepts is accepted with the same meaning, or refused for a documented reason;
// of a file refused for a mistake that the older agent ignores, Lenient returns
// its meaning.
func agreeWithOlderAgent(t *testing.T, data []byte) {
	t.Helper()
	source := Source{Name: "f", Data: data}
	lenient, passedOver, lenientErr := Lenient(Defaults{EnableIPv6: true}, source)
	c, warnings, err := Parse(Defaults{EnableIPv6: true}, source)
	checkLenient(t, err, passedOver, lenientErr)
	want, olderErr := readAsOlderAgent(data)
	if olderErr != nil {
		return
	}
	if lenientErr != nil {
		if !beyondBounds.MatchString(lenientErr.Error()) && !behindTheDocument(data, lenientErr, want) {
			t.Errorf("an older agent accepts this as %s\n%q\ngot %v", want, data, lenientErr)
		}
		return
	}
	if strings.Contains(warningLines(warnings), keyLinkLocal+" is deprecated") {
		return // they ignore it
	}
	if err == nil && !cmp.Equal(meaning(c, nil), meaning(lenient, nil)) {
		t.Errorf("%q: Parse and Lenient differ", data)
	}
	if diff := cmp.Diff(want, olderMeaning(lenient)); diff != "" {
		t.Errorf("%q (-older agent +got):\n%s", data, diff)
	}
}

// checkLenient compares the mistakes that Lenient returns with those of Parse.
func checkLenient(t *testing.T, err error, passedOver []Problem, lenientErr error) {
	t.Helper()
	problems, _ := err.(Problems)
	want, wantErr := fmt.Sprint(problems), "<nil>"
	if slices.ContainsFunc(problems, func(p Problem) bool { return !p.PassedOver }) {
		want, wantErr = "", want
	}
	if diff := cmp.Diff([]string{want, wantErr}, []string{fmt.Sprint(Problems(passedOver)), fmt.Sprint(lenientErr)}); diff != "" {
		t.Errorf("the errors of Lenient (-those of Parse +got):\n%s", diff)
	}
}

// olderMeaning returns what readAsOlderAgent returns.
func olderMeaning(c Config) string {
	return fmt.Sprint(strings.Fields(prefixes(c.NonMasqueradeCIDRs)), c.MasqLinkLocal, c.MasqLinkLocalIPv6, c.ResyncInterval)
}

// behindTheDocument reports whether a syntax error stands right after the
// document, where yaml.v3 looks for comments already and yaml.v2 does not look: the
// file means the same without it.
func behindTheDocument(data []byte, err error, want string) bool {
	problems, _ := err.(Problems)
	if !strings.HasPrefix(problems[0].Msg, "syntax: ") {
		return false
	}
	before := newText(Source{Data: data}).lines()[:problems[0].Pos.Line-1]
	got, err := readAsOlderAgent([]byte(strings.Join(before, "\n")))
	return err == nil && got == want
}

func TestFilesOfOlderAgentsKeepTheirMeaning(t *testing.T) {
	for _, dir := range []string{"good", "bad", "older"} {
		for _, name := range inputs(t, dir) {
			data, err := os.ReadFile(filepath.Join(corpus, dir, name))
			if err != nil {
				continue // a directory, which they do not read
			}
			t.Run(dir+"/"+name, func(t *testing.T) { agreeWithOlderAgent(t, data) })
		}
	}
}

// Every file of the corpus "older" is one that the older agents accept.
func TestTheCorpusOfOlderFilesIsAccepted(t *testing.T) {
	for _, name := range inputs(t, "older") {
		t.Run(name, func(t *testing.T) {
			data, err := os.ReadFile(filepath.Join(corpus, "older", name))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := readAsOlderAgent(data); err != nil {
				t.Errorf("the older agent: %v", err)
			}
			c, warnings, err := Parse(Defaults{EnableIPv6: true}, Source{Name: name, Data: data})
			if err != nil {
				t.Fatal(err)
			}
			golden(t, filepath.Join("older", stem(name)+".txt"), meaning(c, warnings))
		})
	}
}

func FuzzFilesOfOlderAgentsKeepTheirMeaning(f *testing.F) {
	seed(f)
	f.Fuzz(agreeWithOlderAgent)
}

// mistakes are lines of YAML that Parse refuses. Ignored are those with which
// the older agents accept a file.
var mistakes = []struct {
	ignored bool
	line    string
}{
	{true, `resyncIntervall: 30s`},
	{true, `nonMasqueradeCIDR: [198.51.100.0/24]`},
	{true, "foo: 1\nfoo: 2"},
	{true, "nonMasqueradeCIDRs: [198.51.100.0/24]\nnonMasqueradeCIDRs: [192.0.2.0/24]"},
	{true, "nonMasqueradeCIDRs: [192.0.2.0/24]\nNonMasqueradeCIDRs: [198.51.100.0/24]"},
	{true, "nonMasqueradeCIDRs: [192.0.2.0/24, 198.51.100.0/24]\nNONMASQUERADECIDRS: [203.0.113.0/24]\nnonmasqueradecidrs: [null]"},
	{true, "nonMasqueradeCIDRs: [10.0.0.1/8]\nnonMasqueradeCIDRs: []"},
	{true, "nonMasqueradeCIDRs: nothing\nnonMasqueradeCIDRs: "},
	{true, "masqLinkLocal: true\nMasqLinkLocal: false\nmasqlinklocal:"},
	{true, "masqLinkLocalIPv6: 1\nmasqLinkLocalIPv6: true"},
	{true, "<<: {masqLinkLocal: true, MASQLINKLOCAL: false}\nMasqLinkLocal: false"},
	{true, "---\nmasqLinkLocal: true"},
	{true, "bar: 1\n---\nfoo: ["},
	{true, "bar: 1\n...\nfoo\nbaz: 1"},
	{true, "nonMasqueradeCIDRs: [10.0.0.1/8, foo]\nnonmasqueradecidrs: [192.0.2.0/24]"},
	{false, "nonMasqueradeCIDRs: [10.0.0.1/8, foo]\nnonmasqueradecidrs: [null]"},
	{false, "nonMasqueradeCIDRs: [1]\nnonmasqueradecidrs: [192.0.2.0/24]"},
	{true, "resyncInterval: 0s"},
	{true, "resyncInterval: -5m"},
	{true, `resyncInterval: "0"`},
	{false, `resyncInterval: 0`},
	{true, `enableIPv6: "true"`},
	{true, `enableIPv6: [1]`},
	{true, `linkLocal: 7`},
	{true, "linkLocal: true\nmasqLinkLocal: true"},
	{true, `forceMasqueradeCIDRs: 10.0.0.0/8`},
	{true, `masqueradeSrcCIDRs: [10.0.0.1/8, foo]`},
	{true, `nonMasqueradeSrcCIDRs: [null]`},
	{true, `nonMasqueradeCIDRs: [null, 192.0.2.0/24, null]`},
	{false, `nonMasqueradeCIDRs: [192.0.2.0/24, null, 10.0.0.0/8, null]`},
	{false, `nonMasqueradeCIDRs: [10.0.0.1/8]`},
	{false, `nonMasqueradeCIDRs: [10.0.0.1]`},
	{false, `nonMasqueradeCIDRs: [10.0.0.0/33]`},
	{false, `nonMasqueradeCIDRs: [""]`},
	{false, `nonMasqueradeCIDRs: [1]`},
	{false, `nonMasqueradeCIDRs: {10.0.0.0/8: }`},
	{false, `nonMasqueradeCIDRs: 10.0.0.0/8`},
	{false, "masqLinkLocal: x\nmasqlinklocal: true"},
	{false, `masqLinkLocal: "true"`},
	{false, `masqLinkLocalIPv6: 0`},
	{false, `resyncInterval: 60`},
	{false, `resyncInterval: ""`},
	{false, `resyncInterval: soon`},
	{false, `cidrLimit: "64"`},
	{false, `cidrLimit: 1.5`},
	{false, `cidrLimit: 0`},
	{false, `cidrLimit: -1`},
	{false, `[a]: b`},
	{false, `<<: [a]`},
	{false, `foo: [`},
	{false, "\tfoo: 1"},
	{false, "foo"},
}

func TestLenientIgnoresWhatTheOlderAgentsIgnore(t *testing.T) {
	for _, m := range mistakes {
		for _, file := range []string{m.line, "masqLinkLocalIPv6: true\n" + m.line + "\n"} {
			compareMistakes(t, file, m.ignored)
		}
	}
	for file, ignored := range map[string]bool{
		`{"nonMasqueradeCIDRs": ["192.0.2.0/24"], "NonMasqueradeCIDRs": ["198.51.100.0/24"]}`: true,
		`{"nonMasqueradeCIDRs": ["192.0.2.0/24"], "nonMasqueradeCIDRs": [null]}`:              true,
		`{"masqLinkLocal": true, "MASQLINKLOCAL": false, "masqLinkLocal": null}`:              true,
		`{"resyncInterval": "0s", "resyncIntervall": "1s"}`:                                   true,
		`{"enableIPv6": "true"}`:                                  true,
		`{"masqLinkLocal": 1, "masqLinkLocal": true}`:             false,
		`{"nonMasqueradeCIDRs": ["a"], "foo": 1,"foo":2}`:         false,
		`{"nonMasqueradeCIDRs": ["a"], "nonMasqueradeCIDRs": []}`: true,
		`{"nonMasqueradeCIDRs": [1], "nonMasqueradeCIDRs": []}`:   false,
		`{"masqLinkLocal": true} {}`:                              false,
		`{"masqLinkLocal": true,}`:                                false,
	} {
		compareMistakes(t, file, ignored)
	}
}

// Any number of mistakes together, in any order: ignored if each is.
func TestLenientIgnoresMistakesTogether(t *testing.T) {
	random, files := rand.New(rand.NewPCG(1, 2)), 2000
	if testing.Short() {
		files = 200
	}
	for range files {
		var lines []string
		for _, i := range random.Perm(len(mistakes))[:2+random.IntN(3)] {
			if !strings.Contains(mistakes[i].line, "\n") || random.IntN(3) == 0 {
				lines = append(lines, mistakes[i].line)
			}
		}
		file := strings.Join(lines, "\n")
		_, err := readAsOlderAgent([]byte(file))
		compareMistakes(t, file, err == nil)
	}
}

func compareMistakes(t *testing.T, file string, ignored bool) {
	t.Helper()
	agreeWithOlderAgent(t, []byte(file))
	_, olderErr := readAsOlderAgent([]byte(file))
	_, _, err := Lenient(Defaults{EnableIPv6: true}, Source{Name: "f", Data: []byte(file)})
	if (olderErr == nil) != ignored || (err == nil) != ignored {
		t.Errorf("%q: want ignored %t\nthe older agent: %v\nLenient: %v", file, ignored, olderErr, err)
	}
}
