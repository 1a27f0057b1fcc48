package xtables

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/rule"
)

// A Shared is a shared table of iptables-nft as read from the kernel:
// POSTROUTING, the chains that its rules jump to, and those that we use.
type Shared struct {
	Family  nfnetlink.Family
	present bool
	table   nfnetlink.Table
	post    *nfnetlink.Chain // nil if there is no POSTROUTING
	rules   []nfnetlink.Rule // of POSTROUTING
	hidden  bool             // POSTROUTING has rules that the kernel does not list
	unread  int              // other programs' rules of POSTROUTING that are not in rules, because there are too many
	named   []OwnChain       // the chains to which one of these rules is our jump
	Partial bool             // only the rule that used to be our jump was read
	chains  map[string][]nfnetlink.Rule
	heads   map[string]nfnetlink.Chain // chains without their rules
	trusted map[string]bool            // chains whose rules need not be read
	flooded map[string]bool            // chains with many more rules than wanted; only the first ones were read
	all     int                        // number of chains, sets and objects, ours or not; counted if the table may be empty without ours
}

// A Jump is what was recorded about the jump to a chain of ours.
type Jump struct {
	handle uint64 // 0 for none
	use    uint32 // number of rules of POSTROUTING at that time
}

// A Mark detects changes of a chain that was in sync: a different handle, or
// another number of rules or references, not counting the jump.
type Mark struct {
	handle uint64
	use    uint32
}

// A trust holds the marks of chains that need not be read while these are the same.
type trust map[string]Mark

// marks returns the marks of the chains that were read or trusted.
func (n *Shared) marks() trust {
	t := trust{}
	for name, c := range n.heads {
		t[name] = n.mark(c)
	}
	return t
}

// marksOf returns the marks of the chains after ensure repaired them.
func (n *Shared) marksOf(c *nfnetlink.Conn, chain string) trust {
	t := trust{}
	for _, name := range WithSubchains(chain) {
		head, err := c.Chain(n.Family, NATTable, name)
		if err != nil {
			continue
		}
		t[name] = n.mark(head)
		if name == chain { // there is one jump to it now
			t[name] = Mark{head.Handle, head.Use - 1}
		}
	}
	return t
}

// mark does not count references from POSTROUTING: the jump is checked without
// reading the chain.
func (n *Shared) mark(c nfnetlink.Chain) Mark {
	use := c.Use
	for _, r := range n.rules {
		if to, _ := rule.Target(r); to == c.Name {
			use--
		}
	}
	return Mark{c.Handle, use}
}

// Jump returns what is known about the jump to the chain, if POSTROUTING was read
// and has exactly the wanted one.
func (n *Shared) Jump(want nft.Table, chain string) Jump {
	if n.post == nil || n.Partial {
		return Jump{}
	}
	exact, others := n.jumps(chain, want.Chain(Postrouting).Bytecode(want, nil)[0])
	if len(exact) != 1 || len(others) > 0 {
		return Jump{}
	}
	return Jump{exact[0].Handle, n.post.Use}
}

// readPost reads the rules of POSTROUTING. If their number is the same as when
// the jump was recorded, it reads only the jump, because there can be tens of
// thousands of others.
func (n *Shared) readPost(c *nfnetlink.Conn, names []string, o Reading) (err error) {
	if s := o.Since; n.post != nil && s != nil && s.post != nil && !s.Partial && int(n.post.Use) >= o.Long && sameHead(*n.post, *s.post) {
		n.rules, n.unread, n.hidden = s.rules, s.unread, s.hidden
		return nil
	}
	if n.post != nil && o.Seen.handle != 0 && (o.Quick || n.post.Use == o.Seen.use) {
		r, err := c.Rule(n.Family, NATTable, Postrouting, o.Seen.handle)
		if err == nil {
			n.rules, n.Partial = []nfnetlink.Rule{r}, true
		}
		if !nfnetlink.IsNotExist(err) {
			return err
		}
	}
	more, memory := n.post != nil && n.post.Use > manyRules, 0
	if !more {
		n.rules, more, err = c.FirstRules(n.Family, NATTable, Postrouting, func(r nfnetlink.Rule) bool {
			memory += r.Memory()
			return memory > maxMemory
		})
	}
	if more {
		err = n.readJumps(c, names)
	}
	if err == nil && n.post != nil && len(n.rules)+n.unread < int(n.post.Use) {
		now, err := c.Chain(n.Family, NATTable, Postrouting)
		if err != nil || now.Use != n.post.Use {
			return nfnetlink.ErrInterrupted
		}
		n.hidden = true
	}
	return err
}

// Hidden is an error if POSTROUTING has rules that were not listed.
func (n *Shared) Hidden() error {
	if !n.hidden {
		return nil
	}
	return fmt.Errorf("table %s nat: POSTROUTING has a rule that is too large for the kernel to list (32 KiB), "+
		"which hides those after it; only flushing the chain removes it", n.Family)
}

// How many rules of POSTROUTING are read whole, and how much memory they may take.
const (
	manyRules = 20_000
	maxMemory = 20 << 20
)

// readJumps reads only those rules of POSTROUTING that jump to chains of these
// names, or are jumps of ours.
func (n *Shared) readJumps(c *nfnetlink.Conn, names []string) (err error) {
	n.rules, n.unread, err = c.Jumps(n.Family, NATTable, Postrouting, func(r nfnetlink.Rule) bool {
		to, _ := rule.Target(r)
		_, ours := jumpOf(r)
		return ours || slices.Contains(names, to)
	})
	return err
}

// A Reading selects what is read of a shared table.
type Reading struct {
	Others bool // also chains of ours under any name
	Quick  bool // only the recorded jump of POSTROUTING, if it exists
	Seen   Jump
	Trust  trust
	Since  *Shared // long chains with the same mark are not read again; may be nil
	Long   int     // the number of rules of a chain that takes long to read
	Skip   string  // no rules of this chain
	Most   int     // limit of rules of a chain that is not in Trust; 0: all, except of foreign chains
}

// ReadShared reads the chains of these names in the shared table of a family, and
// with Others also those of ours under any name. With Quick the result only shows
// whether the table differs: changes must be planned without it.
//
// Chains in Trust with an unchanged mark are not read. Of others, not many more
// rules are read than the wanted table has.
func ReadShared(c *nfnetlink.Conn, family nfnetlink.Family, names []string, o Reading) (*Shared, error) {
	n := &Shared{
		Family: family, chains: map[string][]nfnetlink.Rule{}, heads: map[string]nfnetlink.Chain{},
		trusted: map[string]bool{}, flooded: map[string]bool{},
	}
	t, err := c.Table(family, NATTable)
	if nfnetlink.IsNotExist(err) {
		return n, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read table %s nat: %w", family, err)
	}
	n.present, n.table = true, t
	post, err := c.Chain(family, NATTable, Postrouting)
	switch {
	case err == nil:
		n.post = &post
	case !nfnetlink.IsNotExist(err):
		return nil, fmt.Errorf("read chain POSTROUTING: %w", err)
	}
	if err := n.readPost(c, names, o); err != nil {
		return nil, err
	}
	wanted := names
	for _, r := range n.rules {
		own, ok := jumpOf(r)
		if !ok || slices.Contains(n.named, own) {
			continue
		}
		n.named = append(n.named, own)
		if o.Others || slices.Contains(wanted, own.Text) {
			names = append(slices.Clip(names), own.Members()...)
		}
	}
	for _, name := range names {
		if err := n.readChain(c, name, o); err != nil {
			return nil, err
		}
	}
	if o.Others && n.allOurs() {
		return n, n.count(c)
	}
	return n, nil
}

// allOurs reports whether all rules of POSTROUTING jump to chains of ours, so
// that the table may be empty without them.
func (n *Shared) allOurs() bool {
	return n.unread == 0 && !slices.ContainsFunc(n.rules, func(r nfnetlink.Rule) bool {
		to, _ := rule.Target(r)
		_, ours := n.chains[to]
		return !ours
	})
}

func (n *Shared) count(c *nfnetlink.Conn) error {
	chains, err := c.Chains(n.Family)
	if err != nil {
		return err
	}
	for _, ch := range chains {
		if ch.Table == NATTable {
			n.all++
		}
	}
	sets, err := c.Sets(n.Family, NATTable)
	if err != nil {
		return err
	}
	objects, err := c.Objects(n.Family, NATTable)
	n.all += len(sets) + len(objects)
	return err
}

// sameHead reports whether a chain is the same one with the same length.
func sameHead(a, b nfnetlink.Chain) bool { return a.Handle == b.Handle && a.Use == b.Use }

// reuse takes what was read before of a long chain that has the same mark since.
func (n *Shared) reuse(since *Shared, name string, long int) bool {
	if since == nil || len(since.chains[name]) < long || since.mark(since.heads[name]) != n.mark(n.heads[name]) {
		return false
	}
	n.chains[name], n.flooded[name] = since.chains[name], since.flooded[name]
	return true
}

func (n *Shared) readChain(c *nfnetlink.Conn, name string, o Reading) error {
	if _, known := n.chains[name]; known {
		return nil
	}
	head, err := c.Chain(n.Family, NATTable, name)
	if err != nil {
		if nfnetlink.IsNotExist(err) {
			return nil
		}
		return fmt.Errorf("read chain %s: %w", nfnetlink.Printable(name), err)
	}
	n.heads[name] = head
	if m, ok := o.Trust[name]; ok && m == n.mark(head) {
		n.chains[name], n.trusted[name] = nil, true
		return nil
	}
	if name == o.Skip || n.reuse(o.Since, name, o.Long) {
		return nil
	}
	most, foreign := o.Most, 0
	if most == 0 {
		most = math.MaxInt
	}
	// If no ruleset is wanted, the chain is as long as the config was.
	enough := func(r nfnetlink.Rule) bool {
		most--
		if !ofAgent(r) {
			foreign++
		}
		return most < 0 || foreign > slack
	}
	n.chains[name], n.flooded[name], err = c.FirstRules(n.Family, NATTable, name, enough)
	return err
}

// ofAgent reports whether the comment of a rule is that of a masquerade agent, in
// any version: "subject to MASQUERADE".
func ofAgent(r nfnetlink.Rule) bool {
	return strings.Contains(rule.Comment(r), "subject to MASQUERADE")
}

// unchanged reports whether a plan for what was read before is still right.
func (n *Shared) unchanged(since *Shared) bool {
	return n.present == since.present && n.table == since.table && n.all == since.all &&
		(n.post == nil) == (since.post == nil) && (n.post == nil || sameHead(*n.post, *since.post)) &&
		n.unread == since.unread && nfnetlink.SameRules(n.rules, since.rules) && maps.EqualFunc(n.chains, since.chains, nfnetlink.SameRules) &&
		maps.EqualFunc(n.heads, since.heads, sameHead) &&
		maps.Equal(n.trusted, since.trusted) && maps.Equal(n.flooded, since.flooded)
}

// Trusted reports whether a chain was not read.
func (n *Shared) Trusted() bool { return len(n.trusted) > 0 }

// slack is the number of unexpected rules that are read and listed. Their number
// alone is reported beyond that, because other programs can add more than fits
// our memory.
const slack = 5_000

// hides reports whether rules of a chain were not listed, because one before them
// is too large for the kernel to list: the last wanted one is missing, and the
// chain has more uses than its rules and a jump.
func (n *Shared) hides(name string, want []nfnetlink.Rule) bool {
	got := n.chains[name]
	return len(want) > 0 && int(n.heads[name].Use) > len(got)+1 &&
		!slices.ContainsFunc(got, func(r nfnetlink.Rule) bool { return nfnetlink.EqualExprs(r.Exprs, want[len(want)-1].Exprs) })
}
