package config

import (
	"fmt"
	"maps"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"testing"

	"nft-masq-agent/nft/nfttest"
)

// hostileInputs are inputs that have made such parsers use more than linear time
// or memory, or overflow the stack. Each is a function of the size in bytes.
func hostileInputs() map[string]func(n int) string {
	repeat := func(s string) func(int) string {
		return func(n int) string { return strings.Repeat(s, n/len(s)) }
	}
	numbered := func(format string) func(int) string {
		return func(n int) string {
			var b strings.Builder
			for i := 0; b.Len() < n; i++ {
				fmt.Fprintf(&b, format, i)
			}
			return b.String()
		}
	}
	inputs := map[string]func(n int) string{
		"open lists":               repeat("["),
		"open mappings":            list("--- ", "{a: ", ""),
		"open JSON":                repeat(`{"a":`),
		"open JSON lists":          list(`{"a":`, "[", ""),
		"nested dashes":            repeat("- "),
		"nulls":                    list("nonMasqueradeCIDRs:\n", "- \n", ""),
		"numbers":                  list("nonMasqueradeCIDRs: [1", ",1", "]"),
		"question marks in a list": list("nonMasqueradeCIDRs: [1", ",?", "]"),
		"colons in a list":         list("nonMasqueradeCIDRs: [1", ",:", "]"),
		"keys in a mapping":        list("a: {b", ",b", "}"),
		"one alias":                list("nonMasqueradeCIDRs: [&a 10.0.0.0/8", ",*a", "]"),
		"comments with quotes":     repeat("# '\n"),
		"quotes over lines":        list("a: [\"\n", " # \", 1,1,1,1,1, \"\n", "\"]"),
		"nested question marks":    repeat("? "),
		"unknown keys":             numbered("k%d:\n"),
		"near misspellings":        numbered("masqLinkLoca%05d:\n"),
		"spellings of a key":       func(n int) string { return spellings(n/30, ": [10.0.0.0/8]\n") },
		"spellings of a bool":      func(n int) string { return spellings(n/30, ": x\n") },
		"one key repeated":         repeat("foo:\n"),
		"one known key repeated":   repeat("cidrLimit:\n"),
		"long key":                 list("? ", "a", "\n: b\n"),
		"long value":               list("resyncInterval: ", "9", "\n"),
		"bad entries":              list("nonMasqueradeCIDRs:\n", "- a\n", ""),
		"bad entries in a line":    list("nonMasqueradeCIDRs: [", "a,", "]"),
		"bad entries not in ASCII": list("nonMasqueradeCIDRs: [é,", "é,", "]"),
		"bad JSON entries":         list(`{"nonMasqueradeCIDRs": [1`, ",1", "]}"),
		"bad JSON, not in ASCII":   list(`{"nonMasqueradeCIDRs": [1`, `,"é"`, "]}"),
		"good entries":             list("nonMasqueradeCIDRs:\n", "- ::/0\n", ""),
		"slashes":                  repeat("/\n"),
		"short runs":               list("nonMasqueradeCIDRs:\n", strings.Repeat("- ::/0\n", 4)+"- a\n", ""),
		"runs in a block scalar":   list("a: |\n", strings.Repeat(" - ::/0\n", 4)+" b\n", ""),
		"tag directives":           numbered("%%TAG !a%d! x\n"),
		"tag directives with CR": func(n int) string {
			return strings.ReplaceAll(numbered("%%TAG !a%d! x\n")(n), "\n", "\r")
		},
		"documents":           repeat("---\n"),
		"carriage returns":    repeat("\r"),
		"blank lines":         repeat("\n"),
		"comments":            repeat("#\n"),
		"broken late":         list("a:\n", "  - b\n", " - c\n"),
		"broken after blanks": list("a:\n  - b\n", "\n", " - c\n"),
		"broken after text":   list("a:\n  - b\n - ", "c\n   ", "\n"),
		"unclosed quote":      list("a: \"", "\n", ""),
		"alias unknown":       list("a: |\n", "  *b:\n", "c: *b\n"),
		"UTF-16":              func(n int) string { return "\xff\xfe" + strings.Repeat("a\x00", n/2) },
		"NUL":                 repeat("\x00"),
		"continuation bytes":  repeat("\x80"),
	}
	maps.Copy(inputs, hostileAliases())
	return inputs
}

func hostileAliases() map[string]func(n int) string {
	return map[string]func(n int) string{
		"anchors": list("a:\n", "- &a b\n", ""),
		"aliases": list("a: &a b\nnonMasqueradeCIDRs:\n", "- *a\n", ""),
		"aliases of a long text": func(n int) string {
			return "a: &a " + strings.Repeat("/", n/2) + "\nnonMasqueradeCIDRs:\n" + strings.Repeat("- *a\n", n/10)
		},
		"aliases of a long address": func(n int) string {
			return "a: &a " + strings.Repeat("a", n/2) + "\nsnatAddresses:\n" + strings.Repeat("- *a\n", n/80)
		},
		"aliases of a long binary": func(n int) string {
			return "a: &a !!binary " + strings.Repeat("AAAA", n/8) + "\nnonMasqueradeCIDRs:\n" + strings.Repeat("- *a\n", n/10)
		},
		"aliases far along a line": func(n int) string {
			return "--- {a: &a x, nonMasqueradeCIDRs: [" + strings.Repeat("é,", n/6) + strings.Repeat("*a ,", n/8) + "]}"
		},
		"merges of a long key": func(n int) string {
			return "a: &a {? " + strings.Repeat("k", n/2) + " : 1}\n<<: [*a" + strings.Repeat(", *a", n/8) + "]\n"
		},
		"keys by alias of a long text": func(n int) string {
			return "a: &a " + strings.Repeat("k", n/2) + "\n" + strings.Repeat("*a : 1\n", n/14)
		},
		"spellings of an aliased list": func(n int) string {
			return "a: &a [" + strings.Repeat("10.0.0.0/8,", n/20) + "]\n" + spellings(n/60, ": *a\n")
		},
		"merge of itself": func(n int) string { return "a: &a {<<: *a}\n<<: *a\n#" + strings.Repeat("a", n) },
		"merges of merges": func(n int) string {
			return "a: &a {b: c}\n" + numbered2("a%d: &a%d {<<: [*a%d, *a, *a%d]}\n", n) + "<<: *a1\n"
		},
		"chain of merges": func(n int) string {
			return "a0: &a0 {b: c}\n" + numbered2("a%d: &a%d {<<: *a%d, b%d: c}\n", n)
		},
		"chain of anchors": func(n int) string { return "a0: &a0 x\n" + numbered2("a%d: &a%d [*a%d, b%d]\n", n) },
	}
}

// spellings writes a key in as many combinations of upper and lower case, in
// descending order of the names.
func spellings(n int, value string) string {
	var b strings.Builder
	for i := range n {
		name := []byte(strings.ToLower(KeyNonMasqueradeSrcCIDRs))
		for bit := range name {
			if i>>bit&1 == 1 {
				name[len(name)-1-bit] ^= 0x20
			}
		}
		b.WriteString(string(name) + value)
	}
	return b.String()
}

// list returns a function that repeats entry between two texts.
func list(before, entry, after string) func(int) string {
	return func(n int) string { return before + strings.Repeat(entry, n/len(entry)) + after }
}

func numbered2(format string, n int) string {
	var b strings.Builder
	for i := 1; b.Len() < n; i++ {
		fmt.Fprintf(&b, format, i, i, i-1, i)
	}
	return b.String()
}

// The most that Parse may allocate, including garbage. At any one time it holds
// less than 50 MB.
const mostAllocated = 96 << 20

// hostileSize is the size of a hostile input, in bytes. The race detector makes them slow.
var hostileSize = map[bool]int{true: 1 << 17, false: 1 << 19}[nfttest.Race]

// allocated returns the bytes that a function allocates, including garbage.
func allocated(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// Each of these ends in well under a second; with much more than linear time it
// would exceed the time limit of the test binary. The largest sizes are rejected
// before a tree is built, the smaller ones just fit. Unless LONG is set, each input has one of the sizes.
func TestHostileInputStaysWithinMemoryLimit(t *testing.T) {
	inputs := hostileInputs()
	for i, name := range slices.Sorted(maps.Keys(inputs)) {
		t.Run(name, func(t *testing.T) {
			sizes := []int{hostileSize / 4, maxSize - 100, hostileSize, 1 << 20}
			if testing.Short() {
				sizes = []int{hostileSize / 32}
			} else if !nfttest.Long() {
				sizes = sizes[i%len(sizes):][:1]
			}
			for _, size := range sizes {
				data := []byte(inputs[name](size))
				if bytes := allocated(func() { parseHostile(t, data) }); bytes > mostAllocated && !nfttest.Race {
					t.Errorf("%d bytes of text: %d MB", len(data), bytes>>20)
				}
			}
		})
	}
}

func parseHostile(t *testing.T, data []byte) {
	t.Helper()
	_, problems := Parse(Defaults{}, Source{Name: "f", Data: data})
	if faults, remarks := problems.Faults(), problems.Remarks(); len(faults) > 2002 || len(remarks) > 202 {
		t.Errorf("%d faults, %d remarks", len(faults), len(remarks))
	}
}

// manyCIDRs returns n networks, each written by format.
func manyCIDRs(n int, format string) string {
	var b strings.Builder
	for i := range n {
		v := uint32(10)<<24 + uint32(i)<<8
		fmt.Fprintf(&b, format, netip.AddrFrom4([4]byte{byte(v >> 24), byte(v >> 16), byte(v >> 8)}), 24)
	}
	return b.String()
}

// A ConfigMap holds 1 MiB.
func TestLargestConfigMapIsParsed(t *testing.T) {
	size := 1 << nfttest.Rounds(16, 18, 20)
	// cidrs returns as many entries as fit.
	cidrs := func(format string) string { return manyCIDRs(size/len(fmt.Sprintf(format, "10.10.100.0", 24)), format) }
	for name, file := range map[string]string{
		"block":                 "nonMasqueradeCIDRs:\n" + cidrs("- %s/%d\n"),
		"quoted":                "nonMasqueradeCIDRs:\n" + cidrs("- \"%s/%d\"\n"),
		"comments":              "nonMasqueradeCIDRs:\n" + cidrs("- %s/%d #, it's: a\n"),
		"lines of comments":     "nonMasqueradeCIDRs:\n" + cidrs("# it's\n\n- '%s/%d'\n"),
		"flow":                  "nonMasqueradeCIDRs: [" + cidrs("%s/%d, ") + "]\n",
		"flow, quoted":          "nonMasqueradeCIDRs: [" + cidrs(`"%s/%d",`) + "]\n",
		"flow, lines":           "nonMasqueradeCIDRs: [\n" + cidrs("%s/%d,\n") + "]\n",
		"flow, comments":        "nonMasqueradeCIDRs: [\n" + cidrs("%s/%d, # it's: a, b\n") + "]\n",
		"flow in flow":          "--- {nonMasqueradeCIDRs: [" + cidrs("%s/%d,       ") + "]}\n",
		"JSON":                  `{"nonMasqueradeCIDRs": [` + cidrs(`"%s/%d", `) + `"10.0.0.0/8"]}`,
		"JSON, lines":           "{\"nonMasqueradeCIDRs\": [\n" + cidrs("\t\"%s/%d\",\n") + `"10.0.0.0/8"]}`,
		"block with a mistake":  "resyncIntervall: 1s\nnonMasqueradeCIDRs:\n" + cidrs("- %s/%d\n"),
		"mistake after a block": "nonMasqueradeCIDRs:\n" + cidrs("- %s/%d\n") + "---\nfoo: [",
	} {
		t.Run(name, func(t *testing.T) {
			var c Config
			var problems Problems
			bytes := allocated(func() { c, problems = Parse(Defaults{}, Source{Name: "f", Data: []byte(file)}) })
			if n, want := len(c.NonMasqueradeCIDRs), strings.Count(file, "/24"); n < want {
				t.Errorf("%d CIDRs of %d: %v", n, want, problems)
			}
			if bytes > mostAllocated && !nfttest.Race {
				t.Errorf("%d MB", bytes>>20)
			}
		})
	}
}

func TestTooManyValuesAreAnError(t *testing.T) {
	nfttest.SkipIfShort(t)
	// One node for each of the mapping, the key, its list and what countNodes begins with.
	const entries = maxNodes - 4
	repeat := strings.Repeat
	of := func(files ...string) (sources []Source) {
		for i, text := range files {
			sources = append(sources, Source{Name: fmt.Sprintf("f%d", i), Data: []byte(text)})
		}
		return sources
	}
	aliases := func(n int) []Source {
		return of("a: &a [" + repeat("10.0.0.0/8,", 10_000) + "]\n" + spellings(n, ": *a\n"))
	}
	json := `{"nonMasqueradeCIDRs": [` + repeat(`"10.0.0.0/8",`, entries-10) + `"10.0.0.0/8"]}`
	many := "a: &a {" + repeat("cidrLimit: 1, ", 5_000) + "}\n<<: [" + repeat("*a, ", 61) + "]"
	const tooMany, expand = "f0: too many values", "f0:1:4: the aliases expand"
	for name, tt := range map[string]struct {
		want    string
		sources []Source
	}{
		"as many as possible":    {"", of("nonMasqueradeCIDRs:\n" + repeat("- 10.0.0.0/8\n", entries))},
		"as many in a line":      {"", of("nonMasqueradeCIDRs: [" + repeat("10.0.0.0/8,", entries-1) + "]")},
		"one more":               {tooMany, of("nonMasqueradeCIDRs:\n" + repeat("- 10.0.0.0/8\n", entries+2))},
		"entries in a line":      {tooMany, of("nonMasqueradeCIDRs: [" + repeat("10.0.0.0/8,", entries+4) + "]")},
		"mappings":               {tooMany, of("- {" + repeat("a,", entries/2+4) + "}")},
		"JSON":                   {"", of(json)},
		"quoted keys":            {tooMany, of("--- {" + repeat(`"a":b,`, entries/4+4) + "}")},
		"comments":               {"", of("# " + repeat("a, b: [# ]", 100) + "\n" + repeat("#\n", entries))},
		"commented entries":      {"", of("nonMasqueradeCIDRs:\n" + repeat("# a\n  # b: {\n- 10.0.0.0/8 # c, d\n", entries))},
		"comments behind quotes": {tooMany, of("a: 'b\n" + repeat("# ,\n", entries/3+4) + "'")},
		"lines":                  {tooMany, of(repeat("\n", maxLines+1))},
		"blank lines":            {"", of(repeat("\n", maxLines))},
		"directives":             {tooMany, of(repeat("%TAG ! a\n", 200) + "---\na: b")},
		"lists in lists":         {"f0:1:1: syntax: exceeded max depth of 10000", of("x: " + repeat("[", 10_001))},
		"some directives":        {"", of(hostileInputs()["tag directives"](1500) + "---\na: b")},
		"aliases":                {expand, aliases(31)},
		"some aliases":           {"f0:3:1: duplicate key", aliases(29)},
		"merges of many keys":    {expand, of(many)},
		"merge of itself":        {expand, of("a: &a {<<: *a}\n<<: *a")},
		"in two files": {
			"f1: too many values",
			of("a: ["+repeat("1,", entries/2)+"]", "a: ["+repeat("1,", entries/2+4)+"]"),
		},
	} {
		t.Run(name, func(t *testing.T) {
			_, problems := Parse(Defaults{}, tt.sources...)
			got := problems.Faults().Error()
			if !strings.HasPrefix(got, tt.want) || tt.want == "" && got != "" {
				t.Errorf("%.200s, want %q", got, tt.want)
			}
		})
	}
}

// Each file from the fuzzer is repeated, so that expensive input stands out.
func FuzzParseStaysWithinMemoryLimit(f *testing.F) {
	for _, text := range []string{
		"[1,", "- ", "? ", "&a a,*a,", "{a: ", "#", "'", "a:\n", "- 10.0.0.0/8\n", "<<: *a\n", "--- ", "|\n ",
	} {
		f.Add("nonMasqueradeCIDRs: ", text, "]")
	}
	f.Fuzz(func(t *testing.T, before, text, after string) {
		sizes := []int{hostileSize / 4, 1 << 20}
		if testing.Short() {
			sizes = []int{hostileSize / 32}
		}
		for _, size := range sizes {
			data := []byte(before + strings.Repeat(text, size/(len(text)+1)) + after)
			if bytes := allocated(func() { parseHostile(t, data) }); bytes > mostAllocated && !nfttest.Race {
				t.Errorf("%d bytes of text: %d MB", len(data), bytes>>20)
			}
		}
	})
}

func TestSecretMountedByMistakeIsNotQuoted(t *testing.T) {
	const secret = "hunter2hunter2"
	for _, file := range []string{
		secret, secret + "\n" + secret, "- " + secret, "*" + secret, "&" + secret + " [", "password: *" + secret,
		`"` + secret,
		"password: [" + secret, "a: b\n" + secret,
		"-----BEGIN PRIVATE KEY-----\n" + secret + "=\n-----END PRIVATE KEY-----\n",
		"key: |\n  " + secret + "\n\tb", `{"password": "` + secret, `{"password": "` + secret + `"}`,
		`{"password": ` + secret + `}`,
		"password: " + secret, "password: " + secret + "\n---\n" + secret, "%" + secret, "@" + secret,
		"? [" + secret + "]\n: b",
		"<<: " + secret, "ipv6: yes\npassword: *" + secret, "resync: [" + secret, "masquerade_password: 1\n@" + secret,
		"nonMasqueradeCIDRs: |\n  a\n  " + secret, "nonMasqueradeCIDRs: [" + strings.Repeat(secret, 5) + "]",
		"resyncInterval: " + strings.Repeat(secret, 5), "nonMasqueradeCIDRs:\n- |\n  " + secret + "\n  b\n",
		"a " + secret + ": b", "a/" + secret + ": b", strings.Repeat("x", maxQuoted) + secret + ": b",
	} {
		_, problems := Parse(Defaults{}, Source{Name: "f", Data: []byte(file)})
		if text := lines(problems); strings.Contains(text, secret) {
			t.Errorf("%q: %s", file, text)
		}
	}
}
