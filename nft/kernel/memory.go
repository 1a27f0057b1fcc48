package kernel

import (
	"slices"

	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/nfnetlink"
)

// A memory gives the rules of a long chain that it gave before, as long as nobody
// has written: a start asks for POSTROUTING four times, and the kernel takes half
// a second to print 50,000 rules.
type memory struct {
	*nfnetlink.Conn
	at    uint32 // the generation at which they were read
	rules map[layout.ChainID][]nfnetlink.Rule
	jumps map[layout.ChainID]foundJumps
	read  int // how many rules, also of short chains
}

// manyRules is how many rules it takes to remember them.
const manyRules = 100

// Generation forgets the rules where somebody has written since they were read.
func (m *memory) Generation() (uint32, error) {
	g, err := m.Conn.Generation()
	if err != nil || g != m.at {
		m.Forget()
	}
	m.at = g
	return g, err
}

// Rules is for who asked for the Generation before and has the kernel compare it
// behind: what a writer has torn is remembered, too. The kernel raises the
// generation a moment before the new rules are in force, so who fails forgets.
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

// FirstRules remembers chains that it has read to their end.
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

// foundJumps are the rules of a chain that matched what was last asked for, and how many
// others it has.
type foundJumps struct {
	rules []nfnetlink.Rule
	rest  int
}

// Jumps is asked for the same rules, as long as nobody has written.
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

// wrote says that as many transactions of ours followed on a generation, which
// changed no rule that is remembered.
func (m *memory) wrote(generation, transactions uint32) {
	if m.at == generation {
		m.at += transactions
	}
}

// Forget implements [layout.Cache].
func (m *memory) Forget() { m.rules, m.jumps = nil, nil }
