package nfnetlink

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Quote returns text of another program, such as a name or a comment, so that neither a terminal nor a shell
// takes it for its own: unchanged if it is plain, in single quotes if it is printable, and else in the form
// $'…' with escapes, which is one word to any shell.
func Quote(text string) string {
	const plain = "_-./:@%+=,"
	special := func(r rune) bool {
		return r > unicode.MaxASCII || !unicode.IsLetter(r) && !unicode.IsDigit(r) && !strings.ContainsRune(plain, r)
	}
	unprintable := func(r rune) bool { return r == '\'' || r == utf8.RuneError || !unicode.IsPrint(r) }
	switch {
	case text != "" && !strings.ContainsFunc(text, special):
		return text
	case !strings.ContainsFunc(text, unprintable):
		return "'" + text + "'"
	}
	var b strings.Builder
	b.WriteString("$'")
	for _, c := range []byte(text) {
		switch {
		case c == '\'' || c == '\\':
			b.WriteString(`\` + string(rune(c)))
		case c < ' ' || c > '~':
			fmt.Fprintf(&b, `\x%02x`, c)
		default:
			b.WriteByte(c)
		}
	}
	return b.String() + "'"
}
