package xtables

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/rule"
)

// A Shared is what the kernel holds of a table that iptables-nft shares with
// everybody: POSTROUTING and the chains that its rules jump to, and those that
// we would use.
type Shared struct {
	Family  nfnetlink.Family
	present bool
	dormant bool
	post    *nfnetlink.Chain // nil where there is no POSTROUTING
	rules   []nfnetlink.Rule // of POSTROUTING
	hidden  bool             // POSTROUTING has rules that the kernel does not list
	unread  int              // rules of POSTROUTING that are not in rules: others', of which there are too many
	named   []OwnChain       // the chains to which one of these is our jump
	Partial bool             // only the rule that was our jump was read
	chains  map[string][]nfnetlink.Rule
	heads   map[string]nfnetlink.Chain // of chains
	trusted map[string]bool            // chains whose rules need not be read
	flooded map[string]bool            // chains with many more rules than wanted, of which only the first were read
	all     int                        // chains, sets and objects, ours or not; counted where nothing else may be left of the table
}

// A Jump is what was seen of the jump to a chain of ours.
type Jump struct {
	handle uint64 // 0 for none
	use    uint32 // rules of POSTROUTING then
}

// A Mark tells whether a chain that was found right may have changed since: it is
// another one then, or has more or fewer rules or references, but for the jump.
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

// marksOf reads the heads of the chains that ensure has made right.
func (n *Shared) marksOf(c nfnetlink.Reader, chain string) trust {
	t := trust{}
	for _, name := range WithSubchains(chain) {
		head, err := c.Chain(n.Family, NATTable, name)
		if err != nil {
			continue
		}
		t[name] = n.mark(head)
		if name == chain { // to which there is one jump now
			t[name] = Mark{head.Handle, head.Use - 1}
		}
	}
	return t
}

// mark does not count what POSTROUTING refers to: whether the jump is there is seen
// without reading the chain.
func (n *Shared) mark(c nfnetlink.Chain) Mark {
	use := c.Use
	for _, r := range n.rules {
		if to, _ := rule.Target(r); to == c.Name {
			use--
		}
	}
	return Mark{c.Handle, use}
}

// Jump gives what was seen of the jump to the chain, if POSTROUTING was read and
// has just the one that is wanted.
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

// readPost reads the rules of POSTROUTING; of as many as when the jump was seen only
// this, for the others can be tens of thousands.
func (n *Shared) readPost(c nfnetlink.Reader, names []string, o Reading) (err error) {
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

// readJumps reads of the rules of POSTROUTING those that lead to chains of these names,
// or are jumps of ours.
func (n *Shared) readJumps(c nfnetlink.Reader, names []string) (err error) {
	n.rules, n.unread, err = c.Jumps(n.Family, NATTable, Postrouting, func(r nfnetlink.Rule) bool {
		to, _ := rule.Target(r)
		_, ours := jumpOf(r)
		return ours || slices.Contains(names, to)
	})
	return err
}

// A Reading says what is read of a shared table.
type Reading struct {
	Others bool // also chains of ours under whichever name
	Quick  bool // of POSTROUTING only the jump that was seen, if it is there
	Seen   Jump
	Trust  trust
	Heads  bool // no rules of chains that are not in Trust: they are to be written anew
	Most   int  // rules of a chain that is not in Trust; 0: all but for those of others
}

// ReadShared reads the chains of these names in the shared table of a family, and
// with others those of ours under whichever name. Where the jump was seen before it
// may give no more than whether the table differs: what is planned has to be read
// without.
//
// Of chains in trust whose mark is the same only the head is read. Of others no more
// rules are read than the wanted table has, and some.
func ReadShared(c nfnetlink.Reader, family nfnetlink.Family, names []string, o Reading) (*Shared, error) {
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
	n.present, n.dormant = true, t.Dormant()
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

// allOurs says that all rules of POSTROUTING lead to chains of ours: without these
// the table may be empty.
func (n *Shared) allOurs() bool {
	return n.unread == 0 && !slices.ContainsFunc(n.rules, func(r nfnetlink.Rule) bool {
		to, _ := rule.Target(r)
		_, ours := n.chains[to]
		return !ours
	})
}

func (n *Shared) count(c nfnetlink.Reader) error {
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

func (n *Shared) readChain(c nfnetlink.Reader, name string, o Reading) error {
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
	if o.Heads {
		n.chains[name], n.flooded[name] = nil, true
		return nil
	}
	most, odd := o.Most, 0
	if most == 0 {
		most = math.MaxInt
	}
	// Where no ruleset is wanted, what is read is as long as the config was.
	enough := func(r nfnetlink.Rule) bool {
		most--
		if !ofAgent(r) {
			odd++
		}
		return most < 0 || odd > slack
	}
	n.chains[name], n.flooded[name], err = c.FirstRules(n.Family, NATTable, name, enough)
	return err
}

// ofAgent reports whether the comment of a rule is one that a masquerade agent, of
// whatever version, gives: what is subject to MASQUERADE.
func ofAgent(r nfnetlink.Rule) bool {
	return strings.Contains(rule.Comment(r), "subject to MASQUERADE")
}

// Trusted reports whether a chain was not read.
func (n *Shared) Trusted() bool { return len(n.trusted) > 0 }

// slack is how many more rules than wanted are still read and named. Beyond, that there
// are more is difference enough: what others add can be larger than our memory.
const slack = 5_000

// hides reports whether rules of a chain were not listed, because one before them is
// too large for the kernel to list: the last wanted one lacks, and more uses the chain
// than its rules and a jump.
func (n *Shared) hides(name string, want []nfnetlink.Rule) bool {
	got := n.chains[name]
	return len(want) > 0 && int(n.heads[name].Use) > len(got)+1 &&
		!slices.ContainsFunc(got, func(r nfnetlink.Rule) bool { return nfnetlink.EqualExprs(r.Exprs, want[len(want)-1].Exprs) })
}
