package native

import (
	"fmt"
	"slices"

	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/facts"
	"nft-masq-agent/nft/nfnetlink"
)

// An ourTable is our table as the kernel has it.
type ourTable struct {
	nfnetlink.Table
	exists  bool
	chains  []nfnetlink.Chain
	named   map[string]nfnetlink.Chain
	rules   map[string][]nfnetlink.Rule // by chain
	flooded bool                        // it has more rules, which were not read
	sets    map[string]nfnetlink.Set    // by their names in the kernel
	objects []nfnetlink.Object
}

// slack is the number of unexpected rules, or elements of a set, that are read
// and listed. Their number alone is reported beyond that, because other programs
// can add more than fits our memory.
const slack = 5_000

func newTable() *ourTable {
	return &ourTable{
		named: map[string]nfnetlink.Chain{}, rules: map[string][]nfnetlink.Rule{}, sets: map[string]nfnetlink.Set{},
	}
}

// fixed returns the rules of the chains of a ruleset, such as the blocks of portsPerPod, whose rules have no
// sets.
func fixed(has nft.Ruleset) map[string][]nfnetlink.Rule {
	rules := map[string][]nfnetlink.Rule{}
	if has.Mode() != nft.ModeNFTables || len(has.Tables) == 0 {
		return rules
	}
	for _, c := range has.Tables[0].Chains {
		all := c.Bytecode(has.Tables[0], nil)
		if !slices.ContainsFunc(all, func(r nfnetlink.Rule) bool { return len(facts.Sets(r)) > 0 }) {
			rules[c.Name] = all
		}
	}
	return rules
}

// readTable reads our table, with at most so many rules, without the elements of its sets.
func readTable(c *nfnetlink.Conn, left int, known map[string][]nfnetlink.Rule) (*ourTable, error) {
	out := newTable()
	var err error
	out.Table, err = c.Table(nfnetlink.Inet, nft.TableName)
	if nfnetlink.IsNotExist(err) {
		return out, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read table: %w", err)
	}
	out.exists = true
	chains, err := c.Chains(nfnetlink.Inet)
	if err != nil {
		return nil, err
	}
	out.chains = slices.DeleteFunc(chains, func(ch nfnetlink.Chain) bool { return ch.Table != nft.TableName })
	for _, ch := range out.chains {
		out.named[ch.Name] = ch
	}
	read := []string{""} // all chains
	if len(known) > 0 {
		out.rules, read = known, nil
		for _, ch := range out.chains {
			if known[ch.Name] == nil {
				read = append(read, ch.Name)
			}
		}
	}
	for _, chain := range read {
		err = c.EachRule(nfnetlink.Inet, nft.TableName, chain, func(r nfnetlink.Rule) error {
			if out.flooded = left == 0; out.flooded {
				return nfnetlink.ErrEnough
			}
			left--
			out.rules[r.Chain] = append(out.rules[r.Chain], r)
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	sets, err := c.Sets(nfnetlink.Inet, nft.TableName)
	if err != nil {
		return nil, err
	}
	for _, s := range sets {
		if s.Flags&unix.NFT_SET_ANONYMOUS == 0 { // others go with their rule
			out.sets[s.Name] = s
		}
	}
	out.objects, err = c.Objects(nfnetlink.Inet, nft.TableName)
	return out, err
}

func (t *ourTable) chain(name string) (nfnetlink.Chain, bool) {
	c, ok := t.named[name]
	return c, ok
}

// refersTo reports whether a rule of a chain, or of any if it is "", refers to a set.
func (t *ourTable) refersTo(set, chain string) bool {
	refers := func(r nfnetlink.Rule) bool { return slices.Contains(facts.Sets(r), set) }
	if chain != "" {
		return slices.ContainsFunc(t.rules[chain], refers)
	}
	for _, rules := range t.rules {
		if slices.ContainsFunc(rules, refers) {
			return true
		}
	}
	return false
}

func (t *ourTable) hasStatements() bool {
	for _, s := range t.sets {
		if s.HasStatements() {
			return true
		}
	}
	return false
}

// likeOurs reports whether a set is of one of the kinds that we create. One of another
// kind may do more than match.
func likeOurs(s nfnetlink.Set) bool {
	switch s.Flags {
	case unix.NFT_SET_INTERVAL, unix.NFT_SET_EVAL | unix.NFT_SET_TIMEOUT:
	case unix.NFT_SET_MAP:
		return len(s.Special) == 0 && (s.DataType == s.KeyType || s.DataType == unix.NFT_DATA_VERDICT)
	default:
		return false
	}
	return len(s.Special) == 0
}

// sameDeclaration compares sets without their elements.
func sameDeclaration(a, b nfnetlink.Set) bool {
	const comment = byte(userdata.NFTNL_UDATA_SET_COMMENT)
	return a.Flags == b.Flags && a.KeyType == b.KeyType && a.KeyLen == b.KeyLen &&
		a.DataType == b.DataType && (a.DataLen == b.DataLen || a.DataType == unix.NFT_DATA_VERDICT) && a.Size == b.Size &&
		slices.Equal(a.Special, b.Special) &&
		facts.UserData(a.UserData, comment) == facts.UserData(b.UserData, comment)
}
