package kernel

import "nft-masq-agent/nft/nfnetlink"

// A memory gives the rules of a long chain that it gave before, as long as nobody
// has written: a start asks for POSTROUTING four times, and the kernel takes half
// a second to print 50,000 rules.
type memory struct {
	*nfnetlink.Conn
	at    uint32 // the generation at which they were read
	rules map[chainID][]nfnetlink.Rule
	read  int // how many rules, also of short chains
}

// manyRules is how many rules it takes to remember them.
const manyRules = 100

// Generation forgets the rules where somebody has written since they were read.
func (m *memory) Generation() (uint32, error) {
	g, err := m.Conn.Generation()
	if err != nil || g != m.at {
		m.forget()
	}
	m.at = g
	return g, err
}

// Rules is for who asked for the Generation before and has the kernel compare it
// behind: what a writer has torn is remembered, too. The kernel raises the
// generation a moment before the new rules are in force, so who fails forgets.
func (m *memory) Rules(family nfnetlink.Family, table, chain string) ([]nfnetlink.Rule, error) {
	at := chainID{family, table, chain}
	if rules, ok := m.rules[at]; ok {
		return rules, nil
	}
	rules, err := m.Conn.Rules(family, table, chain)
	m.read += len(rules)
	if err == nil && len(rules) >= manyRules {
		if m.rules == nil {
			m.rules = map[chainID][]nfnetlink.Rule{}
		}
		m.rules[at] = rules
	}
	return rules, err
}

// wrote says that as many transactions of ours followed on a generation, which
// changed no rule that is remembered.
func (m *memory) wrote(generation, transactions uint32) {
	if m.at == generation {
		m.at += transactions
	}
}

func (m *memory) forget() { m.rules = nil }
