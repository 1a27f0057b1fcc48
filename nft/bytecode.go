package nft

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"

	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfnetlink"
)

// bytecode is the rule as the kernel gets it.
func (r Rule) bytecode(t Table, chain string, s sides) nfnetlink.Rule {
	out := nfnetlink.Rule{Family: t.Family, Table: t.Name, Chain: chain}
	for _, n := range r.Nodes {
		out.Exprs = append(out.Exprs, n.bytecode(t.Family, s)...)
	}
	if r.Comment != "" {
		out.UserData = userdata.AppendString(nil, userdata.TypeComment, r.Comment)
	}
	return out
}

// bytecode gives the rules of the chain as the kernel gets them.
func (c Chain) bytecode(t Table, s sides) []nfnetlink.Rule {
	out := make([]nfnetlink.Rule, len(c.Rules))
	for i, r := range c.Rules {
		out[i] = r.bytecode(t, c.Name, s)
	}
	return out
}

// kernelChain is the chain as the kernel gets it.
func (c Chain) kernelChain(t Table) nfnetlink.Chain {
	return nfnetlink.Chain{Family: t.Family, Table: t.Name, Name: c.Name, Hook: c.Hook, Policy: nfnetlink.Accept}
}

// nft's numbers of the key types, from which it knows how to print a set
// (nftables, include/datatype.h: TYPE_IPADDR, TYPE_IP6ADDR).
const (
	typeIPv4Addr = 7
	typeIPv6Addr = 8
)

// nft reads of which byte order a set's keys are in the order of the host.
const networkOrder = 2

// kernelSet is the set as the kernel gets it, under one of its two names.
func (s Set) kernelSet(t Table, name string) nfnetlink.Set {
	out := nfnetlink.Set{
		Family: t.Family, Table: t.Name, Name: name,
		Flags: unix.NFT_SET_INTERVAL, KeyType: typeIPv4Addr, KeyLen: 4,
	}
	if s.IPv6 {
		out.KeyType, out.KeyLen = typeIPv6Addr, 16
	}
	order := binary.NativeEndian.AppendUint32(nil, networkOrder)
	out.UserData = userdata.Append(nil, userdata.NFTNL_UDATA_SET_KEYBYTEORDER, order)
	out.UserData = userdata.AppendString(out.UserData, userdata.NFTNL_UDATA_SET_COMMENT, s.Comment)
	return out
}

// sameSet compares what makes a set, without its elements.
func sameSet(a, b nfnetlink.Set) bool {
	const comment = byte(userdata.NFTNL_UDATA_SET_COMMENT)
	return a.Flags == b.Flags && a.KeyType == b.KeyType && a.KeyLen == b.KeyLen &&
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

// lookups names the sets that a rule refers to.
func lookups(r nfnetlink.Rule) []string {
	var names []string
	for _, e := range r.Exprs {
		if e.Name == "lookup" {
			names = append(names, e.Str(unix.NFTA_LOOKUP_SET))
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
