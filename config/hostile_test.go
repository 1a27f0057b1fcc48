package config

import (
	"fmt"
	"maps"
	"strings"
	"testing"
)

// hostileInputs are the shapes that have cost parsers of this kind more than
// linear time or memory, or the stack, each as a function of the size in bytes.
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
		"nested question marks":    repeat("? "),
		"unknown keys":             numbered("k%d:\n"),
		"near slips":               numbered("masqLinkLoca%05d:\n"),
		"one key twice":            repeat("foo:\n"),
		"one known key twice":      repeat("cidrLimit:\n"),
		"long key":                 list("? ", "a", "\n: b\n"),
		"long value":               list("resyncInterval: ", "9", "\n"),
		"bad entries":              list("nonMasqueradeCIDRs:\n", "- a\n", ""),
		"bad entries in a line":    list("nonMasqueradeCIDRs: [", "a,", "]"),
		"bad entries not in ASCII": list("nonMasqueradeCIDRs: [é,", "é,", "]"),
		"bad JSON entries":         list(`{"nonMasqueradeCIDRs": [1`, ",1", "]}"),
		"bad JSON, not in ASCII":   list(`{"nonMasqueradeCIDRs": [1`, `,"é"`, "]}"),
		"good entries":             list("nonMasqueradeCIDRs:\n", "- ::/0\n", ""),
		"slashes":                  repeat("/\n"),
		"short runs":               list("nonMasqueradeCIDRs:\n", strings.Repeat("- ::/0\n", minRun)+"- a\n", ""),
		"runs in a block scalar":   list("a: |\n", strings.Repeat(" - ::/0\n", minRun)+" b\n", ""),
		"tag directives":           numbered("%%TAG !a%d! x\n"),
		"tag directives with CR": func(n int) string {
			return strings.ReplaceAll(numbered("%%TAG !a%d! x\n")(n), "\n", "\r")
		},
		"documents":            repeat("---\n"),
		"carriage returns":     repeat("\r"),
		"blank lines":          repeat("\n"),
		"comments":             repeat("#\n"),
		"broken late":          list("a:\n", "  - b\n", " - c\n"),
		"broken behind blanks": list("a:\n  - b\n", "\n", " - c\n"),
		"broken behind text":   list("a:\n  - b\n - ", "c\n   ", "\n"),
		"unclosed quote":       list("a: \"", "\n", ""),
		"alias unknown":        list("a: |\n", "  *b:\n", "c: *b\n"),
		"UTF-16":               func(n int) string { return "\xff\xfe" + strings.Repeat("a\x00", n/2) },
		"NUL":                  repeat("\x00"),
		"continuation bytes":   repeat("\x80"),
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
		"chain of merges": func(n int) string {
			return "a0: &a0 {b: c}\n" + numbered2("a%d: &a%d {<<: *a%d, b%d: c}\n", n)
		},
		"chain of anchors": func(n int) string { return "a0: &a0 x\n" + numbered2("a%d: &a%d [*a%d, b%d]\n", n) },
	}
}

// list returns entries between two texts.
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

// Each of these ends in well under a second, and would not within the time limit
// of the test binary if it cost much more than linear time.
func TestHostileInputEnds(t *testing.T) {
	for name, input := range hostileInputs() {
		t.Run(name, func(t *testing.T) {
			c, warnings, err := Parse(Defaults{}, Source{Name: "f", Data: []byte(input(hostileSize))})
			if err != nil && len(c.NonMasqueradeCIDRs) > 0 {
				t.Error("a config beside an error")
			}
			for _, w := range warnings {
				_ = w.Caret()
			}
			if problems, ok := err.(Problems); ok {
				for _, p := range problems {
					_ = p.Caret()
				}
			}
		})
	}
}
