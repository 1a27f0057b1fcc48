package tables

import (
	"bytes"
	"fmt"
	"slices"
	"strings"

	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfnetlink"
)

// sameSet compares what makes a set, without its elements.
func sameSet(a, b nfnetlink.Set) bool {
	const comment = byte(userdata.NFTNL_UDATA_SET_COMMENT)
	return a.Flags == b.Flags && a.KeyType == b.KeyType && a.KeyLen == b.KeyLen &&
		a.DataType == b.DataType && a.DataLen == b.DataLen && slices.Equal(a.Special, b.Special) &&
		userDataString(a.UserData, comment) == userDataString(b.UserData, comment)
}

// userDataString gives a string from the type, length, value entries that
// programs leave with an object. Anybody may have written them: the library's
// reader would panic where a length is wrong.
func userDataString(b []byte, typ byte) string {
	for len(b) >= 2 && len(b) >= 2+int(b[1]) {
		if b[0] == typ {
			return strings.TrimRight(string(b[2:2+int(b[1])]), "\x00")
		}
		b = b[2+int(b[1]):]
	}
	return ""
}

func sameRule(a, b nfnetlink.Rule) bool {
	return nfnetlink.EqualExprs(a.Exprs, b.Exprs) && bytes.Equal(a.UserData, b.UserData)
}

// ruleKey is the same for rules that [sameRule] calls the same.
func ruleKey(r nfnetlink.Rule) string { return nfnetlink.Key(r.Exprs) + string(r.UserData) }

func sameRules(a, b []nfnetlink.Rule) bool { return slices.EqualFunc(a, b, sameRule) }

func sameHook(a, b *nfnetlink.Hook) bool {
	if a == nil || b == nil {
		return a == b
	}
	return *a == *b
}

// lookups names the sets that a rule refers to: whose elements it asks for, adds, or
// takes an object from.
func lookups(r nfnetlink.Rule) []string {
	var names []string
	for _, e := range r.Exprs {
		switch e.Name {
		case "lookup":
			names = append(names, e.Str(unix.NFTA_LOOKUP_SET))
		case "dynset":
			names = append(names, e.Str(unix.NFTA_DYNSET_SET_NAME))
		case "objref":
			if set := e.Str(unix.NFTA_OBJREF_SET_NAME); set != "" {
				names = append(names, set)
			}
		}
	}
	return names
}

func hookText(h *nfnetlink.Hook) string {
	if h == nil {
		return "no hook"
	}
	name := fmt.Sprint(h.Number)
	if hooks := [...]string{"prerouting", "input", "forward", "output", "postrouting"}; h.Number < uint32(len(hooks)) {
		name = hooks[h.Number] // NF_INET_…
	}
	return fmt.Sprintf("%s hook %s priority %d", h.Type, name, h.Priority)
}
