package foreign

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/rule"
)

// A Snapshot is the rules that [Read] found.
type Snapshot struct {
	// Generation is that of the ruleset when reading began. With it, Commit makes
	// the kernel reject changes that are based on older rules.
	Generation uint32
	Chains     []Chain
	sets       map[id][]iprange.Range // of addresses, that rules refer to; none for a trace
	maps       map[id]mapping         // for a trace
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

// A Chain is a chain with its rules. The rules of our own chains are not read.
type Chain struct {
	nfnetlink.Chain
	Rules []nfnetlink.Rule
	Own   bool
	// Unread means that its rules were not read, because there are too many.
	Unread bool
	// Base is the first base chain from which it can be reached, or nil. It may
	// be the chain itself.
	Base *nfnetlink.Chain
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

// Read reads the postrouting NAT chains of the families ip, ip6 and inet, the
// chains reachable from them, and the chains named like a known agent's chain.
// own reports which chains are ours.
//
// If the ruleset changes meanwhile, it reads again, up to three times, and then
// returns what it has; Generation is then out of date. It fails with
// [nfnetlink.ErrInterrupted] if every attempt was interrupted, and when ctx ends.
func Read(ctx context.Context, c *nfnetlink.Conn, own func(nfnetlink.Chain) bool) (Snapshot, error) {
	return read(reader{ctx: ctx, conn: c, own: own, hooks: []uint32{unix.NF_INET_POST_ROUTING}})
}

func read(template reader) (Snapshot, error) {
	var torn Snapshot
	for range 3 {
		r := template
		r.seen, r.wanted = map[id]bool{}, map[id]bool{}
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
	ctx      context.Context
	conn     *nfnetlink.Conn
	hooks    []uint32 // of the base chains
	tracing  bool     // read base chains of all types, and maps instead of sets
	own      func(nfnetlink.Chain) bool
	listed   []nfnetlink.Chain // of the family being read
	seen     map[id]bool       // the chains that are in Chains
	wanted   map[id]bool       // the sets that rules refer to
	rules    int               // the number of rules read
	memory   int               // that they take, in bytes
	elements int               // the number of ranges in sets
}

func (r *reader) read() (err error) {
	if r.Generation, err = r.conn.Generation(); err != nil {
		return err
	}
	for _, family := range []nfnetlink.Family{nfnetlink.IPv4, nfnetlink.IPv6, nfnetlink.Inet} {
		if err := r.readFamily(family); err != nil {
			return err
		}
	}
	if err := r.ctx.Err(); err != nil {
		return err
	}
	return r.readSets()
}

func (r *reader) readFamily(family nfnetlink.Family) error {
	tables, err := r.conn.Tables(family)
	if err != nil {
		return err
	}
	dormant := map[string]bool{}
	for _, t := range tables {
		dormant[t.Name] = t.Dormant()
	}
	if r.listed, err = r.conn.Chains(family); err != nil {
		return err
	}
	types := []string{"nat"} // first, in case there are too many rules
	if r.tracing {
		types = append(types, "filter", "route")
	}
	var bases []nfnetlink.Chain
	for _, c := range r.listed {
		if h := c.Hook; h != nil && slices.Contains(types, h.Type) && slices.Contains(r.hooks, h.Number) && !dormant[c.Table] {
			bases = append(bases, c)
		}
	}
	slices.SortStableFunc(bases, func(a, b nfnetlink.Chain) int {
		byType := cmp.Compare(slices.Index(types, a.Hook.Type), slices.Index(types, b.Hook.Type))
		return cmp.Or(byType, cmp.Compare(a.Hook.Priority, b.Hook.Priority))
	})
	for _, c := range bases {
		if err := r.follow(c); err != nil {
			return err
		}
	}
	for _, c := range r.listed {
		if c.Hook == nil && agentChains[c.Name] && !r.tracing {
			if err := r.readChains(nil, c); err != nil {
				return err
			}
		}
	}
	return nil
}

// follow reads a base chain and all chains reachable from it, level by level.
func (r *reader) follow(base nfnetlink.Chain) error {
	for level := []nfnetlink.Chain{base}; len(level) > 0; {
		from := len(r.Chains)
		if err := r.readChains(&base, level...); err != nil {
			return err
		}
		targets, byMap := map[string]bool{}, false
		for _, c := range r.Chains[from:] {
			byMap = r.targets(c, targets) || byMap
		}
		level = nil
		for _, c := range r.listed {
			if c.Table == base.Table && c.Hook == nil && (byMap || targets[c.Name]) && !r.seen[chainID(c)] {
				level = append(level, c)
			}
		}
	}
	return nil
}

// targets records the target chains and sets of a chain's rules, and reports
// whether one of them takes its verdict from a map.
func (r *reader) targets(c Chain, targets map[string]bool) (byMap bool) {
	for _, from := range c.Rules {
		if chain, ok := rule.Target(from); ok {
			targets[chain] = true
		}
		for _, set := range rule.Sets(from) {
			r.wanted[id{c.Family, c.Table, set}] = true
		}
		byMap = byMap || slices.ContainsFunc(from.Exprs, nfnetlink.Expr.JumpsByMap)
	}
	return byMap
}

func (r *reader) readChains(base *nfnetlink.Chain, chains ...nfnetlink.Chain) (err error) {
	for _, c := range chains {
		if r.seen[chainID(c)] {
			continue
		}
		if err := r.ctx.Err(); err != nil {
			return err
		}
		r.seen[chainID(c)] = true
		out := Chain{Chain: c, Base: base, Own: r.own(c)}
		unread := 0
		switch {
		case out.Own:
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

// The types and the size of the sets that are read, and of all of them together. A
// larger set takes the kernel long to list, and is treated as unknown.
const (
	typeIPv4    = 7 // nft's ipv4_addr
	typeIPv6    = 8 // nft's ipv6_addr
	maxSetSize  = 10_000
	maxElements = 200_000
)

func (r *reader) readSets() error {
	tables := map[id]bool{}
	for want := range r.wanted {
		tables[id{want.family, want.table, ""}] = true
	}
	for t := range tables {
		sets, err := r.conn.Sets(t.family, t.table)
		if err != nil && !nfnetlink.IsNotExist(err) {
			return err
		}
		for _, s := range sets {
			at := id{s.Family, s.Table, s.Name}
			switch isMap := s.Flags&unix.NFT_SET_MAP != 0; {
			case !r.wanted[at], isMap != r.tracing:
			case isMap:
				err = r.readMap(at, s)
			case ofAddresses(s):
				err = r.readSet(at, s)
			}
			if err != nil && !nfnetlink.IsNotExist(err) {
				return err
			}
		}
	}
	return nil
}

func (r *reader) readSet(at id, s nfnetlink.Set) error {
	contents, err := r.conn.Contents(s, min(maxSetSize, maxElements-r.elements))
	if err != nil || contents.More {
		return err
	}
	ranges := contents.Ranges
	r.elements += len(ranges)
	if s.Flags&unix.NFT_SET_INTERVAL == 0 {
		for i := range ranges {
			ranges[i].To = ranges[i].From
		}
	}
	r.sets[at] = iprange.Normal(ranges)
	return nil
}

// readMap reads a map of up to maxRules elements. What is in a larger one is unknown.
func (r *reader) readMap(at id, s nfnetlink.Set) error {
	elements, more, err := r.conn.Elements(s.Family, s.Table, s.Name, maxRules)
	if err != nil || more {
		return err
	}
	r.maps[at] = newMapping(elements, s.Flags&unix.NFT_SET_INTERVAL != 0)
	return nil
}

func ofAddresses(s nfnetlink.Set) bool {
	const changing = unix.NFT_SET_MAP | unix.NFT_SET_TIMEOUT | unix.NFT_SET_EVAL | unix.NFT_SET_OBJECT
	return (s.KeyType == typeIPv4 || s.KeyType == typeIPv6) && s.Flags&changing == 0 && !(s.Counted && s.Count > maxSetSize)
}
