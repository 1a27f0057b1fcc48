package kernel

import (
	"fmt"
	"testing"

	"github.com/mdlayher/netlink"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/tables"
)

func TestALargeFillIsMadeWhileTheListenerPauses(t *testing.T) {
	ns := nfttest.NewNS(t, "node")
	var l *nfnetlink.Listener
	if err := ns.Do(func() (err error) {
		l, err = nfnetlink.Listen()
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	k := open(t, ns)
	pauses := 0
	var filled uint32 // the generation when listening began again
	k.BeforeLargeFill(func() func() {
		pauses++
		if err := l.Pause(); err != nil {
			t.Error(err)
		}
		return func() {
			filled = generation(t, ns)
			if err := l.Resume(); err != nil {
				t.Error(err)
			}
		}
	})
	small := config.Default(config.Defaults{})
	large := small
	for i := range largeFill {
		large.NonMasqueradeCIDRs = append(large.NonMasqueradeCIDRs, cases.CIDRs(fmt.Sprintf("11.%d.%d.0/24", i/256, i%256))...)
	}
	for i, tt := range []struct {
		c       config.Config
		unheard bool
	}{{small, false}, {large, true}, {large, false}, {small, false}, {large, true}} {
		before, paused := generation(t, ns), pauses
		want := nft.Compile(tt.c, nft.Options{Mode: nft.ModeNFTables})
		apply(t, k, want, Look{})
		inStep(t, ns, want)
		if (pauses > paused) != tt.unheard {
			t.Errorf("apply %d: %d pauses for a large fill %t", i, pauses-paused, tt.unheard)
		}
		first := before + 1
		if tt.unheard {
			first = filled + 1 // what makes the sets effective is heard
		}
		for want := first; want <= generation(t, ns); want++ {
			c, err := l.Receive()
			if err != nil || c.ID != want {
				t.Fatalf("apply %d: heard of generation %d, want %d: %v", i, c.ID, want, err)
			}
		}
	}
}

func TestALargeFillFitsASmallSendBuffer(t *testing.T) {
	ns := nfttest.NewNS(t, "node")
	dial := dialIn(ns)
	k := New(nfnetlink.New(func() (*netlink.Conn, error) {
		nl, err := dial()
		if err != nil {
			return nil, err
		}
		return nl, nl.SetWriteBuffer(212992) // what distributions allow everybody
	}))
	t.Cleanup(func() { _ = k.Close() })
	c := config.Default(config.Defaults{EnableIPv6: true})
	for i := range 40_000 {
		c.NonMasqueradeCIDRs = append(c.NonMasqueradeCIDRs, cases.CIDRs(fmt.Sprintf("2001:db8:%x::/48", i))...)
	}
	want := nft.Compile(c, nft.Options{Mode: nft.ModeNFTables})
	apply(t, k, want, Look{})
	if k.perBatch != tables.SmallBatch {
		t.Error("the send buffer was not too small: nothing is tested")
	}
	diffs, err := open(t, ns).Diff(want, Look{Full: true})
	if err != nil || len(diffs) > 0 {
		t.Errorf("differs: %q, %v", diffs, err)
	}
}
