package nfnetlink

import (
	"fmt"
	"strconv"
	"strings"
	"unicode"
)

// Printable returns the name of a table, chain, set, object or process for use in
// messages. Other programs choose these names, and the kernel allows any bytes. A
// name of printable characters without spaces and quotes is returned unchanged,
// any other is quoted as a Go string.
func Printable(name string) string {
	unsafe := func(r rune) bool {
		return r == '"' || r == '\\' || r == '�' || unicode.IsSpace(r) || !unicode.IsPrint(r)
	}
	if name == "" || strings.ContainsFunc(name, unsafe) {
		return strconv.Quote(name)
	}
	return name
}

// ShellWord quotes a name chosen by another program as one word of a command that
// can be pasted into a shell. The form $'...', for unprintable names, is
// understood by bash, ksh, zsh and busybox.
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
