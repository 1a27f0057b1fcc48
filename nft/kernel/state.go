package kernel

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/foreign"
	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/xtables"
)

// bigSet is the size from which a set is not read whenever the ruleset changed:
// the kernel walks a set from its start for every page of a dump.
const bigSet = 10_000

// A state is what the kernel holds of ours, and beside it, at one generation.
type state struct {
	generation uint32
	own        *native.Own
	nat        []*xtables.Shared     // IPv4 and IPv6, where they were asked for
	readAll    bool                  // no set was taken on trust
	trusted    bool                  // a chain of mode iptables-nft was
	legacy     []foreign.LegacyChain // where a take-over is asked for
}

// read reads the kernel's state.
func (k *Kernel) read(want nft.Ruleset, l Look) (*state, error) {
	s, err := k.readRules(want, l)
	if err != nil {
		return nil, err
	}
	if s.own != nil && want.Mode() == nft.ModeNFTables {
		for _, w := range want.Tables[0].Sets {
			if err := k.readSides(s, w, l); err != nil {
				return nil, err
			}
		}
	}
	return s, nil
}

// readRules reads everything but the elements of sets.
func (k *Kernel) readRules(want nft.Ruleset, l Look) (*state, error) {
	s := &state{readAll: true}
	k.wide = k.wide || l.Others || l.TakeOver
	var err error
	if s.generation, err = k.seen.Generation(); err != nil {
		return nil, err
	}
	if s.own, err = native.ReadOwn(k.conn); err != nil {
		return nil, err
	}
	if want.Mode() == nft.ModeIPTables || l.Others || l.TakeOver {
		if err := k.readShared(s, want, l); err != nil {
			return nil, err
		}
	}
	if l.TakeOver {
		if err := k.readLegacy(s, want); err != nil {
			return nil, err
		}
	}
	return s, nil
}

func (k *Kernel) readShared(s *state, want nft.Ruleset, l Look) error {
	var names []string
	if want.Mode() == nft.ModeIPTables {
		names = xtables.WithSubchains(want.Chain())
	}
	others := l.Others || l.TakeOver
	trust := k.trustsChains(s, want, l)
	start := time.Now()
	for i, f := range []nfnetlink.Family{nfnetlink.IPv4, nfnetlink.IPv6} {
		how := xtables.Reading{Others: others, Quick: l.Quick && trust}
		if !others {
			how.Seen = k.jumps[i]
		}
		if trust {
			how.Trust = k.marks[i]
		}
		t := natTable(want, f)
		if t != nil {
			how.Most = native.Slack
			for _, c := range t.Chains {
				how.Most += len(c.Rules)
			}
		}
		n, err := xtables.ReadShared(&k.seen, f, names, how)
		if err != nil {
			return err
		}
		s.nat = append(s.nat, n)
		s.trusted = s.trusted || n.Trusted()
		if t != nil && !n.Partial {
			k.jumps[i] = n.Jump(*t, want.Chain())
		}
	}
	if !s.trusted {
		k.chainsRead, k.chainsCost = time.Now(), time.Since(start)
	}
	return nil
}

// bigChain is the size from which a chain of mode iptables-nft is not read whenever
// the ruleset changed: the kernel walks it from its start for every page of a dump.
const bigChain = 5_000

// trustsChains reports whether chains of mode iptables-nft that were found right need
// not be read while they are the same and as long: no transaction was made since, or
// they are big. Those are read so often that the reading takes no more than a
// hundredth of a processor.
func (k *Kernel) trustsChains(s *state, want nft.Ruleset, l Look) bool {
	if want.Mode() != nft.ModeIPTables || !k.inStep.Same(want) {
		return false
	}
	if l.Quick || s.generation == k.at && (k.full || !l.Full) {
		return true
	}
	v4, v6 := want.CIDRs()
	return !l.Full && v4+v6 > k.bigChain && time.Since(k.chainsRead) < 100*k.chainsCost
}

// markWritten remembers the chains of mode iptables-nft that a transaction has just
// made right, unless somebody else has written since.
func (k *Kernel) markWritten(s *state, want nft.Ruleset) {
	k.marks = [2]xtables.Trust{}
	for i, n := range s.nat {
		if t := natTable(want, n.Family); t != nil {
			k.marks[i] = n.MarksOf(k.conn, want.Chain())
		}
	}
	if g, err := k.conn.Generation(); err != nil || g != k.at {
		k.marks = [2]xtables.Trust{}
	}
}

// markChains remembers the chains of mode iptables-nft as they are, which is right.
func (k *Kernel) markChains(s *state) {
	for i, n := range s.nat {
		k.marks[i] = n.Marks()
	}
}

// natTable gives the wanted shared table of a family, nil where none is wanted.
func natTable(want nft.Ruleset, f nfnetlink.Family) *nft.Table {
	for i, t := range want.Tables {
		if t.Family == f && t.Name == xtables.NATTable {
			return &want.Tables[i]
		}
	}
	return nil
}

// readSides reads what a wanted set holds, under both names where both are there.
func (k *Kernel) readSides(s *state, w nft.Set, l Look) error {
	for _, side := range []string{nft.SideA, nft.SideB} {
		held, ok := s.own.Sets[w.Name+side]
		if !ok {
			continue
		}
		known := s.generation == k.at && (k.full || !l.Full)
		if known || (l.Quick || max(len(w.Prefixes), int(held.Count)) > bigSet) && !l.Full {
			s.readAll = s.readAll && (known && k.full)
			remembered, err := k.remembers(held, w, known, l)
			if err != nil {
				return err
			}
			if remembered {
				continue
			}
		}
		start := time.Now()
		if err := held.ReadElements(k.conn, len(w.Prefixes)+native.Slack); err != nil {
			return err
		}
		k.dumped, k.dumpCost = time.Now(), time.Since(start)
		if held.Equals(w.Prefixes) {
			k.trust[held.Name] = trusted{prefixes: w.Prefixes, handle: held.Handle}
		}
	}
	return nil
}

// remembers reports whether what a set holds need not be read: nothing changed
// since it was known, or it is the same set, holds as many elements, and has none for
// addresses between them. Kernels before 6.18 do not tell how many; there the set is
// read now and then, so that the reading takes no more than a hundredth of a
// processor.
func (k *Kernel) remembers(held *native.HeldSet, w nft.Set, known bool, l Look) (bool, error) {
	t, ok := k.trust[held.Name]
	switch {
	case !ok || t.handle != 0 && t.handle != held.Handle:
		return false, nil
	case known:
	case held.Counted && int(held.Count) != len(t.prefixes):
		return false, nil
	case !held.Counted && !l.Quick && time.Since(k.dumped) > 100*k.dumpCost:
		return false, nil
	default:
		for _, a := range probes(t.prefixes) {
			if has, err := k.conn.HasElement(held.Family, held.Table, held.Name, a); has || err != nil {
				return false, err
			}
		}
	}
	t.handle = held.Handle
	k.trust[held.Name] = t
	if held.Trusted = slices.Equal(t.prefixes, w.Prefixes); !held.Trusted {
		held.Read = true
		for _, p := range t.prefixes {
			held.Holds = append(held.Holds, iprange.Of(p))
		}
	}
	return true, nil
}

// probes returns addresses that the prefixes, which are sorted, do not hold: some
// directly after one of them, the last of all, and the zero address for the element
// *, which is in no count. One element cannot take in many addresses without taking in
// one of these, unless it lies within a gap.
func probes(prefixes []netip.Prefix) []netip.Addr {
	const many = 8
	out := []netip.Addr{{}}
	if len(prefixes) == 0 {
		return out
	}
	for i := range many {
		at := i * len(prefixes) / many
		after := iprange.Of(prefixes[at]).To.Next()
		if after.IsValid() && (at+1 == len(prefixes) || !prefixes[at+1].Contains(after)) {
			out = append(out, after)
		}
	}
	for _, end := range []netip.Addr{first(prefixes[0].Addr()), iprange.Of(netip.PrefixFrom(prefixes[0].Addr(), 0)).To} {
		if !prefixes[0].Contains(end) && !prefixes[len(prefixes)-1].Contains(end) {
			out = append(out, end)
		}
	}
	return out
}

// first returns the first address of a family.
func first(a netip.Addr) netip.Addr { return netip.PrefixFrom(a, 0).Masked().Addr() }

// differences says in words how the state is not the wanted one.
func (s *state) differences(want nft.Ruleset) []string {
	var diffs []string
	for _, l := range s.legacy {
		diffs = append(diffs, "another agent's "+l.String())
	}
	for _, t := range want.Tables {
		if want.Mode() == nft.ModeNFTables {
			diffs = append(diffs, s.own.Differences(t)...)
		} else {
			diffs = append(diffs, s.shared(t.Family).Differences(t, want.Chain())...)
		}
	}
	for _, left := range s.unwanted(want) {
		diffs = append(diffs, left+" is left")
	}
	return diffs
}

// unsigned names chains of ours that an older agent, or an older version, wrote.
func (s *state) unsigned(want nft.Ruleset) (diffs []string) {
	for _, n := range s.nat {
		if natTable(want, n.Family) != nil && n.Unsigned(want.Chain()) {
			diffs = append(diffs, fmt.Sprintf("table %s nat: chain %s was written by another agent or version", n.Family, want.Chain()))
		}
	}
	return diffs
}

func (s *state) shared(f nfnetlink.Family) *xtables.Shared {
	i := slices.IndexFunc(s.nat, func(n *xtables.Shared) bool { return n.Family == f })
	return s.nat[i]
}

// unwanted names what the other mode, or ours with another chain, has installed.
func (s *state) unwanted(want nft.Ruleset) []string {
	var left []string
	chain := ""
	if want.Mode() == nft.ModeIPTables {
		chain = want.Chain()
		if s.own != nil {
			left = append(left, fmt.Sprintf("table inet %s of mode nftables", nft.TableName))
		}
	}
	for _, n := range s.nat {
		for _, c := range n.Leftovers(chain, natTable(want, n.Family) != nil) {
			left = append(left, fmt.Sprintf("chain %s of mode iptables-nft in table %s nat", c, n.Family))
		}
	}
	return left
}

// transactions plans what makes the wanted ruleset effective and removes what
// the other mode, another name or another agent had installed. It is one
// transaction, with two exceptions. The kernel refuses to wake a table and to
// make a base chain in it at once, so that a dormant table without POSTROUTING is
// woken before. And from mode nftables to mode iptables-nft a packet that has
// passed the chain of iptables, still empty for it, could meet our own chain when
// that is empty already, because each base chain looks for itself which rules are
// the current ones: so the table goes in a further transaction, and until then
// both decide, with the old verdict or the new. Towards mode nftables a packet
// meets the chain that is emptied first, and can see both, never neither.
func (s *state) transactions(want nft.Ruleset, target nft.Sides) []*nfnetlink.Batch {
	wake, b := &nfnetlink.Batch{}, &nfnetlink.Batch{}
	if want.Mode() == nft.ModeNFTables {
		native.Flip(b, want.Tables[0], target, s.own)
	}
	for _, n := range s.nat {
		t := natTable(want, n.Family)
		if t != nil && n.Asleep() {
			wake.AddTable(n.Family, xtables.NATTable)
		}
		if t != nil {
			n.Ensure(b, *t, want.Chain())
		}
		s.remove(b, n, want)
	}
	for _, l := range s.legacy {
		l.Remove(b)
	}
	batches := []*nfnetlink.Batch{wake, b}
	if want.Mode() == nft.ModeIPTables && s.own != nil {
		last := &nfnetlink.Batch{}
		last.DelTable(s.own.Family, s.own.Name)
		batches = append(batches, last)
	}
	return slices.DeleteFunc(batches, func(b *nfnetlink.Batch) bool { return b.Len() == 0 })
}
