package foreign

import (
	"encoding/binary"
	"strings"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/rule"
)

// A match is what a rule checks in a packet, as far as it matters here. Packets
// that leave by the loopback device, or go to an address of this node, never need
// masquerading and are ignored throughout.
type match struct {
	never bool            // it matches only packets that are ignored
	src   []iprange.Range // nil: any
	dst   []iprange.Range // nil: any
	marks []bits
	other bool     // it has other conditions
	from  []string // the source, as text
	words []string // everything else except destinations, as text
}

// plain reports whether the rule checks only addresses.
func (m match) plain() bool { return len(m.marks) == 0 && !m.other }

// bits is a comparison of some bits of a number, such as the packet's mark.
type bits struct {
	mask, value uint32
	not         bool
}

const allBits = 0xffffffff

// bitsOf decodes the comparison of a statement.
func bitsOf(s rule.Statement) (b bits, ok bool) {
	if s.Set != "" || len(s.Value) != 4 || s.Mask != nil && len(s.Mask) != 4 || s.Op != "==" && s.Op != "!=" {
		return bits{}, false
	}
	b = bits{allBits, binary.NativeEndian.Uint32(s.Value), s.Op == "!="}
	if s.Mask != nil {
		b.mask = binary.NativeEndian.Uint32(s.Mask)
	}
	return b, true
}

// set reports whether the number must have one of some bits, and which.
func (b bits) set() (which uint32, ok bool) {
	if b.not {
		return b.mask, b.value == 0
	}
	return b.value & b.mask, b.value&b.mask != 0
}

// An action is what a rule does with a packet that it matches.
type action struct {
	rule.NAT
	ends    bool   // the packet does not go on in this chain
	returns bool   // nor in the target of this rule, but in the calling chain
	target  string // the chain it goes to
	byMap   bool   // the verdict comes from a map
	verdict int32  // NFT_CONTINUE if there is none
}

func (w *walker) parse(r nfnetlink.Rule) (match, action) {
	var m match
	a := action{verdict: unix.NFT_CONTINUE}
	for s := range rule.Statements(r) {
		if !a.take(s) {
			m.compare(s, w.set(r, s.Set))
		}
	}
	if a.Family != 0 && r.Family == nfnetlink.Inet {
		m.dst = m.restrict(m.dst, rule.Statement{}, anywhere(a.Family), true)
	}
	return m, a
}

// dynsetExpressions is NFTA_DYNSET_EXPRESSIONS, which x/sys/unix lacks.
const dynsetExpressions = 10

// set returns the content of a set that a rule refers to, nil if it is unknown.
func (w *walker) set(r nfnetlink.Rule, name string) []iprange.Range {
	content := w.sets[id{r.Family, r.Table, name}]
	if w.work += len(content); w.spent() && len(content) > maxNamed {
		return nil
	}
	return content
}

// take adds the effect of a statement, and reports whether the statement is an
// action rather than a comparison.
func (a *action) take(s rule.Statement) bool {
	if code, chain, ok := s.Expr.Verdict(); ok {
		a.target, a.verdict = chain, code
		a.ends = code != unix.NFT_CONTINUE && code != unix.NFT_JUMP
		a.returns = code == unix.NFT_RETURN || code == unix.NFT_GOTO
		return true
	}
	if s.Source || s.Destination {
		a.NAT = s.NAT
		return true
	}
	a.byMap = a.byMap || s.Expr.JumpsByMap()
	switch s.Expr.Name {
	case "dynset": // can have a limit or a quota
		return s.Expr.Attr(unix.NFTA_DYNSET_EXPR) == nil && s.Expr.Attr(dynsetExpressions) == nil
	case "counter", "log", "meta", "ct", "notrack", "payload", "target":
		return true
	case "objref":
		return s.Expr.Uint32(unix.NFTA_OBJREF_IMM_TYPE) == unix.NFT_OBJECT_COUNTER
	case "match":
		return s.Expr.Str(unix.NFTA_MATCH_NAME) == "comment"
	}
	return false
}

// compare adds a comparison. set is the content of the set that it refers to, nil
// if unknown.
func (m *match) compare(s rule.Statement, set []iprange.Range) {
	addresses, is := set, s.Op != "!="
	r, ok := s.Range()
	switch {
	case ok:
		addresses = []iprange.Range{r}
	case s.Op != "==" && s.Op != "!=" || s.Mask != nil && s.Field != "meta mark":
		m.unknown(s)
		return
	}
	switch word := lastWord(s); s.Field {
	case "ip saddr", "ip6 saddr":
		m.from = append(m.from, sourceWords(s))
		m.src = m.restrict(m.src, s, addresses, is)
	case "ip daddr", "ip6 daddr":
		m.dst = m.restrict(m.dst, s, addresses, is)
	case "meta nfproto", "meta protocol":
		switch {
		case s.Set != "":
			m.unknown(s)
		case word == "ipv4" || word == "ip":
			m.dst = m.restrict(m.dst, s, anywhere(nfnetlink.IPv4), is)
		case word == "ipv6" || word == "ip6":
			m.dst = m.restrict(m.dst, s, anywhere(nfnetlink.IPv6), is)
		default:
			m.never = m.never || is
		}
	case "meta mark":
		m.words = append(m.words, s.String())
		b, ok := bitsOf(s)
		if m.other = m.other || !ok; ok {
			m.marks = append(m.marks, b)
		}
	case "oif", "oifname", "fib daddr type":
		if word != `"lo"` && !strings.EqualFold(word, "local") {
			m.unknown(s)
			return
		}
		m.never = m.never || is
	case "fib saddr type":
		m.other = true
		m.from = append(m.from, sourceWords(s))
	default:
		m.unknown(s)
	}
}

func lastWord(s rule.Statement) string {
	words := s.String()
	return words[strings.LastIndexByte(words, ' ')+1:]
}

// unknown adds a condition that may be true or false.
func (m *match) unknown(s rule.Statement) {
	m.other = true
	m.words = append(m.words, s.String())
}

// restrict narrows a set of addresses to the given ones, or to all others.
func (m *match) restrict(set []iprange.Range, s rule.Statement, addresses []iprange.Range, is bool) []iprange.Range {
	if addresses == nil {
		m.other = true
		return set
	}
	if set == nil {
		set = anywhere(nfnetlink.Inet)
	}
	switch { // nft checks the family first
	case strings.HasPrefix(s.Field, "ip6 "):
		set = iprange.Intersect(set, anywhere(nfnetlink.IPv6))
	case strings.HasPrefix(s.Field, "ip "):
		set = iprange.Intersect(set, anywhere(nfnetlink.IPv4))
	}
	if is {
		set = iprange.Intersect(set, addresses)
	} else {
		set = iprange.Subtract(set, addresses)
	}
	m.never = m.never || len(set) == 0
	return set
}

// sourceWords returns the source that a statement matches, as text.
func sourceWords(s rule.Statement) string {
	words := strings.TrimPrefix(strings.TrimPrefix(s.String(), s.Field+" "), "!= ")
	if strings.HasPrefix(s.Field, "fib") {
		if words = "addresses of type " + lastWord(s); strings.EqualFold(lastWord(s), "local") {
			words = "this node"
		}
	}
	if s.Op == "!=" {
		return "not " + words
	}
	return words
}
