package kernel

import (
	"bytes"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/xtables"
)

// A busySocket makes another program commit after every request to list the
// destinations of IPv4: the elements of the set, or the rules of the chain.
type busySocket struct {
	*faultySocket
	busy  *bool
	lists map[netlink.HeaderType]int // number of such requests of each kind
	write func()
}

func (s *busySocket) Send(m netlink.Message) error {
	err := s.faultySocket.Send(m)
	kind := m.Header.Type & 0xff
	has := func(name string) bool { return bytes.Contains(m.Data, []byte(name)) }
	if *s.busy && m.Header.Flags&netlink.Dump == netlink.Dump && (kind == unix.NFT_MSG_GETSETELEM && has("non-masq-v4") ||
		kind == unix.NFT_MSG_GETRULE && has(cases.DefaultChain+"\x00") && m.Data[0] == unix.AF_INET) {
		s.lists[kind]++
		s.write()
	}
	return err
}

// busyKernel opens a Kernel in a namespace; while busy is set, another program
// commits to its own table as often as a long list of ours is read.
func busyKernel(t *testing.T, ns *nfttest.NS) (k *Kernel, busy *bool, lists map[netlink.HeaderType]int, write func()) {
	t.Helper()
	other := connect(t, ns)
	busy, lists = new(bool), map[netlink.HeaderType]int{}
	write = func() {
		var b nfnetlink.Batch
		b.AddTable(nfnetlink.Inet, "other")
		b.DelTable(nfnetlink.Inet, "other")
		if err := other.Commit(&b, 0); err != nil {
			t.Error(err)
		}
	}
	k = New(nfnetlink.New(func() (*netlink.Conn, error) {
		nl, err := dialIn(ns)()
		if err != nil {
			return nil, err
		}
		s := &busySocket{&faultySocket{real: nl, faults: &faults{}}, busy, lists, write}
		return netlink.NewConn(s, nl.PID()), nil
	}))
	k.readers[1].(*xtables.Reader).BigChain = 400
	return k, busy, lists, write
}

// A longList is a ruleset that takes longer to read than the time between another
// program's transactions.
type longList struct {
	name      string
	compile   func(...config.CIDR) nft.Ruleset
	list      netlink.HeaderType // of the request that reads it
	deleteOne func(*attacker)
	deleteAll func(*attacker)
}

func longLists() []longList {
	with := func(n int, more []config.CIDR) config.Config {
		c := tamperConfig(n)
		c.NonMasqueradeCIDRs = append(c.NonMasqueradeCIDRs, more...)
		return c
	}
	return []longList{
		{
			"mode nftables", func(more ...config.CIDR) nft.Ruleset {
				return nft.Compile(with(native.BigSet+500, more), nft.Options{Layout: native.Layout{}})
			}, unix.NFT_MSG_GETSETELEM,
			func(a *attacker) {
				a.nft("delete element inet nft-masq-agent " + liveSet(a.t, a.ns) + " { 10.0.4.0/24 }")
			}, does("delete table inet nft-masq-agent"),
		},
		{
			"mode iptables-nft", func(more ...config.CIDR) nft.Ruleset { return xtOf(with(500, more)) }, unix.NFT_MSG_GETRULE,
			runs("-D IP-MASQ-AGENT 3"), runs("-F POSTROUTING", "-F IP-MASQ-AGENT", "-X IP-MASQ-AGENT"),
		},
	}
}

// What takes longer to read than the time between another program's transactions
// is read a few times, and then trusted.
func TestFullReadsOfLargeListsAreBoundedNextToACommittingProgram(t *testing.T) {
	t.Parallel()
	for _, tt := range longLists() {
		t.Run(tt.name, func(t *testing.T) {
			k, busy, lists, write := busyKernel(t, nfttest.NewNS(t, "node"))
			want := tt.compile()
			apply(t, k, want, Look{})
			write()
			*busy = true
			if diffs, err := k.Diff(t.Context(), want, Look{Full: true, Others: true, TakeOver: true}); err != nil || len(diffs) > 0 {
				t.Errorf("a full check finds %q, error %v", diffs, err)
			}
			if n := lists[tt.list]; n == 0 || n > fullAttempts {
				t.Errorf("%d dumps of this kind: %v", n, lists)
			}
		})
	}
}

// A config with a long list takes effect, is restored, and removed, although every read of
// the list takes longer than the time between another program's transactions.
func TestLongListsAreChangedRestoredAndRemovedNextToACommittingProgram(t *testing.T) {
	nfttest.SkipIfShort(t) // reads, plans and writes them often
	nfttest.Require(t, "nft", "iptables-nft")
	for _, tt := range longLists() {
		t.Run(tt.name, func(t *testing.T) {
			ns := nfttest.NewNS(t, "node")
			k, busy, lists, _ := busyKernel(t, ns)
			want := tt.compile()
			apply(t, k, want, Look{})
			nothing := func(*attacker) {}
			for _, step := range []struct {
				name string
				do   func(*attacker)
				want nft.Ruleset
				look Look
			}{
				{"another config", nothing, tt.compile(cases.CIDRs("203.0.113.0/25")...), Look{}},
				{"back, with all checks", nothing, want, Look{Others: true, TakeOver: true}},
				{"one CIDR is gone", tt.deleteOne, want, Look{}},
				{"one CIDR is gone, with all checks", tt.deleteOne, want, Look{Full: true, Others: true, TakeOver: true}},
				{"all is gone", tt.deleteAll, want, Look{}},
			} {
				step.do(&attacker{t: t, ns: ns, table: "inet " + nft.TableName, want: want})
				clear(lists)
				*busy = true
				a, err := k.Apply(t.Context(), step.want, step.look)
				*busy = false
				if err != nil || len(a.Differences) == 0 {
					t.Errorf("%s: Apply found %q, %v", step.name, a.Differences, err)
				}
				if n := lists[tt.list]; n > 2*fullAttempts {
					t.Errorf("%s: %d dumps of this kind: %v", step.name, n, lists)
				}
				inSync(t, ns, step.want)
			}
			*busy = true
			if removed, err := k.Cleanup(t.Context(), WithLegacy); err != nil || len(removed) == 0 {
				t.Errorf("Cleanup removed %q, %v", removed, err)
			}
		})
	}
}
