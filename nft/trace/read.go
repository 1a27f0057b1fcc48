package trace

import (
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/facts"
	"nft-masq-agent/nft/nfnetlink"
)

// Rules are the chains that [Read] found, with the sets and maps that their rules refer to.
type Rules struct {
	// Generation is that of the ruleset when reading began.
	Generation uint32
	Chains     []*Chain
	// Devices are the chains with rules at the hooks of network devices, ingress and egress, which are not read.
	Devices []nfnetlink.ChainID
	// Unread counts rules that were not read, because there are too many. Their effect is
	// unknown.
	Unread  int
	Listing Listing                      // of all chains
	ByID    map[nfnetlink.ChainID]*Chain // those that were read
	bases   []*Chain                     // in the order in which packets meet them
	sets    map[nfnetlink.ChainID]*set   // all, of which those are read that rules refer to
}

// Bounds of what is read. A rule usually takes about a kilobyte, one of the 128
// expressions that the kernel allows ten and more. A set that is larger takes the kernel long
// to list.
const (
	maxRules    = 60_000
	maxMemory   = 60 << 20
	maxSetSize  = 10_000
	maxElements = 200_000
)

const ingress = 5 // NF_INET_INGRESS

// A Chain is a chain with its rules.
type Chain struct {
	nfnetlink.Chain
	Rules []nfnetlink.Rule
	Own   bool
	// Unread is how many of its rules were not read, because there are too many.
	Unread int

	index *index
}

// idOf names a chain or a set in the table of a chain.
func idOf(c nfnetlink.Chain, name string) nfnetlink.ChainID {
	c.Name = name
	return c.ID()
}

// A Scope is what to read: some base chains, and all chains that they lead to.
type Scope struct {
	Own   func(nfnetlink.Chain) bool // which are this agent's
	Ours  bool                       // whether the rules of these are read, too
	Reads func(nfnetlink.Chain) bool // of the base chains
}

// Read reads chains of the families ip, ip6 and inet.
//
// If the ruleset changes meanwhile, it reads again, up to three times, and then
// returns what it has. It fails with [nfnetlink.ErrInterrupted] if the kernel says so, and
// when the connection's context ends.
func Read(c *nfnetlink.Conn, of Scope) (*Rules, error) {
	for attempt := 1; ; attempt++ {
		r := &reader{Rules: &Rules{}, Scope: of, conn: c}
		if err := r.read(); err != nil {
			return nil, fmt.Errorf("read rules: %w", err)
		}
		after, err := c.Generation()
		if err != nil {
			return nil, err
		}
		if after == r.Generation || attempt == 3 {
			return r.Rules, nil
		}
	}
}

type reader struct {
	*Rules
	Scope
	conn     *nfnetlink.Conn
	listed   map[nfnetlink.ChainID]int // where in Listing.Chains
	rules    int                       // the number of rules read
	memory   int                       // that they take, in bytes
	elements int                       // in sets and maps
}

func (r *reader) read() (err error) {
	if r.Generation, err = r.conn.Generation(); err != nil {
		return err
	}
	if r.Listing, err = List(r.conn); err != nil {
		return err
	}
	sets, err := r.conn.Sets(nfnetlink.AnyFamily, "")
	if err != nil {
		return err
	}
	r.ByID, r.sets = map[nfnetlink.ChainID]*Chain{}, map[nfnetlink.ChainID]*set{}
	r.listed = map[nfnetlink.ChainID]int{}
	var bases []nfnetlink.Chain
	for _, s := range sets {
		r.sets[nfnetlink.ChainID{Family: s.Family, Table: s.Table, Name: s.Name}] = &set{Set: s}
	}
	for i, c := range r.Listing.Chains {
		r.listed[c.ID()] = i
		switch {
		case !r.Listing.InForce(c):
		case c.Family == unix.NFPROTO_NETDEV, c.Hook.Number == ingress:
			if c.Use > 0 || c.Policy == drop {
				r.Devices = append(r.Devices, c.ID())
			}
		case r.Reads(c):
			bases = append(bases, c)
		}
	}
	slices.SortStableFunc(bases, func(a, b nfnetlink.Chain) int { // route, nat, filter, in case there are too many rules
		return strings.Compare(b.Hook.Type, a.Hook.Type)
	})
	for _, c := range bases {
		if err := r.follow(c.ID()); err != nil {
			return err
		}
		r.bases = append(r.bases, r.ByID[c.ID()])
	}
	slices.SortStableFunc(r.bases, func(a, b *Chain) int { return slices.Compare(a.when(), b.when()) })
	return nil
}

// follow reads a chain, the sets and maps of its rules, and all chains that it leads to.
func (r *reader) follow(id nfnetlink.ChainID) error {
	at, listed := r.listed[id]
	if !listed || r.ByID[id] != nil {
		return nil
	}
	c := &Chain{Chain: r.Listing.Chains[at]}
	c.Own, r.ByID[id] = r.Own(c.Chain), c
	if err := r.readChain(c); err != nil {
		return err
	}
	for _, each := range c.Rules {
		var targets []string
		if chain, ok := facts.Target(each); ok {
			targets = append(targets, chain)
		}
		for _, name := range facts.Sets(each) {
			if s := r.sets[idOf(c.Chain, name)]; s != nil {
				if err := r.readSet(s); err != nil && !nfnetlink.IsNotExist(err) {
					return err
				}
				for _, e := range append(s.elements, s.rest...) {
					if e.Chain != "" {
						targets = append(targets, e.Chain)
					}
				}
			}
		}
		for _, name := range targets {
			if err := r.follow(idOf(c.Chain, name)); err != nil {
				return err
			}
		}
	}
	return nil
}

func (r *reader) readChain(c *Chain) error {
	r.Chains = append(r.Chains, c)
	if c.Own && !r.Ours {
		return nil
	}
	var rules []nfnetlink.Rule
	more := r.rules+int(c.Use) > maxRules
	if !more { // they are in memory then
		var err error
		rules, more, err = r.conn.FirstRules(c.Family, c.Table, c.Name, func(next nfnetlink.Rule) bool {
			r.memory += next.Memory()
			return r.memory > maxMemory
		})
		if err != nil {
			return err
		}
	}
	switch {
	case more:
		c.Unread, rules = int(c.Use), nil
	case c.Hook != nil: // a rule of more than 32 KiB hides itself and those after it
		c.Unread = max(0, int(c.Use)-len(rules))
	}
	r.Unread, r.rules = r.Unread+c.Unread, r.rules+len(rules)
	others := slices.ContainsFunc(rules, func(r nfnetlink.Rule) bool { return !facts.Signed(r) })
	c.Own = c.Own || !others && len(rules) > 0 && c.Hook == nil
	if !c.Own || r.Ours {
		c.Rules = rules
	}
	return nil
}

// readSet reads a set or a map, unless it is too large or packets change its elements.
func (r *reader) readSet(s *set) error {
	if s.read || s.large || s.Flags&(unix.NFT_SET_EVAL|unix.NFT_SET_OBJECT) != 0 {
		return nil
	}
	if s.large = s.Count > maxSetSize; s.large {
		return nil
	}
	elements, more, err := r.conn.Elements(s.Family, s.Table, s.Name, min(2*maxSetSize, maxElements-r.elements))
	if s.large = more; err == nil && !more {
		r.elements += len(elements)
		s.pair(elements)
	}
	return err
}
