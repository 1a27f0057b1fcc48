package nfnetlink_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/nfttest/modes"
	"nft-masq-agent/nft/xtables"
)

// connIn returns a connection to the namespace, also after its socket failed, and
// how often it was dialed.
func connIn(t *testing.T, ns *nfttest.NS) (c *nfnetlink.Conn, dialed *int) {
	t.Helper()
	dialed = new(int)
	c = nfnetlink.New(func() (*netlink.Conn, error) {
		*dialed++
		return nfttest.DialNetfilter(ns)
	})
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c, dialed
}

// createTable creates a table with a chain, a set and a counter.
func createTable(name string) *nfnetlink.Batch {
	b := &nfnetlink.Batch{}
	b.AddTable(nfnetlink.Inet, name)
	b.AddChain(nfnetlink.Chain{Family: nfnetlink.Inet, Table: name, Name: "c"})
	b.AddSet(nfnetlink.Set{
		Family: nfnetlink.Inet, Table: name, Name: "s", Flags: unix.NFT_SET_INTERVAL, KeyType: 7,
		KeyLen: 4,
	})
	b.AddCounter(nfnetlink.Inet, name, "o")
	return b
}

func must(t *testing.T, err error) {
	t.Helper()
	nfttest.NoError(t, err)
}

func TestTransactionIsAtomic(t *testing.T) {
	c, _ := connIn(t, nfttest.NewNS(t, "conn"))
	must(t, c.Commit(&nfnetlink.Batch{}))
	must(t, c.Commit(createTable("t")))
	before, err := c.Generation()
	must(t, err)

	b := &nfnetlink.Batch{}
	b.AddTable(nfnetlink.Inet, "other")
	b.DelSet(nfnetlink.Inet, "t", "missing")
	b.AddCounter(nfnetlink.Inet, "t", "p")
	b.DelTable(nfnetlink.Inet, "missing")
	err = c.Commit(b)
	if !errors.Is(err, unix.ENOENT) || !nfnetlink.IsNotExist(err) || !strings.Contains(err.Error(), "delete set") {
		t.Errorf("error %v, want that of the first rejected message", err)
	}
	after, err := c.Generation()
	must(t, err)
	if after != before {
		t.Errorf("generation %d became %d", before, after)
	}
	tables, err := c.Tables(nfnetlink.Inet)
	must(t, err)
	if len(tables) != 1 {
		t.Errorf("tables %v, want t alone: the rejected transaction would add another", tables)
	}
}

// A check is a condition.
type check func() error

func (f check) Check(*nfnetlink.Conn) error { return f() }

// If another program commits between the check of a condition and the transaction, it is checked again.
func TestConditionsHoldWhenTheTransactionTakesEffect(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNS(t, "conn")
	c, _ := connIn(t, ns)
	other, _ := connIn(t, ns)
	checks := 0
	b := createTable("t")
	b.Require(check(func() error {
		checks++
		if checks > 20 {
			return nil
		}
		return other.Commit(createTable(fmt.Sprint("other-", checks)))
	}))
	must(t, c.Commit(b))
	if checks != 21 {
		t.Errorf("%d checks, want one after each of 20 other transactions, and a last one", checks)
	}
	b = createTable("u")
	b.Require(check(func() error { return nfnetlink.ErrReadAgain }))
	if err := c.Commit(b); !errors.Is(err, nfnetlink.ErrReadAgain) {
		t.Errorf("error %v, want %v: the condition does not hold", err, nfnetlink.ErrReadAgain)
	}
	if _, err := c.Table(nfnetlink.Inet, "u"); !nfnetlink.IsNotExist(err) {
		t.Errorf("error %v, want that there is no table u", err)
	}
}

func TestReadEndsWithItsContextAndDelaysNoOtherCall(t *testing.T) {
	c, _ := connIn(t, nfttest.NewNS(t, "conn"))
	b := createTable("t")
	for range 1000 {
		b.AddRule(nfnetlink.Rule{
			Family: nfnetlink.Inet, Table: "t", Chain: "c",
			Exprs: nfnetlink.Marshal(nfnetlink.Inet, &expr.Counter{}),
		})
	}
	must(t, c.Commit(b))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for _, want := range []int{2, 0} { // the second time it has ended before
		rules := 0
		err := c.In(ctx).EachRule(nfnetlink.Inet, "t", "c", func(nfnetlink.Rule) error {
			if rules++; rules == 2 {
				cancel()
			}
			return nil
		})
		if rules > want+1 || !errors.Is(err, context.Canceled) {
			t.Errorf("%d rules, %v", rules, err)
		}
	}
	closed := make(chan error, 1)
	err := c.EachRule(nfnetlink.Inet, "t", "c", func(nfnetlink.Rule) error {
		if len(closed) == 0 && c.PortID() != 0 {
			go func() { closed <- c.Close() }()
			for c.PortID() != 0 { // until it has begun to close
				runtime.Gosched()
			}
		}
		return nil
	})
	t.Log(err) // it may have been complete
	must(t, <-closed)
	_, err = c.Generation()
	must(t, err)
}

func TestMissingObjectsAreReported(t *testing.T) {
	c, dialed := connIn(t, nfttest.NewNS(t, "conn"))
	if rules, err := modes.Rules(c, nfnetlink.Inet, "t", ""); err != nil || len(rules) > 0 {
		t.Errorf("rules %v, error %v", rules, err)
	}
	if objects, err := c.Objects(nfnetlink.Inet, "t"); err != nil && !nfnetlink.IsNotExist(err) || len(objects) > 0 {
		t.Errorf("objects %v, error %v", objects, err)
	}
	for name, ask := range map[string]func() error{
		"table": func() error { _, err := c.Table(nfnetlink.Inet, "t"); return err },
		"chain": func() error { _, err := c.Chain(nfnetlink.Inet, "t", "c"); return err },
		"sets":  func() error { _, err := c.Sets(nfnetlink.Inet, "t"); return err },
		"elements": func() error {
			return c.EachElement(nfnetlink.Inet, "t", "s", func(nfnetlink.Element) error { return nil })
		},
	} {
		if err := ask(); !nfnetlink.IsNotExist(err) {
			t.Errorf("%s: error %v", name, err)
		}
	}
	if *dialed != 1 {
		t.Errorf("dialed %d times", *dialed)
	}
}

func TestTableIsWoken(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNS(t, "conn")
	c, _ := connIn(t, ns)
	for name, wake := range map[string]func(*nfnetlink.Batch, nfnetlink.Table){
		"create": func(b *nfnetlink.Batch, table nfnetlink.Table) { b.AddTable(table.Family, table.Name) },
		"wake":   (*nfnetlink.Batch).WakeTable,
	} {
		nfttest.Run(t, ns, "add table inet t { flags dormant; }", "nft", "-f", "-")
		table, err := c.Table(nfnetlink.Inet, "t")
		must(t, err)
		b := &nfnetlink.Batch{}
		wake(b, table)
		must(t, c.Commit(b))
		woken, err := c.Table(nfnetlink.Inet, "t")
		if err != nil || !table.Dormant() || woken.Dormant() {
			t.Errorf("%s: %+v, then %+v: %v", name, table, woken, err)
		}
	}
}

func TestHooksAreCompared(t *testing.T) {
	nat, filter := &nfnetlink.Hook{Type: "nat"}, &nfnetlink.Hook{Type: "filter"}
	var none *nfnetlink.Hook
	if !nat.Equal(&nfnetlink.Hook{Type: "nat"}) || nat.Equal(filter) || nat.Equal(none) || none.Equal(nat) ||
		!none.Equal(nil) {
		t.Error("hooks are equal that are not, or the other way round")
	}
}

// A table that is created again is another one, and a set has the size that it was given.
func TestTablesAndSetsAreToldApart(t *testing.T) {
	t.Parallel()
	c, _ := connIn(t, nfttest.NewNS(t, "conn"))
	b := createTable("t")
	b.AddSet(nfnetlink.Set{
		Family: nfnetlink.Inet, Table: "t", Name: "sized", Flags: unix.NFT_SET_EVAL, KeyType: 7, KeyLen: 4, Size: 7,
	})
	must(t, c.Commit(b))
	if generation, err := c.Generation(); err != nil || b.Generation != generation {
		t.Errorf("generation %d, and then %d: %v", b.Generation, generation, err)
	}
	sets, err := c.Sets(nfnetlink.Inet, "t")
	must(t, err)
	if len(sets) != 2 || sets[0].Size != 0 || sets[1].Size != 7 {
		t.Errorf("sets are %+v", sets)
	}
	must(t, c.Commit(createTable("u")))
	if objects, err := c.Objects(nfnetlink.Inet, "t"); err != nil || len(objects) != 1 || objects[0].Table != "t" {
		t.Errorf("objects are %+v: %v", objects, err)
	}
	table, err := c.Table(nfnetlink.Inet, "t")
	must(t, errors.Join(err, c.SameTable(table)))
	b = &nfnetlink.Batch{}
	b.DelEmptyTable(table)
	if err := c.Commit(b); !errors.Is(err, unix.EBUSY) {
		t.Errorf("a table that is not empty is deleted: %v", err)
	}
	b = &nfnetlink.Batch{}
	b.DelTable(nfnetlink.Inet, "t")
	must(t, c.Commit(b))
	b = &nfnetlink.Batch{}
	b.AddTable(nfnetlink.Inet, "empty")
	b.DelEmptyTable(nfnetlink.Table{Family: nfnetlink.Inet, Name: "empty"})
	must(t, c.Commit(b))
	for range 2 { // it is gone, then there is another one
		if err := c.SameTable(table); !errors.Is(err, nfnetlink.ErrReadAgain) {
			t.Error(err)
		}
		must(t, c.Commit(createTable("t")))
	}
}

// They take several messages, and fit the send buffer of an unprivileged process.
func TestManyElementsFitOneTransaction(t *testing.T) {
	c, _ := connIn(t, nfttest.NewNS(t, "conn"))
	var prefixes []netip.Prefix
	var want []nfnetlink.Range
	for i := range 4000 {
		p := netip.PrefixFrom(netip.AddrFrom4([4]byte{240 | byte(i>>8), byte(i), 0, 0}), 16+i%17)
		prefixes, want = append(prefixes, p), append(want, nfnetlink.PrefixRange(p))
	}
	b := createTable("t")
	b.AddElements(nfnetlink.Inet, "t", "s", prefixes)
	if b.Elements != len(prefixes) {
		t.Errorf("counts %d elements", b.Elements)
	}
	must(t, c.Commit(b))
	var bounds []nfnetlink.Bound
	must(t, c.EachElement(nfnetlink.Inet, "t", "s", func(e nfnetlink.Element) error {
		addr, _ := netip.AddrFromSlice(e.Key)
		bounds = append(bounds, nfnetlink.Bound{Addr: addr, End: e.End})
		return nil
	}))
	if got := nfnetlink.Ranges(bounds); !slices.Equal(got, want) {
		t.Fatalf("%d elements, not the same %d", len(got), len(want))
	}
	sets, err := c.Sets(nfnetlink.Inet, "t")
	must(t, err)
	if sets[0].Count != 0 && int(sets[0].Count) != len(prefixes) {
		t.Errorf("the kernel reports %d", sets[0].Count)
	}
}

// Tables, chains with and without hooks, rules, sets, maps and counters, those of random configs in both modes, are
// read back as they were written: none differs.
func TestRulesetsAreReadBackAsWritten(t *testing.T) {
	t.Parallel()
	m, nodes := cases.NewMaker(61), map[nft.Mode]*modes.Node{
		nft.ModeNFTables: modes.New(t, native.Read), nft.ModeIPTables: modes.New(t, xtables.Read),
	}
	for i := range nfttest.Rounds(10, 20, 200) {
		c, node := m.Config(), m.Addresses()
		if i%2 == 0 { // a set that rules fill
			c.Enforce, c.MasqueradeSrcCIDRs = true, cases.CIDRs("10.0.0.0/8")
		}
		for mode, n := range nodes {
			n.Apply(t, nft.Compile(c, m.Options(mode)).WithAddresses(node), nft.WithLeftovers)
		}
	}
}

// Which elements of a map have a timeout is read, and that there are more than were asked for.
func TestElementsOfMapsAreRead(t *testing.T) {
	ns := nfttest.NewNS(t, "conn")
	c, _ := connIn(t, ns)
	nfttest.Run(t, ns, `table inet t {
		set plain { type ipv4_addr; elements = { 10.0.0.1 }; }
		set counted { type ipv4_addr; counter; elements = { 10.0.0.1 }; }
		set timed { type ipv4_addr; timeout 1h; elements = { 10.0.0.1 }; }
		set limited { type ipv4_addr; limit rate 1/hour; elements = { 10.0.0.1 limit rate 1/hour }; }
		map m { type ipv4_addr : ipv4_addr; flags timeout
			elements = { 0.0.0.0 : 198.51.100.11, 0.0.0.7 timeout 1h : 198.51.100.12, 0.0.0.8 : 198.51.100.13 }
		}
		set pairs { type ipv4_addr . ipv4_addr; flags interval; elements = { 10.0.0.1 . 10.0.0.2-10.0.0.5 }; }
	}`, "nft", "-f", "-")
	got := map[string]bool{}
	err := c.EachElement(nfnetlink.Inet, "t", "m", func(e nfnetlink.Element) error {
		got[fmt.Sprint(e.Key, e.Value)] = e.Conditional
		return nil
	})
	must(t, err)
	want := map[string]bool{
		"[0 0 0 0] [198 51 100 11]": false, "[0 0 0 7] [198 51 100 12]": true, "[0 0 0 8] [198 51 100 13]": false,
	}
	nfttest.Same(t, "elements with a timeout (-want +got)", want, got)
	must(t, c.EachElement(nfnetlink.Inet, "t", "pairs", func(e nfnetlink.Element) error {
		if !e.Conditional || !slices.Equal(e.Last, []byte{10, 0, 0, 1, 10, 0, 0, 5}) {
			t.Errorf("an interval of pairs is %+v", e)
		}
		return nil
	}))
	sets, err := c.Sets(nfnetlink.Inet, "t")
	must(t, err)
	for _, s := range sets[:4] {
		if statements := s.Name == "counted" || s.Name == "limited"; s.HasStatements() != statements {
			t.Errorf("%s: statements %t", s.Name, s.HasStatements())
		}
	}
}

func TestConnectionIsSharedAndRedialed(t *testing.T) {
	t.Parallel()
	c, dialed := connIn(t, nfttest.NewNS(t, "conn"))
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			name := fmt.Sprint("t", i)
			for range nfttest.Rounds(5, 20, 20) {
				if err := c.Commit(createTable(name)); err != nil {
					t.Error(err)
				}
				if table, err := c.Table(nfnetlink.Inet, name); err != nil || table.Name != name {
					t.Errorf("table %q, error %v", table.Name, err)
				}
				b := &nfnetlink.Batch{}
				b.DelTable(nfnetlink.Inet, name)
				b.DelTable(nfnetlink.Inet, "missing")
				if err := c.Commit(b); !errors.Is(err, unix.ENOENT) {
					t.Errorf("deleting a table that is missing: error %v, want %v", err, unix.ENOENT)
				}
			}
		})
	}
	wg.Wait()
	if *dialed != 1 || c.PortID() == 0 {
		t.Errorf("dialed %d times, port %d", *dialed, c.PortID())
	}
	must(t, c.Close())
	if c.PortID() != 0 {
		t.Errorf("closed, port %d", c.PortID())
	}
	if tables, err := c.Tables(nfnetlink.Inet); err != nil || len(tables) != 8 || *dialed != 2 {
		t.Errorf("after Close: %d tables, dialed %d times, error %v", len(tables), *dialed, err)
	}
}

// Whichever message is not sent, or not received, the next call is over another socket.
func TestSocketThatFailedIsReplaced(t *testing.T) {
	ns := nfttest.NewNS(t, "conn")
	broken := errors.New("broken")
	for at := range 8 {
		for _, sending := range []bool{true, false} {
			dialed, messages := 0, 0
			fails := func(*netlink.Message) error {
				if messages++; dialed == 1 && messages == at+1 {
					return broken
				}
				return nil
			}
			sent, received := fails, fails
			if sending {
				received = nil
			} else {
				sent = nil
			}
			dial := func() (*netlink.Conn, error) { dialed++; return nfttest.DialNetfilter(ns) }
			c := nfnetlink.New(nfttest.Through(dial, sent, received))
			err := c.Commit(createTable("t"))
			for range at + 1 {
				if err == nil {
					_, err = c.Generation()
				}
			}
			if _, again := c.Generation(); !errors.Is(err, broken) || again != nil || dialed != 2 {
				t.Errorf("message %d, sending %t: %v, then %v; dialed %d times", at, sending, err, again, dialed)
			}
			must(t, c.Close())
		}
	}
}

func TestSocketThatCannotBeOpenedIsAnError(t *testing.T) {
	c := nfnetlink.New(func() (*netlink.Conn, error) { return nil, unix.EMFILE })
	if _, err := c.Generation(); !errors.Is(err, unix.EMFILE) {
		t.Errorf("the generation without a socket: error %v, want %v", err, unix.EMFILE)
	}
	if err := c.Commit(&nfnetlink.Batch{}); err != nil {
		t.Errorf("a commit of nothing: %v", err)
	}
	if err := c.Commit(createTable("t")); !errors.Is(err, unix.EMFILE) {
		t.Errorf("a commit without a socket: error %v, want %v", err, unix.EMFILE)
	}
	must(t, c.Close())
	must(t, nfttest.NewNS(t, "conn").Do(func() error {
		c := nfnetlink.Dial()
		_, err := c.Generation()
		return errors.Join(err, c.Close())
	}))
}

func TestAgainRepeatsWhatOthersMayHaveDisturbed(t *testing.T) {
	for err, want := range map[error]int{
		unix.ERESTART: 2, unix.ENOENT: 2, unix.EPERM: 1, &nfnetlink.RejectedError{Err: unix.ENOENT}: 1,
	} {
		n := 0
		got := nfnetlink.Again(t.Context(), func() error {
			if n++; n == 2 {
				return nil
			}
			return err
		})
		if n != want || (got == nil) != (n == 2) {
			t.Errorf("%v: %d times, %v", err, n, got)
		}
	}
}

// It is repeated five times, however slow it is, and for three seconds, however fast.
func TestAgainEndsAfterAWhile(t *testing.T) {
	for pause, fewest := range map[time.Duration]int{2 * time.Second: 5, time.Millisecond: 100} {
		synctest.Test(t, func(t *testing.T) {
			begun, n := time.Now(), 0
			err := nfnetlink.Again(t.Context(), func() error {
				n++
				time.Sleep(pause)
				return nfnetlink.ErrReadAgain
			})
			passed := time.Since(begun)
			if !errors.Is(err, nfnetlink.ErrBusy) || n < fewest || pause > time.Second && n > fewest ||
				passed < 3*time.Second || passed > 3*time.Second+5*pause+20*time.Millisecond {
				t.Errorf("%s each: %d times, %s: %v", pause, n, passed, err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			if err := nfnetlink.Again(ctx, func() error { return nfnetlink.ErrReadAgain }); !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
		})
	}
}

// Without memory for the message nothing was sent. Without memory for the reply, the outcome is unknown.
func TestRejectionsAreToldFromUnknownOutcomes(t *testing.T) {
	ns := nfttest.NewNS(t, "conn")
	fails := func(*netlink.Message) error { return unix.ENOBUFS }
	dial := func() (*netlink.Conn, error) { return nfttest.DialNetfilter(ns) }
	for _, tt := range []struct {
		sent, received func(*netlink.Message) error
		do             func(*nfnetlink.Batch)
		op             nfnetlink.Op
		want           error
	}{
		{fails, nil, func(*nfnetlink.Batch) {}, "send transaction", unix.ENOMEM},
		{nil, fails, func(*nfnetlink.Batch) {}, "", unix.ENOBUFS},
		{nil, nil, func(b *nfnetlink.Batch) { b.DelTable(nfnetlink.Inet, "x") }, "delete table", unix.ENOENT},
		{nil, nil, func(b *nfnetlink.Batch) { b.DelSet(nfnetlink.Inet, "t", "x") }, "delete set", unix.ENOENT},
		{nil, nil, func(b *nfnetlink.Batch) {
			b.AddRule(nfnetlink.Rule{Family: nfnetlink.Inet, Table: "t", Chain: "x"})
		}, nfnetlink.CreateRule, unix.ENOENT},
		{nil, nil, func(b *nfnetlink.Batch) {
			b.AddChain(nfnetlink.Chain{Family: nfnetlink.Inet, Table: "x", Name: "c"})
		}, nfnetlink.CreateChain, unix.ENOENT},
	} {
		c, b := nfnetlink.New(dial), createTable("t")
		if tt.want != unix.ENOENT {
			c = nfnetlink.New(nfttest.Through(dial, tt.sent, tt.received))
		}
		tt.do(b)
		err := c.Commit(b)
		var rejected *nfnetlink.RejectedError
		if errors.As(err, &rejected) != (tt.op != "") || rejected != nil && rejected.Op != tt.op || !errors.Is(err, tt.want) {
			t.Errorf("%v, want %s: %v", err, tt.op, tt.want)
		}
		must(t, c.Close())
	}
}

func TestMain(m *testing.M) { os.Exit(nfttest.Main(m)) }

// The kernel marks such a dump as interrupted, although it is right: it counts only
// the rules of the chain. That of a whole table counts those of all chains.
func TestListOfAChainIsRightNextToTransactionsElsewhere(t *testing.T) {
	ns := nfttest.NewNS(t, "dump")
	c, _ := connIn(t, ns)
	other, _ := connIn(t, ns)
	counts := nfnetlink.Marshal(nfnetlink.Inet, &expr.Counter{})
	rule := func(chain string) nfnetlink.Rule {
		return nfnetlink.Rule{Family: nfnetlink.Inet, Table: "t", Chain: chain, Exprs: counts}
	}
	b := createTable("t")
	for _, chain := range []string{"before", "long", "after"} {
		b.AddChain(nfnetlink.Chain{Family: nfnetlink.Inet, Table: "t", Name: chain})
		b.AddRule(rule(chain))
	}
	for range 5000 {
		b.AddRule(rule("long"))
	}
	must(t, c.Commit(b))

	// A transaction elsewhere after each part of a dump.
	toggle := 0
	write := func() {
		toggle++
		b := &nfnetlink.Batch{}
		for _, chain := range []string{"before", "after"} {
			if toggle%2 == 0 {
				b.FlushChain(nfnetlink.ChainID{Family: nfnetlink.Inet, Table: "t", Name: chain})
				continue
			}
			for range 50 {
				b.AddRule(rule(chain))
			}
		}
		must(t, other.Commit(b))
	}
	list := func(chain string) (handles []uint64, err error) {
		err = c.EachRule(nfnetlink.Inet, "t", chain, func(r nfnetlink.Rule) error {
			handles = append(handles, r.Handle)
			if len(handles)%100 == 0 {
				write()
			}
			return nil
		})
		return handles, err
	}
	want, err := list("long")
	must(t, err)
	if len(want) != 5001 || !slices.IsSorted(want) {
		t.Fatalf("%d rules are listed, sorted: %t; want 5001 in their order", len(want), slices.IsSorted(want))
	}
	for range nfttest.FullRounds(5, 100) {
		got, err := list("long")
		if must(t, err); !slices.Equal(got, want) {
			t.Fatalf("listed %d rules, want %d", len(got), len(want))
		}
	}
	if _, err := list(""); !errors.Is(err, nfnetlink.ErrReadAgain) {
		t.Errorf("the list of the table: %v, want that it was interrupted", err)
	}
}
