package nfnetlink

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// Expr is one expression of a rule: its name and its raw attributes.
type Expr struct {
	Name string
	Attrs
}

// Marshal encodes the library's expressions for the kernel, without the nesting flag, which the
// kernel does not list: most of its rules are then equal byte for byte. The layout of xtables
// matches depends on the family. It panics on an expression that the library
// cannot encode, because the set of expressions is fixed at compile time.
func Marshal(family Family, exprs ...expr.Any) []Expr {
	encoded := make([]Expr, 0, len(exprs))
	for _, e := range exprs {
		b, err := expr.Marshal(byte(family), e)
		if err != nil {
			panic(fmt.Sprintf("expression %T: %v", e, err))
		}
		x := parseExpr(b)
		encoded = append(encoded, Expr{x.Name, withoutFlags(x.Name, x.Attrs)})
	}
	return encoded
}

// withoutFlags clears the flags of the types of attributes.
func withoutFlags(name string, attrs Attrs) (cleared Attrs) {
	for typ, data := range attrs.All() {
		if inner, ok := nested(name, typ); ok {
			data = withoutFlags(inner, data)
		}
		cleared.AddBytes(typ, data)
	}
	return cleared
}

// The flags NF_NAT_RANGE_… of include/uapi/linux/netfilter/nf_nat.h.
const (
	NATAddresses   = 1 << 0
	NATPorts       = 1 << 1
	NATRandomFully = 1 << 4
)

// Masquerade is `masquerade`, to the ports in two registers if those are not 0. The
// library's expression lacks the flag NF_NAT_RANGE_PROTO_SPECIFIED, without which the
// kernel ignores the ports (net/netfilter/nft_masq.c).
func Masquerade(fullyRandom bool, minPort, maxPort uint32) Expr {
	flags := uint32(0)
	if fullyRandom {
		flags |= NATRandomFully
	}
	var ports, a Attrs
	if minPort != 0 {
		flags |= NATPorts
		ports.AddUint32(unix.NFTA_MASQ_REG_PROTO_MIN, minPort)
		ports.AddUint32(unix.NFTA_MASQ_REG_PROTO_MAX, maxPort)
	}
	a.AddUint32(unix.NFTA_MASQ_FLAGS, flags)
	a = append(a, ports...)
	return Expr{Name: "masq", Attrs: a}
}

// SourceNAT is `snat to` the address in a register, and to the ports in two
// registers if those are not 0. It is encoded as the kernel lists it: with both
// ends of the address range, and with the flags that the kernel adds. The library's expression
// lacks NF_NAT_RANGE_MAP_IPS, so every comparison would need an exception.
func SourceNAT(family Family, fullyRandom bool, address, minPort, maxPort uint32) Expr {
	flags := uint32(NATAddresses)
	if fullyRandom {
		flags |= NATRandomFully
	}
	var a Attrs
	a.AddUint32(unix.NFTA_NAT_TYPE, unix.NFT_NAT_SNAT)
	a.AddUint32(unix.NFTA_NAT_FAMILY, uint32(family))
	a.AddUint32(unix.NFTA_NAT_REG_ADDR_MIN, address)
	a.AddUint32(unix.NFTA_NAT_REG_ADDR_MAX, address)
	if minPort != 0 {
		flags |= NATPorts
		a.AddUint32(unix.NFTA_NAT_REG_PROTO_MIN, minPort)
		a.AddUint32(unix.NFTA_NAT_REG_PROTO_MAX, maxPort)
	}
	a.AddUint32(unix.NFTA_NAT_FLAGS, flags)
	return Expr{Name: "nat", Attrs: a}
}

func parseExpr(a Attrs) Expr { return Expr{a.Str(unix.NFTA_EXPR_NAME), a.Attr(unix.NFTA_EXPR_DATA)} }

// Verdict returns the code of an immediate verdict, and the target chain of a
// jump or goto.
func (e Expr) Verdict() (code int32, chain string, ok bool) {
	if e.Name != "immediate" || e.Uint32(unix.NFTA_IMMEDIATE_DREG) != unix.NFT_REG_VERDICT {
		return 0, "", false
	}
	return parseVerdict(e.Attr(unix.NFTA_IMMEDIATE_DATA))
}

func parseVerdict(data Attrs) (code int32, chain string, ok bool) {
	v := data.Attr(unix.NFTA_DATA_VERDICT)
	return int32(v.Uint32(unix.NFTA_VERDICT_CODE)), v.Str(unix.NFTA_VERDICT_CHAIN), v.Attr(unix.NFTA_VERDICT_CODE) != nil
}

// JumpsByMap reports whether the expression takes its verdict from a map.
func (e Expr) JumpsByMap() bool {
	return e.Name == "lookup" && e.Attr(unix.NFTA_LOOKUP_DREG) != nil &&
		e.Uint32(unix.NFTA_LOOKUP_DREG) == unix.NFT_REG_VERDICT
}

// Set returns the name of the set or map that the expression refers to, see [Rule.Sets]; "" if there is none.
func (e Expr) Set() string {
	switch e.Name {
	case "lookup", "dynset":
		return e.Str(unix.NFTA_LOOKUP_SET) // the same number as NFTA_DYNSET_SET_NAME
	case "objref":
		return e.Str(unix.NFTA_OBJREF_SET_NAME)
	}
	return ""
}

// WithSet returns the expression, which looks in a set or adds to it, with another set.
func (e Expr) WithSet(name string) Expr {
	changed := Expr{Name: e.Name}
	for typ, data := range e.All() {
		if typ == unix.NFTA_LOOKUP_SET {
			changed.str(typ, name)
		} else {
			changed.AddBytes(typ, data)
		}
	}
	return changed
}

// Same reports whether the kernel does the same for two rules: attributes are compared regardless of
// their order, absent equals zero, and counter values are ignored.
func Same(a, b []Expr) bool {
	return slices.EqualFunc(a, b, func(a, b Expr) bool {
		return a.Name == b.Name && (bytes.Equal(a.Attrs, b.Attrs) || bytes.Equal(a.canonical(), b.canonical()))
	})
}

// canonical returns the attributes by which an expression is compared.
func (e Expr) canonical() (data Attrs) {
	if e.Name != "counter" {
		data = canonical(e.Name, e.Attrs)
	}
	if e.JumpsByMap() { // register 0, the verdict's, is not none
		data.AddUint32(unix.NFTA_LOOKUP_DREG, unix.NFT_REG_VERDICT)
	}
	return data
}

// canonical sorts the attributes, trims trailing zeros, drops attributes that are
// all zero, and clears the nesting flag: the kernel and the libraries differ in
// the order, in the terminating zero of a string and in the flag.
func canonical(name string, b Attrs) Attrs {
	type attr struct {
		typ  uint16
		data Attrs
	}
	attributes := make([]attr, 0, 8)
	err := Each(b, func(typ uint16, data []byte) error {
		if inner, ok := nested(name, typ); ok {
			data = canonical(inner, data)
		}
		if name != "data" {
			data = bytes.TrimRight(data, "\x00")
		}
		if len(data) > 0 {
			attributes = append(attributes, attr{typ, data})
		}
		return nil
	})
	if err != nil {
		return b
	}
	slices.SortStableFunc(attributes, func(a, b attr) int { return cmp.Compare(a.typ, b.typ) })
	sorted := make(Attrs, 0, len(b)) // which is padded, and so has room for what is left
	for _, a := range attributes {
		sorted.AddBytes(a.typ, a.data)
	}
	return sorted
}

// nested reports whether an attribute of an expression contains attributes, and
// what they describe.
func nested(name string, typ uint16) (string, bool) {
	switch {
	case name == "cmp" && typ == unix.NFTA_CMP_DATA,
		name == "immediate" && typ == unix.NFTA_IMMEDIATE_DATA,
		name == "bitwise" && (typ == unix.NFTA_BITWISE_MASK || typ == unix.NFTA_BITWISE_XOR),
		name == "range" && (typ == unix.NFTA_RANGE_FROM_DATA || typ == unix.NFTA_RANGE_TO_DATA):
		return "data", true
	case name == "data" && typ == unix.NFTA_DATA_VERDICT:
		return "verdict", true
	}
	return "", false
}

// AddressPayload loads an address into register 1: RFC 791, section 3.1, and RFC 8200,
// section 3.
func AddressPayload(ipv6, source bool) *expr.Payload {
	p := &expr.Payload{DestRegister: unix.NFT_REG_1, Base: expr.PayloadBaseNetworkHeader, Offset: 16, Len: 4}
	if ipv6 {
		p.Offset = 24
		p.Len = 16
	}
	if source {
		p.Offset -= p.Len
	}
	return p
}
