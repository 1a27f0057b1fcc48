package others

import (
	"context"
	"net/netip"
	"slices"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nftrace"
)

// Limits of the rules and of the chains that are kept, and of the elements that are read in all.
const (
	maxFound    = 16
	maxElements = 200_000
)

// A Query has the addresses of a packet.
type Query struct {
	Source      netip.Addr // not valid: any
	Destination netip.Addr
}

// A Rule of another program names an address, or it stands for a chain that translates sources.
type Rule struct {
	// Table is family and name.
	Table string `json:"table"`
	// Chain that translates sources, or has the rule.
	Chain string `json:"chain"`
	// Handle of the rule that names the address; 0 for a chain that translates sources.
	Handle uint64 `json:"handle,omitempty"`
	// Command that shows it.
	Command string `json:"command"`
}

// Find reads the rules of other programs. It returns the first ones that compare an address or a prefix with the source
// or the destination, and then the first chains with rules that translate sources.
func Find(ctx context.Context, c *nfnetlink.Conn, q Query) ([]Rule, error) {
	lookups := c.Another() // of sets, while the rules are listed
	defer func() { _ = lookups.Close() }()
	var s *search
	err := nfnetlink.Again(ctx, func() error {
		s = &search{query: q, sets: lookups.In(ctx), known: map[lookup]bool{}}
		return c.In(ctx).EachRule(nfnetlink.AnyFamily, "", "", s.add)
	})
	if err != nil {
		return nil, err
	}
	return append(s.rules, s.chains...), nil
}

// A search is what is known while the rules are read.
type search struct {
	query         Query
	sets          *nfnetlink.Conn
	known         map[lookup]bool // whether a set has the address
	elements      int             // that were read
	rules, chains []Rule
}

// add looks at a rule.
func (s *search) add(r nfnetlink.Rule) error {
	if r.Family == nfnetlink.Inet && r.Table == nft.TableName || r.Signed() {
		return nil
	}
	named, err := s.names(r)
	if err != nil {
		return err
	}
	source := r.TranslatesSources()
	found := Rule{
		Table: r.Family.String() + " " + nfnetlink.Quote(r.Table), Chain: nfnetlink.Quote(r.Chain),
		Command: nftrace.Command(r.In()),
	}
	if source && len(s.chains) < maxFound && !slices.Contains(s.chains, found) {
		s.chains = append(s.chains, found)
	}
	if named && len(s.rules) < maxFound {
		found.Handle = r.Handle
		s.rules = append(s.rules, found)
	}
	return nil
}
