package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/google/go-cmp/cmp"
	sigsyaml "sigs.k8s.io/yaml"

	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/script"
)

func TestMain(m *testing.M) { os.Exit(nfttest.Main(m)) }

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
// the result later, or because of what only their libraries decode.
var beyondBounds = regexp.MustCompile(`(?m)` + strings.Join([]string{
	`IPv4-mapped`,
	`byte order marks`,
	`the tag "!"`,
	`an empty entry`,
	`without a leading zero`,
	`larger than 4 MiB`,
	`the aliases expand`,
	`too many values`,
	`want a whole number in decimal digits`,
	`this is a (ConfigMap|Kubernetes) manifest`,
}, "|"))

// explicitTag matches tags that only the library of the older agents accepts.
var explicitTag = regexp.MustCompile(`!.*(bool|binary)`)

// newerKeys matches the keys that only this agent has. Wrong values of them are
// errors although the older agents ignore the keys.
var newerKeys = func() *regexp.Regexp {
	older := []string{KeyNonMasqueradeCIDRs, KeyMasqLinkLocal, KeyMasqLinkLocalIPv6, keyResyncInterval, keyCIDRLimit}
	newer := slices.DeleteFunc(Keys(), func(key string) bool { return slices.Contains(older, key) })
	return regexp.MustCompile(`(?i)(^|[^a-z])(` + strings.Join(newer, "|") + `)\W`)
}()

// agreeWithOlderAgent compares Parse with an older agent: a file that it accepts
// has no errors and the same meaning, but for documented reasons.
func agreeWithOlderAgent(t *testing.T, data []byte) {
	t.Helper()
	c, problems := Parse(Defaults{EnableIPv6: true}, Source{Name: "f", Data: data})
	want, olderErr := readAsOlderAgent(data)
	switch {
	case olderErr != nil:
		return
	case problems.Worst() == Error:
		text := newText(Source{Data: data}).s
		expected := beyondBounds.MatchString(problems.Error()) || newerKeys.MatchString(text) ||
			explicitTag.MatchString(text) || afterTheDocument(data, problems, want)
		if !expected {
			t.Errorf("an older agent accepts this as %s\n%q\ngot %v", want, data, problems)
		}
		return
	}
	if diff := cmp.Diff(want, olderMeaning(c)); diff != "" {
		t.Errorf("%q (-older agent +got):\n%s", data, diff)
	}
}

// olderMeaning prints a Config as readAsOlderAgent does.
func olderMeaning(c Config) string {
	list := strings.Fields(prefixes(c.NonMasqueradeCIDRs))
	return fmt.Sprint(list, c.MasqLinkLocal, c.MasqLinkLocalIPv6, c.ResyncInterval)
}

// afterTheDocument reports whether a syntax error is right after the document,
// without a line that ends it: yaml.v3 looks for comments there, yaml.v2 does not
// read on. Without it, the file means the same.
func afterTheDocument(data []byte, problems Problems, want string) bool {
	i := slices.IndexFunc(problems, func(p Problem) bool { return strings.HasPrefix(p.Msg, "syntax: ") })
	if i < 0 {
		return false
	}
	before := newText(Source{Data: data}).lines()[:problems[i].Pos.Line-1]
	got, err := readAsOlderAgent([]byte(strings.Join(before, "\n")))
	return err == nil && got == want
}

func TestFilesOfOlderAgentsKeepTheirMeaning(t *testing.T) {
	for _, name := range tables {
		for _, c := range script.Read(t, corpusFile(name)) {
			if len(c.Steps) > 0 {
				continue // the older agents do not read directories
			}
			t.Run(name+"/"+c.Name, func(t *testing.T) { agreeWithOlderAgent(t, []byte(c.Data)) })
		}
	}
}

func FuzzFilesOfOlderAgentsKeepTheirMeaning(f *testing.F) {
	seed(f)
	f.Fuzz(agreeWithOlderAgent)
}

// A fault is the text of a file, and how severe its problems are.
type fault struct{ level, text string }

// faults are texts that Parse rejects, or does not. The older agents accept those that have mistakes, and those that
// are valid mean the same to them.
func faults(t testing.TB) (all []fault) {
	t.Helper()
	for _, c := range script.Read(t, corpusFile("mistakes")) {
		for _, s := range c.Steps {
			s.IsDocumented(t)
			level, quoted := s.Words()
			text, err := strconv.Unquote(quoted)
			if err != nil {
				t.Fatalf("%s: %s: %v", s.Place, s.Line, err)
			}
			all = append(all, fault{level, text})
		}
	}
	return all
}

func TestFaultsAreTakenAsTheOlderAgentsTakeThem(t *testing.T) {
	for _, f := range faults(t) {
		compareFaults(t, f.text, f.level)
		if f.level != valid && !strings.ContainsAny(f.text[:1], "{-.") { // JSON, or a document's first line
			compareFaults(t, "masqLinkLocalIPv6: true\n"+f.text+"\n", f.level)
		}
	}
}

// Any number of mistakes in any order is ignored if each of them is.
func TestFaultsTogetherAreTakenAsTheOlderAgentsTakeThem(t *testing.T) {
	random, all := rand.New(rand.NewPCG(1, 2)), faults(t)
	all = slices.DeleteFunc(all, func(f fault) bool { return f.level == valid || f.text[0] == '{' })
	for range nfttest.Rounds(200, 500, 2000) {
		var lines []string
		for _, i := range random.Perm(len(all))[:2+random.IntN(3)] {
			if !strings.Contains(all[i].text, "\n") || random.IntN(3) == 0 {
				lines = append(lines, all[i].text)
			}
		}
		if len(lines) == 0 {
			continue
		}
		file, level := strings.Join(lines, "\n"), Mistake.String()
		if _, err := readAsOlderAgent([]byte(file)); err != nil {
			level = Error.String()
		}
		if newerKeys.MatchString(file) || bareTag.MatchString(file) { // of which this agent rejects more
			agreeWithOlderAgent(t, []byte(file))
		} else {
			compareFaults(t, file, level)
		}
	}
}

// valid is the level of a text without mistakes and errors.
const valid = "valid"

func compareFaults(t *testing.T, file, level string) {
	t.Helper()
	agreeWithOlderAgent(t, []byte(file))
	_, olderErr := readAsOlderAgent([]byte(file))
	_, problems := parse(file)
	got := problems.Worst().String()
	if problems.Err() == nil {
		got = valid
	}
	if (olderErr != nil) != (level == Error.String()) && !newerKeys.MatchString(file) || got != level {
		t.Errorf("%q: want %s\nthe older agent: %v\ngot %s: %v", file, level, olderErr, got, problems)
	}
}
