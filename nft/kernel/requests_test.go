package kernel

import (
	"testing"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/nfttest/cases"
)

// requests returns how many messages, or transactions, were sent to the kernel.
func (f *faults) requests() (n int) {
	for _, c := range f.seen {
		if c != callReceive {
			n++
		}
	}
	return n
}

// A change of a set takes two transactions, and the outcome of each is asked for. The
// others read: the generation, the table, its chains, rules, sets, counters, and without a
// change the elements of each set.
func TestRequestsOfAnApplyAreFew(t *testing.T) {
	for _, tt := range []struct {
		mode         nft.Mode
		depth        layout.Depth
		change, read int
	}{
		{nft.ModeNFTables, layout.Ours, 11, 8},
		{nft.ModeNFTables, layout.Everything, 13, 10},
		{nft.ModeIPTables, layout.Ours, 18, 15},
		{nft.ModeIPTables, layout.Everything, 23, 20},
	} {
		r := newRig(t)
		before, after := cases.Load(t, "both-families"), cases.Load(t, "both-families")
		after.Config.NonMasqueradeCIDRs = append(cases.CIDRs("198.51.100.0/24"), before.Config.NonMasqueradeCIDRs...)
		f := r.faults(0, fault{})
		k := f.open()
		apply(t, k, before.Compile(tt.mode), tt.depth)
		want := after.Compile(tt.mode)
		f.seen = nil
		if diffs := apply(t, k, want, tt.depth); len(diffs) == 0 {
			t.Error("nothing was written")
		}
		if n := f.requests(); n != tt.change {
			t.Errorf("%s, depth %d: a change takes %d requests, want %d", tt.mode, tt.depth, n, tt.change)
		}
		f.seen = nil
		apply(t, k, want, tt.depth)
		if n := f.requests(); n != tt.read {
			t.Errorf("%s, depth %d: without a change there are %d requests, want %d", tt.mode, tt.depth, n, tt.read)
		}
		r.closing.Go(func() { _ = k.Close() })
	}
}
