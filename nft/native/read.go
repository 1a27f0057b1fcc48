package native

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
)

// A State is our table as the kernel has it, and the wanted one. It implements [nft.KernelState] and [nft.Replacer].
type State struct {
	conn      *nfnetlink.Conn
	want      *nft.Table // nil: none
	otherMode bool       // another mode is wanted: its rules come first, and our table goes after that
	table     *ourTable
	inUse     nft.Sides                // by the names of wanted sets: the kernel's set that is used for it, if it has one
	correct   map[string]nfnetlink.Set // by the names of wanted sets: the kernel's set with exactly the wanted elements

	filled    []nfnetlink.Set // the correct sets that were filled, and to which no rule refers yet
	unchanged bool            // the wanted rules are those of the last Apply, also where they were not read
	diffs     []string        // the differences of the elements
}

// Read reads our table, and the elements of its sets as far as the caller needs them:
//
//   - With the state of an earlier attempt, whose elements were compared and whose sets were filled, it reads no
//     elements, only whether these sets are still there.
//   - In a [nft.Frame], if the last Apply had the wanted policy, elements are taken to be as that left them, if the kernel
//     counts as many. So are the rules of chains to which only maps lead.
//   - Otherwise it reads the elements of sets if the policy in force is the wanted one: with another one, sets are filled
//     anew. Elements of maps are always read: they are few, changes seldom concern them, and the deletion of an old map
//     waits for packets.
//
// With an error, the state is not valid.
func Read(c *nfnetlink.Conn, want, lastApplied nft.Ruleset, depth nft.Depth, staged nft.KernelState) (
	nft.KernelState, error,
) {
	s := &State{
		conn: c, table: newTable(), otherMode: want.Mode() != "" && want.Mode() != nft.ModeNFTables,
		inUse: nft.Sides{}, correct: map[string]nfnetlink.Set{},
	}
	if want.Mode() == nft.ModeNFTables && len(want.Tables) > 0 {
		s.want = &want.Tables[0]
	}
	earlier, _ := staged.(*State)
	frame := depth == nft.Frame && want.SamePolicy(lastApplied)
	s.unchanged = frame && want.Same(lastApplied)
	if err := s.table.read(c); err != nil {
		return nil, err
	}
	if s.table.exists {
		if err := s.readRules(frame); err != nil {
			return nil, err
		}
	}
	if s.want == nil {
		return s, nil
	}
	for _, w := range s.want.Sets {
		if name := s.nameInUse(w); name != "" {
			s.inUse[w.Name] = name
		}
	}
	switch {
	case earlier != nil:
		s.keepSets(earlier)
		return s, nil
	case frame:
		return s, s.trustSets(lastApplied)
	default:
		return s, s.compareSets(want.Hash())
	}
}

// keepSets takes over the sets that an earlier attempt has compared or filled, if they are still there. Their handles
// tell, together with that of the table: handles begin again in another table.
func (s *State) keepSets(earlier *State) {
	for _, w := range s.want.Sets {
		known := earlier.correct[w.Name]
		if earlier.table.Handle == s.table.Handle && known.Handle != 0 && s.table.sets[known.Name].Handle == known.Handle {
			s.correct[w.Name] = known
			if slices.ContainsFunc(earlier.filled, func(f nfnetlink.Set) bool { return f.Name == known.Name }) {
				s.filled = append(s.filled, known)
			}
		} else {
			s.diffs = append(s.diffs, fmt.Sprintf("set %s is not filled", w.Name))
		}
	}
}

// trustSets takes a set to be correct if the last Apply left it with the elements that are wanted now, and the kernel
// counts as many. The policy is the same, but the addresses of the node can be others.
func (s *State) trustSets(lastApplied nft.Ruleset) error {
	for _, w := range s.want.Sets {
		name, ok := s.inUse[w.Name]
		if !ok {
			continue
		}
		set := s.table.sets[name]
		if !s.unchanged && !lastApplied.Tables[0].Set(w.Name).SameElements(w) {
			s.diffs = append(s.diffs, fmt.Sprintf("set %s has the addresses of before", name))
			continue
		}
		var diffs []string
		if !w.Learned && set.Counted && int(set.Count) != kernelCount(w) {
			var err error
			diffs, err = compare(s.conn, set, w)
			if err != nil {
				return err
			}
		}
		if len(diffs) == 0 {
			s.correct[w.Name] = set
		}
		s.diffs = append(s.diffs, diffs...)
	}
	return nil
}

// kernelCount returns how many elements of a set the kernel counts: half of its bounds, rounded down. An interval that
// reaches the last address has one bound instead of two, so that it does not count.
func kernelCount(w nft.Set) int {
	n := len(w.Prefixes)
	if n > 0 && !nfnetlink.PrefixRange(w.Prefixes[n-1]).Last.Next().IsValid() {
		return n - 1
	}
	return w.Len()
}

// compareSets reads and compares the elements of sets. If another policy is in force than the wanted one, which has this
// hash, it compares only maps, and their differences do not count: what differs is filled anew.
func (s *State) compareSets(hash string) error {
	installed, _ := s.Installed()
	other := installed.Hash != hash
	for _, w := range s.want.Sets {
		name, ok := s.inUse[w.Name]
		if !ok || other && w.Mappings == nil {
			continue
		}
		diffs, err := compare(s.conn, s.table.sets[name], w)
		if err != nil {
			return err
		}
		if len(diffs) == 0 {
			s.correct[w.Name] = s.table.sets[name]
		}
		if !other {
			s.diffs = append(s.diffs, diffs...)
		}
	}
	return nil
}

// Installed implements [nft.KernelState]. The comment of the last rule has the hash.
func (s *State) Installed() (found nft.Installed, ok bool) {
	base := s.table.chains[BaseChain]
	if base == nil || len(base.rules) == 0 {
		return found, false
	}
	found.Layout = Layout{}
	for _, r := range base.rules {
		if hash, match := strings.CutPrefix(r.Comment(), hashComment); match {
			found.Hash = hash
		}
	}
	return found, true
}

// wantedRuleRefersTo reports whether a rule of a wanted chain refers to a set of the kernel.
func (s *State) wantedRuleRefersTo(set string) bool {
	for _, c := range s.table.chains {
		if c.wanted && c.refersTo(set) {
			return true
		}
	}
	return false
}

// nameInUse returns the name of the kernel's set that is used for a wanted one, "" for none. It is that on side B only if
// there is none on side A, or a rule of a wanted chain refers to it.
func (s *State) nameInUse(w nft.Set) (name string) {
	for _, side := range []string{w.Name + nft.SideA, w.Name + nft.SideB} {
		existing, ok := s.table.sets[side]
		if ok && sameDeclaration(existing, w.KernelSet(*s.want, side)) && (name == "" || s.wantedRuleRefersTo(side)) {
			name = side
		}
	}
	return name
}

// nameToUse returns the name of the set that the new rules refer to: the correct one if there is one, otherwise the name
// that no rule uses, so that the set can be filled while the old one serves packets.
func (s *State) nameToUse(w nft.Set) string {
	if correct, ok := s.correct[w.Name]; ok {
		return correct.Name
	}
	current := s.nameInUse(w)
	if _, taken := s.table.sets[w.Name+nft.SideA]; current == w.Name+nft.SideA || current == "" && taken {
		return w.Name + nft.SideB
	}
	return w.Name + nft.SideA
}

// An ourTable is our table as the kernel has it.
type ourTable struct {
	nfnetlink.Table
	exists  bool
	chains  map[string]*ourChain
	flooded bool                     // it has so many rules that not all were read
	sets    map[string]nfnetlink.Set // by their names in the kernel
	objects []nfnetlink.Object
}

// An ourChain is a chain of our table. It holds no compiled rules, because there may be hundreds of chains at each check.
type ourChain struct {
	nfnetlink.Chain
	wanted bool // the wanted table has a chain of this name
	rules  []nfnetlink.Rule
	unread bool // its rules were not read
}

// slack is the number of unexpected rules, or elements of a set, that are read
// and listed. Their number alone is reported beyond that, because other programs
// can add more than fits our memory.
const slack = 5_000

func newTable() *ourTable { return &ourTable{sets: map[string]nfnetlink.Set{}} }

// read reads our table without rules and elements.
func (t *ourTable) read(c *nfnetlink.Conn) (err error) {
	t.Table, err = c.Table(nfnetlink.Inet, nft.TableName)
	if nfnetlink.IsNotExist(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read table: %w", err)
	}
	t.exists = true
	t.chains = make(map[string]*ourChain, t.Use)
	err = c.EachChain(nfnetlink.Inet, nft.TableName, func(ch nfnetlink.Chain) {
		t.chains[ch.Name] = &ourChain{Chain: ch}
	})
	if err != nil {
		return err
	}
	sets, err := c.Sets(nfnetlink.Inet, nft.TableName)
	if err != nil {
		return err
	}
	for _, set := range sets {
		if set.Flags&unix.NFT_SET_ANONYMOUS == 0 { // others go with their rule
			t.sets[set.Name] = set
		}
	}
	t.objects, err = c.Objects(nfnetlink.Inet, nft.TableName)
	return err
}

// unexpected describes what the table has that cannot be in the wanted one, and cannot be deleted without it.
func (t *ourTable) unexpected() (texts []string) {
	name := tableName()
	switch {
	case t.Dormant():
		texts = append(texts, name+" is dormant")
	case t.Flags != 0:
		texts = append(texts, name+" has the flag owner or persist")
	case t.hides():
		texts = append(texts, name+" has something that is not in the config, such as a flowtable")
	}
	for _, name := range slices.Sorted(maps.Keys(t.sets)) {
		if !likeOurs(t.sets[name]) {
			texts = append(texts, fmt.Sprintf("set %s is not in the config", nfnetlink.Quote(name)))
		}
	}
	for _, x := range t.objects {
		if x.Type != unix.NFT_OBJECT_COUNTER {
			texts = append(texts, fmt.Sprintf("object %s is not in the config", nfnetlink.Quote(x.Name)))
		}
	}
	return texts
}

// hides reports whether the kernel counts more than it lists.
func (t *ourTable) hides() bool { return int(t.Use) > len(t.chains)+len(t.sets)+len(t.objects) }

// onlyHides reports whether nothing else is unexpected than that.
func (t *ourTable) onlyHides() bool { return t.hides() && len(t.unexpected()) == 1 }

func tableName() string { return fmt.Sprintf("table %s %s", nfnetlink.Inet, nft.TableName) }

// readRules reads the rules that need it, in one list of the table if they are those of all chains. In a frame, those
// of chains that only maps lead to are not read, because these chains are many: unless their number is another one.
// With other addresses of the node they are written anew.
func (s *State) readRules(frame bool) error {
	limit := slack
	if s.want != nil {
		for _, w := range s.want.Chains {
			limit += len(w.Rules)
			if c := s.table.chains[w.Name]; c != nil {
				c.wanted = true
				c.unread = frame && w.Elements > 0 && (!s.unchanged || int(c.Use) == len(w.Rules)+w.Elements)
			}
		}
	}
	var chains []string
	for name, c := range s.table.chains {
		if !c.unread {
			chains = append(chains, name)
		}
	}
	if len(chains) == len(s.table.chains) {
		_, err := s.listRules("", limit)
		if !errors.Is(err, nfnetlink.ErrReadAgain) {
			return err
		}
		s.table.flooded = false
		for _, c := range s.table.chains {
			c.rules = nil
		}
	}
	// The list of one chain is right even if other programs commit meanwhile.
	slices.Sort(chains)
	for _, name := range chains {
		count, err := s.listRules(name, limit)
		if err != nil {
			return err
		}
		limit -= count
	}
	return nil
}

// listRules reads the rules of a chain, or of all if it is "", up to a number. It returns how many there are.
func (s *State) listRules(chain string, limit int) (count int, err error) {
	err = s.conn.EachRule(nfnetlink.Inet, nft.TableName, chain, func(r nfnetlink.Rule) error {
		if count == limit {
			s.table.flooded = true
			return nfnetlink.ErrEnough
		}
		count++
		if c := s.table.chains[r.Chain]; c != nil { // otherwise it is newer than the list of chains
			c.rules = append(c.rules, r)
		}
		return nil
	})
	return count, err
}

// refersTo reports whether a rule of the chain refers to a set.
func (c *ourChain) refersTo(set string) bool {
	return slices.ContainsFunc(c.rules, func(r nfnetlink.Rule) bool { return slices.Contains(r.Sets(), set) })
}

// anyRuleRefersTo reports whether a rule of any chain refers to a set.
func (t *ourTable) anyRuleRefersTo(set string) bool {
	for _, c := range t.chains {
		if c.refersTo(set) {
			return true
		}
	}
	return false
}

func (t *ourTable) hasStatements() bool {
	for _, s := range t.sets {
		if s.HasStatements() {
			return true
		}
	}
	return false
}

// likeOurs reports whether a set is of one of the kinds that we create. One of another
// kind may do more than match.
func likeOurs(s nfnetlink.Set) bool {
	switch s.Flags {
	case unix.NFT_SET_INTERVAL, unix.NFT_SET_EVAL | unix.NFT_SET_TIMEOUT:
	case unix.NFT_SET_MAP:
		return len(s.Special) == 0 && (s.DataType == s.KeyType || s.DataType == unix.NFT_DATA_VERDICT)
	default:
		return false
	}
	return len(s.Special) == 0
}

// sameDeclaration compares sets without their elements.
func sameDeclaration(a, b nfnetlink.Set) bool {
	const comment = byte(userdata.NFTNL_UDATA_SET_COMMENT)
	return a.Flags == b.Flags && a.KeyType == b.KeyType && a.KeyLen == b.KeyLen &&
		a.DataType == b.DataType && (a.DataLen == b.DataLen || a.DataType == unix.NFT_DATA_VERDICT) && a.Size == b.Size &&
		slices.Equal(a.Special, b.Special) &&
		nfnetlink.UserData(a.UserData, comment) == nfnetlink.UserData(b.UserData, comment)
}

// Counters reads the counters of our table: the number of connections by verdict; none if there is no table.
func Counters(c *nfnetlink.Conn) (counts []nft.Counts, err error) {
	objects, err := c.Objects(nfnetlink.Inet, nft.TableName)
	if nfnetlink.IsNotExist(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	for _, o := range objects {
		for _, f := range []nft.FamilyPolicy{{}, {IPv6: true}} {
			for _, v := range []nft.Verdict{nft.Local, nft.Exempt, nft.Masqueraded, nft.Invalid} {
				if o.Name == string(v)+f.Suffix() {
					counts = append(counts, nft.Counts{IPv6: f.IPv6, Verdict: v, Packets: o.Packets})
				}
			}
		}
	}
	return counts, nil
}
