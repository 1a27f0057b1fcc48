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
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/rule"
)

// A State is our table as the kernel has it, and the wanted one. It implements
// [layout.State] and [layout.Recreator].
type State struct {
	conn *nfnetlink.Conn
	want *nft.Table // nil: none
	last bool       // another mode is wanted, whose rules come first
	held *table
}

// Read reads our table. With a state that was read before, it does not read the elements
// of sets again that are still the same ones.
func Read(c *nfnetlink.Conn, want nft.Ruleset, _ layout.Depth, before layout.State) (layout.State, error) {
	s := &State{conn: c, last: want.Mode() != "" && want.Mode() != nft.ModeNFTables}
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
	if s.held, err = readTable(c, most); err != nil || s.want == nil {
		return s, err
	}
	earlier, _ := before.(*State)
	for _, w := range s.want.Sets {
		for _, name := range []string{w.Name + nft.SideA, w.Name + nft.SideB} {
			held, ok := s.held.sets[name]
			if !ok || !sameDeclaration(held.Set, w.KernelSet(*s.want, name)) {
				continue
			}
			if held.content = earlier.content(s.held.Handle, held.Set); held.content != nil {
				continue
			}
			if held.content, err = compare(c, held.Set, w); err != nil {
				return nil, err
			}
		}
	}
	return s, nil
}

// content returns what is known about a set of a table; nil: nothing. Its number of elements
// is 0 before Linux 6.18, and after we have added some.
func (s *State) content(table uint64, set nfnetlink.Set) *content {
	if s == nil || s.held.Handle != table {
		return nil
	}
	held, ok := s.held.sets[set.Name]
	if ok && held.Handle == set.Handle && (held.Count == 0 || held.Count == set.Count) {
		return held.content
	}
	return nil
}

// Owns implements [layout.State].
func (s *State) Owns(c nfnetlink.Chain) bool {
	return c.Family == nfnetlink.Inet && c.Table == nft.TableName
}

// Installed implements [layout.State]. The comment of the last rule has the hash.
func (s *State) Installed() (found layout.Installed, ok bool) {
	rules := s.held.rules[BaseChain]
	found.Layout = Layout{}
	for _, r := range rules {
		if hash, is := strings.CutPrefix(rule.Comment(r), hashComment); is {
			found.Hash = hash
		}
	}
	return found, len(rules) > 0
}

// now returns the set of the kernel that is used for a wanted one, "" for none: the one
// that rules refer to, or else one with the right elements.
func (s *State) now(w nft.Set) (name string) {
	best := -1
	for _, side := range []string{nft.SideA, nft.SideB} {
		held, ok := s.held.sets[w.Name+side]
		if !ok || held.content == nil {
			continue
		}
		score := 0
		if s.held.refersTo(held.Name) {
			score += 2
		}
		if held.complete() {
			score++
		}
		if score > best {
			best, name = score, held.Name
		}
	}
	return name
}

// next returns the set that is to be used for a wanted one: the one that is, if it has the
// right elements, or else the other side.
func (s *State) next(w nft.Set) string {
	now := s.now(w)
	if held, ok := s.held.sets[now]; ok && held.complete() {
		return now
	}
	if _, taken := s.held.sets[w.Name+nft.SideA]; now == w.Name+nft.SideA || now == "" && taken {
		return w.Name + nft.SideB
	}
	return w.Name + nft.SideA
}

// Differences implements [layout.State].
func (s *State) Differences() []layout.Difference {
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
	s.chainDifferences(add)
	s.setDifferences(add)
	s.objectDifferences(add)
	return out
}

func (s *State) chainDifferences(add func(layout.Kind, string, ...any)) {
	live := nft.Sides{}
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
		for _, text := range w.Differences("chain "+w.Name, *s.want, live, s.held.rules[w.Name]) {
			add(layout.Drift, "%s", text)
		}
	}
	for _, c := range s.held.chains {
		if !wants(s.want, c.Name) {
			add(layout.Drift, "chain %s is not in the config", nfnetlink.Printable(c.Name))
		}
	}
}

func wants(t *nft.Table, chain string) bool {
	return slices.ContainsFunc(t.Chains, func(w nft.Chain) bool { return w.Name == chain })
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
		held := s.held.sets[name]
		for _, text := range held.diffs {
			add(layout.Drift, "%s", text)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(s.held.sets)) {
		kind := layout.Drift
		if !likeOurs(s.held.sets[name].Set) {
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
// Switch then changes the rules and deletes the old sets (maps a transaction later). Only
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

// Stage implements [layout.State]: it fills the sets that are to be used. A set that
// has the right elements already, or the first of them, from an earlier attempt, is used.
func (s *State) Stage(ctx context.Context, commit layout.Commit) error {
	if s.want == nil {
		return nil
	}
	err := s.fill(ctx, commit, largeBatch)
	if errors.Is(err, unix.EMSGSIZE) { // the send buffer is small, and nothing was sent
		err = s.fill(ctx, commit, smallBatch)
	}
	if err != nil {
		return fmt.Errorf("fill sets: %w", err)
	}
	return nil
}

// A filling is a set that is being filled.
type filling struct {
	*set
	want  nft.Set
	added int // elements of the transaction under construction
}

// fill fills sets in transactions of at most so many elements.
func (s *State) fill(ctx context.Context, commit layout.Commit, most int) error {
	b := &nfnetlink.Batch{}
	sets := s.create(b)
	send := func() error {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := commit(b); err != nil {
			return err
		}
		for _, f := range sets {
			s.record(f, b)
		}
		b = &nfnetlink.Batch{}
		return nil
	}
	total := 0
	for _, f := range sets {
		total += f.want.Len() - f.exactly
	}
	most = min(max((total+fillShare-1)/fillShare, smallBatch), most)
	for _, f := range sets {
		for at := f.exactly; at < f.want.Len(); at += most {
			to := min(at+most, f.want.Len())
			if b.Elements > 0 && b.Elements+to-at > most {
				if err := send(); err != nil {
					return err
				}
			}
			if f.want.Mappings != nil {
				b.AddMappings(s.want.Family, s.want.Name, f.Name, f.want.Mappings[at:to])
			} else {
				b.AddElements(s.want.Family, s.want.Name, f.Name, f.want.Prefixes[at:to])
			}
			f.added += to - at
		}
	}
	return send()
}

// create adds the table, the counters, the sets and the chains to which maps refer, if
// they are missing, and returns the sets that are to be filled.
func (s *State) create(b *nfnetlink.Batch) (fill []*filling) {
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
	for _, w := range s.want.Sets {
		name := s.next(w)
		held, exists := s.held.sets[name]
		switch {
		case exists && held.complete():
			continue
		case exists && held.content != nil && held.exactly > 0:
		default:
			if exists {
				b.DelSet(s.want.Family, s.want.Name, name)
			}
			held = &set{w.KernelSet(*s.want, name), &content{diffs: []string{"is being filled"}}}
			b.AddSet(held.Set)
		}
		fill = append(fill, &filling{set: held, want: w})
	}
	return fill
}

// record records that a transaction was committed.
func (s *State) record(f *filling, b *nfnetlink.Batch) {
	if handle, created := b.Handles[f.Name]; created {
		f.Handle = handle
	}
	f.exactly, f.added, f.Count = f.exactly+f.added, 0, 0
	if f.exactly == f.want.Len() {
		f.diffs = nil
	}
	s.held.exists, s.held.sets[f.Name] = true, f.set
}

// Switch implements [layout.State]. If another mode is wanted, our table is
// deleted in a later transaction: otherwise a packet that has passed the still
// empty iptables chain could reach our own chain when it is empty already,
// because each base chain determines separately which rules are current. Until
// then both modes apply, with the old verdict or the new one. In the other
// direction, a packet reaches the chain that is emptied first, and sees both or
// one, never neither.
func (s *State) Switch(now, after *nfnetlink.Batch) {
	switch {
	case s.want != nil:
		s.write(now, after)
	case !s.held.exists:
	case s.last:
		after.DelTable(s.held.Family, s.held.Name)
	default:
		now.DelTable(s.held.Family, s.held.Name)
	}
}

// write replaces all rules, and deletes what the wanted table does not have. Anonymous
// sets and chains go with their rules. A map that the old rules refer to goes in a later
// transaction, and the chains that it refers to: the kernel makes the elements of a deleted
// map inactive, which a packet on its way through the old rules would miss, so that the
// next rule would apply.
func (s *State) write(b, after *nfnetlink.Batch) {
	t, sides := *s.want, nft.Sides{}
	for _, w := range t.Sets {
		sides[w.Name] = s.next(w)
	}
	b.FlushChain(t.Family, t.Name, "")
	for _, w := range t.Chains {
		if held, ok := s.held.chain(w.Name); ok && !held.Hook.Equal(w.Hook) {
			b.DelChain(t.Family, t.Name, w.Name)
		}
		b.AddChain(w.KernelChain(t))
	}
	for _, w := range t.Chains {
		for _, r := range w.Bytecode(t, sides) {
			b.AddRule(r)
		}
	}
	used := slices.Collect(maps.Values(sides))
	for _, name := range slices.Sorted(maps.Keys(s.held.sets)) {
		switch {
		case slices.Contains(used, name):
		case s.held.sets[name].Flags&unix.NFT_SET_MAP != 0 && s.held.refersTo(name):
			after.DelSet(t.Family, t.Name, name)
		default:
			b.DelSet(t.Family, t.Name, name)
		}
	}
	for _, c := range s.held.chains {
		if !c.Bound && !wants(s.want, c.Name) {
			after.DelChain(t.Family, t.Name, c.Name)
		}
	}
	for _, x := range s.held.objects {
		if !slices.Contains(t.Counters, x.Name) {
			b.DelObject(x)
		}
	}
}

// Recreate implements [layout.Recreator]: other programs' maps, objects and chains in our
// table may refer to what has to go, and flags of the table cannot be changed. The table
// is deleted only after a rehearsal shows that the kernel accepts the new one.
func (s *State) Recreate(commit layout.Commit) error {
	t := *s.want
	t.Sets = slices.Clone(t.Sets)
	for i := range t.Sets {
		t.Sets[i].Prefixes, t.Sets[i].Mappings = nil, t.Sets[i].Mappings[:0]
	}
	again := State{want: &t, held: newTable()}
	rehearsal := &nfnetlink.Batch{}
	rehearsal.DelTable(t.Family, t.Name)
	again.create(rehearsal)
	again.write(rehearsal, rehearsal)
	rehearsal.Refuse(t.Family, t.Name)
	var refused *nfnetlink.RefusedError
	if err := commit(rehearsal); !errors.As(err, &refused) || !refused.Last {
		return err
	}
	b := &nfnetlink.Batch{}
	b.DelTable(t.Family, t.Name)
	if err := commit(b); err != nil {
		return err
	}
	return s.conn.Settle()
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
