package kernel

import (
	"encoding/binary"
	"errors"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/xtables"
)

// A window is the moment in which another program's transaction has raised the generation, and lists do not show it
// yet. The kernel is in it for less than a microsecond (nf_tables_commit); here it is until our next transaction, which
// has to wait for its turn.
type window struct {
	kernel *Kernel
	commit func() // the other program's transaction
	// opens tells by a message that is sent whether the next generation that is read is the new one.
	opens  func(netlink.Message) bool
	opened bool
	open   bool
}

func openWindow(t *testing.T, ns *nfttest.NS, commit func(), opens func(netlink.Message) bool) *window {
	w := &window{commit: commit, opens: opens}
	dial := nfttest.Through(dialIn(ns), func(m *netlink.Message) error {
		if m.Header.Type == unix.NFNL_MSG_BATCH_BEGIN && w.open {
			w.open = false
			w.commit()
		}
		w.opened = w.opened || w.opens(*m)
		return nil
	}, func(m *netlink.Message) error {
		const newGeneration = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWGEN
		if m.Header.Type == newGeneration && w.opened && w.commit != nil {
			w.opened = false
			w.open = true
			w.opens = func(netlink.Message) bool { return false }
			id := m.Data[8:] // after the headers of the message and of its first attribute
			binary.BigEndian.PutUint32(id, binary.BigEndian.Uint32(id)+1)
		}
		return nil
	})
	w.kernel = New(nfnetlink.New(dial))
	t.Cleanup(func() { _ = w.kernel.Close() })
	return w
}

func isRequest(m netlink.Message, kind uint16) bool {
	return m.Header.Type == netlink.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8|kind)
}

// A check compares what the other program has committed, if that is in the generation that it reads.
func TestCheckSeesWhatTheGenerationHas(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft")
	for _, mode := range cases.Modes() {
		ns := nfttest.NewNS(t, "node")
		want := cases.Load(t, "default").Compile(mode)
		other, armed := connect(t, ns), false
		chain := nfnetlink.ChainID{Family: nfnetlink.Inet, Table: nft.TableName, Name: "postrouting"}
		if mode == nft.ModeIPTables {
			chain = nfnetlink.ChainID{Family: nfnetlink.IPv4, Table: xtables.NATTable, Name: cases.DefaultChain}
		}
		w := openWindow(t, ns, func() {
			b := &nfnetlink.Batch{}
			b.FlushChain(chain)
			nfttest.Check(other.Commit(b))
		}, func(m netlink.Message) bool { return armed && isRequest(m, unix.NFT_MSG_GETGEN) })
		apply(t, w.kernel, want, nft.Contents)
		armed = true
		a, err := w.kernel.Apply(t.Context(), want, nft.Frame)
		if err != nil || len(a.Differences) == 0 {
			t.Errorf("%s: %q, %v: at generation %d the chain is empty", mode, a.Differences, err, a.Read)
		}
		inSync(t, ns, want)
	}
}

// A switch does not take a set for its own that another program has just put in its place.
func TestSwitchNeedsTheSetThatWasFilled(t *testing.T) {
	t.Parallel()
	for _, late := range []bool{false, true} {
		ns := nfttest.NewNS(t, "node")
		before, after := neighborConfigs(nft.ModeNFTables, 10)
		apply(t, open(t, ns), before, nft.Contents)
		other, replaced := connect(t, ns), 0
		table := after.Tables[0]
		set := table.Sets[0].KernelSet(table, table.Sets[0].Name+nft.SideB)
		replace := func() {
			replaced++
			b := &nfnetlink.Batch{}
			b.DelSet(set.Family, set.Table, set.Name)
			b.AddSet(set)
			nfttest.Check(other.Commit(b))
		}
		filled, generations := false, 0
		w := openWindow(t, ns, replace, func(m netlink.Message) bool {
			filled = filled || isRequest(m, unix.NFT_MSG_NEWSETELEM)
			if !filled || !isRequest(m, unix.NFT_MSG_GETGEN) {
				return false
			}
			generations++ // the first one is asked for after the set was filled, the next before the switch
			if generations == 2 && !late {
				replace()
			}
			return generations == 2 && late
		})
		if a, err := w.kernel.Apply(t.Context(), after, nft.Contents); err != nil || replaced != 1 {
			t.Errorf("%+v, %v; replaced %d times", a, err, replaced)
		}
		inSync(t, ns, after)
	}
}

// What another program commits right after our transaction is not covered by the generation that is reported as right.
func TestGenerationAfterOurTransactionHidesNoOther(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft")
	for name, tt := range map[string]struct {
		mode   nft.Mode
		attack string // before the check
		theirs string // right after, or before, our next transaction
		before bool
	}{
		"after a repair": {
			nft.ModeNFTables, "flush chain inet nft-masq-agent postrouting", "add rule inet nft-masq-agent postrouting accept",
			false,
		},
		"before a transaction that changes nothing": {
			nft.ModeIPTables, "add table ip nat { flags dormant; }", "add table ip nat { }; flush chain ip nat POSTROUTING",
			true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			ns := nfttest.NewNS(t, "node")
			want := cases.Load(t, "default").Compile(tt.mode)
			apply(t, open(t, ns), want, nft.Contents)
			nfttest.NFT(t, ns, tt.attack, "-f", "-")
			committed, done := false, false
			dial := nfttest.Through(dialIn(ns), func(m *netlink.Message) error {
				creates := m.Header.Flags&(netlink.Create|netlink.Dump) == netlink.Create
				ours := m.Header.Type>>8 == unix.NFNL_SUBSYS_NFTABLES && creates
				committed = committed || ours
				if !done && committed && (tt.before && ours || !tt.before && isRequest(*m, unix.NFT_MSG_GETGEN)) {
					done = true
					nfttest.NFT(t, ns, tt.theirs, "-f", "-")
				}
				return nil
			}, nil)
			k := New(nfnetlink.New(dial))
			t.Cleanup(func() { _ = k.Close() })
			a, err := k.Apply(t.Context(), want, nft.Frame)
			if err != nil || !done || a.Generation == generation(t, ns) {
				t.Errorf("%+v, %v, at generation %d; the other program has committed: %t", a, err, generation(t, ns), done)
			}
		})
	}
}

// The kernel may have no memory for a message: that is its answer, and not that others disturb. Only the outcome of a
// transaction is then unknown, so that the kernel is read again.
func TestNoMemoryForAMessageIsNoDisturbance(t *testing.T) {
	t.Parallel()
	for at := 0; ; at++ {
		ns := nfttest.NewNS(t, "node")
		sent := 0
		k := New(nfnetlink.New(nfttest.Through(dialIn(ns), func(*netlink.Message) error {
			sent++
			if sent <= at {
				return nil
			}
			return &netlink.OpError{Op: "send", Err: unix.ENOBUFS}
		}, nil)))
		_, err := k.Apply(t.Context(), cases.Load(t, "default").Compile(nft.ModeNFTables), nft.Contents)
		if err == nil && at > 20 {
			return // there are no more messages
		}
		hint := Hint(err)
		if !errors.Is(err, unix.ENOMEM) || Delayed(err) || sent > at+3 || hint != "the kernel has no memory for the rules" {
			t.Errorf("message %d is not sent: %v, delayed %t, after %d messages; hint %q", at, err, Delayed(err), sent, hint)
		}
		_ = k.Close()
	}
}

// A table in which the kernel counts more than it lists has something that goes only with it.
func TestTableThatHidesSomethingIsReplaced(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNS(t, "node")
	want := cases.Load(t, "default").Compile(nft.ModeNFTables)
	hides := false
	k := New(nfnetlink.New(nfttest.Through(dialIn(ns), func(m *netlink.Message) error {
		hides = hides && !isRequest(*m, unix.NFT_MSG_DELTABLE)
		return nil
	}, func(m *netlink.Message) error {
		const use = 3 // NFTA_TABLE_USE
		if !isRequest(*m, unix.NFT_MSG_NEWTABLE) || !hides {
			return nil
		}
		return nfnetlink.Each(m.Data[4:], func(typ uint16, data []byte) error {
			if typ == use {
				binary.BigEndian.PutUint32(data, binary.BigEndian.Uint32(data)+1)
			}
			return nil
		})
	})))
	t.Cleanup(func() { _ = k.Close() })
	apply(t, k, want, nft.Contents)
	hides = true
	a, err := k.Apply(t.Context(), want, nft.Frame)
	if err != nil || !a.Recreated {
		t.Errorf("%+v, %v, want that it is replaced", a, err)
	}
	inSync(t, ns, want)
}
