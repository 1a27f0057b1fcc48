package native

import (
	"maps"
	"slices"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/rule"
)

// An update has two phases. Stage fills new sets, which no rule refers to yet;
// Flip then changes the rules and deletes the old sets in one transaction. Only
// with this sequence every packet gets the right verdict on all tested kernels:
// since Linux 6.18, a set gets its lookup array after the rules of its own
// transaction become active, and up to 6.12 a set that is changed in place can
// miss an element (see nft/README.md).

// A filling transaction contains half of all prefixes, within bounds. The kernel
// writes the whole set into a new array at the end of each transaction, so that
// many small ones take a multiple of the time; a large one blocks other writers.
const (
	fillShare = 2
	// 4,000 IPv6 prefixes take 256 KiB, which fit the send buffer of a process
	// without CAP_NET_ADMIN in the initial user namespace.
	SmallBatch = 4_000
	largeBatch = 100_000 // 6.4 MB
)

// Recreate plans how to delete our table and create it again: the first transaction
// deletes it, and its sets are filled before the last one creates its chain. Until
// then we have no rules, so this is only for a table that cannot be repaired in
// place. The rehearsal is a transaction of which the kernel rejects only the last
// message, if it would accept the others.
func Recreate(want nft.Table, most int) (batches []*nfnetlink.Batch, rehearsal *nfnetlink.Batch) {
	first := &nfnetlink.Batch{}
	first.DelTable(want.Family, want.Name)
	fill, sides := Stage(&nfnetlink.Batch{}, want, nil, most)
	last := &nfnetlink.Batch{}
	Flip(last, want, sides, &Own{})

	rehearsal = &nfnetlink.Batch{}
	rehearsal.DelTable(want.Family, want.Name)
	empty := want
	empty.Sets = slices.Clone(want.Sets)
	for i := range empty.Sets {
		empty.Sets[i].Prefixes, empty.Sets[i].Mappings = nil, empty.Sets[i].Mappings[:0]
	}
	Stage(rehearsal, empty, nil, most)
	Flip(rehearsal, want, sides, &Own{})
	rehearsal.Refuse(want.Family, want.Name)
	return append(append([]*nfnetlink.Batch{first}, fill...), last), rehearsal
}

// Stage plans the filling transactions, of at most so many prefixes each, the first of
// which continues b, and returns the name that each set will have in the kernel.
// Sets that have the right elements stay as they are.
func Stage(b *nfnetlink.Batch, want nft.Table, got *Own, most int) (batches []*nfnetlink.Batch, target nft.Sides) {
	if got == nil {
		got = &Own{}
		b.AddTable(want.Family, want.Name)
	}
	for _, c := range want.Counters {
		if !slices.ContainsFunc(got.objects, func(o nfnetlink.Object) bool { return o.Name == c && o.Type == unix.NFT_OBJECT_COUNTER }) {
			b.AddCounter(want.Family, want.Name, c)
		}
	}
	live, target := got.live(want), nft.Sides{}
	if got.Dormant() {
		// The kernel does not wake a table and create a base chain in it in one
		// transaction. Without rules, an active table has no effect either.
		b.FlushChain(want.Family, want.Name, "")
		b.AddTable(want.Family, want.Name)
		got.rules = nil
	}
	var fill []nft.Set
	for _, w := range want.Sets {
		if name, ok := live[w.Name]; ok && got.Sets[name].equals(w) {
			target[w.Name] = name
			continue
		}
		target[w.Name] = w.Name + spare(w.Name, live)
		fill = append(fill, w)
	}
	got.clear(b, fill, target)
	total := 0
	for _, w := range fill {
		b.AddSet(w.KernelSet(want, target[w.Name]))
		total += len(w.Prefixes)
	}
	most = min(max((total+fillShare-1)/fillShare, SmallBatch), most)
	for _, w := range fill {
		for chunk := range slices.Chunk(w.Prefixes, most) {
			if b.Prefixes > 0 && b.Prefixes+len(chunk) > most {
				batches = append(batches, b)
				b = &nfnetlink.Batch{}
			}
			b.AddElements(want.Family, want.Name, target[w.Name], chunk)
		}
		b.AddMappings(want.Family, want.Name, target[w.Name], w.Mappings)
	}
	if b.Len() > 0 {
		batches = append(batches, b)
	}
	return batches, target
}

func spare(set string, live nft.Sides) string {
	if live[set] == set+nft.SideA {
		return nft.SideB
	}
	return nft.SideA
}

// clear deletes what exists under the names of the sets to fill, and the rules
// that refer to it: ours refer to the other side.
func (o *Own) clear(b *nfnetlink.Batch, fill []nft.Set, target nft.Sides) {
	for _, w := range fill {
		name := target[w.Name]
		if _, ok := o.Sets[name]; !ok {
			continue
		}
		for _, chain := range sortedKeys(o.rules) {
			for _, r := range o.rules[chain] {
				if slices.Contains(rule.Sets(r), name) {
					b.DelRule(r.Family, r.Table, r.Chain, r.Handle)
				}
			}
		}
		b.DelSet(o.Family, o.Name, name)
	}
}

// Holds reports whether the table exists and still has the same sets that were
// filled.
func (o *Own) Holds(handles map[string]uint64) bool {
	if o == nil {
		return false
	}
	for name, handle := range handles {
		if held, ok := o.Sets[name]; !ok || held.Handle != handle {
			return false
		}
	}
	return true
}

// Flip plans the transaction that activates the staged sets: after it the table
// has exactly what is wanted.
func Flip(b *nfnetlink.Batch, want nft.Table, target nft.Sides, got *Own) {
	b.AddTable(want.Family, want.Name)
	b.FlushChain(want.Family, want.Name, "")
	for _, w := range want.Chains {
		if held, ok := got.chain(w.Name); ok && !held.Hook.Equal(w.Hook) {
			b.DelChain(want.Family, want.Name, w.Name)
		}
		b.AddChain(w.KernelChain(want))
	}
	for _, w := range want.Chains {
		for _, r := range w.Bytecode(want, target) {
			b.AddRule(r)
		}
	}
	got.deleteRest(b, want, target)
}

// deleteRest deletes what the wanted table does not have. Sets are deleted before
// chains, because elements of a map can refer to chains. Anonymous sets and
// chains were deleted with their rule.
func (o *Own) deleteRest(b *nfnetlink.Batch, want nft.Table, target nft.Sides) {
	keep := slices.Collect(maps.Values(target))
	for _, name := range sortedKeys(o.Sets) {
		if !slices.Contains(keep, name) && o.Sets[name].Flags&unix.NFT_SET_ANONYMOUS == 0 {
			b.DelSet(o.Family, o.Name, name)
		}
	}
	for _, c := range o.chains {
		if !c.Bound && !slices.ContainsFunc(want.Chains, func(w nft.Chain) bool { return w.Name == c.Name }) {
			b.DelChain(c.Family, c.Table, c.Name)
		}
	}
	for _, x := range o.objects {
		if x.Type != unix.NFT_OBJECT_COUNTER || !slices.Contains(want.Counters, x.Name) {
			b.DelObject(x)
		}
	}
	for _, f := range o.flowtables {
		b.DelFlowtable(f.Family, f.Table, f.Name)
	}
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
