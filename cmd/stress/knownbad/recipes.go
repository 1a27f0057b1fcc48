package knownbad

import (
	"fmt"
	"net/netip"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfnetlink"
)

// A Recipe is a way to update a table.
type Recipe struct {
	Name  string
	CIDRs int // approximate length of the list
	// ComesAndGoes means that the table intentionally does not exist for a while:
	// connections not masqueraded in the meantime are not an error of the recipe.
	ComesAndGoes bool

	shows  kernels
	update func(c *nftables.Conn, t *Table, to []netip.Prefix) error
}

// kernels is the set of kernels on which a recipe is wrong.
type kernels int

const (
	everywhere kernels = iota
	withArrays
	withoutArrays
	everywhereButRarely
)

// Shows reports whether wrong packets must be seen. With arrays, since Linux
// 6.18, a set gets its lookup array at the end of a commit: rules that become
// active in the same transaction see a new set as empty for a moment. Without,
// lookups use the tree that is being modified: elements being added or deleted
// hide others for a moment. A recipe that is rarely wrong need not show it.
func (r Recipe) Shows(arrays bool) bool {
	switch r.shows {
	case everywhere:
		return true
	case withArrays:
		return arrays
	case withoutArrays:
		return !arrays
	}
	return false
}

// Recipes returns all recipes. The first one, which is not even atomic, is wrong
// on every kernel.
func Recipes() []Recipe {
	return []Recipe{
		{Name: "control: flush the set, add in the next transaction", CIDRs: 4, shows: everywhere, update: flushThenAdd},
		{Name: "replace the table, one transaction", CIDRs: 4, shows: withArrays, update: replaceTable},
		{Name: "new set and rules, one transaction", CIDRs: 4, shows: withArrays, update: setAndRules},
		{Name: "in place (flush chain and set, add again), one transaction", CIDRs: 4, shows: withoutArrays, update: inPlace},
		{Name: "difference of elements, one transaction", CIDRs: 4, shows: withoutArrays, update: difference},
		{
			Name: "first installation in one transaction", CIDRs: 2000, shows: withArrays, update: installAtOnce,
			ComesAndGoes: true,
		},
		{
			Name: "rules move to an earlier base chain and back, one transaction", CIDRs: 4, shows: everywhereButRarely,
			update: moveRules,
		},
	}
}

// A Table masquerades what is in neither of its two sets.
type Table struct {
	conn   *nftables.Conn
	recipe Recipe
	table  *nftables.Table
	chain  *nftables.Chain
	round  int // part of the sets' names
	early  bool
	list   []netip.Prefix
}

// Install creates the table correctly: sets first, rules in a later transaction.
// The connection must stay open.
func (r Recipe) Install(c *nftables.Conn, list []netip.Prefix) (*Table, error) {
	table := &nftables.Table{Family: nftables.TableFamilyINet, Name: "known-bad"}
	t := &Table{conn: c, recipe: r, list: list, table: table, chain: &nftables.Chain{
		Table: table, Name: "postrouting", Type: nftables.ChainTypeNAT,
		Hooknum: nftables.ChainHookPostrouting, Priority: nftables.ChainPriorityNATSource,
	}}
	c.AddTable(t.table)
	if err := t.fill(0, list); err != nil {
		return nil, err
	}
	if err := c.Flush(); err != nil {
		return nil, err
	}
	c.AddChain(t.chain)
	t.rules(0)
	return t, c.Flush()
}

// Update changes to another list, as the recipe does.
func (t *Table) Update(to []netip.Prefix) error {
	if err := t.recipe.update(t.conn, t, to); err != nil {
		return fmt.Errorf("%s: %w", t.recipe.Name, err)
	}
	t.list = to
	return nil
}

func flushThenAdd(c *nftables.Conn, t *Table, to []netip.Prefix) error {
	c.FlushSet(t.set(false, 0))
	c.FlushSet(t.set(true, 0))
	if err := c.Flush(); err != nil {
		return err
	}
	if err := t.elements(0, to); err != nil {
		return err
	}
	return c.Flush()
}

func replaceTable(c *nftables.Conn, t *Table, to []netip.Prefix) error {
	c.DelTable(t.table)
	return t.createAll(to)
}

func installAtOnce(c *nftables.Conn, t *Table, to []netip.Prefix) error {
	c.DelTable(t.table)
	if err := c.Flush(); err != nil {
		return err
	}
	return t.createAll(to)
}

func setAndRules(c *nftables.Conn, t *Table, to []netip.Prefix) error {
	if err := t.fill(t.round+1, to); err != nil {
		return err
	}
	c.FlushChain(t.chain)
	t.rules(t.round + 1)
	c.DelSet(t.set(false, t.round))
	c.DelSet(t.set(true, t.round))
	t.round++
	return c.Flush()
}

func inPlace(c *nftables.Conn, t *Table, to []netip.Prefix) error {
	c.FlushChain(t.chain)
	c.FlushSet(t.set(false, 0))
	c.FlushSet(t.set(true, 0))
	if err := t.elements(0, to); err != nil {
		return err
	}
	t.rules(0)
	return c.Flush()
}

func difference(c *nftables.Conn, t *Table, to []netip.Prefix) error {
	v4, v6 := byFamily(t.list)
	if err := c.SetDeleteElements(t.set(false, 0), Elements(v4)); err != nil {
		return err
	}
	if err := c.SetDeleteElements(t.set(true, 0), Elements(v6)); err != nil {
		return err
	}
	if err := t.elements(0, to); err != nil {
		return err
	}
	return c.Flush()
}

// moveRules moves the rules to an earlier base chain, or back. Each base chain
// determines separately which generation of the ruleset is current: a packet that
// passes the earlier one before the commit and the later one after it sees the
// rules in neither.
func moveRules(c *nftables.Conn, t *Table, _ []netip.Prefix) error {
	const othersRules = 100 // time for such packets
	early := *t.chain
	early.Name, early.Priority = "early", nftables.ChainPriorityRef(*t.chain.Priority-10)
	c.AddChain(&early)
	c.FlushChain(&early)
	c.FlushChain(t.chain)
	for range othersRules {
		c.AddRule(&nftables.Rule{Table: t.table, Chain: &early, Exprs: []expr.Any{
			&expr.Meta{Key: expr.MetaKeyMARK, Register: 1},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{1, 2, 3, 4}},
			&expr.Counter{},
		}})
	}
	if t.early = !t.early; t.early {
		t.rulesIn(&early, 0)
	} else {
		t.rulesIn(t.chain, 0)
	}
	return c.Flush()
}

// createAll creates everything in one transaction.
func (t *Table) createAll(list []netip.Prefix) error {
	t.conn.AddTable(t.table)
	if err := t.fill(0, list); err != nil {
		return err
	}
	t.conn.AddChain(t.chain)
	t.rules(0)
	return t.conn.Flush()
}

// set returns the set of a family, with the name of a round.
func (t *Table) set(ipv6 bool, round int) *nftables.Set {
	s := &nftables.Set{Table: t.table, Name: fmt.Sprintf("v4-%d", round), KeyType: nftables.TypeIPAddr, Interval: true}
	if ipv6 {
		s.Name, s.KeyType = fmt.Sprintf("v6-%d", round), nftables.TypeIP6Addr
	}
	return s
}

// fill creates the sets of a round, with their elements.
func (t *Table) fill(round int, list []netip.Prefix) error {
	for _, ipv6 := range []bool{false, true} {
		if err := t.conn.AddSet(t.set(ipv6, round), nil); err != nil {
			return err
		}
	}
	return t.elements(round, list)
}

func (t *Table) elements(round int, list []netip.Prefix) error {
	v4, v6 := byFamily(list)
	if err := t.conn.SetAddElements(t.set(false, round), Elements(v4)); err != nil {
		return err
	}
	return t.conn.SetAddElements(t.set(true, round), Elements(v6))
}

func (t *Table) rules(round int) { t.rulesIn(t.chain, round) }

func (t *Table) rulesIn(chain *nftables.Chain, round int) {
	for _, f := range []struct {
		proto       byte
		offset, len uint32 // of the destination address
	}{{unix.NFPROTO_IPV4, 16, 4}, {unix.NFPROTO_IPV6, 24, 16}} {
		t.conn.AddRule(&nftables.Rule{Table: t.table, Chain: chain, Exprs: []expr.Any{
			&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{f.proto}},
			&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: f.offset, Len: f.len},
			&expr.Lookup{SourceRegister: 1, SetName: t.set(f.proto == unix.NFPROTO_IPV6, round).Name},
			&expr.Verdict{Kind: expr.VerdictReturn},
		}})
	}
	t.conn.AddRule(&nftables.Rule{Table: t.table, Chain: chain, Exprs: []expr.Any{&expr.Masq{}}})
}

func byFamily(list []netip.Prefix) (v4, v6 []netip.Prefix) {
	for _, p := range list {
		if p.Addr().Is4() {
			v4 = append(v4, p)
		} else {
			v6 = append(v6, p)
		}
	}
	return v4, v6
}

// Elements returns prefixes as interval bounds. None may reach the last address
// of its family, after which there is no bound.
func Elements(list []netip.Prefix) (elements []nftables.SetElement) {
	for _, p := range list {
		elements = append(elements,
			nftables.SetElement{Key: p.Addr().AsSlice()},
			nftables.SetElement{Key: nfnetlink.PrefixRange(p).Last.Next().AsSlice(), IntervalEnd: true})
	}
	return elements
}
