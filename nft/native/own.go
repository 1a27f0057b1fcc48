package native

import (
	"bytes"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/rule"
)

// An Own is the table of mode nftables as read from the kernel.
type Own struct {
	nfnetlink.Table
	chains     []nfnetlink.Chain
	rules      map[string][]nfnetlink.Rule // by chain
	flooded    bool                        // it has many more rules than any config needs
	Sets       map[string]*heldSet         // by name in the kernel
	objects    []nfnetlink.Object
	flowtables []nfnetlink.Flowtable
}

// A heldSet is a set in the kernel. It was read, or is trusted to hold what is
// wanted because it was ours and nothing speaks against it, or is known only
// by its count, which is wrong.
type heldSet struct {
	nfnetlink.Set
	Holds    []iprange.Range
	Mappings []nfnetlink.Mapping // of a map, by their keys
	Read     bool
	Trusted  bool
	// Conditional counts the elements that do more than match.
	Conditional int
	// Counting means that the set or an element has a limit of connections.
	Counting bool
	// AtLeast is how many CIDRs had been read when reading stopped because there
	// are many more than wanted.
	AtLeast int
}

// slack is the number of unexpected rules, or elements of a set, that are read
// and listed. Their number alone is reported beyond that, because other programs
// can add more than fits our memory.
const slack = 5_000

// readElements reads the elements of the set, up to a number of CIDRs.
func (h *heldSet) readElements(c *nfnetlink.Conn, most int) error {
	if h.Counted && int(h.Count) > most {
		return nil
	}
	switch {
	case h.Flags&unix.NFT_SET_MAP != 0:
		return h.readMap(c, most)
	case h.Flags&unix.NFT_SET_EVAL != 0:
		return h.readPairs(c)
	}
	held, err := c.Contents(h.Set, most)
	switch {
	case err != nil:
		return err
	case held.More:
		h.AtLeast = most
	default:
		h.Holds, h.Conditional, h.Read, h.Counting = held.Ranges, held.Conditional, true, h.Counting || held.ConnLimit
	}
	return nil
}

// readPairs reads a set to which rules add pairs of an address and itself.
func (h *heldSet) readPairs(c *nfnetlink.Conn) error {
	elements, _, err := c.MapElements(h.Family, h.Table, h.Name, nft.LearnedSize)
	if err != nil {
		return err
	}
	h.Read = true
	for _, e := range elements {
		if half := len(e.Key) / 2; e.Limited || !bytes.Equal(e.Key[:half], e.Key[half:]) {
			h.Conditional++
		}
	}
	return nil
}

// readMap reads a map of addresses.
func (h *heldSet) readMap(c *nfnetlink.Conn, most int) error {
	elements, more, err := c.MapElements(h.Family, h.Table, h.Name, most)
	if err != nil {
		return err
	}
	if more {
		h.AtLeast = most
		return nil
	}
	h.Read = true
	for _, e := range elements {
		h.Counting = h.Counting || e.ConnLimit
		key, isKey := netip.AddrFromSlice(e.Key)
		value, isValue := netip.AddrFromSlice(e.Value)
		if e.Conditional || !isKey || !isValue {
			h.Conditional++
			continue
		}
		h.Mappings = append(h.Mappings, nfnetlink.Mapping{Key: key, Value: value})
	}
	slices.SortFunc(h.Mappings, func(a, b nfnetlink.Mapping) int { return a.Key.Compare(b.Key) })
	return nil
}

// ReadOwn reads our table without the elements of its sets. It returns nil if the
// table does not exist.
func ReadOwn(c *nfnetlink.Conn) (*Own, error) {
	t, err := c.Table(nfnetlink.Inet, nft.TableName)
	if nfnetlink.IsNotExist(err) {
		return nil, nil //nolint:nilnil // no table is a valid result
	}
	if err != nil {
		return nil, fmt.Errorf("read table: %w", err)
	}
	own := &Own{Table: t, rules: map[string][]nfnetlink.Rule{}, Sets: map[string]*heldSet{}}
	chains, err := c.Chains(nfnetlink.Inet)
	if err != nil {
		return nil, err
	}
	for _, ch := range chains {
		if ch.Table == nft.TableName {
			own.chains = append(own.chains, ch)
		}
	}
	rules, more, err := c.FirstRules(nfnetlink.Inet, nft.TableName, "", moreThan(slack))
	if err != nil {
		return nil, err
	}
	own.flooded = more
	for _, r := range rules {
		own.rules[r.Chain] = append(own.rules[r.Chain], r)
	}
	sets, err := c.Sets(nfnetlink.Inet, nft.TableName)
	if err != nil {
		return nil, err
	}
	for _, s := range sets {
		own.Sets[s.Name] = &heldSet{Set: s, Counting: s.ConnLimit}
	}
	if own.objects, err = c.Objects(nfnetlink.Inet, nft.TableName); err != nil {
		return nil, err
	}
	own.flowtables, err = c.Flowtables(nfnetlink.Inet, nft.TableName)
	return own, err
}

// moreThan returns a function that returns false the first n times.
func moreThan(n int) func(nfnetlink.Rule) bool {
	return func(nfnetlink.Rule) bool {
		n--
		return n < 0
	}
}

// unchanged reports whether a plan for what was read before is still right.
func (o *Own) unchanged(since *Own) bool {
	if o == nil || since == nil {
		return o == since
	}
	return o.Table == since.Table && o.flooded == since.flooded &&
		slices.EqualFunc(o.chains, since.chains, func(a, b nfnetlink.Chain) bool { return a.Handle == b.Handle }) &&
		maps.EqualFunc(o.rules, since.rules, nfnetlink.SameRules) &&
		maps.EqualFunc(o.Sets, since.Sets, func(a, b *heldSet) bool { return a.Handle == b.Handle }) &&
		slices.EqualFunc(o.objects, since.objects, func(a, b nfnetlink.Object) bool { return a.Name == b.Name && a.Type == b.Type }) &&
		slices.Equal(o.flowtables, since.flowtables)
}

// untracked reports whether the table has a set by which the kernel may have turned
// off connection tracking, and with it NAT, for the whole network namespace: each
// element with a limit of connections ("ct count") releases one user of it too many
// (seen on Linux 6.18). A repair in place would leave it off: only when none of our
// rules is left does the number of users agree again.
func (o *Own) untracked() bool {
	if o == nil {
		return false
	}
	for _, s := range o.Sets {
		if s.Counting {
			return true
		}
	}
	return false
}

func (o *Own) chain(name string) (nfnetlink.Chain, bool) {
	i := slices.IndexFunc(o.chains, func(c nfnetlink.Chain) bool { return c.Name == name })
	if i < 0 {
		return nfnetlink.Chain{}, false
	}
	return o.chains[i], true
}

// live returns the name in the kernel of each wanted set: the one that the rules
// refer to. If both exist, it is the one with the right elements.
func (o *Own) live(want nft.Table) nft.Sides {
	referred := map[string]bool{}
	for _, c := range want.Chains {
		for _, r := range o.rules[c.Name] {
			for _, name := range rule.Sets(r) {
				referred[name] = true
			}
		}
	}
	s := nft.Sides{}
	for _, w := range want.Sets {
		best := -1
		for _, side := range []string{nft.SideA, nft.SideB} {
			held, ok := o.Sets[w.Name+side]
			if !ok || !sameSet(held.Set, w.KernelSet(want, held.Name)) {
				continue
			}
			score := 0
			if referred[held.Name] {
				score += 2
			}
			if held.equals(w) {
				score++
			}
			if score > best {
				best, s[w.Name] = score, held.Name
			}
		}
	}
	return s
}

// equals reports whether the set is known to have exactly the wanted elements.
func (h *heldSet) equals(w nft.Set) bool {
	return h.Trusted || h.Read && h.Conditional == 0 && len(h.compare(w)) == 0
}

// compareMap is like compare, for a map.
func (h *heldSet) compareMap(want []nfnetlink.Mapping) []string {
	const few = 10
	var diffs []string
	held := make(map[netip.Addr]netip.Addr, len(h.Mappings))
	for _, m := range h.Mappings {
		held[m.Key] = m.Value
	}
	for _, w := range want {
		switch value, ok := held[w.Key]; {
		case !ok:
			diffs = append(diffs, fmt.Sprintf("map %s lacks %s : %s", h.Name, w.Key, w.Value))
		case value != w.Value:
			diffs = append(diffs, fmt.Sprintf("map %s has %s : %s instead of %s", h.Name, w.Key, value, w.Value))
		}
		delete(held, w.Key)
	}
	for _, m := range h.Mappings {
		if _, left := held[m.Key]; left {
			diffs = append(diffs, fmt.Sprintf("map %s has %s : %s, which is not in the config", h.Name, m.Key, m.Value))
		}
	}
	if len(diffs) > few {
		return append(diffs[:few], fmt.Sprintf("map %s: %d more elements are wrong", h.Name, len(diffs)-few))
	}
	return diffs
}

// compare describes the first few missing and unexpected prefixes of the set.
func (h *heldSet) compare(w nft.Set) []string {
	switch {
	case w.Learned: // whatever it was, packets added it
		return nil
	case w.Mappings != nil:
		return h.compareMap(w.Mappings)
	}
	const few = 10
	var diffs []string
	prefixes := w.Prefixes
	i, j := 0, 0
	for i < len(prefixes) || j < len(h.Holds) {
		switch {
		case len(diffs) == few:
			return append(diffs, fmt.Sprintf("set %s has more differences: %d CIDRs instead of %d", h.Name, len(h.Holds), len(prefixes)))
		case j == len(h.Holds) || i < len(prefixes) && prefixes[i].Addr().Less(h.Holds[j].From):
			diffs = append(diffs, fmt.Sprintf("set %s lacks %s", h.Name, prefixes[i]))
			i++
		case i == len(prefixes) || h.Holds[j].From.Less(prefixes[i].Addr()):
			diffs = append(diffs, fmt.Sprintf("set %s contains %s, which is not in the config", h.Name, h.Holds[j]))
			j++
		default:
			if h.Holds[j] != iprange.Of(prefixes[i]) {
				diffs = append(diffs, fmt.Sprintf("set %s contains %s instead of %s", h.Name, h.Holds[j], prefixes[i]))
			}
			i++
			j++
		}
	}
	return diffs
}

// Differences describes how the kernel's table, nil if it does not exist, differs
// from the wanted one.
func (o *Own) Differences(want nft.Table) []string {
	if o == nil {
		return []string{fmt.Sprintf("table %s %s is missing", want.Family, want.Name)}
	}
	var diffs []string
	if o.Dormant() {
		diffs = append(diffs, fmt.Sprintf("table %s %s is dormant", want.Family, want.Name))
	}
	if o.Owned() {
		diffs = append(diffs, fmt.Sprintf("table %s %s has the flag owner or persist", want.Family, want.Name))
	}
	live := o.live(want)
	diffs = append(diffs, o.chainDifferences(want, live)...)
	diffs = append(diffs, o.setDifferences(want, live)...)
	return append(diffs, o.objectDifferences(want)...)
}

func (o *Own) chainDifferences(want nft.Table, live nft.Sides) []string {
	var diffs []string
	wanted := map[string]bool{}
	for _, w := range want.Chains {
		wanted[w.Name] = true
		got, ok := o.chain(w.Name)
		switch {
		case !ok:
			diffs = append(diffs, fmt.Sprintf("chain %s is missing", w.Name))
			continue
		case !got.Hook.Equal(w.Hook):
			diffs = append(diffs, fmt.Sprintf("chain %s has %s, not %s", w.Name, got.Hook, w.Hook))
		case got.Hook != nil && got.Policy != nfnetlink.Accept:
			diffs = append(diffs, fmt.Sprintf("chain %s has another policy than accept", w.Name))
		}
		diffs = append(diffs, w.Differences("chain "+w.Name, want, live, o.rules[w.Name])...)
	}
	if o.flooded {
		diffs = append(diffs, fmt.Sprintf("table %s %s has more than %d rules", want.Family, want.Name, slack))
	}
	for _, c := range o.chains {
		if !wanted[c.Name] {
			diffs = append(diffs, fmt.Sprintf("chain %s is not in the config", nfnetlink.Printable(c.Name)))
		}
	}
	return diffs
}

func (o *Own) setDifferences(want nft.Table, live nft.Sides) []string {
	var diffs []string
	wanted := map[string]bool{}
	for _, w := range want.Sets {
		name, ok := live[w.Name]
		if !ok {
			diffs = append(diffs, fmt.Sprintf("set %s is missing", w.Name))
			continue
		}
		wanted[name] = true
		switch held := o.Sets[name]; {
		case held.Read && w.Learned:
			if held.Conditional > 0 {
				diffs = append(diffs, fmt.Sprintf("set %s: %d elements are not pairs of an address and itself", name, held.Conditional))
			}
		case held.Read:
			diffs = append(diffs, held.compare(w)...)
			if held.Conditional > 0 {
				diffs = append(diffs, fmt.Sprintf("set %s: %d elements have a limit, a timeout or another condition", name, held.Conditional))
			}
		case held.AtLeast > 0:
			diffs = append(diffs, fmt.Sprintf("set %s has more than %d CIDRs instead of %d", name, held.AtLeast, w.Len()))
		case !held.Trusted:
			diffs = append(diffs, fmt.Sprintf("set %s has %d CIDRs instead of %d", name, held.Count, w.Len()))
		}
	}
	for _, name := range sortedKeys(o.Sets) {
		if !wanted[name] {
			diffs = append(diffs, fmt.Sprintf("set %s is not in the config", nfnetlink.Printable(name)))
		}
	}
	return diffs
}

func (o *Own) objectDifferences(want nft.Table) []string {
	var diffs []string
	lacking := slices.Clone(want.Counters)
	for _, x := range o.objects {
		at := slices.Index(lacking, x.Name)
		if x.Type != unix.NFT_OBJECT_COUNTER || at < 0 {
			diffs = append(diffs, fmt.Sprintf("object %s is not in the config", nfnetlink.Printable(x.Name)))
			continue
		}
		lacking = slices.Delete(lacking, at, at+1)
	}
	if len(lacking) > 0 {
		diffs = append(diffs, "counters are missing: "+strings.Join(lacking, ", "))
	}
	for _, f := range o.flowtables {
		diffs = append(diffs, fmt.Sprintf("flowtable %s is not in the config", nfnetlink.Printable(f.Name)))
	}
	return diffs
}

// sameSet compares the declarations of sets, without their elements.
func sameSet(a, b nfnetlink.Set) bool {
	const comment = byte(userdata.NFTNL_UDATA_SET_COMMENT)
	return a.Flags == b.Flags && a.KeyType == b.KeyType && a.KeyLen == b.KeyLen &&
		a.DataType == b.DataType && a.DataLen == b.DataLen && a.Size == b.Size && slices.Equal(a.Special, b.Special) &&
		rule.UserData(a.UserData, comment) == rule.UserData(b.UserData, comment)
}
