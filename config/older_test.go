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
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/google/go-cmp/cmp"
	sigsyaml "sigs.k8s.io/yaml"

	"nft-masq-agent/nft/nfttest"
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
// encoding/json and validated, and its CIDRs are given to iptables. It returns the
// resulting config in one line.
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
		if c.NonMasqueradeCIDRs[i], err = readAsIPTables(s); err != nil {
			return "", err
		}
	}
	interval := min(max(time.Duration(c.ResyncInterval), shortestInterval), longestInterval)
	return fmt.Sprint(c.NonMasqueradeCIDRs, c.MasqLinkLocal, c.MasqLinkLocalIPv6, interval), nil
}

// readAsIPTables returns the network that iptables makes of a CIDR which
// net.ParseCIDR accepts. It reads the prefix length by strtoul with base 0.
func readAsIPTables(cidr string) (string, error) {
	address, length, _ := strings.Cut(cidr, "/")
	bits, err := strconv.ParseUint(length, 0, 8)
	if err != nil {
		return "", err
	}
	_, network, err := net.ParseCIDR(fmt.Sprintf("%s/%d", address, bits))
	return fmt.Sprint(network), err
}

// beyondBounds matches the errors for files that the older agents accept although
// they exceed the limits of this package, or although iptables-restore rejects
// the result later, or because of what only their libraries decode.
var beyondBounds = regexp.MustCompile(`(?m)` + strings.Join([]string{
	`IPv4-mapped`,
	`larger than 4 MiB`,
	`the aliases expand`,
	`too many values`,
	`want a whole number in decimal digits`,
}, "|"))

// onlyJSON matches those for JSON files: escapes, control characters, bytes that are
// not UTF-8, line separators, and long keys.
var onlyJSON = regexp.MustCompile(`(?m)^f:\d+:\d+: (syntax|JSON|byte|control character)`)

// explicitTag matches tags that only the library of the older agents accepts.
var explicitTag = regexp.MustCompile(`!.*(bool|binary)`)

// newerKeys matches the keys that only this agent has. Wrong values of them are
// errors although the older agents ignore the keys.
var newerKeys = func() *regexp.Regexp {
	older := []string{KeyNonMasqueradeCIDRs, keyMasqLinkLocal, keyMasqLinkLocalIPv6, keyResyncInterval, keyCIDRLimit}
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
		expected := beyondBounds.MatchString(problems.Error()) || newerKeys.Match(data) || explicitTag.Match(data) ||
			json.Valid(data) && onlyJSON.MatchString(problems.Error()) || afterTheDocument(data, problems, want)
		if !expected {
			t.Errorf("an older agent accepts this as %s\n%q\ngot %v", want, data, problems)
		}
		return
	case strings.Contains(problems.Error(), keyLinkLocal+" is deprecated"):
		return // the older agents ignore it
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
			c, problems := Parse(Defaults{EnableIPv6: true}, Source{Name: name, Data: data})
			if err := problems.Err(); err != nil {
				t.Fatal(err)
			}
			golden(t, filepath.Join("older", stem(name)+".txt"), meaning(c, problems))
		})
	}
}

func FuzzFilesOfOlderAgentsKeepTheirMeaning(f *testing.F) {
	seed(f)
	f.Fuzz(agreeWithOlderAgent)
}

// faults are lines of YAML that Parse rejects. The older agents accept a file with
// a mistake.
var faults = []struct {
	level Level
	line  string
}{
	{Mistake, `resyncIntervall: 30s`},
	{Mistake, `nonMasqueradeCIDR: [198.51.100.0/24]`},
	{Mistake, "foo: 1\nfoo: 2"},
	{Mistake, "nonMasqueradeCIDRs: [198.51.100.0/24]\nnonMasqueradeCIDRs: [192.0.2.0/24]"},
	{Mistake, "nonMasqueradeCIDRs: [192.0.2.0/24]\nNonMasqueradeCIDRs: [198.51.100.0/24]"},
	{
		Mistake,
		"nonMasqueradeCIDRs: [192.0.2.0/24, 198.51.100.0/24]\nNONMASQUERADECIDRS: [203.0.113.0/24]\n" +
			"nonmasqueradecidrs: [null]",
	},
	{Mistake, "nonMasqueradeCIDRs: [10.0.0.1/8]\nnonMasqueradeCIDRs: []"},
	{Mistake, "nonMasqueradeCIDRs: nothing\nnonMasqueradeCIDRs: "},
	{Mistake, "masqLinkLocal: true\nMasqLinkLocal: false\nmasqlinklocal:"},
	{Mistake, "masqLinkLocalIPv6: 1\nmasqLinkLocalIPv6: true"},
	{Mistake, "masqLinkLocal: true\nmaſqLinkLocal: true"}, // a letter that differs only in case for encoding/json
	{Mistake, "<<: {masqLinkLocal: true, MASQLINKLOCAL: false}\nMasqLinkLocal: false"},
	{Mistake, "bar: 1\n---\nmasqLinkLocal: true"},
	{Mistake, "bar: 1\n--- masqLinkLocal: true"},
	{Mistake, "bar: 1\n---\tmasqLinkLocal: true"},
	{Mistake, "bar: 1\n---\n\t- a"},
	{Mistake, "bar: 1\n---\n@"},
	{Mistake, "bar: 1\n---\n\""},
	{Mistake, "bar: 1\n---\n# a\n[\n"},
	{Mistake, "bar: 1\n---\n---\n...\n- a"},
	{Mistake, "bar: 1\n... # a\n@"},
	{Mistake, "bar: 1\r\n---\r\n\"\r\n"},
	{Mistake, "bar: 1\r--- @\r"},
	{Mistake, "bar: \"1\n  ---\n  2\"\n---\n'"},
	{Mistake, "bar: |\n  1\n\n---\n`"},
	{Error, "bar: \"1\n---\n2\""},
	{Error, "bar: [1,\n---\n2]"},
	{Error, "bar: [1\n---\n2"},
	{Mistake, "bar: 1\n---\nfoo: ["},
	{Mistake, "bar: 1\n...\nfoo\nbaz: 1"},
	{Mistake, "nonMasqueradeCIDRs: [10.0.0.1/8, foo]\nnonmasqueradecidrs: [192.0.2.0/24]"},
	{Mistake, "nonMasqueradeCIDRs: [10.0.0.0/010, 172.16.0.0/12, fd00::/010]"},
	{Mistake, "nonMasqueradeCIDRs: [10.1.0.0/0017]"},
	{Mistake, "nonMasqueradeCIDRs: [10.0.0.0/08]\nnonmasqueradecidrs: [192.0.2.0/24]"},
	{Error, "nonMasqueradeCIDRs: [10.0.0.0/08]"},
	{Error, "nonMasqueradeCIDRs: [fd00::/09]"},
	{Error, "nonMasqueradeCIDRs: [10.0.0.0/018]"},
	{Error, "nonMasqueradeCIDRs: [10.1.0.0/010]"},
	{Error, "nonMasqueradeCIDRs: [10.0.0.0/040]"},
	{Error, "nonMasqueradeCIDRs: [10.0.0.0/0x8]"},
	{Error, "nonMasqueradeCIDRs: [10.0.0.0/+8]"},
	{Error, "nonMasqueradeSrcCIDRs: [10.0.0.0/010]"},
	{Error, "masqueradeSrcCIDRs: [10.0.0.0/00]"},
	{Error, "forceMasqueradeCIDRs: [fd00::/010]"},
	{Error, "snatAddresses: [198.51.100.0/030]"},
	{Error, "nonMasqueradeCIDRs: [10.0.0.1/8, foo]\nnonmasqueradecidrs: [null]"},
	{Error, "nonMasqueradeCIDRs: [1]\nnonmasqueradecidrs: [192.0.2.0/24]"},
	{Mistake, "resyncInterval: 0s"},
	{Mistake, "resyncInterval: -5m"},
	{Error, "resyncInterval: -5s\nmasqLinkLocal: 1"},
	{Error, "masqLinkLocal: 1\nresyncInterval: -5s"},
	{Mistake, "masqueradeCIDRs: [192.0.2.0/24]"},
	{Mistake, "outputInterface: eth0"},
	{Mistake, `resyncInterval: "0"`},
	{Error, `resyncInterval: 0`},
	{Error, `enableIPv6: "true"`},
	{Error, `enableIPv6: [1]`},
	{Error, `linkLocal: 7`},
	{Mistake, "linkLocal: true\nmasqLinkLocal: true"},
	{Error, `forceMasqueradeCIDRs: 10.0.0.0/8`},
	{Error, `masqueradeSrcCIDRs: [10.0.0.1/8, foo]`},
	{Error, `nonMasqueradeSrcCIDRs: [null]`},
	{Mistake, `nonMasqueradeCIDRs: [null, 192.0.2.0/24, null]`},
	{Error, `nonMasqueradeCIDRs: [192.0.2.0/24, null, 10.0.0.0/8, null]`},
	{Error, `nonMasqueradeCIDRs: [10.0.0.1/8]`},
	{Error, `nonMasqueradeCIDRs: [10.0.0.1]`},
	{Error, `nonMasqueradeCIDRs: [10.0.0.0/33]`},
	{Error, `nonMasqueradeCIDRs: [""]`},
	{Error, `nonMasqueradeCIDRs: [1]`},
	{Error, `nonMasqueradeCIDRs: {10.0.0.0/8: }`},
	{Error, `nonMasqueradeCIDRs: 10.0.0.0/8`},
	{Error, "masqLinkLocal: x\nmasqlinklocal: true"},
	{Error, `masqLinkLocal: "true"`},
	{Error, `masqLinkLocal: "yes"`},
	{Error, `masqLinkLocal: 'on'`},
	{Error, `masqLinkLocal: "y"`},
	{Error, `masqLinkLocalIPv6: ! true`},
	{Error, "masqLinkLocal: >-\n  no"},
	{Error, `masqLinkLocal: !!str yes`},
	{Error, `cidrLimit: ! 64`},
	{Error, `resyncInterval:`},
	{Error, `resyncInterval: ~`},
	{Error, `resyncInterval: null`},
	{Error, `masqLinkLocalIPv6: 0`},
	{Error, `resyncInterval: 60`},
	{Error, `resyncInterval: ""`},
	{Error, `resyncInterval: soon`},
	{Error, `cidrLimit: "64"`},
	{Error, `cidrLimit: 1.5`},
	{Error, `cidrLimit: 0`},
	{Error, `cidrLimit: -1`},
	{Error, `staleConnections: sometimes`},
	{Error, `staleConnections: [udp]`},
	{Error, `enforceNonMasquerade: true`},
	{Error, `masqueradeSrcInterfaces: [a b]`},
	{Error, `[a]: b`},
	{Error, `<<: [a]`},
	{Error, `foo: [`},
	{Error, "\tfoo: 1"},
	{Error, "foo"},
}

func TestFaultsAreTakenAsTheOlderAgentsTakeThem(t *testing.T) {
	for _, fault := range faults {
		for _, file := range []string{fault.line, "masqLinkLocalIPv6: true\n" + fault.line + "\n"} {
			compareFaults(t, file, fault.level)
		}
	}
	for file, level := range map[string]Level{
		`{"nonMasqueradeCIDRs": ["192.0.2.0/24"], "NonMasqueradeCIDRs": ["198.51.100.0/24"]}`: Mistake,
		`{"nonMasqueradeCIDRs": ["192.0.2.0/24"], "nonMasqueradeCIDRs": [null]}`:              Mistake,
		`{"masqLinkLocal": true, "MASQLINKLOCAL": false, "masqLinkLocal": null}`:              Mistake,
		`{"resyncInterval": "0s", "resyncIntervall": "1s"}`:                                   Mistake,
		`{"enableIPv6": "true"}`:                                  Error,
		`{"masqLinkLocal": 1, "masqLinkLocal": true}`:             Error,
		`{"nonMasqueradeCIDRs": ["a"], "foo": 1,"foo":2}`:         Error,
		`{"nonMasqueradeCIDRs": ["a"], "nonMasqueradeCIDRs": []}`: Mistake,
		`{"nonMasqueradeCIDRs": [1], "nonMasqueradeCIDRs": []}`:   Error,
		`{"masqLinkLocal": true} {}`:                              Error,
		`{"masqLinkLocal": true,}`:                                Error,
		"{\"masqLinkLocal\": true}\n---\n":                        Error,
	} {
		compareFaults(t, file, level)
	}
}

// A line "---" is part of a text that is indented, and what follows the document
// may be nothing.
func TestDocumentsEndAsForTheOlderAgents(t *testing.T) {
	for file, set := range map[string]bool{
		"masqLinkLocal: true\n---\n":                              true,
		"masqLinkLocal: true\n--- # a\n\n# b\n...\n---\t\n":       true,
		"masqLinkLocal: true\n...\n":                              true,
		"masqLinkLocal: true\n...\n# a":                           true,
		"masqLinkLocal: true\r\n...\r\n\r\n":                      true,
		"# a\n\n%YAML 1.1\n---\nmasqLinkLocal: true\n---\n":       true,
		"--- # a\nmasqLinkLocal: true\n":                          true,
		"---\tmasqLinkLocal: true\n":                              false,
		"bar: |\n  ---\n  @\n  ...\nmasqLinkLocal: true\n":        true,
		"bar: \"\n  ---\n  @\n  ...\"\nmasqLinkLocal: true\n":     true,
		"bar: '\n ...\n'\nmasqLinkLocal: true\n":                  true,
		"bar: a\n  ---\n  b\nmasqLinkLocal: true\n":               true,
		"----: a\nmasqLinkLocal: true\n":                          true,
		"...a: a\nmasqLinkLocal: true\n":                          true,
		"bar: [\n ---a,\n --- ]\nmasqLinkLocal: true\n":           true,
		"{\"a\": \"---\\n...\",\n \"masqLinkLocal\": true}\n\n\n": true,
	} {
		agreeWithOlderAgent(t, []byte(file))
		c, problems := Parse(Defaults{EnableIPv6: true}, Source{Name: "f", Data: []byte(file)})
		if (problems.Err() == nil) != set || c.MasqLinkLocal != set {
			t.Errorf("%q: %t %v", file, c.MasqLinkLocal, problems)
		}
	}
}

// iptables is asked about each prefix length, and decides what the older agents'
// rules are for.
func TestPrefixLengthsMeanWhatIPTablesReads(t *testing.T) {
	nfttest.Require(t, "iptables-nft", "ip6tables-nft")
	ns := nfttest.NewNS(t, "octal")
	destination := regexp.MustCompile(`-d (\S+)`)
	rejected := 0
	for _, cidr := range []string{
		"10.0.0.0/8", "10.0.0.0/08", "10.0.0.0/008", "10.0.0.0/010", "10.0.0.0/0010", "10.1.0.0/017", "10.0.0.0/09",
		"10.0.0.0/018",
		"8.0.0.0/007", "0.0.0.0/00", "0.0.0.0/000", "10.9.8.7/040", "10.9.8.7/032", "10.0.0.0/0x8", "10.0.0.0/+8",
		"fd00::/8", "fd00::/08", "fd00::/010", "fd00::/0010", "fd00::/09", "fc00::/007", "::/00", "2001:db8::/0100",
		"2001:db8::/060",
	} {
		program, none := "iptables-nft", "0.0.0.0/0"
		if strings.Contains(cidr, ":") {
			program, none = "ip6tables-nft", "::/0"
		}
		file := "nonMasqueradeCIDRs: ['" + cidr + "']"
		got, err := readAsOlderAgent([]byte(file))
		_, ruleErr := ns.Output("", program, "-t", "nat", "-A", "POSTROUTING", "-d", cidr, "-j", "RETURN")
		c, problems := parse(file)
		if ruleErr != nil || err != nil {
			rejected++
			if err == nil || problems.Worst() != Error {
				t.Errorf("%s: iptables: %v; the older agent: %v; got %v", cidr, ruleErr, err, problems)
			}
			if ruleErr != nil {
				continue
			}
		}
		rules := nfttest.Run(t, ns, "", program, "-t", "nat", "-S", "POSTROUTING")
		nfttest.Run(t, ns, "", program, "-t", "nat", "-F", "POSTROUTING")
		want := none
		if found := destination.FindStringSubmatch(rules); found != nil {
			want = found[1]
		}
		if err == nil && (prefixes(c.NonMasqueradeCIDRs) != want || !strings.HasPrefix(got, "["+want+"]")) {
			t.Errorf("%s: %s, %s; want %s", cidr, prefixes(c.NonMasqueradeCIDRs), got, want)
		}
	}
	if rejected < 5 {
		t.Errorf("%d rejected", rejected)
	}
}

// Any number of mistakes in any order is ignored if each of them is.
func TestFaultsTogetherAreTakenAsTheOlderAgentsTakeThem(t *testing.T) {
	random, files := rand.New(rand.NewPCG(1, 2)), 2000
	if testing.Short() {
		files = 200
	}
	for range files {
		var lines []string
		for _, i := range random.Perm(len(faults))[:2+random.IntN(3)] {
			if !strings.Contains(faults[i].line, "\n") || random.IntN(3) == 0 {
				lines = append(lines, faults[i].line)
			}
		}
		if len(lines) == 0 {
			continue
		}
		file, level := strings.Join(lines, "\n"), Mistake
		if _, err := readAsOlderAgent([]byte(file)); err != nil {
			level = Error
		}
		if newerKeys.MatchString(file) {
			agreeWithOlderAgent(t, []byte(file))
		} else {
			compareFaults(t, file, level)
		}
	}
}

func compareFaults(t *testing.T, file string, level Level) {
	t.Helper()
	agreeWithOlderAgent(t, []byte(file))
	_, olderErr := readAsOlderAgent([]byte(file))
	_, problems := Parse(Defaults{EnableIPv6: true}, Source{Name: "f", Data: []byte(file)})
	if (olderErr != nil) != (level == Error) && !newerKeys.MatchString(file) || problems.Worst() != level {
		t.Errorf("%q: want %s\nthe older agent: %v\ngot %s: %v", file, level, olderErr, problems.Worst(), problems)
	}
}
