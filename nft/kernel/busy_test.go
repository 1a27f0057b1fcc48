package kernel

import (
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/xtables"
)

// A busySocket makes another program commit during every dump of elements or
// rules.
type busySocket struct {
	*faultySocket
	busy  *bool
	lists map[netlink.HeaderType]int // number of requests of each kind
	write func()
}

func (s *busySocket) Send(m netlink.Message) error {
	err := s.faultySocket.Send(m)
	if *s.busy && m.Header.Flags&netlink.Dump == netlink.Dump {
		s.lists[m.Header.Type&0xff]++
		s.write()
	}
	return err
}

// What takes longer to read than the time between another program's transactions
// is read a few times, and then trusted.
func TestFullReadsOfLargeListsAreBoundedNextToACommittingProgram(t *testing.T) {
	for _, tt := range []struct {
		name string
		want nft.Ruleset
		list netlink.HeaderType
	}{
		{"mode nftables", nft.Compile(tamperConfig(native.BigSet+500), nft.Options{Layout: native.Layout{}}), unix.NFT_MSG_GETSETELEM},
		{"mode iptables-nft", xtOf(tamperConfig(500)), unix.NFT_MSG_GETRULE},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ns := nfttest.NewNS(t, "node")
			other, busy, lists := connect(t, ns), false, map[netlink.HeaderType]int{}
			write := func() {
				var b nfnetlink.Batch
				b.AddTable(nfnetlink.Inet, "other")
				b.DelTable(nfnetlink.Inet, "other")
				if err := other.Commit(&b, 0); err != nil {
					t.Error(err)
				}
			}
			k := New(nfnetlink.New(func() (*netlink.Conn, error) {
				nl, err := dialIn(ns)()
				if err != nil {
					return nil, err
				}
				s := &busySocket{&faultySocket{real: nl, faults: &faults{}}, &busy, lists, write}
				return netlink.NewConn(s, nl.PID()), nil
			}))
			k.readers[1].(*xtables.Reader).BigChain = 400
			apply(t, k, tt.want, Look{})
			write()
			busy = true
			if diffs, err := k.Diff(t.Context(), tt.want, Look{Full: true, Others: true, TakeOver: true}); err != nil || len(diffs) > 0 {
				t.Errorf("a full check finds %q, error %v", diffs, err)
			}
			if n := lists[tt.list]; n == 0 || n >= attempts {
				t.Errorf("%d dumps of this kind, want less than %d times: %v", n, attempts, lists)
			}
		})
	}
}
