package nfnetlink

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Quote returns text of another program, such as a name or a comment, so that neither a terminal nor a shell
// takes it for its own: unchanged if it is plain, in single quotes if it is printable, and else in the form
// $'…' with octal escapes (POSIX.1-2024, Shell Command Language, 2.2.4). A shell that does not know this form has
// a wrong word, but one word, because there is no quote within the quotes.
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
		case c == '\\':
			b.WriteString(`\\`)
		case c < ' ' || c > '~' || c == '\'':
			fmt.Fprintf(&b, `\%03o`, c)
		default:
			b.WriteByte(c)
		}
	}
	b.WriteString("'")
	return b.String()
}
