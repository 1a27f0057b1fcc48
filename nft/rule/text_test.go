package rule_test

import (
	"os"
	"testing"

	"nft-masq-agent/nft/facts"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/rule"
)

func TestMain(m *testing.M) { os.Exit(nfttest.Main(m)) }

func FuzzRuleText(f *testing.F) {
	names := []string{
		"payload", "meta", "ct", "fib", "numgen", "immediate", "bitwise", "byteorder", "lookup", "cmp", "range",
		"match", "target", "masq", "nat", "redir", "objref", "limit", "counter", "other",
	}
	f.Add(byte(2), []byte{0, 8, 0, 1, 0, 0, 0, 0, 1, 9, 8, 0, 1, 0, 0, 0, 0, 1}, []byte{0, 3, 'a'})
	f.Fuzz(func(t *testing.T, family byte, data, userData []byte) {
		r := nfnetlink.Rule{Family: nfnetlink.Family(family), UserData: userData}
		for len(data) > 2 {
			n := min(int(data[1]), len(data)-2)
			r.Exprs = append(r.Exprs, nfnetlink.Expr{Name: names[int(data[0])%len(names)], Attrs: data[2 : 2+n]})
			data = data[2+n:]
		}
		_ = rule.String(r)
		_ = facts.Comment(r)
		for s := range rule.Statements(r) {
			s.Range()
		}
		facts.RandomFully(r)
		_, _ = facts.NAT(r)
		_, _ = facts.Packets(r)
		_ = facts.Sets(r)
		_ = facts.Returns(r)
	})
}
