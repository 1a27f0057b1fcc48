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
	Sets       []Set
	maps       map[id]mapping // for a trace
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

// A Set is a set of addresses that rules refer to.
type Set struct {
	Family nfnetlink.Family
	Table  string
	Name   string
	Ranges []iprange.Range // sorted, none overlaps another
}

// An id names a chain or a set.
type id struct {
	family      nfnetlink.Family
	table, name string
}

func chainID(c nfnetlink.Chain) id { return id{c.Family, c.Table, c.Name} }

// Read reads the postrouting NAT chains of the families ip, ip6 and inet, the
// chains reachable from them, and the chains named like a known agent's chain.
// own reports which chains are ours.
//
// If the ruleset changes meanwhile, it reads again, up to three times, and then
// returns what it has; Generation is then out of date. It fails with
// [nfnetlink.ErrInterrupted] if every attempt was interrupted, and when ctx ends.
func Read(ctx context.Context, c nfnetlink.Reader, own func(nfnetlink.Chain) bool) (Snapshot, error) {
	return read(reader{ctx: ctx, conn: c, own: own, hooks: []uint32{unix.NF_INET_POST_ROUTING}, types: []string{"nat"}})
}

func read(template reader) (Snapshot, error) {
	var torn Snapshot
	for range 3 {
		r := template
		r.seen, r.wanted = map[id]bool{}, map[id]bool{}
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
	ctx    context.Context
	conn   nfnetlink.Reader
	hooks  []uint32            // of the base chains
	types  []string            // of the base chains, in the order in which they are read
	maps   func(*reader) error // reads maps instead of sets; nil: sets
	own    func(nfnetlink.Chain) bool
	listed []nfnetlink.Chain // of the family being read, in the order in which packets traverse them
	seen   map[id]bool       // the chains that are in Chains
	wanted map[id]bool       // the sets that rules refer to
	rules  int               // the number of rules read
	memory int               // that they take, in bytes
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
	if r.maps != nil {
		return r.maps(r)
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
	slices.SortStableFunc(r.listed, func(a, b nfnetlink.Chain) int { return cmp.Compare(priority(a), priority(b)) })
	for _, typ := range r.types {
		for _, c := range r.listed {
			if h := c.Hook; h != nil && h.Type == typ && slices.Contains(r.hooks, h.Number) && !dormant[c.Table] {
				if err := r.follow(c); err != nil {
					return err
				}
			}
		}
	}
	for _, c := range r.listed {
		if c.Hook == nil && agentChains[c.Name] && r.maps == nil {
			if err := r.readChains(nil, c); err != nil {
				return err
			}
		}
	}
	return nil
}

func priority(c nfnetlink.Chain) int32 {
	if c.Hook == nil {
		return 0
	}
	return c.Hook.Priority
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
		byMap = byMap || rule.ByMap(from)
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
		switch {
		case out.Own:
		case r.rules+int(c.Use) > maxRules: // checked before they are in memory
			r.Unread += int(c.Use)
			out.Unread = true
		default:
			rules, more, err := r.conn.FirstRules(c.Family, c.Table, c.Name, r.enough)
			if err != nil {
				return err
			}
			if more {
				r.Unread += int(c.Use)
				out.Unread = true
				break
			}
			out.Rules = rules
			r.rules += len(rules)
			// A rule of more than 32 KiB hides itself and those after it.
			if hidden := int(c.Use) - len(rules); c.Hook != nil && hidden > 0 {
				r.Unread += hidden
				out.Unread = true
			}
		}
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

// readSets reads the address sets that the rules refer to.
func (r *reader) readSets() error {
	tables, left := map[id]bool{}, maxElements
	for want := range r.wanted {
		tables[id{want.family, want.table, ""}] = true
	}
	for t := range tables {
		sets, err := r.conn.Sets(t.family, t.table)
		if err != nil && !nfnetlink.IsNotExist(err) {
			return err
		}
		for _, s := range sets {
			if !r.wanted[id{s.Family, s.Table, s.Name}] || !ofAddresses(s) {
				continue
			}
			contents, err := r.conn.Contents(s, min(maxSetSize, left))
			if nfnetlink.IsNotExist(err) || contents.More {
				continue
			}
			if err != nil {
				return err
			}
			ranges := contents.Ranges
			left -= len(ranges)
			if s.Flags&unix.NFT_SET_INTERVAL == 0 {
				for i := range ranges {
					ranges[i].To = ranges[i].From
				}
			}
			r.Sets = append(r.Sets, Set{s.Family, s.Table, s.Name, iprange.Normal(ranges)})
		}
	}
	return nil
}

func ofAddresses(s nfnetlink.Set) bool {
	const changing = unix.NFT_SET_MAP | unix.NFT_SET_TIMEOUT | unix.NFT_SET_EVAL | unix.NFT_SET_OBJECT
	return (s.KeyType == typeIPv4 || s.KeyType == typeIPv6) && s.Flags&changing == 0 && !(s.Counted && s.Count > maxSetSize)
}
