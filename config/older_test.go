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

// olderConfig is what the iptables-based agents unmarshal into.
type olderConfig struct {
	NonMasqueradeCIDRs []string      `json:"nonMasqueradeCIDRs"`
	CIDRLimit          int           `json:"cidrLimit"`
	MasqLinkLocal      bool          `json:"masqLinkLocal"`
	MasqLinkLocalIPv6  bool          `json:"masqLinkLocalIPv6"`
	ResyncInterval     olderDuration `json:"resyncInterval"`
}

// olderDuration unmarshals like metav1.Duration in k8s.io/apimachinery.
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

// readAsOlderAgent reads a file as kubernetes-sigs/ip-masq-agent v2.12 does with
// IPv6 on: YAML is converted to JSON, unless it looks like JSON, then decoded by
// encoding/json and validated. It returns the resulting config in one line.
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

// beyondBounds matches the errors for files that the older agents accept although
// they exceed the limits of this package, or although iptables-restore rejects
// the result later.
var beyondBounds = regexp.MustCompile(`(?m)` + strings.Join([]string{
	`IPv4-mapped`,
	`larger than 4 MiB`,
	`more than \d+ %TAG`,
	`the aliases expand`,
}, "|"))

// agreeWithOlderAgent compares Parse and Lenient with an older agent: a file that
// it accepts is accepted with the same meaning, or rejected for a documented
// reason. If a file is rejected for a mistake that the older agent ignores,
// Lenient returns the same meaning.
func agreeWithOlderAgent(t *testing.T, data []byte) {
	t.Helper()
	source := Source{Name: "f", Data: data}
	lenient, tolerated, lenientErr := Lenient(Defaults{EnableIPv6: true}, source)
	c, warnings, err := Parse(Defaults{EnableIPv6: true}, source)
	checkLenient(t, err, tolerated, lenientErr)
	want, olderErr := readAsOlderAgent(data)
	if olderErr != nil {
		return
	}
	if lenientErr != nil {
		if !beyondBounds.MatchString(lenientErr.Error()) && !afterTheDocument(data, lenientErr, want) {
			t.Errorf("an older agent accepts this as %s\n%q\ngot %v", want, data, lenientErr)
		}
		return
	}
	if strings.Contains(warningLines(warnings), keyLinkLocal+" is deprecated") {
		return // the older agents ignore it
	}
	if err == nil && !cmp.Equal(meaning(c, nil), meaning(lenient, nil)) {
		t.Errorf("%q: Parse and Lenient differ", data)
	}
	if diff := cmp.Diff(want, olderMeaning(lenient)); diff != "" {
		t.Errorf("%q (-older agent +got):\n%s", data, diff)
	}
}

// checkLenient compares the mistakes that Lenient returns with those of Parse.
func checkLenient(t *testing.T, err error, tolerated []Problem, lenientErr error) {
	t.Helper()
	problems, _ := err.(Problems)
	want, wantErr := fmt.Sprint(problems), "<nil>"
	if slices.ContainsFunc(problems, func(p Problem) bool { return !p.Tolerated }) {
		want, wantErr = "", want
	}
	if diff := cmp.Diff([]string{want, wantErr}, []string{fmt.Sprint(Problems(tolerated)), fmt.Sprint(lenientErr)}); diff != "" {
		t.Errorf("errors of Lenient (-Parse +Lenient):\n%s", diff)
	}
}

// olderMeaning prints a Config as readAsOlderAgent does.
func olderMeaning(c Config) string {
	return fmt.Sprint(strings.Fields(prefixes(c.NonMasqueradeCIDRs)), c.MasqLinkLocal, c.MasqLinkLocalIPv6, c.ResyncInterval)
}

// afterTheDocument reports whether a syntax error is right after the document,
// where yaml.v3 looks for comments and yaml.v2 does not read: without it, the
// file means the same.
func afterTheDocument(data []byte, err error, want string) bool {
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
				continue // the older agents do not read directories
			}
			t.Run(dir+"/"+name, func(t *testing.T) { agreeWithOlderAgent(t, data) })
		}
	}
}

// The older agents accept every file in the corpus "older".
func TestOlderCorpusIsAccepted(t *testing.T) {
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

// mistakes are lines of YAML that Parse rejects. The older agents accept a file
// with those marked ignored.
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

func TestLenientIgnoresWhatOlderAgentsIgnore(t *testing.T) {
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

// Any number of mistakes in any order is ignored if each of them is.
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
