package nfnetlink

import (
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
