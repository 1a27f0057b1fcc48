package nfnetlink

import (
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
