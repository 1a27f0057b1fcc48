package native

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
)

// An update has two phases. Stage fills new sets, which no rule refers to yet. Switch then changes the rules and
// deletes the old sets. Only with this sequence every packet gets the right verdict on all tested kernels: since Linux
// 6.18, a set gets its lookup array after the rules of its own transaction become active, and up to 6.12 a set that is
// changed in place can miss an element (see nft/README.md).

// A filling transaction contains half of all prefixes, within bounds. The kernel
// writes the whole set into a new array at the end of each transaction, so that
// many small ones take a multiple of the time; a large one blocks other writers.
const (
	fillShare = 2
	// 4,000 IPv6 prefixes take 256 KiB, which fit the send buffer of a process
	// without CAP_NET_ADMIN in the initial user namespace.
	smallBatch = 4_000
	largeBatch = 100_000 // 6.4 MB
)

// Stage implements [nft.KernelState]: it fills the sets that are to be used.
func (s *State) Stage(ctx context.Context, commit nft.Commit) error {
	if s.want == nil {
		return nil
	}
	total := 0
	for _, w := range s.lacking() {
		total += w.Len()
	}
	limit := min(max((total+fillShare-1)/fillShare, smallBatch), largeBatch)
	err := s.fill(ctx, commit, limit)
	if errors.Is(err, unix.EMSGSIZE) { // the send buffer is small, and nothing was sent
		err = s.fill(ctx, commit, smallBatch)
	}
	if err != nil {
		return fmt.Errorf("fill sets: %w", err)
	}
	return nil
}

// lacking returns the wanted sets for which the kernel has no correct one.
func (s *State) lacking() []nft.Set {
	return slices.DeleteFunc(slices.Clone(s.want.Sets), func(w nft.Set) bool {
		_, ok := s.correct[w.Name]
		return ok
	})
}

// fill creates the lacking sets and fills them, in transactions of at most limit elements. If it fails, no rule refers
// to what was filled so far, and the next attempt creates these sets again.
func (s *State) fill(ctx context.Context, commit nft.Commit, limit int) error {
	lacking := s.lacking()
	creating := &nfnetlink.Batch{}
	s.create(creating)
	b := creating
	for _, w := range lacking {
		for position := 0; position < w.Len(); position += limit {
			end := min(position+limit, w.Len())
			if b.Elements+end-position > limit {
				if err := send(ctx, commit, b); err != nil {
					return err
				}
				b = &nfnetlink.Batch{}
			}
			s.addElements(b, w, position, end)
		}
	}
	if err := send(ctx, commit, b); err != nil {
		return err
	}
	s.record(lacking, creating.Handles)
	return nil
}

// send commits a batch, unless ctx is done.
func send(ctx context.Context, commit nft.Commit, b *nfnetlink.Batch) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	return commit(b)
}

// record records that sets are correct, which a transaction has created: with these handles.
func (s *State) record(sets []nft.Set, handles map[string]uint64) {
	if handle, created := handles[s.want.Name]; created {
		s.table.Table = nfnetlink.Table{Family: s.want.Family, Name: s.want.Name, Handle: handle}
	}
	for _, w := range sets {
		name := s.nameToUse(w)
		filled := nfnetlink.Set{Name: name, Handle: handles[name]}
		s.correct[w.Name] = filled
		s.filled = append(s.filled, filled)
	}
}

func (s *State) addElements(b *nfnetlink.Batch, w nft.Set, start, end int) {
	if w.Mappings != nil {
		b.AddMappings(s.want.Family, s.want.Name, s.nameToUse(w), w.Mappings[start:end])
	} else {
		b.AddElements(s.want.Family, s.want.Name, s.nameToUse(w), w.Prefixes[start:end])
	}
}

// create adds what is missing of the table, the counters, and the chains, to which maps may refer, and the lacking sets
// anew. Base chains are left to Switch, because packets pass them.
func (s *State) create(b *nfnetlink.Batch) {
	if !s.table.exists {
		b.AddTable(s.want.Family, s.want.Name)
	}
	for _, name := range s.want.Counters {
		if !slices.ContainsFunc(s.table.objects, func(o nfnetlink.Object) bool { return o.Name == name }) {
			b.AddCounter(s.want.Family, s.want.Name, name)
		}
	}
	for _, w := range s.want.Chains {
		if s.table.chains[w.Name] == nil && w.Hook == nil {
			b.AddChain(w.KernelChain(*s.want))
		}
	}
	for _, w := range s.lacking() {
		name := s.nameToUse(w)
		if _, exists := s.table.sets[name]; exists {
			b.DelSet(s.want.Family, s.want.Name, name)
		}
		b.AddSet(w.KernelSet(*s.want, name))
	}
}
