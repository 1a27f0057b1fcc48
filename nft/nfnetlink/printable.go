package nfnetlink

import (
	"fmt"
	"strconv"
	"strings"
	"unicode"
)

// Printable returns a name that somebody else chose, of a table, chain, set, object
// or process, as it goes into messages: the kernel takes any bytes. A name that
// prints and has neither space nor quote stands for itself, any other is quoted as
// a Go string.
func Printable(name string) string {
	odd := func(r rune) bool {
		return r == '"' || r == '\\' || r == '�' || unicode.IsSpace(r) || !unicode.IsPrint(r)
	}
	if name == "" || strings.ContainsFunc(name, odd) {
		return strconv.Quote(name)
	}
	return name
}

// ShellWord returns a name that somebody else chose as a word of a command that people
// paste into a shell. The form $'...' of names that do not print is that of bash, ksh,
// zsh and busybox.
func ShellWord(name string) string {
	plain := func(r rune) bool {
		return r < unicode.MaxASCII && (unicode.IsLetter(r) || unicode.IsDigit(r) || strings.ContainsRune("-_.:/+@", r))
	}
	if name != "" && !strings.ContainsFunc(name, func(r rune) bool { return !plain(r) }) {
		return name
	}
	if !strings.ContainsFunc(name, func(r rune) bool { return r == '�' || !unicode.IsPrint(r) }) {
		return "'" + strings.ReplaceAll(name, "'", `'\''`) + "'"
	}
	var b strings.Builder
	for _, c := range []byte(name) {
		fmt.Fprintf(&b, `\x%02x`, c)
	}
	return "$'" + b.String() + "'"
}
