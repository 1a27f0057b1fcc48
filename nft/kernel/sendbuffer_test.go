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
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
)

func TestLargeFillFitsASmallSendBuffer(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	ns := nfttest.NewNS(t, "node")
	tooLong := false
	k := (&faults{dial: func() (*netlink.Conn, error) {
		nl, err := dialIn(ns)()
		if err != nil {
			return nil, err
		}
		return nl, nl.SetWriteBuffer(212992) // the default limit of distributions
	}, after: func(_ call, _ []netlink.Message, err error) { tooLong = tooLong || errors.Is(err, unix.EMSGSIZE) }}).open()
	t.Cleanup(func() { _ = k.Close() })
	c := config.Default(config.Defaults{EnableIPv6: true})
	for i := range 40_000 {
		c.NonMasqueradeCIDRs = append(c.NonMasqueradeCIDRs, cases.CIDRs(fmt.Sprintf("2001:db8:%x::/48", i))...)
	}
	want := nft.Compile(c, nft.Options{Layout: native.Layout{}})
	apply(t, k, want, layout.Ours)
	if !tooLong {
		t.Error("the send buffer was not too small: nothing is tested")
	}
	diffs, err := open(t, ns).Diff(t.Context(), want, layout.Ours)
	if err != nil || len(diffs) > 0 {
		t.Errorf("differs: %q, %v", diffs, err)
	}
}
