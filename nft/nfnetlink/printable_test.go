package nfnetlink_test

import (
	"os/exec"
	"strings"
	"testing"
	"unicode"

	"nft-masq-agent/nft/nfnetlink"
)

func TestUnprintableNamesAreQuoted(t *testing.T) {
	for name, want := range map[string]string{
		"KUBE-POSTROUTING": "KUBE-POSTROUTING", "__set0": "__set0", "größe": "größe",
		"": `""`, "a b": `"a b"`, "a\nb": `"a\nb"`, "\x1b[2J": `"\x1b[2J"`, "\u009b1m": `"\u009b1m"`,
		"\u202eabc": `"\u202eabc"`, "a\x80": `"a\x80"`, `"`: `"\""`, `\n`: `"\\n"`, "\u00a0": `"\u00a0"`,
	} {
		if got := nfnetlink.Printable(name); got != want {
			t.Errorf("%q: %s, want %s", name, got, want)
		}
	}
}

func TestShellReadsNameAsOneWord(t *testing.T) {
	for _, name := range []string{
		"IP-MASQ-AGENT", "größe", "", "a b", "a;reboot", "$(reboot)", "`reboot`", "a'b", "'", `\`, `"`, "*", "~", "#", "!!", "a\nreboot\n", "\n",
		"\x1b[2J'$(reboot)", "\u009b1m", "\u202eabc", "a\x80f", "\u00a0", "{a,b}", "a=b", "\x7f",
	} {
		word := nfnetlink.ShellWord(name)
		if strings.ContainsFunc(word, func(r rune) bool { return !unicode.IsPrint(r) }) {
			t.Errorf("%q becomes %q", name, word)
		}
		got, err := exec.Command("bash", "-c", `printf '%s.' `+word).Output()
		if err != nil || string(got) != name+"." {
			t.Errorf("%q: a shell takes %s for %q: %v", name, word, got, err)
		}
	}
}
