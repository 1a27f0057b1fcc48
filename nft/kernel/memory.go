package kernel

import (
	"slices"

	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/nfnetlink"
)

// A memory caches the rules of long chains until the ruleset changes: a start
// reads POSTROUTING four times, and the kernel takes half a second to dump 50,000
// rules.
type memory struct {
	*nfnetlink.Conn
	at    uint32 // the generation at which they were read
	rules map[layout.ChainID][]nfnetlink.Rule
	jumps map[layout.ChainID]foundJumps
	read  int // number of rules, including those of short chains
}

// manyRules is the number of rules from which on a chain is cached.
const manyRules = 100

// Generation drops the rules if the ruleset has changed since they were read.
func (m *memory) Generation() (uint32, error) {
	g, err := m.Conn.Generation()
	if err != nil || g != m.at {
		m.Forget()
	}
	m.at = g
	return g, err
}

// Rules is for callers that read the Generation before and have the kernel
// compare it afterwards, because inconsistent dumps are cached, too. The kernel
// increments the generation just before the new rules are active, so callers drop
// the cache on failure.
func (m *memory) Rules(family nfnetlink.Family, table, chain string) ([]nfnetlink.Rule, error) {
	at := layout.ChainID{Family: family, Table: table, Chain: chain}
	if rules, ok := m.rules[at]; ok {
		return rules, nil
	}
	rules, err := m.Conn.Rules(family, table, chain)
	if err == nil {
		m.keep(at, rules)
	}
	return rules, err
}

// FirstRules caches chains that it has read completely.
func (m *memory) FirstRules(family nfnetlink.Family, table, chain string, enough func(nfnetlink.Rule) bool) (rules []nfnetlink.Rule, more bool, err error) {
	at := layout.ChainID{Family: family, Table: table, Chain: chain}
	if rules, ok := m.rules[at]; ok {
		if i := slices.IndexFunc(rules, enough); i >= 0 {
			return rules[:i:i], true, nil
		}
		return rules, false, nil
	}
	rules, more, err = m.Conn.FirstRules(family, table, chain, enough)
	if err != nil || more {
		return rules, more, err
	}
	m.keep(at, rules)
	return rules, false, nil
}

// foundJumps are the rules of a chain that matched last time, and the number of
// other rules.
type foundJumps struct {
	rules []nfnetlink.Rule
	rest  int
}

// Jumps is called with the same match until the ruleset changes.
func (m *memory) Jumps(family nfnetlink.Family, table, chain string, match func(nfnetlink.Rule) bool) ([]nfnetlink.Rule, int, error) {
	at := layout.ChainID{Family: family, Table: table, Chain: chain}
	if j, ok := m.jumps[at]; ok {
		return j.rules, j.rest, nil
	}
	rules, rest, err := m.Conn.Jumps(family, table, chain, match)
	if err == nil {
		if m.jumps == nil {
			m.jumps = map[layout.ChainID]foundJumps{}
		}
		m.jumps[at] = foundJumps{rules, rest}
	}
	return rules, rest, err
}

func (m *memory) keep(at layout.ChainID, rules []nfnetlink.Rule) {
	m.read += len(rules)
	if len(rules) < manyRules {
		return
	}
	if m.rules == nil {
		m.rules = map[layout.ChainID][]nfnetlink.Rule{}
	}
	m.rules[at] = rules
}

// wrote records transactions of ours after a generation, which changed no cached
// rule.
func (m *memory) wrote(generation, transactions uint32) {
	if m.at == generation {
		m.at += transactions
	}
}

// Forget implements [layout.Cache].
func (m *memory) Forget() { m.rules, m.jumps = nil, nil }
