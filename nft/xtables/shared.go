package xtables

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"

	"github.com/google/nftables/userdata"

	"nft-masq-agent/config"
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

// A Trust holds the marks of chains that need not be read while these are the same.
type Trust map[string]Mark

// Marks returns the marks of the chains that were read or trusted.
func (n *Shared) Marks() Trust {
	t := Trust{}
	for name, c := range n.heads {
		t[name] = n.mark(c)
	}
	return t
}

// MarksOf reads the heads of the chains that Ensure has made right.
func (n *Shared) MarksOf(c nfnetlink.Reader, chain string) Trust {
	t := Trust{}
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
	Trust  Trust
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

// An OwnChain is a chain of ours: its name, and the one of which its rules and its
// jump speak. After `iptables -E` these are two.
type OwnChain struct{ Name, Text string }

// Members gives the chain behind its further chains, which its rules name.
func (c OwnChain) Members() []string {
	names := WithSubchains(c.Text)
	names[len(names)-1] = c.Name
	return names
}

// String is for people.
func (c OwnChain) String() string {
	if c.Name == c.Text {
		return nfnetlink.Printable(c.Name)
	}
	return fmt.Sprintf("%s (renamed from %s)", nfnetlink.Printable(c.Name), nfnetlink.Printable(c.Text))
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
		return most < 0 || odd > Slack
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

// Slack is how many more rules than wanted are still read and named. Beyond, that there
// are more is difference enough: what others add can be larger than our memory.
const Slack = 5_000

// sameXT compares what a rule of the shared tables does; programs keep notes of
// their own in the user data.
func sameXT(a, b nfnetlink.Rule) bool { return nfnetlink.EqualExprs(a.Exprs, b.Exprs) }

// JumpsTo says whether the chain holds rules, and a jump as we make it leads there.
func (n *Shared) JumpsTo(chain string) bool {
	return len(n.chains[chain]) > 0 && slices.Contains(n.named, OwnChain{chain, chain})
}

// Foreign says whether the chain is somebody else's: it holds rules, and none
// that a masquerade agent wrote. All of them, whatever their version, say in
// their comments what is subject to MASQUERADE.
func (n *Shared) Foreign(chain string) bool {
	return len(n.chains[chain]) > 0 && !slices.ContainsFunc(n.chains[chain], ofAgent)
}

// Differences says in words how our part of the shared table is not the wanted
// one.
func (n *Shared) Differences(want nft.Table, chain string) []string {
	where := fmt.Sprintf("table %s nat", want.Family)
	var diffs []string
	if n.dormant {
		diffs = append(diffs, where+" is dormant")
	}
	if !n.present || n.post == nil {
		return append(diffs, where+" has no chain POSTROUTING")
	}
	if wrong := n.WrongHook(); wrong != "" {
		diffs = append(diffs, wrong)
	}
	jump := want.Chain(Postrouting).Bytecode(want, nil)[0]
	exact, others := n.jumps(chain, jump)
	if len(exact) == 0 {
		diffs = append(diffs, fmt.Sprintf("%s: POSTROUTING has no jump to %s", where, chain))
	}
	if extra := len(exact) + len(others) - 1; extra > 0 {
		diffs = append(diffs, fmt.Sprintf("%s: POSTROUTING has %d other jumps to %s", where, extra, chain))
	}
	for _, name := range WithSubchains(chain) {
		w := want.Chain(name)
		got, present := n.chains[name]
		switch {
		case !present && len(w.Rules) > 0:
			diffs = append(diffs, fmt.Sprintf("%s: chain %s is missing", where, name))
		case present && len(w.Rules) == 0 && len(got) == 0 && n.heldByOthers(name):
			// Empty it decides nothing, and the kernel does not let it go.
		case present && n.heads[name].Hook != nil:
			diffs = append(diffs, fmt.Sprintf("%s: chain %s has %s", where, name, n.heads[name].Hook))
		case present && len(w.Rules) == 0:
			diffs = append(diffs, fmt.Sprintf("%s: chain %s is not of the config", where, name))
		case n.trusted[name]:
		case n.flooded[name] && len(got) == 0: // of which only the head was read
			diffs = append(diffs, fmt.Sprintf("%s: chain %s was changed", where, name))
		case n.flooded[name]:
			diffs = append(diffs, fmt.Sprintf("%s: chain %s has more than %d rules", where, name, len(got)))
		case present:
			diffs = append(diffs, xtRuleDifferences(where+": chain "+name, w, want, got)...)
		}
	}
	return diffs
}

// Asleep says whether the table is dormant and has no POSTROUTING: the kernel
// refuses to wake a table and to make a base chain in it in one transaction.
func (n *Shared) Asleep() bool { return n.dormant && n.post == nil }

// WrongHook says that POSTROUTING has another hook than iptables gives it, "" where
// it has not.
func (n *Shared) WrongHook() string {
	if n.post == nil || n.post.Hook.Equal(PostroutingHook()) {
		return ""
	}
	return fmt.Sprintf("table %s nat: chain POSTROUTING has %s, not %s", n.Family, n.post.Hook, PostroutingHook())
}

func xtRuleDifferences(where string, want nft.Chain, t nft.Table, got []nfnetlink.Rule) []string {
	plain := make([]nfnetlink.Rule, len(got))
	for i, r := range got {
		r.UserData = nil
		plain[i] = r
	}
	return want.Differences(where, t, nil, plain)
}

// jumps gives the rules of POSTROUTING that go to the chain: those that are
// exactly ours, and variants of other agents and versions.
func (n *Shared) jumps(chain string, jump nfnetlink.Rule) (exact, others []nfnetlink.Rule) {
	for _, r := range n.rules {
		switch to, ok := rule.Target(r); {
		case !ok || to != chain:
		case sameXT(r, jump):
			exact = append(exact, r)
		default:
			others = append(others, r)
		}
	}
	return exact, others
}

// signature is left in the user data of each rule that we write into our chains. It
// tells them from chains of the same text that ip-masq-agent up to v2.0.0 writes.
// Neither iptables nor nft shows it, and what they write anew does not bear it.
var signature = userdata.AppendString(nil, signatureType, nft.TableName)

// signatureType is a type of user data that neither iptables nor nft knows.
const signatureType = 200

func signed(r nfnetlink.Rule) bool {
	return rule.UserData(r.UserData, signatureType) == nft.TableName
}

// signed reports whether we wrote rules of the chain. That all of them bear the
// signature is not asked for: somebody may have put one back.
func (n *Shared) signed(c OwnChain) bool {
	return slices.ContainsFunc(c.Members(), func(name string) bool { return slices.ContainsFunc(n.chains[name], signed) })
}

// Unsigned reports whether the chain was read and holds rules, none of which we wrote.
func (n *Shared) Unsigned(chain string) bool {
	return len(n.chains[chain]) > 0 && !n.signed(OwnChain{chain, chain})
}

// Ensure plans what brings our part of the shared table to the wanted one:
// rules that are right stay where they are with their counters, nothing of
// anybody else is touched.
func (n *Shared) Ensure(b *nfnetlink.Batch, want nft.Table, chain string) {
	if !n.present || n.dormant {
		b.AddTable(want.Family, NATTable)
	}
	// What was renamed still names the further chains.
	for _, c := range n.renamed(chain) {
		b.FlushChain(want.Family, NATTable, c.Name)
	}
	// Chains before the rules that name them, as withSubchains has them, and
	// ours before POSTROUTING, as iptables makes them.
	for _, name := range WithSubchains(chain) {
		n.unhook(b, name)
		if _, present := n.chains[name]; !present && len(want.Chain(name).Rules) > 0 {
			b.AddChain(nfnetlink.Chain{Family: want.Family, Table: NATTable, Name: name})
		}
	}
	if n.post == nil {
		b.AddChain(want.Chain(Postrouting).KernelChain(want))
	}
	for _, name := range slices.Backward(WithSubchains(chain)) {
		rules, got := want.Chain(name).Bytecode(want, nil), n.chains[name]
		switch {
		case n.trusted[name]:
			continue
		case n.flooded[name], n.hides(name, rules):
			b.FlushChain(want.Family, NATTable, name)
			got = nil
		}
		editRules(b, rules, got)
	}
	for _, name := range slices.Backward(WithSubchains(chain)) {
		if _, present := n.chains[name]; present && len(want.Chain(name).Rules) == 0 && !n.heldByOthers(name) {
			b.DelChain(want.Family, NATTable, name)
		}
	}
	n.ensureJump(b, want.Chain(Postrouting).Bytecode(want, nil)[0], chain)
}

// hides reports whether rules of a chain were not listed, because one before them is
// too large for the kernel to list: the last wanted one lacks, and more uses the chain
// than its rules and a jump.
func (n *Shared) hides(name string, want []nfnetlink.Rule) bool {
	got := n.chains[name]
	return len(want) > 0 && int(n.heads[name].Use) > len(got)+1 &&
		!slices.ContainsFunc(got, func(r nfnetlink.Rule) bool { return nfnetlink.EqualExprs(r.Exprs, want[len(want)-1].Exprs) })
}

// unhook deletes a base chain of the name of one of ours, to which nothing can jump.
func (n *Shared) unhook(b *nfnetlink.Batch, name string) {
	if n.heads[name].Hook == nil {
		return
	}
	b.FlushChain(n.Family, NATTable, name)
	b.DelChain(n.Family, NATTable, name)
	delete(n.chains, name)
	delete(n.heads, name)
}

// heldByOthers reports whether rules or maps of others refer to a further chain of
// ours. The kernel does not delete such a chain.
func (n *Shared) heldByOthers(name string) bool { return n.heldBeside(name, 0) }

// heldBeside does so for a chain to which as many rules of POSTROUTING lead that go.
func (n *Shared) heldBeside(name string, jumps int) bool {
	head, read := n.heads[name]
	switch {
	case !read || n.trusted[name]:
		return false
	case n.flooded[name]: // how many of what uses it are its own rules is not known
		return true
	}
	ours := len(n.chains[name]) + jumps
	for _, rules := range n.chains {
		for _, r := range rules {
			if to, _ := rule.Target(r); to == name {
				ours++
			}
		}
	}
	return int(head.Use) > ours
}

func (n *Shared) ensureJump(b *nfnetlink.Batch, jump nfnetlink.Rule, chain string) {
	exact, others := n.jumps(chain, jump)
	// The oldest was there first, wherever a copy was put.
	slices.SortFunc(exact, func(a, b nfnetlink.Rule) int { return cmp.Compare(a.Handle, b.Handle) })
	switch {
	case len(exact) > 0:
		others = append(others, exact[1:]...)
	case len(others) > 0:
		jump.Handle = others[0].Handle
		b.ReplaceRule(jump)
		others = others[1:]
	default:
		n.addJump(b, jump, chain)
	}
	for _, r := range others {
		b.DelRule(r.Family, r.Table, r.Chain, r.Handle)
	}
}

// addJump adds the jump, before the one to the chain that was ours until somebody
// renamed it.
func (n *Shared) addJump(b *nfnetlink.Batch, jump nfnetlink.Rule, chain string) {
	renamed := n.renamed(chain)
	i := slices.IndexFunc(n.rules, func(r nfnetlink.Rule) bool {
		c, ok := jumpOf(r)
		return ok && slices.Contains(renamed, c)
	})
	if i < 0 {
		b.AddRule(jump)
		return
	}
	b.InsertRule(jump, n.rules[i].Handle)
}

// editRules turns the rules of a chain into the wanted ones. The head and the
// tail that are right stay; of the rest, a rule that stays keeps what its
// counter has counted.
func editRules(b *nfnetlink.Batch, want, got []nfnetlink.Rule) {
	head := 0
	for head < len(want) && head < len(got) && sameXT(want[head], got[head]) {
		head++
	}
	tail := 0
	for tail < min(len(want), len(got))-head && sameXT(want[len(want)-1-tail], got[len(got)-1-tail]) {
		tail++
	}
	middle := got[head : len(got)-tail]
	counted := make(map[string][][]nfnetlink.Expr, len(middle))
	for _, r := range middle {
		key := nfnetlink.Key(r.Exprs)
		counted[key] = append(counted[key], r.Exprs)
	}
	for _, w := range want[head : len(want)-tail] {
		w.UserData = signature
		key := nfnetlink.Key(w.Exprs)
		if same := counted[key]; len(same) > 0 {
			w.Exprs, counted[key] = same[0], same[1:]
		}
		if tail > 0 {
			b.InsertRule(w, got[len(got)-tail].Handle)
		} else {
			b.AddRule(w)
		}
	}
	for _, r := range middle {
		b.DelRule(r.Family, r.Table, r.Chain, r.Handle)
	}
	if head+tail == len(want) && head+tail > 0 && !slices.ContainsFunc(got, signed) {
		last := got[len(got)-1]
		if tail == 0 {
			last = got[head-1]
		}
		last.UserData = signature
		b.ReplaceRule(last)
	}
}

// Remove plans the removal of chains of ours with their jumps, except the chains
// to be kept. Where they are the last of ours, what is then left of the table goes
// too if only we can have made it: a lone POSTROUTING without rules. Chains that rules or
// maps of others refer to stay, empty, as the kernel does not delete them; it returns
// their names.
func (n *Shared) Remove(b *nfnetlink.Batch, chains []OwnChain, kept []string, last bool) (held []string) {
	rest := len(n.rules) + n.unread
	jumps := map[string]int{}
	for _, c := range chains {
		for _, r := range n.rules {
			if to, ok := rule.Target(r); ok && to == c.Name && !slices.Contains(kept, to) {
				b.DelRule(r.Family, r.Table, r.Chain, r.Handle)
				jumps[to]++
				rest--
			}
		}
	}
	// First the rules, which name chains, then the chains.
	names := n.doomed(chains, kept)
	for _, name := range names {
		b.FlushChain(n.Family, NATTable, name)
	}
	for _, name := range names {
		if n.heldBeside(name, jumps[name]) {
			held = append(held, name)
		} else {
			b.DelChain(n.Family, NATTable, name)
		}
	}
	if last && rest == 0 && n.all-len(names) == 1 && n.post != nil && len(held) == 0 {
		b.DelTable(n.Family, NATTable)
	}
	return held
}

// doomed gives the chains that go with chains of ours.
func (n *Shared) doomed(chains []OwnChain, kept []string) []string {
	var names []string
	for _, c := range chains {
		for _, name := range c.Members() {
			if _, present := n.chains[name]; present && !slices.Contains(kept, name) && !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	return names
}

// jumpOf says to which chain a rule leads that is, to the byte, the jump that we
// make to a chain of the name of which it speaks. The kernel knows longer names
// than iptables takes, and than fit our comment.
func jumpOf(r nfnetlink.Rule) (OwnChain, bool) {
	to, ok := rule.Target(r)
	said, ours := SharedJumpSays(rule.Comment(r))
	if !ok || !ours || len(said) > MaxChainName {
		return OwnChain{}, false
	}
	return OwnChain{Name: to, Text: said}, slices.ContainsFunc(CommentPrefixes(said), func(prefix string) bool {
		return sameXT(r, SharedJump(r.Family, said, to, prefix))
	})
}

// Ours gives the chains of the table that are ours: we wrote them, and chain and jump
// are exactly what some config of this version yields, but for the name under which
// the chain stands.
func (n *Shared) Ours() []OwnChain { return n.oursWhere(n.signed) }

// Alike gives also those that an older agent wrote in the same words.
func (n *Shared) Alike() []OwnChain {
	return n.oursWhere(func(OwnChain) bool { return true })
}

// renamed gives those that were the chain until somebody renamed it.
func (n *Shared) renamed(chain string) []OwnChain {
	return n.oursWhere(func(c OwnChain) bool { return c.Text == chain && c.Name != chain && n.signed(c) })
}

func (n *Shared) oursWhere(wanted func(OwnChain) bool) []OwnChain {
	var found []OwnChain
	for _, c := range n.named {
		if !wanted(c) || slices.ContainsFunc(found, func(f OwnChain) bool { return f.Name == c.Name }) {
			continue
		}
		if _, err := n.Policy(c); err == nil {
			found = append(found, c)
		}
	}
	return found
}

// Leftovers gives the chains that are ours, or were until somebody changed them, and
// are not wanted.
func (n *Shared) Leftovers(chain string, wanted bool) []OwnChain {
	// Whether the wanted one is ours need not be looked at, rule by rule.
	chains := n.oursWhere(func(c OwnChain) bool { return (!wanted || c != OwnChain{chain, chain}) && n.signed(c) })
	named := func(c OwnChain) bool { return c.Name == chain }
	if _, present := n.chains[chain]; present && !wanted && !n.Unsigned(chain) && !slices.ContainsFunc(chains, named) {
		chains = append(chains, OwnChain{chain, chain})
	}
	return chains
}

var errNotOurs = errors.New("no config of this version yields these rules")

// Policy reads back the policy of a chain of ours; an error says that it is not
// exactly what this version would write.
func (n *Shared) Policy(c OwnChain) (nft.Policy, error) {
	p := n.Held(c)
	for _, prefix := range CommentPrefixes(c.Text) {
		if n.holds(c, SharedTable(p.Families[0], p, c.Text, prefix)) {
			return p, nil
		}
	}
	return nft.Policy{}, errNotOurs
}

func (n *Shared) holds(c OwnChain, want nft.Table) bool {
	members := c.Members()
	for i, name := range WithSubchains(c.Text) {
		if !slices.EqualFunc(want.Chain(name).Bytecode(want, nil), n.chains[members[i]], sameXT) {
			return false
		}
	}
	return true
}

// Held reads the policy of a chain, where the comment of a rule says what it is for;
// rules that are none of ours are left out.
func (n *Shared) Held(c OwnChain) nft.Policy {
	f := nft.FamilyPolicy{IPv6: n.Family == nfnetlink.IPv6}
	p := nft.Policy{}
	lists := map[string][]config.CIDR{} // by comment
	for _, name := range c.Members() {
		for _, r := range n.chains[name] {
			_, comment, _ := strings.Cut(rule.Comment(r), ": ")
			if comment == CommentMasq {
				p.AddMasquerade(r)
			} else {
				lists[comment] = append(lists[comment], config.CIDR{Prefix: prefixOf(r)})
			}
		}
	}
	for _, row := range config.Conditions() {
		if row.View != "" {
			f.Add(row, nft.NewList(lists[row.View]))
		}
	}
	p.Families = []nft.FamilyPolicy{f}
	return p
}

// Strange gives the rules of the chain, and the jumps to it, where we did not write
// them or no config of this version yields them: another agent wrote them.
func (n *Shared) Strange(chain string) (rules, jumps []nfnetlink.Rule) {
	if _, err := n.Policy(OwnChain{chain, chain}); err == nil && !n.Unsigned(chain) {
		return nil, nil
	}
	for _, r := range n.rules {
		if to, ok := rule.Target(r); ok && to == chain {
			jumps = append(jumps, r)
		}
	}
	return n.chains[chain], jumps
}

// prefixOf returns the prefix that a rule of mode iptables-nft matches. A rule that asks
// for none matches the prefix of length 0.
func prefixOf(r nfnetlink.Rule) netip.Prefix {
	p, ok := rule.Prefix(r)
	switch {
	case ok:
		return p
	case r.Family == nfnetlink.IPv6:
		return netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	}
	return netip.PrefixFrom(netip.IPv4Unspecified(), 0)
}
