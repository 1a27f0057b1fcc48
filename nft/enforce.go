package nft

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft/nfnetlink"
)

// EnforceChain is the chain that keeps other programs from translating what pods
// send to exempt destinations. It runs before theirs: the first chain that gives a
// connection a source address decides, also if it is the one that it has.
const (
	EnforceChain    = "enforce"
	EnforcePriority = srcNAT - 10
)

// A Mark is bits of a packet's mark.
type Mark struct{ Value, Mask uint32 }

// String is the mark as iptables writes it.
func (m Mark) String() string { return fmt.Sprintf("%#x/%#x", m.Value, m.Mask) }

// DefaultMarks are the marks of what kube-proxy (masqueradeBit 14) and the CNI plugin
// portmap masquerade so that answers come back by this node.
func DefaultMarks() []Mark { return []Mark{{0x4000, 0x4000}, {0x2000, 0x2000}} }

// ParseMarks reads marks such as "0x4000/0x4000,0x2000/0x2000". Without a mask all
// bits count.
func ParseMarks(s string) ([]Mark, error) {
	const most = 8
	var marks []Mark
	for _, part := range strings.Split(s, ",") {
		value, mask, masked := strings.Cut(part, "/")
		v, err := strconv.ParseUint(value, 0, 32)
		m := uint64(1<<32 - 1)
		if err == nil && masked {
			m, err = strconv.ParseUint(mask, 0, 32)
		}
		switch {
		case err != nil:
			return nil, fmt.Errorf("%q is not a mark such as 0x4000/0x4000", part)
		case m == 0 || v&^m != 0 || v == 0:
			return nil, fmt.Errorf("%q matches no packet, or every one without a mark", part)
		}
		marks = append(marks, Mark{uint32(v), uint32(m)})
	}
	if len(marks) > most {
		return nil, errors.New("has more than 8 marks")
	}
	return marks, nil
}

// compileEnforcement decides as the base chain does. Of what pods send it gives what
// is exempt the source address that it has; everything else goes on.
func compileEnforcement(p Policy) Chain {
	c := Chain{Name: EnforceChain, Hook: natHook(EnforcePriority)}
	for _, m := range p.Enforce.Marks {
		c.Rules = append(c.Rules, Rule{Nodes: []node{hasMark(m), stop{}}, Comment: "left to the program that marked it"})
	}
	for _, f := range p.Families {
		if !f.knowsPods() {
			continue
		}
		c.Rules = append(c.Rules,
			Rule{Nodes: []node{ofFamilyMatch{f.IPv6}, ofThisNode{}, stop{}}, Comment: "to this node"},
			Rule{Nodes: []node{ofFamilyMatch{f.IPv6}, ofThisNode{Source: true}, stop{}}, Comment: "from this node"})
		for _, q := range f.Questions {
			if q.Asks == config.SentByNode {
				continue
			}
			for _, match := range q.matches(f) {
				r := Rule{Nodes: append(match, count{"exempt" + f.Suffix()}, keepSource{f.IPv6})}
				switch {
				case q.Masquerade:
					r.Nodes = append(match, stop{})
				case q.LimitsSources():
					r = Rule{Nodes: append(match, stop{}), Comment: "not from a pod"}
				}
				c.Rules = append(c.Rules, r)
			}
		}
	}
	return c
}

// knowsPods reports whether the policy says which sources are pods.
func (f FamilyPolicy) knowsPods() bool {
	return slices.ContainsFunc(f.Questions, func(q Question) bool { return q.LimitsSources() })
}

// Enforces reports whether exemptions of a family are enforced.
func (p Policy) Enforces(f FamilyPolicy) bool { return p.Enforce != nil && f.knowsPods() }

// Enforced reports whether a connection keeps its address whatever other programs do
// in chains after [EnforcePriority].
func (p Policy) Enforced(c Connection) bool {
	for _, f := range p.Families {
		if f.IPv6 != c.Dst.Unmap().Is6() || !p.Enforces(f) || c.FromNode {
			continue
		}
		steps := p.Explain(c)
		last := steps[len(steps)-1]
		return last.Verdict == Exempt && !slices.ContainsFunc(f.Questions, func(q Question) bool {
			return q.Key == last.Key && q.LimitsSources()
		})
	}
	return false
}

// hasMark passes packets with a mark.
type hasMark Mark

func (m hasMark) String() string {
	if m.Mask == 1<<32-1 {
		return fmt.Sprintf("meta mark 0x%08x", m.Value)
	}
	return fmt.Sprintf("meta mark & 0x%08x == 0x%08x", m.Mask, m.Value)
}

func (m hasMark) bytecode(f nfnetlink.Family, _ Sides) []nfnetlink.Expr {
	word := func(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }
	es := nfnetlink.Marshal(f, &expr.Meta{Key: expr.MetaKeyMARK, Register: reg1})
	if m.Mask != 1<<32-1 {
		es = append(es, nfnetlink.Marshal(f, &expr.Bitwise{
			SourceRegister: reg1, DestRegister: reg1, Len: 4, Mask: word(m.Mask), Xor: word(0),
		})...)
	}
	return append(es, nfnetlink.Marshal(f, &expr.Cmp{Op: expr.CmpOpEq, Register: reg1, Data: word(m.Value)})...)
}

// LeftMark reads the mark of a rule of the chain that enforces.
func LeftMark(r nfnetlink.Rule) (Mark, bool) {
	m := Mark{Mask: 1<<32 - 1}
	if len(r.Exprs) < 3 || r.Exprs[0].Name != "meta" || r.Exprs[0].Uint32(unix.NFTA_META_KEY) != unix.NFT_META_MARK {
		return Mark{}, false
	}
	if mask := r.Exprs[1].Value(unix.NFTA_BITWISE_MASK); r.Exprs[1].Name == "bitwise" && len(mask) == 4 {
		m.Mask = binary.NativeEndian.Uint32(mask)
	}
	value := r.Exprs[len(r.Exprs)-2].Value(unix.NFTA_CMP_DATA)
	if len(value) != 4 {
		return Mark{}, false
	}
	m.Value = binary.NativeEndian.Uint32(value)
	return m, true
}

// keepSource gives a connection the source address that it has.
type keepSource struct{ IPv6 bool }

func (k keepSource) String() string {
	if k.IPv6 {
		return "snat ip6 to ip6 saddr"
	}
	return "snat ip to ip saddr"
}

func (k keepSource) bytecode(f nfnetlink.Family, _ Sides) []nfnetlink.Expr {
	to := nfnetlink.SourceNAT(FamilyPolicy{IPv6: k.IPv6}.family(), false, reg1, 0, 0)
	return append(nfnetlink.Marshal(f, addressPayload(k.IPv6, true)), to)
}
