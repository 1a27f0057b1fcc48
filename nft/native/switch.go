package native

import (
	"maps"
	"slices"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
)

// Switch implements [nft.KernelState]. The chains that differ are written in the first transaction, which is valid only
// while the sets that Stage filled are still there. They are written as a whole and by their names, which is right
// whatever others have committed.
func (s *State) Switch(first, second *nfnetlink.Batch) {
	if s.want == nil {
		s.planRemoval(first, second)
		return
	}
	if len(s.filled) > 0 {
		first.Require(sameSets{s.table.Table, s.filled})
	}
	s.planSwitch(first, second)
}

// planRemoval deletes our table. If another mode takes over, the second transaction does it: otherwise a packet that
// has passed the still empty iptables chain could reach our own chain when it is empty already, because each base chain
// determines separately which rules are current. Until then both modes apply, with the old verdict or the new one. In
// the other direction, a packet reaches the chain that is emptied first, and sees both or one, never neither.
func (s *State) planRemoval(first, second *nfnetlink.Batch) {
	if !s.table.exists {
		return
	}
	b := first
	if s.otherMode {
		b = second
	}
	b.DelTable(s.table.Family, s.table.Name)
}

// notListed is the condition that our table has, at this generation too, something that the kernel counts but does not
// list. The kernel counts at once what another program is adding, but lists it only when that has committed.
type notListed struct{}

// Check implements [nfnetlink.Precondition].
func (notListed) Check(c *nfnetlink.Conn) error {
	current := newTable()
	if err := current.read(c); err != nil {
		return err
	}
	if len(current.unexpected()) == 0 {
		return nfnetlink.ErrReadAgain
	}
	return nil
}

// sameSets is the condition that the sets which were filled are still there.
type sameSets struct {
	table  nfnetlink.Table
	filled []nfnetlink.Set
}

// Check implements [nfnetlink.Precondition].
func (x sameSets) Check(c *nfnetlink.Conn) error {
	if err := c.SameTable(x.table); err != nil {
		return err
	}
	current, err := c.Sets(x.table.Family, x.table.Name)
	if err != nil {
		return err
	}
	handles := map[string]uint64{}
	for _, set := range current {
		handles[set.Name] = set.Handle
	}
	for _, set := range x.filled {
		if handles[set.Name] != set.Handle {
			return nfnetlink.ErrReadAgain
		}
	}
	return nil
}

// planSwitch replaces all rules of the chains that differ, and deletes what the wanted table does not have. Deletions
// are normally in the first transaction: a packet that is in the old rules still sees them, also in a chain that is
// deleted with them, and the elements of a set. Two things are different. The kernel makes the elements of a map
// inactive at once, and a packet may not have reached a base chain yet. If a map in use or a base chain has to go,
// all deletions are in the second transaction, which is sent when no packet is in the old rules any more. Until then,
// obsolete chains keep their rules.
func (s *State) planSwitch(first, second *nfnetlink.Batch) {
	t := *s.want
	sides := nft.Sides{}
	for _, w := range t.Sets {
		sides[w.Name] = s.nameToUse(w)
	}
	used := slices.Collect(maps.Values(sides))
	deletions := first
	for name, set := range s.table.sets {
		if set.Flags&unix.NFT_SET_MAP != 0 && !slices.Contains(used, name) && s.table.anyRuleRefersTo(name) {
			deletions = second
		}
	}
	var obsolete []nfnetlink.ChainID
	for _, name := range slices.Sorted(maps.Keys(s.table.chains)) {
		c := s.table.chains[name]
		switch {
		case c.wanted || c.Bound:
		case c.staysEmpty():
			first.FlushChain(c.ID())
			accepting := c.Chain
			accepting.Policy = nfnetlink.Accept
			first.AddChain(accepting)
		default:
			obsolete = append(obsolete, c.ID())
			if c.Hook != nil {
				deletions = second
			}
		}
	}
	var chains []nft.Chain
	for _, w := range t.Chains {
		if !s.hasChain(w, sides) {
			chains = append(chains, w)
		}
	}
	s.planChains(first, chains, sides)
	for _, chain := range obsolete {
		deletions.FlushChain(chain)
	}
	for _, name := range slices.Sorted(maps.Keys(s.table.sets)) {
		if !slices.Contains(used, name) {
			deletions.DelSet(t.Family, t.Name, name)
		}
	}
	for _, chain := range obsolete {
		deletions.DelChain(chain)
	}
	for _, x := range s.table.objects {
		if !slices.Contains(t.Counters, x.Name) {
			deletions.DelObject(x)
		}
	}
}

// staysEmpty reports whether a chain stays, without rules, if it is not wanted: when any base chain is deleted, the
// kernel drops the packets that wait in the queues (nfqueue) of all programs.
func (c *ourChain) staysEmpty() bool {
	return c.Hook != nil && (c.Name == enforceChain || c.Name == untranslatedChain)
}

// hasChain reports whether the kernel has a wanted chain, with all of its rules and these sets.
func (s *State) hasChain(w nft.Chain, sides nft.Sides) bool {
	got := s.table.chains[w.Name]
	if got == nil || !got.Hook.Equal(w.Hook) || got.Hook != nil && got.Policy != nfnetlink.Accept {
		return false
	}
	if got.unread {
		return s.unchanged && maps.Equal(s.inUse, sides)
	}
	return nft.SameRules(w.Bytecode(*s.want, sides), got.rules)
}

// planChains writes chains with all of their rules, whichever of them the kernel has.
func (s *State) planChains(b *nfnetlink.Batch, chains []nft.Chain, sides nft.Sides) {
	for _, w := range chains {
		if got := s.table.chains[w.Name]; got != nil {
			b.FlushChain(got.ID())
		}
	}
	for _, w := range chains {
		got := s.table.chains[w.Name]
		if got != nil && !got.Hook.Equal(w.Hook) {
			b.DelChain(got.ID())
		}
		b.AddChain(w.KernelChain(*s.want))
		if got == nil { // Stage, or another agent, may have created the chain since the table was read
			b.FlushChain(w.KernelChain(*s.want).ID())
		}
	}
	for _, w := range chains {
		for _, r := range w.Bytecode(*s.want, sides) {
			b.AddRule(r)
		}
	}
}

// Replace implements [nft.Replacer]: it deletes our table and creates the wanted one in one transaction; packets of
// that moment may find the new sets empty. It is for what cannot be deleted alone: flags of the table, and other
// programs' maps, objects and chains that refer to ours. If a set has statements, Replace only deletes the table, and
// the caller's next attempt creates it: until then there are no rules.
func (s *State) Replace(commit nft.Commit) error {
	b := &nfnetlink.Batch{}
	if s.table.onlyHides() {
		b.Require(notListed{})
	}
	if s.table.exists {
		b.DelTable(s.want.Family, s.want.Name)
	}
	if s.table.hasStatements() {
		// An element that counts connections makes the kernel turn off connection tracking, which
		// only the first chain of type nat turns on: when the old one is destroyed.
		if err := commit(b); err != nil {
			return err
		}
		return s.conn.Settle()
	}
	fresh := State{want: s.want, table: newTable(), correct: map[string]nfnetlink.Set{}}
	fresh.create(b)
	for _, w := range s.want.Sets {
		fresh.addElements(b, w, 0, w.Len())
	}
	fresh.planSwitch(b, b)
	if err := commit(b); err != nil {
		return err
	}
	fresh.record(s.want.Sets, b.Handles)
	s.table.Handle = fresh.table.Handle
	s.correct = fresh.correct
	return nil
}
