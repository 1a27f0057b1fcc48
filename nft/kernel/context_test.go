package kernel

import (
	"context"
	"errors"
	"iter"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/rule"
)

func TestCanceledApplyKeepsTheOldRules(t *testing.T) {
	for _, m := range cases.Modes() {
		ns := nfttest.NewNS(t, "node")
		k := open(t, ns)
		before := cases.Load(t, "default").Compile(m)
		apply(t, k, before, layout.Ours)
		after := cases.Load(t, "all-policies").Compile(m)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, applied := k.Apply(ctx, after, layout.Ours)
		_, diff := k.Diff(ctx, after, layout.Ours)
		_, _, installed := k.Installed(ctx)
		for _, err := range []error{applied, diff, installed} {
			if !errors.Is(err, context.Canceled) {
				t.Errorf("mode %s: %v", m, err)
			}
		}
		inSync(t, ns, before)
		apply(t, k, after, layout.Ours)
		inSync(t, ns, after)
	}
}

// A cancelingSocket cancels the context when the first part of a list of elements arrives, and
// counts what is received after that.
type cancelingSocket struct {
	*faultySocket
	lists  *bool // the last request was for elements
	cancel func()
	after  *int
}

func (s *cancelingSocket) Send(m netlink.Message) error {
	*s.lists = m.Header.Type&0xff == unix.NFT_MSG_GETSETELEM
	return s.faultySocket.Send(m)
}

func (s *cancelingSocket) ReceiveIter() iter.Seq2[netlink.Message, error] {
	return func(yield func(netlink.Message, error) bool) {
		for m, err := range s.real.ReceiveIter() {
			if *s.lists && err == nil {
				*s.after++
				s.cancel()
			}
			if !yield(m, err) || err != nil {
				return
			}
		}
		yield(netlink.Message{Header: netlink.Header{Type: netlink.Done, Flags: netlink.Multi, Sequence: s.last}}, nil)
	}
}

func TestLongReadEndsWithItsContext(t *testing.T) {
	ns := nfttest.NewNS(t, "node")
	want := nft.Compile(tamperConfig(20_000), nft.Options{Layout: native.Layout{}})
	apply(t, open(t, ns), want, layout.Ours)
	ctx, cancel := context.WithCancel(t.Context())
	lists, after := false, 0
	k := New(nfnetlink.New(func() (*netlink.Conn, error) {
		nl, err := dialIn(ns)()
		if err != nil {
			return nil, err
		}
		return netlink.NewConn(&cancelingSocket{&faultySocket{real: nl, faults: &faults{}}, &lists, cancel, &after},
			nl.PID()), nil
	}), rule.String)
	defer k.Close()
	if _, err := k.Diff(ctx, want, layout.Ours); !errors.Is(err, context.Canceled) || after != 1 {
		t.Errorf("%d parts of the list were read: %v", after, err)
	}
	if diffs, err := k.Diff(t.Context(), want, layout.Ours); err != nil || len(diffs) > 0 {
		t.Errorf("afterwards: %q, %v", diffs, err)
	}
}
