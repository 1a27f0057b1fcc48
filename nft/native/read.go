package native

import (
	"errors"
	"slices"
	"strings"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
)

// A State is our table as the kernel has it, and the wanted one. It implements [nft.KernelState] and [nft.Replacer].
type State struct {
	conn      *nfnetlink.Conn
	want      *nft.Table // nil: none
	otherMode bool       // another mode is wanted: its rules come first, and our table goes after that
	table     *ourTable
	inUse     nft.Sides                // by the names of wanted sets: the kernel's set that is used for it, if it has one
	correct   map[string]nfnetlink.Set // by the names of wanted sets: the kernel's set with exactly the wanted elements

	filled    []nfnetlink.Set // the correct sets that were filled, and to which no rule refers yet
	unchanged bool            // the wanted rules are those of the last Apply, also where they were not read
	diffs     []string        // the differences of the elements
}

// Read reads our table, and the elements of its sets as far as the caller needs them:
//
//   - With the state of an earlier attempt, whose elements were compared and whose sets were filled, it reads no
//     elements, only whether these sets are still there.
//   - In a [nft.Frame], if the last Apply had the wanted policy, elements are taken to be as that left them, if the
//     kernel counts as many. So are the rules of chains to which only maps lead.
//   - Otherwise it reads the elements of sets if the policy in force is the wanted one: with another one, sets are
//     filled anew. Elements of maps are always read: they are few, changes seldom concern them, and the deletion of an
//     old map waits for packets.
//
// With an error, the state is not valid.
func Read(c *nfnetlink.Conn, want, lastApplied nft.Ruleset, depth nft.Depth, earlier nft.KernelState) (
	nft.KernelState, error,
) {
	s := &State{
		conn: c, table: newTable(), otherMode: want.Mode() != "" && want.Mode() != nft.ModeNFTables,
		inUse: nft.Sides{}, correct: map[string]nfnetlink.Set{},
	}
	if want.Mode() == nft.ModeNFTables && len(want.Tables) > 0 {
		s.want = &want.Tables[0]
	}
	frame := depth == nft.Frame && want.SamePolicy(lastApplied)
	s.unchanged = frame && want.Same(lastApplied)
	if err := s.table.read(c); err != nil {
		return nil, err
	}
	if s.table.exists {
		if err := s.readRules(frame); err != nil {
			return nil, err
		}
	}
	if s.want == nil {
		return s, nil
	}
	for _, w := range s.want.Sets {
		if name := s.nameInUse(w); name != "" {
			s.inUse[w.Name] = name
		}
	}
	if attempted, ok := earlier.(*State); ok {
		s.keepSets(attempted)
		return s, nil
	}
	if frame {
		return s, s.trustSets(lastApplied)
	}
	return s, s.compareSets(want.Hash())
}

// Installed implements [nft.KernelState]. The comment of the last rule has the hash.
func (s *State) Installed() (found nft.Installed, ok bool) {
	base := s.table.chains[BaseChain]
	if base == nil || len(base.rules) == 0 {
		return found, false
	}
	found.Layout = Layout{}
	for _, r := range base.rules {
		if hash, match := strings.CutPrefix(r.Comment(), hashComment); match {
			found.Hash = hash
		}
	}
	return found, true
}

// readRules reads the rules of the table, in one list if those of all chains are needed. In a frame, it does not read
// the chains to which only maps lead, because there may be hundreds: if the node has other addresses, they are written
// anew anyway, and otherwise they are as the last Apply left them if the kernel counts as many rules and elements.
func (s *State) readRules(frame bool) error {
	limit := slack
	if s.want != nil {
		for _, w := range s.want.Chains {
			limit += len(w.Rules)
			if c := s.table.chains[w.Name]; c != nil {
				c.wanted = true
				c.unread = frame && w.Elements > 0 && (!s.unchanged || int(c.Use) == len(w.Rules)+w.Elements)
			}
		}
	}
	var chains []string
	for name, c := range s.table.chains {
		if !c.unread {
			chains = append(chains, name)
		}
	}
	if len(chains) == len(s.table.chains) {
		_, err := s.listRules("", limit)
		if !errors.Is(err, nfnetlink.ErrReadAgain) {
			return err
		}
		// Another program has committed meanwhile, so the list is not right. That of a single chain is right even then.
		s.table.flooded = false
		for _, c := range s.table.chains {
			c.rules = nil
		}
	}
	slices.Sort(chains)
	for _, name := range chains {
		count, err := s.listRules(name, limit)
		if err != nil {
			return err
		}
		limit -= count
	}
	return nil
}

// listRules reads the rules of a chain, or of all chains if it is "", up to a number. It returns how many it has read.
func (s *State) listRules(chain string, limit int) (count int, err error) {
	err = s.conn.EachRule(nfnetlink.Inet, nft.TableName, chain, func(r nfnetlink.Rule) error {
		if count == limit {
			s.table.flooded = true
			return nfnetlink.ErrEnough
		}
		count++
		if c := s.table.chains[r.Chain]; c != nil { // otherwise it is newer than the list of chains
			c.rules = append(c.rules, r)
		}
		return nil
	})
	return count, err
}
