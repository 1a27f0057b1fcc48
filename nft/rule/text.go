package rule

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"iter"
	"math"
	"net"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/facts"
	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/nfnetlink"
)

// String returns the rule in words, for messages: native expressions as
// `nft --stateless list` words them, matches and targets of xtables as
// iptables does. <name> stands for an expression that is not known, <...> for
// parameters that are not.
func String(r nfnetlink.Rule) string {
	var words []string
	for s := range Statements(r) {
		words = append(words, s.String())
	}
	if c := facts.UserData(r.UserData, facts.Comments); c != "" {
		words = append(words, fmt.Sprintf("comment %q", c))
	}
	return strings.Join(words, " ")
}

// A Statement is one step of a rule: a comparison of a Field, or else what its
// expression does.
type Statement struct {
	Expr  nfnetlink.Expr // the last of its expressions
	Field string         // what is compared, in nft's words: "ip daddr", "oifname", "meta mark"; or empty
	Op    string         // "==" or "!="
	Mask  []byte         // of the field, before it is compared; nil: all of it
	Value []byte         // what it is compared with
	Last  []byte         // of a range that begins with Value, also up to the last one; nil: it is one value
	Key   []Part         // what is looked up in a set or a map of verdicts
	Set   string         // or the set in which it is looked up
	NAT   *NAT           // how it translates a connection, nil: it does not
	// NewMark is what the packet's mark is set to, nil if it is not.
	NewMark *NewMark
	Write   *Write // what it writes into the packet, without NAT, nil: nothing

	format format
	text   string // if the parts above are not everything
}

// NAT is how a statement translates a connection.
type NAT struct {
	Source, Destination bool             // which address
	Masquerade          bool             // the source, to the address of the interface
	Family              nfnetlink.Family // of the connections; 0: any
	Flags               uint32           // such as nfnetlink.NATRandomFully
	MinPort, MaxPort    uint16           // 0: any, or not constant
	// To is the new addresses, the zero value if they are not constant; ToField is
	// "ip saddr" or "ip6 saddr" if the connection keeps its own.
	To      iprange.Range
	ToField string
	// ToMap is the map that has the address for each value of ToField, masked.
	ToMap  string
	ToMask []byte
	ToKey  []Part // all that is looked up in ToMap
}

// A Part is one component of the key that a rule looks up.
type Part struct {
	Field string // as in a [Statement], empty if it is not decoded
	Mask  []byte // of the field; nil: all of it
	// Modulus means a number that may be any from Offset to Offset+Modulus-1; 0: it is none.
	Modulus, Offset uint32
}

// A NewMark computes a mark: the bits of the old one in Keep, then those in Xor
// inverted. The bits in Unknown may have any value.
type NewMark struct{ Keep, Xor, Unknown uint32 }

// A Write is what a statement writes into the packet.
type Write struct {
	Field string     // as in a [Statement]
	To    netip.Addr // the whole address that it becomes, the zero value if that is another
}

func (o operand) newMark() *NewMark {
	mask, xor := uint32(math.MaxUint32), uint32(0)
	if o.mask != nil {
		mask, xor = nativeUint32(o.mask), nativeUint32(o.xor)
	}
	switch {
	case o.constant != nil:
		return &NewMark{Xor: nativeUint32(o.constant)}
	case o.name == metaMark:
		return &NewMark{Keep: mask, Xor: xor}
	}
	return &NewMark{Xor: xor, Unknown: mask}
}

// String returns the statement in words.
func (s Statement) String() string {
	if s.text != "" || s.Field == "" {
		return s.text
	}
	op := either(s.Op == "==", "", s.Op+" ")
	value := s.format.word(s.Value)
	r, isRange := s.Range()
	switch anyBit := s.format == formatCTState || s.format == formatCTStatus; {
	case s.Set != "":
		value = "@" + nfnetlink.Printable(s.Set)
	case s.Mask == nil && anyBit: // not any of the bits, but these
		op = s.Op + " "
	case isRange:
		value = r.String()
	case s.Mask != nil && anyBit && nativeUint32(s.Value) == 0:
		op, value = either(s.Op == "!=", "", "! "), s.format.word(s.Mask)
	case s.Mask != nil:
		op = "& " + s.format.word(s.Mask) + " " + s.Op + " "
	}
	return s.Field + " " + op + value
}

func either(first bool, a, b string) string {
	if first {
		return a
	}
	return b
}

// Range returns the addresses that a field is compared with: those that do not match if
// Op is "!=", otherwise those that do.
func (s Statement) Range() (iprange.Range, bool) {
	size := 0
	switch s.format {
	case formatIPv4:
		size = 4
	case formatIPv6:
		size = 16
	}
	if s.Set != "" || len(s.Value) == 0 || len(s.Value) > size {
		return iprange.Range{}, false
	}
	if s.Last != nil {
		from, _ := netip.AddrFromSlice(s.Value)
		to, ok := netip.AddrFromSlice(s.Last)
		return iprange.Range{From: from, To: to}, ok && s.Mask == nil && len(s.Value) == size
	}
	ones := len(s.Value) * 8
	if s.Mask != nil {
		prefix, bits := net.IPMask(s.Mask).Size()
		if ones = prefix; bits != len(s.Value)*8 {
			return iprange.Range{}, false
		}
	}
	addr, _ := netip.AddrFromSlice(append(slices.Clone(s.Value), make([]byte, size-len(s.Value))...))
	return iprange.Of(netip.PrefixFrom(addr, ones)), true
}

// An operand is what a register holds.
type operand struct {
	register uint32
	field
	mask     []byte
	xor      []byte
	constant []byte // in place of a field
	set      string // the map that has it for a key
	key      *operand
	keys     []Part // all of that

	modulus, offset uint32 // of a number that a generator or a hash makes
	swapped         bool   // in network order, which the number is not
}

// ordered reports whether its bytes have the order of the values.
func (o operand) ordered() bool {
	return o.format == formatIPv4 || o.format == formatIPv6 || o.format == formatBig
}

// opaque reports whether it is no part of a field as it is in a packet.
func (o operand) opaque() bool { return o.constant != nil || o.swapped || !zero(o.xor) }

func (o operand) part() Part {
	if o.opaque() {
		return Part{}
	}
	return Part{o.name, o.mask, o.modulus, o.offset}
}

func zero(b []byte) bool { return len(bytes.Trim(b, "\x00")) == 0 }

func (o operand) as(f format) string {
	if o.constant != nil {
		return f.word(o.constant)
	}
	words := o.name
	if bytes.Count(o.mask, []byte{0xff}) != len(o.mask) {
		words += " & " + o.format.word(o.mask)
	}
	if !zero(o.xor) {
		words += " ^ " + o.format.word(o.xor)
	}
	return words
}

// A decoder follows the registers through a rule.
type decoder struct {
	family nfnetlink.Family // narrowed if the rule has tested it
	loads  []operand
	fresh  int // the first load that no statement has used
}

// Statements returns what the rule does, step by step.
func Statements(r nfnetlink.Rule) iter.Seq[Statement] {
	return func(yield func(Statement) bool) {
		d := decoder{family: r.Family}
		for _, e := range r.Exprs {
			if o := d.load(e); o.register != unix.NFT_REG_VERDICT {
				d.fill(o)
				continue
			}
			s, ok := d.compare(e)
			if !ok {
				s, ok = decodeXT(e, d.family)
			}
			if !ok {
				s = d.act(e)
			}
			s.Expr = e
			if !yield(s) {
				return
			}
			d.fresh = len(d.loads)
		}
	}
}

func (d *decoder) fill(o operand) {
	for i := d.fresh; i < len(d.loads); i++ {
		if d.loads[i].register == o.register {
			d.loads[i] = o
			return
		}
	}
	d.loads = append(d.loads, o)
}

func (d *decoder) register(reg uint32) operand {
	for _, o := range slices.Backward(d.loads) {
		if o.register == reg {
			return o
		}
	}
	return operand{field: field{name: fmt.Sprintf("<register %d>", reg)}}
}

// load decodes the expressions that fill a register. The verdict's register
// stands for none.
func (d *decoder) load(e nfnetlink.Expr) (o operand) {
	switch e.Name {
	case "payload":
		o.field, _ = d.payload(e)
		o.register = e.Uint32(unix.NFTA_PAYLOAD_DREG)
	case "meta":
		o.field = keyField(e, unix.NFTA_META_KEY)
		o.register = e.Uint32(unix.NFTA_META_DREG)
	case "ct":
		o.field = keyField(e, unix.NFTA_CT_KEY)
		o.register = e.Uint32(unix.NFTA_CT_DREG)
	case "fib":
		o.field = fibField(e)
		o.register = e.Uint32(unix.NFTA_FIB_DREG)
	case "numgen":
		how := either(e.Uint32(unix.NFTA_NG_TYPE) == unix.NFT_NG_RANDOM, "random", "inc")
		o.field = field{fmt.Sprintf("numgen %s mod %d", how, e.Uint32(unix.NFTA_NG_MODULUS)), formatNumber}
		o.modulus, o.offset = e.Uint32(unix.NFTA_NG_MODULUS), e.Uint32(unix.NFTA_NG_OFFSET)
		o.register = e.Uint32(unix.NFTA_NG_DREG)
	case "hash":
		o.modulus, o.offset = e.Uint32(unix.NFTA_HASH_MODULUS), e.Uint32(unix.NFTA_HASH_OFFSET)
		o.field = field{fmt.Sprintf("hash mod %d", o.modulus), formatNumber}
		o.register = e.Uint32(unix.NFTA_HASH_DREG)
	case "immediate":
		o.constant = append([]byte{}, e.Value(unix.NFTA_IMMEDIATE_DATA)...)
		o.register = e.Uint32(unix.NFTA_IMMEDIATE_DREG)
	case "bitwise":
		o = d.register(e.Uint32(unix.NFTA_BITWISE_SREG))
		if mask := e.Value(unix.NFTA_BITWISE_MASK); mask == nil || o.mask != nil || o.constant != nil {
			o = operand{field: field{name: "<bitwise>"}}
		} else {
			o.mask, o.xor = mask, e.Value(unix.NFTA_BITWISE_XOR)
		}
		o.register = e.Uint32(unix.NFTA_BITWISE_DREG)
	case "byteorder":
		if o = d.register(e.Uint32(unix.NFTA_BYTEORDER_SREG)); o.format == formatNumber || o.format == formatMark {
			o.format = formatBig
		}
		o.swapped = !o.swapped
		o.register = e.Uint32(unix.NFTA_BYTEORDER_DREG)
	case "lookup":
		key := d.register(e.Uint32(unix.NFTA_LOOKUP_SREG))
		o.set, o.key, o.keys = e.Str(unix.NFTA_LOOKUP_SET), &key, parts(d.keys(e))
		o.name = d.key(e) + " map @" + nfnetlink.Printable(o.set)
		o.register = e.Uint32(unix.NFTA_LOOKUP_DREG)
	}
	return o
}

// compare decodes the expressions that compare a register.
func (d *decoder) compare(e nfnetlink.Expr) (s Statement, ok bool) {
	switch e.Name {
	case "cmp":
		o, code := d.register(e.Uint32(unix.NFTA_CMP_SREG)), e.Uint32(unix.NFTA_CMP_OP)
		if code > unix.NFT_CMP_GTE {
			return s, false
		}
		value, op := e.Value(unix.NFTA_CMP_DATA), [...]string{"==", "!=", "<", "<=", ">", ">="}[code]
		words := func() string { return o.as(o.format) + " " + op + " " + o.format.word(value) }
		s = Statement{Field: o.name, format: o.format, Mask: o.mask, Op: op, Value: value}
		equal := op == "==" || op == "!="
		switch {
		case o.opaque(), !equal && !o.ordered():
			s = Statement{text: words()}
		case equal:
		case op == "<", op == ">=":
			s.text, s.Op, s.Last = words(), either(op == "<", "!=", "=="), bytes.Repeat([]byte{0xff}, len(value))
		default:
			s.text, s.Op, s.Value, s.Last = words(), either(op == ">", "!=", "=="), make([]byte, len(value)), value
		}
		if f := nfnetlink.Family(nativeUint32(s.Value)); s.format == formatFamily && s.Op == "==" {
			d.family = f
		}
		return s, true
	case "range":
		o := d.register(e.Uint32(unix.NFTA_RANGE_SREG))
		not := either(e.Uint32(unix.NFTA_RANGE_OP) == unix.NFT_RANGE_NEQ, "!= ", "")
		s.text = o.as(o.format) + " " + not + o.format.word(e.Value(unix.NFTA_RANGE_FROM_DATA)) + "-" +
			o.format.word(e.Value(unix.NFTA_RANGE_TO_DATA))
		if o.ordered() && !o.opaque() {
			s.Field, s.Op, s.Mask, s.format = o.name, either(not == "", "==", "!="), o.mask, o.format
			s.Value, s.Last = e.Value(unix.NFTA_RANGE_FROM_DATA), e.Value(unix.NFTA_RANGE_TO_DATA)
		}
		return s, true
	case "lookup":
		s = Statement{Field: d.key(e), Op: "==", Set: e.Str(unix.NFTA_LOOKUP_SET)}
		if e.Uint32(unix.NFTA_LOOKUP_FLAGS)&unix.NFT_LOOKUP_F_INV != 0 {
			s.Op = "!="
		}
		if e.JumpsByMap() {
			s = Statement{text: s.Field + " vmap @" + nfnetlink.Printable(s.Set)}
		}
		s.Key = parts(d.keys(e))
		return s, true
	}
	return s, false
}

// keys returns what is looked up: all that was loaded for it, from its register on.
func (d *decoder) keys(e nfnetlink.Expr) []operand {
	reg := e.Uint32(unix.NFTA_LOOKUP_SREG)
	from := slices.IndexFunc(d.loads[d.fresh:], func(o operand) bool { return o.register == reg })
	if from < 0 {
		return []operand{d.register(reg)}
	}
	return d.loads[d.fresh+from:]
}

func parts(of []operand) (all []Part) {
	for _, o := range of {
		all = append(all, o.part())
	}
	return all
}

// key words what is looked up.
func (d *decoder) key(e nfnetlink.Expr) string {
	var words []string
	for _, o := range d.keys(e) {
		words = append(words, o.as(o.format))
	}
	return strings.Join(words, " . ")
}

// act decodes what neither loads nor compares.
func (d *decoder) act(e nfnetlink.Expr) (s Statement) {
	if code, chain, ok := e.Verdict(); ok {
		return Statement{text: verdict(code, chain)}
	}
	switch e.Name {
	case "counter", "notrack":
		s.text = e.Name
	case "objref":
		s.text = objects[e.Uint32(unix.NFTA_OBJREF_IMM_TYPE)] + " name " +
			nfnetlink.Printable(e.Str(unix.NFTA_OBJREF_IMM_NAME))
		if set := e.Str(unix.NFTA_OBJREF_SET_NAME); set != "" {
			s.text = "object of map @" + nfnetlink.Printable(set)
		}
	case "dynset":
		how := dynsets[e.Uint32(unix.NFTA_DYNSET_OP)]
		s.text = how + " @" + nfnetlink.Printable(e.Str(unix.NFTA_DYNSET_SET_NAME)) + " { … }"
	case "limit":
		s.text = limit(e)
	case "meta":
		f, value := keyField(e, unix.NFTA_META_KEY), d.register(e.Uint32(unix.NFTA_META_SREG))
		s.text = f.name + " set " + value.as(f.format)
		if f.name == metaMark {
			s.NewMark = value.newMark()
		}
	case "payload":
		f, within := d.payload(e)
		value := d.register(e.Uint32(unix.NFTA_PAYLOAD_SREG))
		s.text, s.Write = f.name+" set "+value.as(f.format), &Write{Field: within}
		if size := len(value.constant); f.format == formatIPv4 && size == 4 || f.format == formatIPv6 && size == 16 {
			s.Write.To, _ = netip.AddrFromSlice(value.constant)
		}
	case "masq", "redir", "nat":
		s.NAT, s.text = d.translate(e)
	}
	if s.text == "" {
		s.text = actions[e.Name]
	}
	if s.text == "" {
		d.loads = d.loads[:0] // it may have filled any register
		s.text = "<" + e.Name + ">"
	}
	return s
}

// translate decodes the expressions that translate addresses, and words them.
func (d *decoder) translate(e nfnetlink.Expr) (n *NAT, words string) {
	n = &NAT{}
	to, portsAt, flagsAt := "", uint16(0), uint16(0)
	switch e.Name {
	case "masq":
		n.Source, n.Masquerade, words = true, true, "masquerade"
		portsAt, flagsAt = unix.NFTA_MASQ_REG_PROTO_MIN, unix.NFTA_MASQ_FLAGS
	case "redir":
		n.Destination, words = true, "redirect"
		portsAt, flagsAt = unix.NFTA_REDIR_REG_PROTO_MIN, unix.NFTA_REDIR_FLAGS
	case "nat":
		n.Source = e.Uint32(unix.NFTA_NAT_TYPE) == unix.NFT_NAT_SNAT
		n.Destination, words = !n.Source, either(n.Source, "snat", "dnat")
		family := nfnetlink.Family(e.Uint32(unix.NFTA_NAT_FAMILY))
		if family != nfnetlink.Inet {
			n.Family = family
		}
		if d.family == nfnetlink.Inet {
			words += " " + family.String()
		}
		to = d.address(e, n)
		portsAt, flagsAt = unix.NFTA_NAT_REG_PROTO_MIN, unix.NFTA_NAT_FLAGS
	}
	first, last, ports := d.span(e, portsAt, formatBig)
	n.MinPort, n.MaxPort, n.Flags = first.port(), last.port(), e.Uint32(flagsAt)
	if ports != "" {
		if n.To.From.Is6() {
			to = "[" + to + "]"
		}
		to += ":" + ports
	}
	if to != "" {
		words += " to " + to
	}
	return n, words + natFlags(n.Flags)
}

// address decodes the new address of an expression nat.
func (d *decoder) address(e nfnetlink.Expr, n *NAT) (words string) {
	k := formatIPv4
	if n.Family == nfnetlink.IPv6 {
		k = formatIPv6
	}
	from, to, words := d.span(e, unix.NFTA_NAT_REG_ADDR_MIN, k)
	switch {
	case from.constant != nil:
		n.To.From, _ = netip.AddrFromSlice(from.constant)
		n.To.To, _ = netip.AddrFromSlice(to.constant)
	case from.mask != nil || !zero(from.xor):
	case from.key != nil && zero(from.key.xor):
		n.ToMap, n.ToField, n.ToMask, n.ToKey = from.set, from.key.name, from.key.mask, from.keys
	case from.key == nil:
		n.ToField = from.name
	}
	return words
}

// span returns a run of addresses or ports, and its words: an attribute names the register
// of the first, and the attribute after it that of the last.
func (d *decoder) span(e nfnetlink.Expr, attr uint16, f format) (first, last operand, words string) {
	if e.Attr(attr) == nil {
		return first, last, ""
	}
	first = d.register(e.Uint32(attr))
	last, words = first, first.as(f)
	if e.Attr(attr+1) != nil {
		last = d.register(e.Uint32(attr + 1))
	}
	if to := last.as(f); to != words {
		words += "-" + to
	}
	return first, last, words
}

// port returns the port that a register has, 0 if it is not constant.
func (o operand) port() uint16 {
	if len(o.constant) < 2 {
		return 0
	}
	return binary.BigEndian.Uint16(o.constant)
}
