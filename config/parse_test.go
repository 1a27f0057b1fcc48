package config

import (
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
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
	tests := []struct {
		name string
		d    Defaults
		want Config
		list string
	}{
		{"no flag", Defaults{}, Config{ResyncInterval: time.Minute}, rfc1918},
		{
			"all flags",
			Defaults{AllReservedRanges: true, EnableIPv6: true, ResyncInterval: 5 * time.Second},
			Config{EnableIPv6: true, ResyncInterval: 5 * time.Second},
			rfc1918 + " 100.64.0.0/10 192.0.0.0/24 192.0.2.0/24 192.88.99.0/24 198.18.0.0/15 198.51.100.0/24 " +
				"203.0.113.0/24 240.0.0.0/4",
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c, problems := Parse(tt.d)
			if len(problems) > 0 {
				t.Fatal(problems)
			}
			if diff := cmp.Diff(tt.list, prefixes(c.NonMasqueradeCIDRs)); diff != "" {
				t.Errorf("list (-want +got):\n%s", diff)
			}
			for _, cidr := range c.NonMasqueradeCIDRs {
				if cidr.Pos != (Position{}) {
					t.Errorf("%s has the position %s", cidr, cidr.Pos)
				}
			}
			c.NonMasqueradeCIDRs = nil
			if diff := cmp.Diff(meaning(tt.want, nil), meaning(c, nil)); diff != "" {
				t.Errorf("config (-want +got):\n%s", diff)
			}
		})
	}
}

func TestFileOverridesFlags(t *testing.T) {
	all := Defaults{AllReservedRanges: true, EnableIPv6: true, ResyncInterval: time.Hour}
	tests := []struct {
		name, file string
		d          Defaults
		want       string
	}{
		{"IPv6 off", "enableIPv6: false", all, "ipv6=false every=1h0m0s ranges=11"},
		{"IPv6 on", "enableIPv6: true", Defaults{}, "ipv6=true every=1m0s ranges=3"},
		{"IPv6 null", "enableIPv6:", all, "ipv6=true every=1h0m0s ranges=11"},
		{"interval", "resyncInterval: 2h", all, "ipv6=true every=2h0m0s ranges=11"},
		{"list", "nonMasqueradeCIDRs: [10.0.0.0/8]", all, "ipv6=true every=1h0m0s ranges=1"},
		{"empty list", "nonMasqueradeCIDRs: []", all, "ipv6=true every=1h0m0s ranges=0"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c, problems := Parse(tt.d, Source{Name: "f", Data: []byte(tt.file)})
			if err := problems.Err(); err != nil {
				t.Fatal(err)
			}
			got := fmt.Sprintf("ipv6=%t every=%s ranges=%d", c.EnableIPv6, c.ResyncInterval, len(c.NonMasqueradeCIDRs))
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestFilesAreMerged(t *testing.T) {
	tests := []struct {
		name  string
		files []string
		want  string // the meaning in short, or the error
	}{
		{
			"booleans are OR-ed",
			[]string{"masqLinkLocal: true", "masqLinkLocal: false"},
			"ll=true ll6=false ipv6=false every=1m0s " + rfc1918,
		},
		{
			"a boolean that one file sets to false is false",
			[]string{"enableIPv6: false", ""},
			"ll=false ll6=false ipv6=false every=1m0s " + rfc1918,
		},
		{
			"linkLocal counts as its inverse",
			[]string{"linkLocal: false", "linkLocal: true", ""},
			"ll=false ll6=false ipv6=false every=1m0s " + rfc1918,
		},
		{
			"linkLocal: false alone masquerades",
			[]string{"linkLocal: false", ""},
			"ll=true ll6=false ipv6=false every=1m0s " + rfc1918,
		},
		{
			"the shortest interval wins",
			[]string{"resyncInterval: 2m", "resyncInterval: 90s", "resyncInterval: 1h"},
			"ll=false ll6=false ipv6=false every=1m30s " + rfc1918,
		},
		{
			"it overrides the flag even if longer",
			[]string{"resyncInterval: 2m", "masqLinkLocal: false"},
			"ll=false ll6=false ipv6=false every=2m0s " + rfc1918,
		},
		{
			"duplicates are kept",
			[]string{"nonMasqueradeCIDRs: [10.0.0.0/8]", "nonMasqueradeCIDRs: [10.0.0.0/8]"},
			"ll=false ll6=false ipv6=false every=1m0s 10.0.0.0/8 10.0.0.0/8",
		},
		{
			"equal limits agree",
			[]string{"cidrLimit: 3", "cidrLimit: 3"},
			"ll=false ll6=false ipv6=false every=1m0s " + rfc1918,
		},
		{
			"the smallest limit applies",
			[]string{"cidrLimit: 3", "cidrLimit: 2", "cidrLimit: 4"},
			"f1:1:12: cidrLimit is 2, but nonMasqueradeCIDRs has 3 entries",
		},
		{
			"the limit applies to the defaults",
			[]string{"cidrLimit: 2", ""},
			"f0:1:12: cidrLimit is 2, but nonMasqueradeCIDRs has 3 entries",
		},
		{
			"an empty list is named where it is first set",
			[]string{"masqLinkLocal: false", "#\nnonMasqueradeCIDRs: []", "nonMasqueradeCIDRs:"},
			"ll=false ll6=false ipv6=false every=1m0s , f1:2:1: nonMasqueradeCIDRs is empty: not even the default ranges are " +
				"exempt (to keep them, leave the key out)",
		},
		{
			"ConfigMap of Tencent TKE, as documented",
			[]string{"NonMasqueradeCIDRs:\n- 192.168.0.0/16\nNonMasqueradeSrcCIDRs:\n- 10.0.0.0/12\nMasqLinkLocal: true\n" +
				"MasqLinkLocalIPv6: false\nResyncInterval: 1m0s\n"},
			"ll=true ll6=false ipv6=false every=1m0s 192.168.0.0/16, not from 10.0.0.0/12",
		},
		{
			"one bad file rejects all",
			[]string{"masqLinkLocal: true", "foo: ["},
			"f1:1:6: syntax: did not find expected node content: close the bracket, or put the value in quotes",
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var sources []Source
			for i, f := range tt.files {
				sources = append(sources, Source{Name: fmt.Sprintf("f%d", i), Data: []byte(f)})
			}
			c, problems := Parse(Defaults{}, sources...)
			got := fmt.Sprintf("ll=%t ll6=%t ipv6=%t every=%s %s",
				c.MasqLinkLocal, c.MasqLinkLocalIPv6, c.EnableIPv6, c.ResyncInterval, prefixes(c.NonMasqueradeCIDRs))
			if len(c.NonMasqueradeSrcCIDRs) > 0 {
				got += ", not from " + prefixes(c.NonMasqueradeSrcCIDRs)
			}
			if err := problems.Err(); err != nil {
				got = err.Error()
			}
			for _, p := range problems {
				if p.ID == "emptyList" {
					got += ", " + p.Error()
				}
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// parse reads one file, with IPv6 on.
func parse(text string) (Config, Problems) {
	return Parse(Defaults{EnableIPv6: true}, Source{Name: "f", Data: []byte(text)})
}

func TestEnforceNonMasqueradeNeedsSources(t *testing.T) {
	for text, want := range map[string]string{
		"enforceNonMasquerade: true":                                                   "error at 1:23",
		"enforceNonMasquerade: true\nnonMasqueradeSrcCIDRs: [10.0.0.0/8]":              "error at 1:23",
		"enforceNonMasquerade: true\nmasqueradeOutInterfaces: [eth0]":                  "error at 1:23",
		"enforceNonMasquerade: false":                                                  "",
		"enforceNonMasquerade:":                                                        "",
		"enforceNonMasquerade: true\nmasqueradeSrcInterfaces: [cni0]":                  "on at 1:23",
		"enforceNonMasquerade: true\nmasqueradeSrcCIDRs: [10.0.0.0/8, fd00::/8]":       "on at 1:23",
		"enforceNonMasquerade: true\nmasqueradeSrcCIDRs: [fd00::/8]":                   "on at 1:23, no effect on IPv4",
		"enforceNonMasquerade: true\nmasqueradeSrcCIDRs: [10.0.0.0/8]":                 "on at 1:23, no effect on IPv6",
		"enforceNonMasquerade: true\nmasqueradeSrcCIDRs: [10.0.0.0/8]\nenableIPv6: no": "on at 1:23",
	} {
		c, problems := parse(text)
		got := ""
		if c.Enforce != nil {
			got = fmt.Sprintf("on at %d:%d", c.Enforce.Line, c.Enforce.Col)
		}
		for _, p := range problems {
			switch p.ID {
			case "needsSources":
				got = fmt.Sprintf("%s at %d:%d", p.Level, p.Pos.Line, p.Pos.Col)
			case "noEffect":
				got += ", " + regexp.MustCompile("no effect on IPv[46]").FindString(p.Msg)
				if p.Level != Warning {
					t.Errorf("%s: %s", text, p.Level)
				}
			default:
				t.Errorf("%s: %v", text, p)
			}
		}
		if got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}

func TestKeysOfModeNFTablesAreErrorsInTheOther(t *testing.T) {
	for text, want := range map[string]string{
		"masqueradeHost: false":                                                  "1:17",
		"masqueradeHost: true":                                                   "",
		"masqueradeSrcInterfaces: [cni0, veth*]":                                 "1:27",
		"masqueradeOutInterfaces: [eth0]":                                        "1:27",
		"nonMasqueradeOutInterfaces: [eth0]":                                     "1:30",
		"enforceNonMasquerade: true\nmasqueradeSrcCIDRs: [10.0.0.0/8, fd00::/8]": "1:23",
		"snatAddresses: [198.51.100.11]":                                         "1:17",
		"staleConnections: udp":                                                  "1:19",
		"staleConnections: ALL":                                                  "1:19",
		"staleConnections: keep":                                                 "",
		"forceMasqueradeCIDRs: [10.0.0.0/8]\nmasqueradeSrcCIDRs: [10.0.0.0/8]\nnonMasqueradeSrcCIDRs: [10.0.0.0/8]": "",
		"masqLinkLocal: true\nresyncInterval: 2m\ncidrLimit: 7\nenableIPv6: true":                                   "",
	} {
		c, problems := parse(text)
		if err := problems.Err(); err != nil {
			t.Errorf("%s: %v", text, err)
		}
		got := ""
		for _, p := range NeedsNFTables(c) {
			got += fmt.Sprintf("%d:%d", p.Pos.Line, p.Pos.Col)
			if key, _, _ := strings.Cut(text, ":"); p.Msg != key+" needs mode nftables" || p.Level != Error {
				t.Errorf("%s: %s %s", text, p.Level, p.Msg)
			}
		}
		if got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}

func TestStaleConnectionsThatDeletesMostApplies(t *testing.T) {
	for _, tt := range []struct {
		files []string
		want  Stale
		at    string
	}{
		{[]string{"udp"}, StaleUDP, "f0:1:19"},
		{[]string{"All"}, StaleAll, "f0:1:19"},
		{[]string{"keep"}, StaleKeep, ""},
		{[]string{"", "udp"}, StaleUDP, "f1:1:19"},
		{[]string{"keep", "udp", "keep"}, StaleUDP, "f1:1:19"},
		{[]string{"udp", "all", "udp"}, StaleAll, "f1:1:19"},
		{[]string{"all", "udp", "all", "keep"}, StaleAll, "f0:1:19"},
	} {
		var sources []Source
		for i, value := range tt.files {
			sources = append(sources, Source{Name: fmt.Sprintf("f%d", i), Data: []byte("staleConnections: " + value)})
		}
		c, problems := Parse(Defaults{}, sources...)
		at := ""
		for _, p := range NeedsNFTables(c) {
			at = p.Pos.String()
		}
		if len(problems) > 0 || c.StaleConnections != tt.want || at != tt.at {
			t.Errorf("%q: %q at %s, %v", tt.files, c.StaleConnections, at, problems)
		}
	}
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
	if diff := cmp.Diff(map[string]int{"error": 101, "mistake": 101, "warning": 101}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	more := problems[len(problems)-3:].Error()
	if diff := cmp.Diff("and 50 more errors\nand 200 more mistakes\nand 502 more warnings", more); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
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
	found := map[string]string{}
	for _, dir := range []string{"bad", "good"} {
		for _, name := range inputs(t, dir) {
			_, problems := Parse(Defaults{}, sourcesOf(t, dir, name)...)
			for _, p := range problems {
				found[p.ID] = p.Level.String()
			}
		}
	}
	want := map[string]string{
		"cidrLimit": "error", "conflictingKeys": "mistake", "deprecatedKey": "warning", "duplicateKey": "mistake",
		"emptyEntry": "mistake",
		"emptyList":  "warning", "ignoredFile": "note", "interval": "warning", "invalidEntry": "error",
		"ipv6Off": "warning", "misspelledKey": "mistake",
		"noKeys": "error", "noList": "warning", "nothingRead": "warning", "octalLength": "mistake",
		"secondDocument": "mistake", "syntax": "error",
		"unknownKey": "warning", "wrongValue": "error", "needsSources": "error", "noEffect": "warning",
		"tooManyEntries": "error", "emptyFile": "note", "notTheirs": "warning",
	}
	for id := range found {
		if want[id] == "" {
			t.Errorf("%s is new", id)
		}
	}
	for id, level := range want {
		if found[id] == "" {
			t.Errorf("%s (%s): no file of the corpus has it", id, level)
		}
	}
}

func TestTooLargeFileIsAnError(t *testing.T) {
	data := []byte(strings.Repeat("#", maxSize))
	if _, problems := Parse(Defaults{}, Source{Name: "f", Data: data}); problems.Err() != nil {
		t.Errorf("4 MiB: %v", problems)
	}
	_, problems := Parse(Defaults{}, Source{Name: "f", Data: append(data, '\n')})
	if diff := cmp.Diff("f:1:1: the file is larger than 4 MiB", fmt.Sprint(problems)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestCaretPointsAtTheProblem(t *testing.T) {
	long := `{"nonMasqueradeCIDRs": [` + strings.Repeat(`"10.0.0.0/8", `, 50) + `"10.0.0.1"]}`
	longest := "masqLinkLocal: 1 #" + strings.Repeat("#", 482)
	tests := []struct{ name, file, want string }{
		{"spaces", "nonMasqueradeCIDRs:\n  - 10.0.0.1/8\n", "  - 10.0.0.1/8\n    ^"},
		{"tabs", "{\n\t\"masqLinkLocal\":\t1\n}", "\t\"masqLinkLocal\":\t1\n\t                \t^"},
		{
			"wide characters count as one",
			"nonMasqueradeCIDRs: [\"é\", 10.0.0.1]\n",
			"nonMasqueradeCIDRs: [\"é\", 10.0.0.1]\n                          ^",
		},
		{"a line that is too long is not shown", long, ""},
		{"a line of 500 bytes is", longest, longest + "\n               ^"},
		{"a line of 501 bytes is not", longest + "#", ""},
		{
			"control characters are not printed",
			"enableIPv6: \x1b[2J\u202e\u200b\n",
			"enableIPv6: \uFFFD[2J\uFFFD\uFFFD\n            ^",
		},
		{"a first line after a byte order mark", "\uFEFFmasqLinkLocal: 1\n", "masqLinkLocal: 1\n               ^"},
		{"the end of the file", "enableIPv6: [", "enableIPv6: [\n            ^"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, problems := Parse(Defaults{}, Source{Name: "f", Data: []byte(tt.file)})
			if diff := cmp.Diff(tt.want, problems[len(problems)-1].Caret()); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// Only short files are parsed again and again to find the line.
func TestSyntaxErrorsOfLongFilesHaveALine(t *testing.T) {
	list := "nonMasqueradeCIDRs:\n" + manyCIDRs(10_000, "- %s/%d\n")
	for end, want := range map[string]string{
		"- a: b: c\n":                   "f:10002:1: syntax: mapping values are not allowed in this context",
		"- @\n- 10.0.0.0/8\n":           "f:10002:3: syntax: found character that cannot start any token",
		"masqLinkLocal: [\n":            "f:10002:16: syntax: did not find expected node content",
		"masqLinkLocal: \"\nfoo: bar\n": "f:10002:16: syntax: found unexpected end of stream",
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

func TestMisspelledKeysAreDistinguishedFromUnknownOnes(t *testing.T) {
	slips := map[string]string{
		"nonMasqueradeCIDR": KeyNonMasqueradeCIDRs, "nonMasquaradeCIDRs": KeyNonMasqueradeCIDRs,
		"noMasqueradeCIDRs":  KeyNonMasqueradeCIDRs,
		"nonMasqueradeCDIRs": KeyNonMasqueradeCIDRs, "non-masquerade-cidrs": KeyNonMasqueradeCIDRs,
		"nonMasqCIDRs":         KeyNonMasqueradeCIDRs,
		"nonMasqueradeSrcCIDR": KeyNonMasqueradeSrcCIDRs, "nonMasqueradeSourceCIDRs": KeyNonMasqueradeSrcCIDRs,
		"masqueradeSrcCidr": KeyMasqueradeSrcCIDRs, "forceMasqCIDRs": KeyForceMasqueradeCIDRs,
		"forcedMasqueradeCIDRs": KeyForceMasqueradeCIDRs,
		"masqLinklLocal":        keyMasqLinkLocal, "masqLinkLocl": keyMasqLinkLocal, "masqueradeLinkLocal": keyMasqLinkLocal,
		"masqLinkLocalIP6": keyMasqLinkLocalIPv6, "masqLinkLocalV6": keyMasqLinkLocalIPv6,
		"enableIP6": keyEnableIPv6, "enabledIPv6": keyEnableIPv6, "enable_ipv6": keyEnableIPv6,
		"resyncIntervall": keyResyncInterval, "syncInterval": keyResyncInterval, "resync-interval": keyResyncInterval,
		"masqueradeCIDRs": KeyForceMasqueradeCIDRs, "MasqueradeExceptionCIDRs": KeyForceMasqueradeCIDRs,
		"outputInterface": keyMasqueradeOutInterfaces, "outputAddress": KeySNATAddresses,
		"outputAddressIPv6": KeySNATAddresses,
		"cidrLimits":        keyCIDRLimit, "cirdLimit": keyCIDRLimit, "linkLocals": keyLinkLocal,
	}
	for name, want := range slips {
		if got := likelyKey(name); got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
	others := []string{
		"", "a", "apiVersion", "kind", "metadata", "data", "x-note",
		"nonMasqueradeDstCIDRs", "nonMasqueradeIPs", "nonMasqueradeCIDRsIPv6", "nonMasqueradeCIDRs6",
		"masqLinkLocalIPv4", "linkLocalIPv6", "noMasqLinkLocal", "nonMasqLinkLocal", "enableIPv4", "disableIPv6", "ipv6",
		"cidrLi", "linkLoca6", "linkLoc", "noLinkLocal", "noEnableIPv6", "masqLinkLocal4", "cidrList", "limit",
		"resyncPeriod", "resyncIntervalSeconds", "interval",
		"masq", "masqChain",
		strings.Repeat("nonMasqueradeCIDRs", 1000),
	}
	for _, name := range others {
		if got := likelyKey(name); got != "" {
			t.Errorf("%s is taken for a misspelling of %s", name, got)
		}
	}
}

func TestInterfaceNamesAreThoseOfTheKernel(t *testing.T) {
	for name, want := range map[string]string{
		`cni0`: "", `"eth0.7"`: "", `veth*`: "", `a`: "", `"*a"`: "only be the last", `fifteen-bytes-0`: "",
		`fourteen-bytes*`:  "",
		`sixteen-bytes-00`: "has 16 bytes", `"*"`: "every interface", `""`: `"" is not the name`,
		`.`: "is not the name", `..`: "is not the name",
		`...`: "", `a/b`: "is not the name", `"a:b"`: "is not the name", `'a"b'`: "is not the name", `a\b`: "is not the name",
		`"a b"`: "is not the name", `"a\tb"`: "is not the name", `"a\u00a0b"`: "is not the name",
		`wg**`: "only be the last", `a*b`: "only be the last",
		`é`: "", `7`: "", `true`: "", `[a]`: "an entry is a list, want the name", `{a: }`: "a: is not the name",
		`null`: "an empty entry",
	} {
		c, problems := parse("masqueradeOutInterfaces:\n- " + name + "\n")
		list := c.MasqueradeOutInterfaces
		if want == "" && (len(problems) > 0 || len(list) != 1 || list[0].Pos != At("f", 2, 3)) {
			t.Errorf("%s: %v, %v", name, problems, list)
		}
		if want != "" && (len(problems) != 1 || !strings.Contains(strings.ReplaceAll(problems[0].Msg, `"a:"`, "a:"), want)) {
			t.Errorf("%s: %v, want %q", name, problems, want)
		}
	}
	for pattern, matches := range map[string]string{"eth0": "eth0", "eth*": "eth0 eth1 eth", "eth01": ""} {
		for _, name := range []string{"eth0", "eth1", "eth", "et", "xeth0"} {
			if want := slices.Contains(strings.Fields(matches), name); (Interface{Name: pattern}).Matches(name) != want {
				t.Errorf("%s: %s: %t", pattern, name, !want)
			}
		}
	}
	for n, want := range map[int]bool{maxInterfaces: true, maxInterfaces + 1: false} {
		_, problems := parse("masqueradeOutInterfaces: [" + strings.Repeat("eth0, ", n) + "]")
		if (problems.Err() == nil) != want {
			t.Errorf("%d names: %v", n, problems)
		}
	}
}

// A message quotes a value only if it is short and in one line.
func TestValuesAreDescribedByTheirType(t *testing.T) {
	long := strings.Repeat("7", maxQuoted)
	for value, want := range map[string]string{
		"x": `the text "x"`, "'é'": `the text "é"`, "[x]": "a list", "{x: y}": "a mapping", "5": "the number 5",
		"5.5":  "the number 5.5",
		"true": "true", "'true'": `the text "true"`, long: "the number " + long, long + "7": "a number",
		"x" + long: "a text", `"a\nb"`: "a text", "[" + long + "7]": "a list",
	} {
		_, problems := parse("staleConnections: " + value)
		if got := problems.Error(); got != "f:1:19: staleConnections is "+want+", want keep, udp or all" {
			t.Errorf("%s: %s", value, got)
		}
	}
	_, problems := parse("nonMasqueradeCIDRs: [x" + long + "]\nforceMasqueradeCIDRs: null\nenableIPv6: ~\n")
	if got := problems.Error(); got != `f:1:22: a text of 65 bytes is not a CIDR: write one such as "10.0.0.0/8"` {
		t.Error(got)
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
	if diff := cmp.Diff(want, strings.Join(got, " ")); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if n := len(Keys()); n != 22 || SNATAddresses().Key != KeySNATAddresses {
		t.Errorf("%d keys", n)
	}
}

func TestPositionsAreWithinTheText(t *testing.T) {
	text := newText(Source{Name: "f", Data: []byte("cidrLimit: 1\né\n")})
	for at, want := range map[Position]Position{
		At("f", 1, 5): At("f", 1, 5), At("f", 1, 13): At("f", 1, 13), At("f", 1, 99): At("f", 1, 13),
		At("f", 2, 3): At("f", 2, 2), At("f", 3, 2): At("f", 3, 1), At("f", 7, 1): At("f", 3, 1),
	} {
		if got := text.show(Problem{Pos: at}).Pos; got != want {
			t.Errorf("%s: %s, want %s", at, got, want)
		}
	}
	for at, want := range map[Position]string{{}: "built-in default", At("f", 0, 0): "f", At("f", 2, 3): "f:2:3"} {
		if at.String() != want {
			t.Errorf("%s, want %s", at, want)
		}
	}
	if got := (Problem{Msg: "x"}).Error(); got != "x" {
		t.Error(got)
	}
}

func TestFurtherDocumentsAreOneMistake(t *testing.T) {
	for _, more := range []string{"---\nmasqLinkLocal: true\n", "---\na: 1\n---\nb: 2\n"} {
		c, problems := parse("nonMasqueradeCIDRs: [10.0.0.0/8]\n" + more)
		if len(problems) != 1 || problems[0].Level != Mistake || problems[0].Line != 3 || c.MasqLinkLocal {
			t.Errorf("%q: %v, masqLinkLocal is %t", more, problems, c.MasqLinkLocal)
		}
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
		t.Errorf("%d ports", n)
	}
}

func TestPortsOfAFileReplaceTheFlags(t *testing.T) {
	for text, want := range map[string]string{
		"": "<nil> <nil>", "toPorts: 1024-2047,4096": "[1024-2047 4096] <nil>", "toPorts: 7\nrandomFully: true": "[7] true",
		`toPorts: ""`: "[] <nil>", "toPorts:\nrandomFully: false": "<nil> false",
	} {
		c, problems := parse(text)
		ports, random := "<nil>", "<nil>"
		if c.ToPorts != nil {
			ports = fmt.Sprint(*c.ToPorts)
		}
		if c.RandomFully != nil {
			random = fmt.Sprint(*c.RandomFully)
		}
		if got := ports + " " + random; got != want || problems.Err() != nil {
			t.Errorf("%q: %s, want %s: %v", text, got, want, problems)
		}
	}
}

// Each message has the line of the slip, and what was meant.
func TestSlipsAreNamedWithWhatWasMeant(t *testing.T) {
	const list, rest = "nonMasqueradeCIDRs:\n", "resyncInterval: 60s\n"
	const further = `this entry is indented further than the one in line 2, and a part of it: align the "-"`
	for file, want := range map[string]string{
		list + "- 10.0.0.0/8\n  - 172.16.0.0/12\n":               "3:3: " + further,
		list + "  - 10.0.0.0/8\n\n    - 172.16.0.0/12\n" + rest:  "4:5: " + further,
		list + "  - 10.0.0.0/8\n   - \"172.16.0.0/12\"\n" + rest: "3:4: " + further,
		list + "- \"10.0.0.0/8\"\n  - 172.16.0.0/12\n" + rest: `3:3: syntax: did not find expected key: ` +
			`align the "-" of all entries of a list`,
		"{\"nonMasqueradeCIDRs\": [\"10.0.0.0/8\",\n]}": `1:37: JSON, as the file begins with "{": invalid character ` +
			`']' looking for beginning of value: remove this comma, the last entry has none`,
		"{\"masqLinkLocal\": true,\n}\n": `1:23: JSON, as the file begins with "{": invalid character '}' looking for ` +
			`beginning of object key string: remove this comma, the last entry has none`,
		"{\"masqLinkLocal\": true\n\"masqLinkLocalIPv6\": true}": `2:1: JSON, as the file begins with "{": invalid ` +
			`character '"' after object key:value pair: put a comma before it`,
		"nonMasqueradeCIDRs: [10.0.0.0 /8]":       `1:22: "10.0.0.0 /8" has a blank in it: write "10.0.0.0/8"`,
		"nonMasqueradeCIDRs: [10. 0.0.0/ 8]":      `1:22: "10. 0.0.0/ 8" has a blank in it: write "10.0.0.0/8"`,
		"nonMasqueradeCIDRs: [\" fd00::/8\"]":     `1:22: " fd00::/8" has a blank in it: write "fd00::/8"`,
		"snatAddresses: [\"198.51.100.1 /32\"]":   `1:17: "198.51.100.1 /32" has a blank in it: write "198.51.100.1/32"`,
		`nonMasqueradeCIDRs: [10.0.0.0\8]`:        `1:22: "10.0.0.0\\8" has a backslash in it: write "10.0.0.0/8"`,
		`nonMasqueradeCIDRs: [10.0.0.0\/8]`:       `1:22: "10.0.0.0\\/8" has a backslash in it: write "10.0.0.0/8"`,
		"nonMasqueradeCIDRs:\n- 10.0.0.0/8 blank": `2:3: "10.0.0.0/8 blank" is not a CIDR: write one such as "10.0.0.0/8"`,
		`nonMasqueradeCIDRs: ["10.0.0.0\8"]`: `1:31: syntax: found unknown escape character: write the character itself, ` +
			`"/" in a CIDR`,
		`{"nonMasqueradeCIDRs": ["10.0.0.0\8"]}`: `1:35: JSON, as the file begins with "{": invalid character '8' in ` +
			`string escape code: a backslash begins an escape; write "/" in a CIDR`,
		`masqLinkLocal: "yes"`:  `1:16: masqLinkLocal is the text "yes", want true or false: write true without quotes or tag`,
		`masqLinkLocal: 'off'`:  `1:16: masqLinkLocal is the text "off", want true or false: write false without quotes or tag`,
		`masqLinkLocal: ! true`: `1:16: masqLinkLocal is true, want true or false: write true without quotes or tag`,
		"resyncInterval:":       `1:16: resyncInterval is null, write one such as "60s", or remove the key`,
	} {
		_, problems := Parse(Defaults{EnableIPv6: true}, Source{Name: "f", Data: []byte(file)})
		if diff := cmp.Diff("f:"+want, problems.Faults().Error()); diff != "" {
			t.Errorf("%q (-want +got):\n%s", file, diff)
		}
	}
}

func TestEmptyFilesSayThatTheyAre(t *testing.T) {
	const want = "f:1:1: the file is empty: each key has its default, unless another file sets it"
	for _, file := range []string{"", "\n\n", "# only\n", "---\n", "null\n", "{}", " {} \n"} {
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
