package kernel

import (
	"fmt"
	"testing"

	"github.com/mdlayher/netlink"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
)

func TestLargeFillFitsASmallSendBuffer(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	ns := nfttest.NewNS(t, "node")
	dial := dialIn(ns)
	k := New(nfnetlink.New(func() (*netlink.Conn, error) {
		nl, err := dial()
		if err != nil {
			return nil, err
		}
		return nl, nl.SetWriteBuffer(212992) // the default limit of distributions
	}))
	t.Cleanup(func() { _ = k.Close() })
	c := config.Default(config.Defaults{EnableIPv6: true})
	for i := range 40_000 {
		c.NonMasqueradeCIDRs = append(c.NonMasqueradeCIDRs, cases.CIDRs(fmt.Sprintf("2001:db8:%x::/48", i))...)
	}
	want := nft.Compile(c, nft.Options{Layout: native.Layout{}})
	apply(t, k, want, Look{})
	if k.readers[0].(*native.Reader).PerBatch != native.SmallBatch {
		t.Error("the send buffer was not too small: nothing is tested")
	}
	diffs, err := open(t, ns).Diff(t.Context(), want, Look{Full: true})
	if err != nil || len(diffs) > 0 {
		t.Errorf("differs: %q, %v", diffs, err)
	}
}
