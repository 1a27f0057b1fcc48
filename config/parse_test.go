package config

import (
	"fmt"
	"io"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/script"
)

// prefixes prints a list without positions.
func prefixes(list []CIDR) string {
	s := make([]string, len(list))
	for i, c := range list {
		s[i] = c.Prefix.String()
	}
	return strings.Join(s, " ")
}

const rfc1918 = "10.0.0.0/8 172.16.0.0/12 192.168.0.0/16"

func TestDefaultsApplyWithoutSources(t *testing.T) {
	const reserved = " 100.64.0.0/10 192.0.0.0/24 192.0.2.0/24 192.88.99.0/24 198.18.0.0/15 198.51.100.0/24 " +
		"203.0.113.0/24 240.0.0.0/4"
	for d, want := range map[Defaults]string{
		{}: rfc1918 + " false 1m0s",
		{AllReservedRanges: true, EnableIPv6: true, ResyncInterval: 5 * time.Second}: rfc1918 + reserved + " true 5s",
	} {
		c, problems := Parse(d)
		got := fmt.Sprint(prefixes(c.NonMasqueradeCIDRs), " ", c.EnableIPv6, " ", c.ResyncInterval)
		if got != want || len(problems) > 0 || c.NonMasqueradeCIDRs[0].Pos != (Position{}) {
			t.Errorf("%+v: %s, want %s; %v", d, got, want, problems)
		}
		c.NonMasqueradeCIDRs, c.EnableIPv6, c.ResyncInterval, c.CIDRLimit, c.given = nil, false, 0, 0, nil
		if !reflect.DeepEqual(c, Config{}) {
			t.Errorf("%+v: more is set: %+v", d, c)
		}
	}
}

// parse reads one file, with IPv6 on.
func parse(text string) (Config, Problems) {
	return Parse(Defaults{EnableIPv6: true}, Source{Name: "f", Data: []byte(text)})
}

func TestProblemsAreSortedAndBoundedByLevel(t *testing.T) {
	var file strings.Builder
	for i := range 300 {
		fmt.Fprintf(&file, "note%d: 1\nNOTE%d: 1\n", i, i) // a mistake and two warnings
	}
	file.WriteString("nonMasqueradeCIDRs: [" + strings.Repeat("10.0.0.1, ", 150) + "]\nresyncInterval: 1ms\n")
	first, second := Source{Name: "a", Data: []byte("noted: 1")}, Source{Name: "f", Data: []byte(file.String())}
	_, problems := Parse(Defaults{}, first, second)
	got := map[string]int{}
	for i, p := range problems {
		got[p.Level.String()]++
		last := problems[max(i-1, 0)]
		if p.ID != "more" && before(p.Pos, last.Pos) {
			t.Errorf("%v is after %v", p, last)
		}
	}
	nfttest.Same(t, "(-want +got)", map[string]int{"error": 101, "mistake": 101, "warning": 101}, got)
	more := problems[len(problems)-3:].Error()
	nfttest.Same(t, "(-want +got)", "and 50 more errors\nand 200 more mistakes\nand 502 more warnings", more)
	if n := len(problems.Faults()); n != 202 || problems.Worst() != Error || problems.Faults().Worst() != Error {
		t.Errorf("%d faults, worst %s", n, problems.Worst())
	}
	if n := len(problems.Remarks()); n != 101 || problems.Remarks().Worst() != Warning || problems.Remarks().Err() != nil {
		t.Errorf("%d remarks, worst %s", n, problems.Remarks().Worst())
	}
	if none := Problems(nil); none.Worst() != Note || none.Err() != nil {
		t.Error(none.Worst(), none.Err())
	}
	for _, tt := range []struct {
		err  error
		want int
	}{{nil, 0}, {problems.Err(), 202}, {io.EOF, 1}} {
		if n := len(ProblemsOf(tt.err)); n != tt.want {
			t.Errorf("%v: %d problems", tt.err, n)
		}
	}
}

func before(a, b Position) bool {
	if a.File != b.File {
		return a.File < b.File
	}
	return a.Line < b.Line || a.Line == b.Line && a.Col < b.Col
}

// Programs know a problem by its ID.
func TestProblemsHaveStableIDs(t *testing.T) {
	found := map[string]bool{}
	for _, dir := range []string{"bad", "good"} {
		for _, c := range script.Read(t, corpusFile(dir)) {
			_, problems := Parse(Defaults{}, filesOf(t, c)...)
			for _, p := range problems {
				found[p.ID] = true
			}
		}
	}
	const want = "cidrLimit conflictingKeys deprecatedKey duplicateKey emptyFile emptyList " +
		"ignoredFile ignoredKey interval invalidEntry ipv6Off misspelledKey needsSources noEffect noKeys noList " +
		"nothingRead secondDocument syntax tooManyEntries unknownKey wrongValue"
	nfttest.Same(t, "IDs of the corpus (-want +got)", strings.Fields(want), slices.Sorted(maps.Keys(found)))
}

func TestTooLargeFileIsAnError(t *testing.T) {
	data := []byte(strings.Repeat("#", maxSize))
	if _, problems := Parse(Defaults{}, Source{Name: "f", Data: data}); problems.Err() != nil {
		t.Errorf("4 MiB: %v", problems)
	}
	_, problems := Parse(Defaults{}, Source{Name: "f", Data: append(data, '\n')})
	nfttest.Same(t, "(-want +got)", "f:1:1: the file is larger than 4 MiB", fmt.Sprint(problems))
}

// Only short files are parsed again and again to find the line.
func TestSyntaxErrorsOfLongFilesHaveALine(t *testing.T) {
	list := "nonMasqueradeCIDRs:\n" + manyCIDRs(10_000, "- %s/%d\n")
	for end, want := range map[string]string{
		"- a: b: c\n":                   "f:10002:1: syntax: mapping values are not allowed in this context",
		"- @\n- 10.0.0.0/8\n":           "f:10002:1: syntax: found character that cannot start any token",
		"masqLinkLocal: [\n":            "f:10002:1: syntax: did not find expected node content",
		"masqLinkLocal: \"\nfoo: bar\n": "f:10002:1: syntax: found unexpected end of stream",
	} {
		_, problems := parse(list + end)
		if got := problems.Error(); !strings.HasPrefix(got, want) {
			t.Errorf("%q:\n%s, want\n%s", end, got, want)
		}
	}
}

func TestCharactersThatYAMLForbidsAreNamed(t *testing.T) {
	for char, want := range map[string]string{
		"\x00": "U+0000", "\x1f": "U+001F", "\x7f": "U+007F", "\u0080": "U+0080", "\u009f": "U+009F", "\ufffe": "U+FFFE",
		"\uffff": "U+FFFF", "\x9f": "byte 0x9f", "\xff": "byte 0xff", "\xc3": "byte 0xc3",
		"\t": "", "\u00a0": "", "\ufffc": "", "\U00010000": "", "\ue000": "",
	} {
		_, problems := parse("masqLinkLocal: true\nx: é" + char + "y")
		got := problems.Faults().Error()
		if (got == "") != (want == "") || got != "" && !strings.HasPrefix(got, "f:2:5: "+want) &&
			!strings.HasPrefix(got, "f:2:5: control character "+want) {
			t.Errorf("%q: %s, want %s", char, got, want)
		}
	}
}

func TestInterfacesMatchByTheirNameOrItsBeginning(t *testing.T) {
	for pattern, matches := range map[string]string{"eth0": "eth0", "eth*": "eth0 eth1 eth", "eth01": ""} {
		for _, name := range []string{"eth0", "eth1", "eth", "et", "xeth0"} {
			if want := slices.Contains(strings.Fields(matches), name); (Interface{Name: pattern}).Matches(name) != want {
				t.Errorf("%s: %s: %t", pattern, name, !want)
			}
		}
	}
}

func TestNumbersOfEntriesAreBounded(t *testing.T) {
	const rule = "{from: [10.0.0.0/24], addresses: [198.51.100.21]}, "
	for _, tt := range []struct {
		before, entry, after string
		most                 int
		says                 string
	}{
		{"snatRules: [{addresses: [198.51.100.21], out: [", "eth0, ", "]}]", 50, "out has 51 names, at most 50 are possible"},
		{"masqueradeSrcInterfaces: [", "eth0, ", "]", 50, "masqueradeSrcInterfaces has 51 names, at most 50 are possible"},
		{"snatRules: [", rule, "]", 64, "snatRules has 65 entries, at most 64 are possible"},
	} {
		_, problems := parse(tt.before + strings.Repeat(tt.entry, tt.most) + tt.after)
		if problems.Err() != nil {
			t.Errorf("%d: %v", tt.most, problems)
		}
		_, problems = parse(tt.before + strings.Repeat(tt.entry, tt.most+1) + tt.after)
		if !strings.Contains(problems.Faults().Error(), tt.says) {
			t.Errorf("%v, want %s", problems, tt.says)
		}
	}
}

// The order is that of evaluation.
func TestRowsAreThoseOfTheKeys(t *testing.T) {
	var got []string
	for _, row := range Conditions() {
		got = append(got, row.Key)
	}
	got = append(got, "then")
	for _, row := range Translations() {
		got = append(got, row.Key)
	}
	want := "masqueradeHost masqueradeSrcInterfaces masqueradeSrcCIDRs nonMasqueradeSrcCIDRs nonMasqueradeOutInterfaces " +
		"masqueradeOutInterfaces forceMasqueradeCIDRs nonMasqueradeCIDRs then enforceNonMasquerade snatAddresses " +
		"snatRules dropInvalid portsPerPod"
	nfttest.Same(t, "(-want +got)", want, strings.Join(got, " "))
	if n := len(Keys()); n != 22 || SNATAddresses().Key != KeySNATAddresses {
		t.Errorf("%d keys, want 22 (a new one needs a place here, in manifests/schema_test.go and in config/README.md): %q; "+
			"snatAddresses is %q", n, Keys(), SNATAddresses().Key)
	}
}

func TestPositionsAreWithinTheText(t *testing.T) {
	text := newText(Source{Name: "f", Data: []byte("cidrLimit: 1\né\n")})
	for at, want := range map[Position]Position{
		{"f", 1, 5}: {"f", 1, 5}, {"f", 1, 13}: {"f", 1, 13}, {"f", 1, 99}: {"f", 1, 13},
		{"f", 2, 3}: {"f", 2, 2}, {"f", 3, 2}: {"f", 3, 1}, {"f", 7, 1}: {"f", 3, 1},
	} {
		if got := text.clamp(at); got != want {
			t.Errorf("%s: %s, want %s", at, got, want)
		}
	}
	for at, want := range map[Position]string{{}: "built-in default", {File: "f"}: "f", {"f", 2, 3}: "f:2:3"} {
		if at.String() != want {
			t.Errorf("%s, want %s", at, want)
		}
	}
	if got := (Problem{Msg: "x"}).Error(); got != "x" {
		t.Error(got)
	}
}

func TestPortRangesAreThoseOfTheOlderAgents(t *testing.T) {
	for text, want := range map[string]string{
		"": "[]", "1024-29999,32768-65535": "[1024-29999 32768-65535]", "7": "[7]", "7-7": "[7]", "0-9": "[1-9]",
		"1-5,3-9": "[1-5 3-9]", "65535": "[65535]",
		"0": "0 is not a port", "0-0": "0 is not a port", "9-1": "9 is greater than 1", "65536": "is not a port from 1 to",
		"-1": "is not a port", "1-": "is not a port", "1-2-3": "is not a port", "a": "is not a port", "1,": "is not a port",
	} {
		ranges, err := ParsePorts(text)
		got := fmt.Sprint(ranges)
		if err != nil {
			got = err.Error()
		}
		if got != want && (err == nil || !strings.Contains(got, want)) {
			t.Errorf("%q: %s, want %s", text, got, want)
		}
	}
	if n := (PortRange{1, 65535}).Size() + (PortRange{7, 7}).Size(); n != 65536 {
		t.Errorf("all ports and one more are %d, want 65536", n)
	}
}

func TestEmptyFilesSayThatTheyAre(t *testing.T) {
	const want = "f:1:1: the file is empty: each key has its default, unless another file sets it"
	for _, file := range []string{"", "\n\n", "# only\n", "---\n", "null\n", "~\n", "{}", " {} \n", "\ufeff"} {
		_, problems := Parse(Defaults{}, Source{Name: "f", Data: []byte(file)})
		if problems.Error() != want || problems[0].Level != Note {
			t.Errorf("%q: %v", file, problems)
		}
	}
}

// What the older agents read as JSON has the same meaning in YAML.
func TestJSONIsReadAsTheOlderAgentsReadIt(t *testing.T) {
	for _, file := range []string{
		"\t{\"masqLinkLocal\": true}", "{\"masqLinkLocal\": true}\n\t\n", "{\t\"masqLinkLocal\"\t:\ttrue\t}\t",
		"\r\n\t{\r\n\t\t\"masqLinkLocal\": true\r\n\t}\r\n\t",
		"{\"x\": \"a\u2028b\", \"masqLinkLocal\": true}", "{\"x\": \"a\u2029b\", \"masqLinkLocal\": true}",
		"{\"x\": \"a\u0085b\", \"masqLinkLocal\": true}", "{\"x\": [\"\u2028\"],\n\"masqLinkLocal\": true}",
	} {
		agreeWithOlderAgent(t, []byte(file))
		c, problems := Parse(Defaults{}, Source{Name: "f", Data: []byte(file)})
		if problems.Err() != nil || !c.MasqLinkLocal {
			t.Errorf("%q: %v", file, problems)
		}
	}
}

// The chain's name and that of the file say whose file it is.
func TestLinkLocalCountsInFilesOfItsAgent(t *testing.T) {
	for _, tt := range []struct{ name, chain, text, want string }{
		{"f", "", "linkLocal: false", "mistake, false"},
		{"f", "IP-MASQ-AGENT", "linkLocal: true", "warning, false"},
		{"f", "IP-MASQ-AGENT", "linkLocal: false", "mistake, false"},
		{"f", "NON-MASQUERADE-DAEMON", "linkLocal: false", "warning, true"},
		{"f", "NON-MASQUERADE-DAEMON", "linkLocal: true", "warning, false"},
		{"/etc/config/non-masquerade-daemon", "IP-MASQ-AGENT", "linkLocal: false", "warning, true"},
		{"/etc/non-masquerade-daemon/config", "IP-MASQ-AGENT", "linkLocal: false", "mistake, false"},
		{"f", "NON-MASQUERADE-DAEMON", "linkLocal: false\nmasqLinkLocal: false", "mistake, false"},
		{"f", "NON-MASQUERADE-DAEMON", "linkLocal:", "note, false"},
	} {
		c, problems := Parse(Defaults{Chain: tt.chain}, Source{Name: tt.name, Data: []byte(tt.text)})
		if got := fmt.Sprintf("%s, %t", problems.Worst(), c.MasqLinkLocal); got != tt.want {
			t.Errorf("%s, chain %s, %q: %s, want %s: %v", tt.name, tt.chain, tt.text, got, tt.want, problems)
		}
	}
}
