package nfnetlink_test

import (
	"errors"
	"slices"
	"testing"

	"github.com/google/nftables/expr"

	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
)

// The kernel marks such a dump as interrupted, although it is right: it counts only
// the rules of the chain. That of a whole table counts those of all chains.
func TestListOfAChainIsRightNextToTransactionsElsewhere(t *testing.T) {
	ns := nfttest.NewNS(t, "dump")
	c, _ := connIn(t, ns)
	other, _ := connIn(t, ns)
	counts := nfnetlink.Marshal(nfnetlink.Inet, &expr.Counter{})
	rule := func(chain string) nfnetlink.Rule {
		return nfnetlink.Rule{Family: nfnetlink.Inet, Table: "t", Chain: chain, Exprs: counts}
	}
	b := createTable("t")
	for _, chain := range []string{"before", "long", "after"} {
		b.AddChain(nfnetlink.Chain{Family: nfnetlink.Inet, Table: "t", Name: chain})
		b.AddRule(rule(chain))
	}
	for range 5000 {
		b.AddRule(rule("long"))
	}
	must(t, c.Commit(b, 0))

	// A transaction elsewhere after each part of a dump.
	toggle := 0
	write := func() {
		toggle++
		b := &nfnetlink.Batch{}
		for _, chain := range []string{"before", "after"} {
			if toggle%2 == 0 {
				b.FlushChain(nfnetlink.ChainID{Family: nfnetlink.Inet, Table: "t", Name: chain})
				continue
			}
			for range 50 {
				b.AddRule(rule(chain))
			}
		}
		must(t, other.Commit(b, 0))
	}
	list := func(chain string) (handles []uint64, err error) {
		err = c.EachRule(nfnetlink.Inet, "t", chain, func(r nfnetlink.Rule) error {
			handles = append(handles, r.Handle)
			if len(handles)%100 == 0 {
				write()
			}
			return nil
		})
		return handles, err
	}
	want, err := list("long")
	must(t, err)
	if len(want) != 5001 || !slices.IsSorted(want) {
		t.Fatalf("%d rules", len(want))
	}
	for range nfttest.FullRounds(5, 100) {
		got, err := list("long")
		if must(t, err); !slices.Equal(got, want) {
			t.Fatalf("listed %d rules, want %d", len(got), len(want))
		}
	}
	if _, err := list(""); !errors.Is(err, nfnetlink.ErrInterrupted) {
		t.Errorf("the list of the table: %v, want that it was interrupted", err)
	}
}
