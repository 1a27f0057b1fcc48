package kernel

import (
	"errors"
	"fmt"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/rule"
)

// A countingSocket counts transactions that do not fit its buffer.
type countingSocket struct {
	*faultySocket
	tooLong *int
}

func (s *countingSocket) SendMessages(m []netlink.Message) error {
	err := s.faultySocket.SendMessages(m)
	if errors.Is(err, unix.EMSGSIZE) {
		*s.tooLong++
	}
	return err
}

func TestLargeFillFitsASmallSendBuffer(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	ns := nfttest.NewNS(t, "node")
	dial, tooLong := dialIn(ns), 0
	k := New(nfnetlink.New(func() (*netlink.Conn, error) {
		nl, err := dial()
		if err != nil {
			return nil, err
		}
		// The default limit of distributions.
		return netlink.NewConn(&countingSocket{&faultySocket{real: nl, faults: &faults{}}, &tooLong}, nl.PID()),
			nl.SetWriteBuffer(212992)
	}), rule.String)
	t.Cleanup(func() { _ = k.Close() })
	c := config.Default(config.Defaults{EnableIPv6: true})
	for i := range 40_000 {
		c.NonMasqueradeCIDRs = append(c.NonMasqueradeCIDRs, cases.CIDRs(fmt.Sprintf("2001:db8:%x::/48", i))...)
	}
	want := nft.Compile(c, nft.Options{Layout: native.Layout{}})
	apply(t, k, want, layout.Ours)
	if tooLong == 0 {
		t.Error("the send buffer was not too small: nothing is tested")
	}
	diffs, err := open(t, ns).Diff(t.Context(), want, layout.Ours)
	if err != nil || len(diffs) > 0 {
		t.Errorf("differs: %q, %v", diffs, err)
	}
}
