package foreign

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/facts"
	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/older"
)

// A Snapshot is the rules that [Read] found.
type Snapshot struct {
	// Generation is that of the ruleset when reading began.
	Generation uint32
	Chains     []Chain
	sets       map[id][]iprange.Range // of addresses, that rules refer to
	maps       map[id]mapping         // that rules refer to
	// Unread counts rules that were not read, because there are too many. Their
	// effect is unknown.
	Unread int
}

// Bounds of what is read. A rule usually takes about a kilobyte, one of the 128
// expressions that the kernel allows ten and more.
const (
	maxRules  = 60_000
	maxMemory = 60 << 20
)

// A Chain is a chain with its rules. Those of our own chains are read only for a trace.
type Chain struct {
	nfnetlink.Chain
	Rules []nfnetlink.Rule
	Own   bool
	// Unread means that its rules were not read, because there are too many.
	Unread bool
}

// An id names a chain or a set.
type id struct {
	family      nfnetlink.Family
	table, name string
}

func chainID(c nfnetlink.Chain) id { return id{c.Family, c.Table, c.Name} }

// byID returns the chains of the snapshot by their names.
func (s Snapshot) byID() map[id]*Chain {
	chains := make(map[id]*Chain, len(s.Chains))
	for i := range s.Chains {
		chains[chainID(s.Chains[i].Chain)] = &s.Chains[i]
	}
	return chains
}

// EachRule returns what reads the rules of a chain, from the kernel if they are not in the
// snapshot.
func (s Snapshot) EachRule(c *nfnetlink.Conn) older.EachRule {
	chains := s.byID()
	return func(family nfnetlink.Family, table, chain string, do func(nfnetlink.Rule) error) error {
		read := chains[id{family, table, chain}]
		if read == nil || read.Unread {
			return c.EachRule(family, table, chain, do)
		}
		for _, r := range read.Rules {
			if err := do(r); err != nil {
				return err
			}
		}
		return nil
	}
}

// Read reads the postrouting chains of the families ip, ip6 and inet, those before
// connection tracking, and the chains reachable from them; of forwarding only base chains
// that drop by policy. own reports which chains are ours.
//
// If the ruleset changes meanwhile, it reads again, up to three times, and then
// returns what it has; Generation is then out of date. It fails with
// [nfnetlink.ErrInterrupted] if every attempt was interrupted, and when ctx ends.
func Read(ctx context.Context, c *nfnetlink.Conn, own func(nfnetlink.Chain) bool) (Snapshot, error) {
	return read(reader{ctx: ctx, conn: c, own: own, reads: func(c nfnetlink.Chain) bool {
		switch h := c.Hook; h.Number {
		case unix.NF_INET_POST_ROUTING:
			return true
		case unix.NF_INET_PRE_ROUTING:
			return h.Priority < conntrackPriority
		case unix.NF_INET_FORWARD:
			return c.Policy == drop
		}
		return false
	}})
}

func read(template reader) (Snapshot, error) {
	var torn Snapshot
	for range 3 {
		r := template
		r.seen, r.unreadSets = map[id]bool{}, map[id]nfnetlink.Set{}
		r.sets, r.maps = map[id][]iprange.Range{}, map[id]mapping{}
		err := r.read()
		if errors.Is(err, nfnetlink.ErrInterrupted) {
			continue
		}
		if err != nil {
			return Snapshot{}, fmt.Errorf("read postrouting chains: %w", err)
		}
		after, err := r.conn.Generation()
		if err != nil {
			return Snapshot{}, err
		}
		if after == r.Generation {
			return r.Snapshot, nil
		}
		torn = r.Snapshot
	}
	if torn.Generation == 0 {
		return Snapshot{}, fmt.Errorf("read postrouting chains: %w", nfnetlink.ErrInterrupted)
	}
	return torn, nil
}

type reader struct {
	Snapshot
	ctx        context.Context
	conn       *nfnetlink.Conn
	reads      func(nfnetlink.Chain) bool // of the base chains
	tracing    bool                       // for a trace
	own        func(nfnetlink.Chain) bool
	listed     []nfnetlink.Chain
	seen       map[id]bool // the chains that are in Chains
	unreadSets map[id]nfnetlink.Set
	rules      int // the number of rules read
	memory     int // that they take, in bytes
	elements   int // in sets and maps
}

func (r *reader) read() (err error) {
	if r.Generation, err = r.conn.Generation(); err != nil {
		return err
	}
	types := []string{"nat", "filter", "route"} // in this order, in case there are too many rules
	families := []nfnetlink.Family{nfnetlink.IPv4, nfnetlink.IPv6, nfnetlink.Inet}
	dormant := map[id]bool{}
	for _, family := range families {
		tables, err := r.conn.Tables(family)
		if err != nil {
			return err
		}
		for _, t := range tables {
			dormant[id{family, t.Name, ""}] = t.Dormant()
			sets, err := r.conn.Sets(family, t.Name)
			if err != nil && !nfnetlink.IsNotExist(err) {
				return err
			}
			for _, s := range sets {
				r.unreadSets[id{family, t.Name, s.Name}] = s
			}
		}
		chains, err := r.conn.Chains(family)
		if err != nil {
			return err
		}
		r.listed = append(r.listed, chains...)
	}
	var bases []nfnetlink.Chain
	for _, c := range r.listed {
		if c.Hook != nil && r.reads(c) && slices.Contains(types, c.Hook.Type) && !dormant[id{c.Family, c.Table, ""}] {
			bases = append(bases, c)
		}
	}
	slices.SortStableFunc(bases, func(a, b nfnetlink.Chain) int {
		byType := cmp.Compare(slices.Index(types, a.Hook.Type), slices.Index(types, b.Hook.Type))
		byFamily := cmp.Compare(slices.Index(families, a.Family), slices.Index(families, b.Family))
		return cmp.Or(byType, byFamily, cmp.Compare(a.Hook.Priority, b.Hook.Priority))
	})
	for _, c := range bases {
		if err := r.follow(c); err != nil {
			return err
		}
	}
	return r.ctx.Err()
}

// follow reads a base chain and all chains reachable from it, level by level.
func (r *reader) follow(base nfnetlink.Chain) error {
	for level := []nfnetlink.Chain{base}; len(level) > 0; {
		from := len(r.Chains)
		if err := r.readChains(level...); err != nil {
			return err
		}
		if base.Hook.Number == unix.NF_INET_FORWARD && !r.tracing {
			return nil
		}
		targets, all := map[string]bool{}, false
		for _, c := range r.Chains[from:] {
			unread, err := r.targets(c, targets)
			if err != nil {
				return err
			}
			all = all || unread
		}
		level = nil
		for _, c := range r.listed {
			inTable := c.Family == base.Family && c.Table == base.Table && c.Hook == nil
			if inTable && (all || targets[c.Name]) && !r.seen[chainID(c)] {
				level = append(level, c)
			}
		}
	}
	return nil
}

// targets reads the sets and maps of a chain's rules, and records the chains that the
// rules lead to. It reports whether that may be any, by a map that was not read.
func (r *reader) targets(c Chain, targets map[string]bool) (all bool, err error) {
	for _, from := range c.Rules {
		if chain, ok := facts.Target(from); ok {
			targets[chain] = true
		}
		for _, set := range facts.Sets(from) {
			if err := r.readSet(id{c.Family, c.Table, set}); err != nil {
				return false, err
			}
		}
		for _, e := range from.Exprs {
			if !e.JumpsByMap() {
				continue
			}
			m, read := r.maps[id{c.Family, c.Table, e.Str(unix.NFTA_LOOKUP_SET)}]
			all = all || !read
			for _, to := range m.elements {
				targets[to.Chain] = true
			}
		}
	}
	return all, nil
}

func (r *reader) readChains(chains ...nfnetlink.Chain) error {
	for _, c := range chains {
		if r.seen[chainID(c)] {
			continue
		}
		if err := r.ctx.Err(); err != nil {
			return err
		}
		r.seen[chainID(c)] = true
		out := Chain{Chain: c, Own: r.own(c)}
		unread := 0
		switch {
		case out.Own && !r.tracing:
		case r.rules+int(c.Use) > maxRules: // checked before they are in memory
			unread = int(c.Use)
		default:
			rules, more, err := r.conn.FirstRules(c.Family, c.Table, c.Name, r.enough)
			if err != nil {
				return err
			}
			if more {
				unread = int(c.Use)
				break
			}
			out.Rules = rules
			r.rules += len(rules)
			if c.Hook != nil { // a rule of more than 32 KiB hides itself and those after it
				unread = max(0, int(c.Use)-len(rules))
			}
		}
		out.Unread = unread > 0
		r.Unread += unread
		r.Chains = append(r.Chains, out)
	}
	return nil
}

// enough counts the memory of a rule and reports whether it is too much, or
// whether reading was canceled.
func (r *reader) enough(next nfnetlink.Rule) bool {
	r.memory += next.Memory()
	return r.memory > maxMemory || r.ctx.Err() != nil
}

// The types and the size of the sets that are read, and of all of them and the maps together.
// A larger set takes the kernel long to list, and is treated as unknown.
const (
	typeIPv4    = 7 // nft's ipv4_addr
	typeIPv6    = 8 // nft's ipv6_addr
	maxSetSize  = 10_000
	maxElements = 200_000
)

// readSet reads a set of addresses or a map, unless it was read before or is too large.
func (r *reader) readSet(at id) error {
	s, listed := r.unreadSets[at]
	delete(r.unreadSets, at)
	var err error
	switch {
	case !listed:
	case s.Flags&unix.NFT_SET_MAP != 0:
		err = r.readMap(at, s)
	case ofAddresses(s):
		err = r.readAddresses(at, s)
	}
	if nfnetlink.IsNotExist(err) {
		return nil
	}
	return err
}

// readAddresses reads a set of addresses, unless some may not match, or all others do.
func (r *reader) readAddresses(at id, s nfnetlink.Set) error {
	contents, err := r.conn.Contents(s, min(maxSetSize, maxElements-r.elements))
	ranges := contents.Ranges
	catchAll := len(ranges) > 0 && !ranges[0].From.IsValid()
	if err != nil || contents.More || contents.Conditional > 0 || catchAll {
		return err
	}
	r.elements += len(ranges)
	if s.Flags&unix.NFT_SET_INTERVAL == 0 {
		for i := range ranges {
			ranges[i].To = ranges[i].From
		}
	}
	r.sets[at] = iprange.Normal(ranges)
	return nil
}

// readMap reads a map. What is in one that is too large is unknown.
func (r *reader) readMap(at id, s nfnetlink.Set) error {
	elements, more, err := r.conn.Elements(s.Family, s.Table, s.Name, maxElements-r.elements)
	if err != nil || more {
		return err
	}
	r.elements += len(elements)
	r.maps[at] = newMapping(elements, s.Flags&unix.NFT_SET_INTERVAL != 0)
	return nil
}

func ofAddresses(s nfnetlink.Set) bool {
	const changing = unix.NFT_SET_MAP | unix.NFT_SET_TIMEOUT | unix.NFT_SET_EVAL | unix.NFT_SET_OBJECT
	tooLarge := s.Count > maxSetSize
	return (s.KeyType == typeIPv4 || s.KeyType == typeIPv6) && s.Flags&changing == 0 && !tooLarge
}
