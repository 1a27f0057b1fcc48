package native

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/facts"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/nfnetlink"
)

// A State is our table as the kernel has it, and the wanted one. It implements
// [layout.State] and [layout.Replacer].
type State struct {
	conn  *nfnetlink.Conn
	want  *nft.Table // nil: none
	last  bool       // another mode is wanted, whose rules come first
	held  *ourTable
	right map[string]nfnetlink.Set // the sets that have the wanted elements, by the wanted ones' names
	alike map[string]bool          // the chains that need not be written, however their sets change
	diffs []string                 // of the elements that were read
}

// Read reads our table. Elements of sets are read, and compared, only if the policy in force is the
// wanted one: otherwise sets are filled anew. Maps are always compared: they are small, few changes concern
// them, and what goes with an old one waits for packets. With a state that has filled some, none are read.
// Of a ruleset that the kernel has for certain, rules without sets are not read.
func Read(c *nfnetlink.Conn, want, has nft.Ruleset, depth layout.Depth, staged layout.State) (layout.State, error) {
	s := &State{
		conn: c, last: want.Mode() != "" && want.Mode() != nft.ModeNFTables,
		right: map[string]nfnetlink.Set{},
	}
	if want.Mode() == nft.ModeNFTables && len(want.Tables) > 0 {
		s.want = &want.Tables[0]
	}
	most := slack
	if s.want != nil {
		for _, c := range s.want.Chains {
			most += len(c.Rules)
		}
	}
	var err error
	if s.held, err = readTable(c, most, fixed(has)); err != nil || s.want == nil {
		return s, err
	}
	earlier, _ := staged.(*State)
	installed, _ := s.Installed()
	for _, w := range s.want.Sets {
		if earlier != nil { // handles begin again in another table
			was := earlier.right[w.Name]
			if earlier.held.Handle == s.held.Handle && was.Handle != 0 && s.held.sets[was.Name].Handle == was.Handle {
				s.right[w.Name] = was
			}
			continue
		}
		held, ok := s.held.sets[s.now(w)]
		other := installed.Hash != want.Hash()
		if !ok || other && w.Mappings == nil {
			continue
		}
		var diffs []string
		if depth > layout.Frame || other {
			if diffs, err = compare(c, held, w); err != nil {
				return nil, err
			}
		}
		if len(diffs) == 0 {
			s.right[w.Name] = held
		}
		if !other {
			s.diffs = append(s.diffs, diffs...)
		}
	}
	return s, nil
}

// Installed implements [layout.State]. The comment of the last rule has the hash.
func (s *State) Installed() (found layout.Installed, ok bool) {
	rules := s.held.rules[BaseChain]
	found.Layout = Layout{}
	for _, r := range rules {
		if hash, is := strings.CutPrefix(facts.Comment(r), hashComment); is {
			found.Hash = hash
		}
	}
	return found, len(rules) > 0
}

// refersTo reports whether a rule of a wanted chain refers to a set.
func (s *State) refersTo(set string) bool {
	return slices.ContainsFunc(s.want.Chains, func(w nft.Chain) bool { return s.held.refersTo(set, w.Name) })
}

// now returns the set of the kernel that is used for a wanted one, "" for none.
func (s *State) now(w nft.Set) (name string) {
	for _, side := range []string{w.Name + nft.SideA, w.Name + nft.SideB} {
		held, ok := s.held.sets[side]
		if ok && sameDeclaration(held, w.KernelSet(*s.want, side)) && (name == "" || s.refersTo(side)) {
			name = side
		}
	}
	return name
}

// next returns the set that is to be used for a wanted one: the one that is right, or else
// the other side.
func (s *State) next(w nft.Set) string {
	if right, ok := s.right[w.Name]; ok {
		return right.Name
	}
	now := s.now(w)
	if _, taken := s.held.sets[w.Name+nft.SideA]; now == w.Name+nft.SideA || now == "" && taken {
		return w.Name + nft.SideB
	}
	return w.Name + nft.SideA
}

// Differences implements [layout.State].
func (s *State) Differences(words facts.Words) []layout.Difference {
	var out []layout.Difference
	add := func(kind layout.Kind, format string, args ...any) {
		out = append(out, layout.Difference{Kind: kind, Text: fmt.Sprintf(format, args...)})
	}
	name := fmt.Sprintf("table %s %s", nfnetlink.Inet, nft.TableName)
	switch t := s.held; {
	case !t.exists && s.want == nil:
		return nil
	case !t.exists:
		add(layout.Drift, "%s is missing", name)
		return out
	case s.want == nil:
		add(layout.Leftover, "%s", name)
		return out
	case t.Dormant():
		add(layout.Odd, "%s is dormant", name)
	case t.Flags != 0:
		add(layout.Odd, "%s has the flag owner or persist", name)
	case t.flooded:
		add(layout.Drift, "%s has more than %d rules that are not in the config", name, slack)
	case int(t.Use) > len(t.chains)+len(t.sets)+len(t.objects):
		add(layout.Odd, "%s has something that is not in the config, such as a flowtable", name)
	}
	s.chainDifferences(words, add)
	s.setDifferences(add)
	s.objectDifferences(add)
	return out
}

func (s *State) chainDifferences(words facts.Words, add func(layout.Kind, string, ...any)) {
	live := nft.Sides{}
	s.alike = map[string]bool{}
	for _, w := range s.want.Sets {
		if name := s.now(w); name != "" {
			live[w.Name] = name
		}
	}
	for _, w := range s.want.Chains {
		got, ok := s.held.chain(w.Name)
		switch {
		case !ok:
			add(layout.Drift, "chain %s is missing", w.Name)
			continue
		case !got.Hook.Equal(w.Hook):
			add(layout.Drift, "chain %s has %s, not %s", w.Name, got.Hook, w.Hook)
		case got.Hook != nil && got.Policy != nfnetlink.Accept:
			add(layout.Drift, "chain %s has another policy than accept", w.Name)
		}
		diffs := w.Differences("chain "+w.Name, *s.want, live, s.held.rules[w.Name], words)
		for _, text := range diffs {
			add(layout.Drift, "%s", text)
		}
		looksUp := func(r nfnetlink.Rule) bool { return len(facts.Sets(r)) > 0 }
		s.alike[w.Name] = len(diffs) == 0 && got.Hook == nil && !slices.ContainsFunc(s.held.rules[w.Name], looksUp)
	}
	wants := chainNames(s.want)
	for _, c := range s.held.chains {
		if !wants[c.Name] && !(stays(c) && len(s.held.rules[c.Name]) == 0 && c.Policy == nfnetlink.Accept) {
			add(layout.Drift, "chain %s is not in the config", nfnetlink.Printable(c.Name))
		}
	}
}

// chainNames returns the names of the chains of a table.
func chainNames(t *nft.Table) map[string]bool {
	names := map[string]bool{}
	for _, w := range t.Chains {
		names[w.Name] = true
	}
	return names
}

// stays reports whether a chain stays, empty, if it is not wanted: when any base chain is
// deleted, the kernel drops the packets that wait in the queues (nfqueue) of all programs.
func stays(c nfnetlink.Chain) bool {
	return c.Hook != nil && (c.Name == enforceChain || c.Name == untranslatedChain)
}

func (s *State) setDifferences(add func(layout.Kind, string, ...any)) {
	wanted := map[string]bool{}
	for _, w := range s.want.Sets {
		name := s.now(w)
		if name == "" {
			add(layout.Drift, "set %s is missing", w.Name)
			continue
		}
		wanted[name] = true
	}
	for _, text := range s.diffs {
		add(layout.Drift, "%s", text)
	}
	for _, name := range slices.Sorted(maps.Keys(s.held.sets)) {
		kind := layout.Drift
		if !likeOurs(s.held.sets[name]) {
			kind = layout.Odd
		}
		if !wanted[name] {
			add(kind, "set %s is not in the config", nfnetlink.Printable(name))
		}
	}
}

func (s *State) objectDifferences(add func(layout.Kind, string, ...any)) {
	lacking := slices.Clone(s.want.Counters)
	for _, x := range s.held.objects {
		at := slices.Index(lacking, x.Name)
		switch {
		case x.Type != unix.NFT_OBJECT_COUNTER:
			add(layout.Odd, "object %s is not in the config", nfnetlink.Printable(x.Name))
		case at < 0:
			add(layout.Drift, "object %s is not in the config", nfnetlink.Printable(x.Name))
		default:
			lacking = slices.Delete(lacking, at, at+1)
		}
	}
	if len(lacking) > 0 {
		add(layout.Drift, "counters are missing: %s", strings.Join(lacking, ", "))
	}
}

// An update has two phases. Stage fills new sets, which no rule refers to yet;
// Switch then changes the rules and deletes the old sets. Only
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
	smallBatch = 4_000
	largeBatch = 100_000 // 6.4 MB
)

// Stage implements [layout.State]: it fills the sets that are to be used.
func (s *State) Stage(ctx context.Context, commit layout.Commit) error {
	if s.want == nil {
		return nil
	}
	total := 0
	for _, w := range s.lacking() {
		total += w.Len()
	}
	most := min(max((total+fillShare-1)/fillShare, smallBatch), largeBatch)
	err := s.fill(ctx, commit, most)
	if errors.Is(err, unix.EMSGSIZE) { // the send buffer is small, and nothing was sent
		err = s.fill(ctx, commit, smallBatch)
	}
	if err != nil {
		return fmt.Errorf("fill sets: %w", err)
	}
	return nil
}

// lacking returns the wanted sets of which the kernel has none with the right elements.
func (s *State) lacking() []nft.Set {
	return slices.DeleteFunc(slices.Clone(s.want.Sets), func(w nft.Set) bool {
		_, ok := s.right[w.Name]
		return ok
	})
}

// fill fills sets in transactions of at most so many elements.
func (s *State) fill(ctx context.Context, commit layout.Commit, most int) error {
	lacking, b := s.lacking(), &nfnetlink.Batch{}
	s.create(b)
	first := b // it creates the sets
	send := func() error {
		if err := ctx.Err(); err != nil {
			return err
		}
		err := commit(b)
		b = &nfnetlink.Batch{}
		return err
	}
	for _, w := range lacking {
		for at := 0; at < w.Len(); at += most {
			to := min(at+most, w.Len())
			if b.Elements > 0 && b.Elements+to-at > most {
				if err := send(); err != nil {
					return err
				}
			}
			s.addElements(b, w, at, to)
		}
	}
	if err := send(); err != nil {
		return err
	}
	s.record(lacking, first.Handles)
	return nil
}

// record records that sets are right, which a transaction has created.
func (s *State) record(sets []nft.Set, handles map[string]uint64) {
	if handle, created := handles[s.want.Name]; created {
		s.held.Handle = handle
	}
	for _, w := range sets {
		name := s.next(w)
		s.right[w.Name] = nfnetlink.Set{Name: name, Handle: handles[name]}
	}
}

func (s *State) addElements(b *nfnetlink.Batch, w nft.Set, from, to int) {
	if w.Mappings != nil {
		b.AddMappings(s.want.Family, s.want.Name, s.next(w), w.Mappings[from:to])
	} else {
		b.AddElements(s.want.Family, s.want.Name, s.next(w), w.Prefixes[from:to])
	}
}

// create adds the table, the counters, the sets that are to be filled, and the chains to
// which maps refer, if they are missing.
func (s *State) create(b *nfnetlink.Batch) {
	if !s.held.exists {
		b.AddTable(s.want.Family, s.want.Name)
	}
	for _, name := range s.want.Counters {
		if !slices.ContainsFunc(s.held.objects, func(o nfnetlink.Object) bool { return o.Name == name }) {
			b.AddCounter(s.want.Family, s.want.Name, name)
		}
	}
	for _, w := range s.want.Chains {
		if _, exists := s.held.chain(w.Name); !exists && w.Hook == nil {
			b.AddChain(w.KernelChain(*s.want))
		}
	}
	for _, w := range s.lacking() {
		name := s.next(w)
		if _, exists := s.held.sets[name]; exists {
			b.DelSet(s.want.Family, s.want.Name, name)
		}
		b.AddSet(w.KernelSet(*s.want, name))
	}
}

// Switch implements [layout.State]. If another mode is wanted, our table is
// deleted in a later transaction: otherwise a packet that has passed the still
// empty iptables chain could reach our own chain when it is empty already,
// because each base chain determines separately which rules are current. Until
// then both modes apply, with the old verdict or the new one. In the other
// direction, a packet reaches the chain that is emptied first, and sees both or
// one, never neither.
func (s *State) Switch(now, after *nfnetlink.Batch) (atAny bool) {
	switch {
	case s.want != nil:
		s.write(now, after)
	case !s.held.exists:
	case s.last:
		after.DelTable(s.held.Family, s.held.Name)
	default:
		now.DelTable(s.held.Family, s.held.Name)
	}
	return false
}

// write replaces all rules of the chains that are not alike, and deletes what the wanted table does
// not have: in the same transaction, because packets on their way through the old rules still see
// those of a chain that is deleted with them, and the elements of a set. Not so those of a map,
// which the kernel makes inactive at once, nor the rules of a base chain that they only come to. If
// one of these has to go, nothing goes before no packet is on its way, and chains keep their rules.
func (s *State) write(b, after *nfnetlink.Batch) {
	t, sides, rest := *s.want, nft.Sides{}, b
	for _, w := range t.Sets {
		sides[w.Name] = s.next(w)
	}
	used := slices.Collect(maps.Values(sides))
	for name, held := range s.held.sets {
		if held.Flags&unix.NFT_SET_MAP != 0 && !slices.Contains(used, name) && s.held.refersTo(name, "") {
			rest = after
		}
	}
	var gone []nfnetlink.ChainID
	wants := chainNames(s.want)
	for _, c := range s.held.chains {
		switch {
		case s.alike[c.Name]:
		case wants[c.Name]:
			b.FlushChain(c.ID())
		case stays(c):
			b.FlushChain(c.ID())
			c.Policy = nfnetlink.Accept
			b.AddChain(c)
		case !c.Bound:
			if gone = append(gone, c.ID()); c.Hook != nil {
				rest = after
			}
		}
	}
	wrong := slices.DeleteFunc(slices.Clone(t.Chains), func(w nft.Chain) bool { return s.alike[w.Name] })
	for _, w := range wrong {
		if held, ok := s.held.chain(w.Name); ok && !held.Hook.Equal(w.Hook) {
			b.DelChain(held.ID())
		}
		b.AddChain(w.KernelChain(t))
	}
	for _, w := range wrong {
		for _, r := range w.Bytecode(t, sides) {
			b.AddRule(r)
		}
	}
	for _, chain := range gone {
		rest.FlushChain(chain)
	}
	for _, name := range slices.Sorted(maps.Keys(s.held.sets)) {
		if !slices.Contains(used, name) {
			rest.DelSet(t.Family, t.Name, name)
		}
	}
	for _, chain := range gone {
		rest.DelChain(chain)
	}
	for _, x := range s.held.objects {
		if !slices.Contains(t.Counters, x.Name) {
			rest.DelObject(x)
		}
	}
}

// Replace implements [layout.Replacer]: other programs' maps, objects and chains in our
// table may refer to what has to go, and flags of the table cannot be changed. Packets of
// that moment may find the new sets empty.
func (s *State) Replace(commit layout.Commit) error {
	b := &nfnetlink.Batch{}
	if s.held.exists {
		b.DelTable(s.want.Family, s.want.Name)
	}
	if s.held.hasStatements() {
		// An element that counts connections makes the kernel turn off connection tracking, which
		// only the first chain of type nat turns on: when the old one is destroyed.
		if err := commit(b); err != nil {
			return err
		}
		return s.conn.Settle()
	}
	all := State{want: s.want, held: newTable(), right: map[string]nfnetlink.Set{}}
	all.create(b)
	for _, w := range s.want.Sets {
		all.addElements(b, w, 0, w.Len())
	}
	all.write(b, b)
	if err := commit(b); err != nil {
		return err
	}
	all.record(s.want.Sets, b.Handles)
	s.held.Handle, s.right = all.held.Handle, all.right
	return nil
}

// Counters reads the number of connections by verdict; nothing if there are no rules.
func Counters(c *nfnetlink.Conn) ([]nft.Counts, error) {
	objects, err := c.Objects(nfnetlink.Inet, nft.TableName)
	if err != nil {
		if nfnetlink.IsNotExist(err) {
			return nil, nil
		}
		return nil, err
	}
	var out []nft.Counts
	for _, o := range objects {
		for _, f := range []nft.FamilyPolicy{{}, {IPv6: true}} {
			for _, v := range []nft.Verdict{nft.Local, nft.Exempt, nft.Masqueraded, nft.Invalid} {
				if o.Name == string(v)+f.Suffix() {
					out = append(out, nft.Counts{IPv6: f.IPv6, Verdict: v, Packets: o.Packets})
				}
			}
		}
	}
	return out, nil
}
