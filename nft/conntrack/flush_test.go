package conntrack

import (
	"context"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfttest"
)

func TestFlushKeepsConnectionsThatMatchThePolicy(t *testing.T) {
	nfttest.SkipIfShort(t)
	t.Parallel()
	top := nfttest.NewTopology(t)
	nfttest.NFT(t, top.Node, "table inet t { chain c { type filter hook forward priority 0; ct state new accept; }; }", "-f", "-")
	// The kernel reports only entries that were created while a listener existed.
	destroyed := watchDestroyed(t, top.Node)
	const stale = 3000
	insert(t, top.Node, stale) // to 203.0.113.9, not translated, though the policy masquerades it
	local := []netip.Prefix{netip.PrefixFrom(top.NodeV4, 32)}
	nobody := func(netip.Addr, netip.Addr, bool) bool { return false }
	judge := NewJudge(nft.NewPolicy(config.Default(config.Defaults{}), nft.Options{Layout: native.Layout{}}), local, nobody)

	// At the same time, connections are opened that the policy exempts.
	ctx, cancel := context.WithCancel(t.Context())
	opened := make(chan int)
	go func() {
		ports := map[string]bool{}
		defer func() { opened <- len(ports) }()
		for ctx.Err() == nil {
			c, err := top.Pod.DialContext(ctx, "udp", "10.9.0.9:53")
			if err != nil {
				continue
			}
			if _, err := c.Write([]byte("x")); err == nil {
				ports[c.LocalAddr().String()] = true
			}
			_ = c.Close()
		}
	}()
	table := New(dialIn(top.Node))
	start := time.Now()
	n, err := table.Flush(t.Context(), judge, func(*Entry) bool { return true })
	took := time.Since(start)
	cancel()
	agreeing := <-opened
	if err != nil || n != stale || agreeing == 0 {
		t.Errorf("deleted %d of %d, with %d others: %v", n, stale, agreeing, err)
	}
	if least := (stale - 100) * time.Second / flushRate; took < least {
		t.Errorf("%d were deleted within %s, faster than %d per second", n, took, flushRate)
	}
	all := destroyed(stale)
	for i := range all {
		if !judge.Stale(&all[i]) {
			t.Errorf("deleted: %+v", all[i])
		}
	}
	if left := entries(t, table, Filter{}); len(left) < agreeing || slices.ContainsFunc(left, func(e Entry) bool { return judge.Stale(&e) }) {
		t.Errorf("%d left of %d", len(left), agreeing)
	}
}

// watchDestroyed returns a function that waits for n entries to be destroyed.
func watchDestroyed(t *testing.T, ns *nfttest.NS) func(n int) []Entry {
	t.Helper()
	const groupDestroy = 3 // NFNLGRP_CONNTRACK_DESTROY
	var nl *netlink.Conn
	err := ns.Do(func() (err error) {
		nl, err = netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{Groups: 1 << (groupDestroy - 1)})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = nl.Close() })
	if err := nl.SetReadBuffer(16 << 20); err != nil {
		t.Fatal(err)
	}
	return func(n int) []Entry {
		var all []Entry
		_ = nl.SetReadDeadline(time.Now().Add(answerTimeout))
		for len(all) < n {
			msgs, err := nl.Receive()
			if err != nil {
				t.Fatalf("%d of %d: %v", len(all), n, err)
			}
			for _, m := range msgs {
				var e Entry
				if err := e.decode(m.Data[headerLen:]); err != nil {
					t.Fatal(err)
				}
				e.Status |= Confirmed
				all = append(all, e.Clone())
			}
		}
		return all
	}
}
