package others

import (
	"context"
	"net/netip"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nftrace"
)

// Limits of what is kept, and of the elements that are read in all.
const (
	maxRules    = 16
	maxElements = 200_000
)

// A Query has the addresses of a packet.
type Query struct {
	Source      netip.Addr // not valid: any
	Destination netip.Addr
}

// Found is what was found.
type Found struct {
	// Rules are the first that compare an address or a prefix with the source or the destination.
	Rules []Rule `json:"rules"`
	// MoreRules is how many others do.
	MoreRules int `json:"moreRules"`
	// Translating are the first chains with rules that translate sources.
	Translating []Chain `json:"translating"`
	// MoreTranslating is how many others there are.
	MoreTranslating int `json:"moreTranslating"`
	// UnreadSets is how many sets were not searched, because they have too many elements.
	UnreadSets int `json:"unreadSets"`
}

// A Rule is a rule that names an address.
type Rule struct {
	// Family of the table.
	Family string `json:"tableFamily"`
	// Table is the name of the table.
	Table string `json:"table"`
	// Chain is the name of the chain.
	Chain string `json:"chain"`
	// Handle of the rule.
	Handle uint64 `json:"handle"`
	// Field is source or destination.
	Field string `json:"field"`
	// Set is the name of the set or map that has the address, if it is one.
	Set string `json:"set,omitempty"`
	// Command shows the rule.
	Command string `json:"command"`
}

// A Chain is a chain that translates sources.
type Chain struct {
	// Family of the table.
	Family string `json:"tableFamily"`
	// Table is the name of the table.
	Table string `json:"table"`
	// Chain is the name of the chain.
	Chain string `json:"chain"`
	// Handles are those of the first rules that translate.
	Handles []uint64 `json:"handles"`
	// Command shows the chain.
	Command string `json:"command"`
}

// Find reads the rules of other programs.
func Find(ctx context.Context, c *nfnetlink.Conn, q Query) (Found, error) {
	lookups := c.Another() // of sets, while the rules are listed
	defer func() { _ = lookups.Close() }()
	var s *search
	err := nfnetlink.Again(ctx, func() error {
		s = &search{
			query: q, sets: lookups.In(ctx), known: map[setID]bool{},
			found: Found{Rules: []Rule{}, Translating: []Chain{}},
		}
		return c.In(ctx).EachRule(nfnetlink.AnyFamily, "", "", s.add)
	})
	if err != nil {
		return Found{}, err
	}
	return s.found, nil
}

// A search is what is known while the rules are read.
type search struct {
	query    Query
	sets     *nfnetlink.Conn
	known    map[setID]bool // whether a set has the address
	elements int            // that were read
	last     nfnetlink.ChainID
	found    Found
}

// add looks at a rule.
func (s *search) add(r nfnetlink.Rule) error {
	own := r.Family == nfnetlink.Inet && r.Table == nft.TableName || r.Signed()
	if own {
		return nil
	}
	if source, _ := r.NAT(); source {
		s.translates(r)
	}
	m, err := s.match(r)
	if err != nil || m.field == "" {
		return err
	}
	if len(s.found.Rules) == maxRules {
		s.found.MoreRules++
		return nil
	}
	s.found.Rules = append(s.found.Rules, Rule{
		Family: r.Family.String(), Table: r.Table, Chain: r.Chain, Handle: r.Handle, Field: m.field, Set: m.set,
		Command: nftrace.Command(r.In()),
	})
	return nil
}

// translates notes the chain of a rule. The kernel lists the rules of a chain one after another.
func (s *search) translates(r nfnetlink.Rule) {
	repeated := r.In() == s.last
	s.last = r.In()
	switch n := len(s.found.Translating); {
	case repeated && s.found.MoreTranslating > 0:
	case repeated && len(s.found.Translating[n-1].Handles) < maxRules:
		s.found.Translating[n-1].Handles = append(s.found.Translating[n-1].Handles, r.Handle)
	case repeated:
	case n == maxRules:
		s.found.MoreTranslating++
	default:
		s.found.Translating = append(s.found.Translating, Chain{
			Family: r.Family.String(), Table: r.Table, Chain: r.Chain, Handles: []uint64{r.Handle},
			Command: nftrace.Command(r.In()),
		})
	}
}
