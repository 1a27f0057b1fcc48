package nfttest_test

import (
	"errors"
	"testing"

	"nft-masq-agent/nft/nfttest"
)

// stopped waits for so many flows to each target, and stops.
func stopped(t *testing.T, h *nfttest.Hammer) nfttest.Tally {
	t.Helper()
	waitErr := h.Wait(t.Context(), 100)
	tally, err := h.Stop()
	if err := errors.Join(waitErr, err); err != nil {
		t.Fatalf("%v; %s", err, tally)
	}
	return tally
}

func TestHammerSeesEveryWrongSourceAndNoOther(t *testing.T) {
	nfttest.Require(t, "nft")
	for _, tt := range []struct {
		name, ruleset   string
		leaked, wronged bool
	}{
		{"right rules", masqueradeBut, false, false},
		{"no rules", "", true, false},
		{"everything masqueraded", "table inet test { chain postrouting { type nat hook postrouting priority srcnat; " +
			"masquerade; }; }", false, true},
		{"wrong source", "table inet test { chain postrouting { type nat hook postrouting priority srcnat; snat ip to " +
			"192.0.2.77; snat ip6 to 2001:db8::77; }; }", true, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			top := nfttest.NewTopology(t)
			nfttest.NFT(t, top.Node, tt.ruleset, "-f", "-")
			// Only UDP for the source that does not exist.
			all := nfttest.TargetsOfBothKinds()
			if tt.leaked && tt.wronged {
				all = all[:4]
			}
			tally := stopped(t, nfttest.StartHammer(t, top, all...))
			for _, c := range tally.Counts {
				wrong := tt.leaked && c.Masqueraded || tt.wronged && !c.Masqueraded
				if want := map[bool]uint64{true: c.Seen()}[wrong]; c.Wrong() != want {
					t.Errorf("%s to %s: %d wrong of %d, want %d", c.Proto, c.Dst, c.Wrong(), c.Seen(), want)
				}
			}
			if got := tally.Leaked() > 0; got != tt.leaked {
				t.Errorf("leaked %v: %s", got, tally)
			}
			if got := tally.Wronged() > 0; got != tt.wronged {
				t.Errorf("wronged %v: %s", got, tally)
			}
			if err := tally.Err(); (err != nil) != (tt.leaked || tt.wronged) || tally.Dropped > 0 {
				t.Errorf("%v; %d packets dropped", err, tally.Dropped)
			}
		})
	}
}
