package foreign

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/nfnetlink"
)

// A Snapshot is what [Read] found.
type Snapshot struct {
	// Generation is that of the ruleset when the reading began. Given to
	// Commit, it lets the kernel refuse what was decided on older rules.
	Generation uint32
	Chains     []Chain
	Sets       []Set
	maps       map[id][]nfnetlink.MapElement // of a trace
	// Unread counts rules that were not read, because there are more than maxRules:
	// what they do is not known.
	Unread int
}

// maxRules bounds what is read: a rule takes about a kilobyte.
const maxRules = 60_000

// A Chain is a chain with its rules. Of a chain of ours the rules are not read.
type Chain struct {
	nfnetlink.Chain
	Rules []nfnetlink.Rule
	Own   bool
	// Unread says that its rules were not read, because there are too many.
	Unread bool
	// Base is the base chain from which it can be reached, the first where
	// there are several; nil where there is none. It may be the chain itself.
	Base *nfnetlink.Chain
}

// A Set is a set of addresses in which rules look.
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
// chains that they lead to, and the chains that have the name of a known agent's
// chain. own says which chains are ours.
//
// While others write, it reads again, up to three times, and then gives what it
// has; Generation tells. It fails with [nfnetlink.ErrInterrupted] where it never
// came to an end.
func Read(c nfnetlink.Reader, own func(nfnetlink.Chain) bool) (Snapshot, error) {
	return read(reader{conn: c, own: own, hook: unix.NF_INET_POST_ROUTING})
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
	conn   nfnetlink.Reader
	hook   uint32              // of the base chains
	maps   func(*reader) error // reads maps instead of sets; nil: sets
	own    func(nfnetlink.Chain) bool
	listed []nfnetlink.Chain // of the family being read, as packets meet them
	seen   map[id]bool       // the chains that are in Chains
	wanted map[id]bool       // sets
	rules  int               // that were read
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
	for _, c := range r.listed {
		if h := c.Hook; h != nil && h.Type == "nat" && h.Number == r.hook && !dormant[c.Table] {
			if err := r.follow(c); err != nil {
				return err
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

// follow reads a base chain and all that can be reached from it, level by level.
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

// targets notes where the rules of a chain lead to and which sets they name, and
// says whether one of them leads where a map says.
func (r *reader) targets(c Chain, targets map[string]bool) (byMap bool) {
	for _, rule := range c.Rules {
		for _, e := range rule.Exprs {
			switch e.Name {
			case "immediate":
				if _, chain, ok := e.Verdict(); ok && chain != "" {
					targets[chain] = true
				}
			case "lookup":
				byMap = byMap || e.JumpsByMap()
				r.wanted[id{c.Family, c.Table, e.Str(unix.NFTA_LOOKUP_SET)}] = true
			}
		}
	}
	return byMap
}

func (r *reader) readChains(base *nfnetlink.Chain, chains ...nfnetlink.Chain) (err error) {
	for _, c := range chains {
		if r.seen[chainID(c)] {
			continue
		}
		r.seen[chainID(c)] = true
		out := Chain{Chain: c, Base: base, Own: r.own(c)}
		switch {
		case out.Own:
		case r.rules+int(c.Use) > maxRules: // before they are in memory
			r.Unread += int(c.Use)
			out.Unread = true
		default:
			if out.Rules, err = r.conn.Rules(c.Family, c.Table, c.Name); err != nil {
				return err
			}
			r.rules += len(out.Rules)
		}
		r.Chains = append(r.Chains, out)
	}
	return nil
}

// The types and the size of the sets that are read. A list of more addresses
// than this takes the kernel long to print, and is treated as not known.
const (
	typeIPv4   = 7 // nft's ipv4_addr
	typeIPv6   = 8 // nft's ipv6_addr
	maxSetSize = 10_000
)

// readSets reads the sets that the rules name, as far as they hold addresses.
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
			if !r.wanted[id{s.Family, s.Table, s.Name}] || !ofAddresses(s) {
				continue
			}
			ranges, err := r.conn.Elements(s.Family, s.Table, s.Name)
			if nfnetlink.IsNotExist(err) {
				continue
			}
			if err != nil {
				return err
			}
			if s.Flags&unix.NFT_SET_INTERVAL == 0 {
				for i := range ranges {
					ranges[i].To = ranges[i].From
				}
			}
			r.Sets = append(r.Sets, Set{s.Family, s.Table, s.Name, normal(ranges)})
		}
	}
	return nil
}

func ofAddresses(s nfnetlink.Set) bool {
	const changing = unix.NFT_SET_MAP | unix.NFT_SET_TIMEOUT | unix.NFT_SET_EVAL | unix.NFT_SET_OBJECT
	return (s.KeyType == typeIPv4 || s.KeyType == typeIPv6) && s.Flags&changing == 0 && !(s.Counted && s.Count > maxSetSize)
}
