package foreign_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strconv"
	"testing"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/foreign"
	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/nfnetlink"
)

// A model is a ruleset of chains, the first of which is the base chain. Rules
// jump only to later chains.
type model [][]modelRule

type modelRule struct {
	src, dst *modelTest
	mark     *modelTest // stands for a condition that may be true or false
	verdict  expr.VerdictKind
	masq     bool
	target   int
}

type modelTest struct {
	prefix netip.Prefix
	not    bool
}

func (t *modelTest) passes(a netip.Addr) bool { return t == nil || t.prefix.Contains(a) != t.not }

// There are 64 packets: from 8 addresses to 8 addresses.
func modelAddr(third byte, n int) netip.Addr { return netip.AddrFrom4([4]byte{10, 0, third, byte(n)}) }

func randomTest(r *rand.Rand, third byte) *modelTest {
	if r.IntN(2) == 0 {
		return nil
	}
	p := netip.PrefixFrom(modelAddr(third, r.IntN(8)), 29+r.IntN(4)).Masked()
	return &modelTest{p, r.IntN(4) == 0}
}

func randomModel(r *rand.Rand) model {
	m := make(model, 4)
	for i := range m {
		for range 1 + r.IntN(5) {
			rule := modelRule{src: randomTest(r, 1), dst: randomTest(r, 2)}
			if r.IntN(6) == 0 {
				rule.mark = &modelTest{not: r.IntN(2) == 0}
			}
			switch n := r.IntN(6); {
			case n < 2:
				rule.masq = true
			case n == 2:
				rule.verdict = expr.VerdictReturn
			case n == 3:
				rule.verdict = expr.VerdictAccept
			case i < len(m)-1:
				rule.verdict = []expr.VerdictKind{expr.VerdictJump, expr.VerdictGoto}[n-4]
				rule.target = i + 1 + r.IntN(len(m)-1-i)
			default:
				rule.verdict = expr.VerdictReturn
			}
			m[i] = append(m[i], rule)
		}
	}
	return m
}

// bound returns the rule that masquerades a packet. done means that the packet
// does not return from the chain.
func (m model) bound(chain int, src, dst netip.Addr, marked bool) (rule [2]int, hit, done bool) {
	for i, r := range m[chain] {
		if !r.src.passes(src) || !r.dst.passes(dst) || r.mark != nil && marked == r.mark.not {
			continue
		}
		switch {
		case r.masq:
			return [2]int{chain, i}, true, true
		case r.verdict == expr.VerdictAccept:
			return rule, false, true
		case r.verdict == expr.VerdictReturn:
			return rule, false, false
		}
		rule, hit, done = m.bound(r.target, src, dst, marked)
		if done || r.verdict == expr.VerdictGoto {
			return rule, hit, done
		}
	}
	return rule, false, false
}

func (m model) snapshot() foreign.Snapshot {
	var s foreign.Snapshot
	for i, rules := range m {
		c := foreign.Chain{Chain: nfnetlink.Chain{Family: nfnetlink.IPv4, Table: "t", Name: fmt.Sprint(i)}}
		if i == 0 {
			c.Hook = &nfnetlink.Hook{Type: "nat", Number: unix.NF_INET_POST_ROUTING}
		}
		for n, r := range rules {
			c.Rules = append(c.Rules, nfnetlink.Rule{
				Family: nfnetlink.IPv4, Table: "t", Chain: c.Name, Handle: uint64(n + 1),
				Exprs: nfnetlink.Marshal(nfnetlink.IPv4, r.exprs()...),
			})
		}
		s.Chains = append(s.Chains, c)
	}
	return s
}

func (r modelRule) exprs() []expr.Any {
	var es []expr.Any
	for offset, t := range map[uint32]*modelTest{12: r.src, 16: r.dst} {
		if t == nil {
			continue
		}
		addr, mask := t.prefix.Addr().AsSlice(),
			iprange.Of(netip.PrefixFrom(netip.AddrFrom4([4]byte{255, 255, 255, 255}), t.prefix.Bits())).From.AsSlice()
		es = append(es,
			&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: 4},
			&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: mask, Xor: make([]byte, 4)},
			&expr.Cmp{Op: op(t.not), Register: 1, Data: addr})
	}
	if r.mark != nil {
		es = append(es, &expr.Meta{Key: expr.MetaKeyMARK, Register: 1},
			&expr.Cmp{Op: op(r.mark.not), Register: 1, Data: []byte{1, 0, 0, 1}})
	}
	if r.masq {
		return append(es, &expr.Masq{})
	}
	v := &expr.Verdict{Kind: r.verdict}
	if r.target > 0 {
		v.Chain = fmt.Sprint(r.target)
	}
	return append(es, v)
}

func op(not bool) expr.CmpOp {
	if not {
		return expr.CmpOpNeq
	}
	return expr.CmpOpEq
}

// In random rulesets, every rule that masquerades some packet to an exempt
// destination is found, and every packet that a rule masquerades.
func TestEveryMasqueradeOfExemptDestinationsIsFound(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 6))
	exempt := []netip.Prefix{netip.MustParsePrefix("10.0.2.0/30"), netip.MustParsePrefix("10.0.2.6/32")}
	for n := range 2_000 {
		m := randomModel(r)
		conflicts := map[[2]int]bool{}
		for _, c := range conflictsOf(m.snapshot(), exempt) {
			chain, err := strconv.Atoi(c.Rule.Chain)
			if err != nil {
				t.Fatal(err)
			}
			conflicts[[2]int{chain, int(c.Rule.Handle) - 1}] = true
		}
		hits := map[[2]int]string{}
		rewrites := foreign.FindRewrites(m.snapshot())
		for i := range 8 * 8 * 2 {
			src, dst, marked := modelAddr(1, i&7), modelAddr(2, i>>3&7), i>>6 == 1
			rule, hit, _ := m.bound(0, src, dst, marked)
			if hit && !rewrites.Meet(src, dst, false) {
				t.Fatalf("ruleset %d: rule %v rewrites %s to %s\n%v", n, rule, src, dst, m.snapshot())
			}
			if hit && (exempt[0].Contains(dst) || exempt[1].Contains(dst)) {
				hits[rule] = fmt.Sprintf("%s to %s, marked %t", src, dst, marked)
			}
		}
		for rule, packet := range hits {
			if !conflicts[rule] {
				t.Fatalf("ruleset %d: rule %v masquerades %s and was not found\n%v", n, rule, packet, m.snapshot())
			}
		}
	}
}
