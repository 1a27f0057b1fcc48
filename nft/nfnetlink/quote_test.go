package nfnetlink_test

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"unicode"

	"nft-masq-agent/nft/nfnetlink"
)

// hostile are names that other programs may give, and how they are quoted.
var hostile = []struct{ name, want string }{
	{"KUBE-POSTROUTING", "KUBE-POSTROUTING"},
	{"a_b.c/d:e@f%g+h=i,j", "a_b.c/d:e@f%g+h=i,j"},
	{"", "''"},
	{"two words", "'two words'"},
	{"t;touch${IFS}x", "'t;touch${IFS}x'"},
	{"$(touch x)", "'$(touch x)'"},
	{"`touch x`", "'`touch x`'"},
	{"a|touch x", "'a|touch x'"},
	{"a&touch x", "'a&touch x'"},
	{">x", "'>x'"},
	{"~", "'~'"},
	{"*", "'*'"},
	{"#", "'#'"},
	{"!!", "'!!'"},
	{"{a,b}", "'{a,b}'"},
	{`say "a"`, `'say "a"'`},
	{`a\`, `'a\'`},
	{"größe", "'größe'"},

	{"a';touch x;'b", `$'a\047;touch x;\047b'`},
	{`\';touch x;'`, `$'\\\047;touch x;\047'`},
	{"a\ntouch x\n", `$'a\012touch x\012'`},
	{"a\rb\tc", `$'a\015b\011c'`},
	{"\x1b[2J", `$'\033[2J'`},
	{"\x1b]0;title\a1", `$'\033]0;title\0071'`},
	{"\u009b1m", `$'\302\2331m'`},
	{"\u202eabc", `$'\342\200\256abc'`},
	{"a\xffb", `$'a\377b'`},
	{"\x7f", `$'\177'`},
	{"\u00a0", `$'\302\240'`},
}

func TestQuotedNamesArePrintable(t *testing.T) {
	for _, tt := range hostile {
		got := nfnetlink.Quote(tt.name)
		if got != tt.want || strings.ContainsFunc(got, func(r rune) bool { return !unicode.IsPrint(r) }) {
			t.Errorf("%q: %q, want %q", tt.name, got, tt.want)
		}
	}
}

// A shell that does not know $'…' has another word, but executes nothing either.
func TestQuotedNamesAreOneWordToAnyShell(t *testing.T) {
	dir := t.TempDir()
	var script, want strings.Builder
	for _, tt := range hostile {
		fmt.Fprintf(&script, "set -- %s\necho $#\n", nfnetlink.Quote(tt.name))
		want.WriteString("1\n")
	}
	for _, shell := range []string{"sh", "bash"} {
		cmd := exec.CommandContext(t.Context(), shell, "-c", script.String())
		cmd.Dir = dir
		out, err := cmd.CombinedOutput()
		if err != nil || string(out) != want.String() {
			t.Errorf("%s: %v\n%s", shell, err, out)
		}
	}
	if files, err := os.ReadDir(dir); err != nil || len(files) > 0 {
		t.Errorf("a shell created %v: %v", files, err)
	}
}

func TestQuotedNamesAreTheNamesToBash(t *testing.T) {
	var script, want strings.Builder
	for _, tt := range hostile {
		fmt.Fprintf(&script, "printf '%%s\\0' %s\n", nfnetlink.Quote(tt.name))
		want.WriteString(tt.name + "\x00")
	}
	out, err := exec.CommandContext(t.Context(), "bash", "-c", script.String()).CombinedOutput()
	if err != nil || string(out) != want.String() {
		t.Errorf("%v: %q\nwant %q", err, out, want.String())
	}
}
