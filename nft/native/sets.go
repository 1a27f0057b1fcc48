package native

import (
	"fmt"
	"slices"

	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
)

// keepSets takes over the sets that an earlier attempt has compared or filled, if they are still there. Their handles
// tell, together with that of the table: handles begin again in another table.
func (s *State) keepSets(earlier *State) {
	sameTable := earlier.table.Handle == s.table.Handle
	for _, w := range s.want.Sets {
		set := earlier.correct[w.Name]
		if !sameTable || set.Handle == 0 || s.table.sets[set.Name].Handle != set.Handle {
			s.diffs = append(s.diffs, fmt.Sprintf("set %s is not filled", w.Name))
			continue
		}
		s.correct[w.Name] = set
		if slices.ContainsFunc(earlier.filled, func(f nfnetlink.Set) bool { return f.Name == set.Name }) {
			s.filled = append(s.filled, set)
		}
	}
}

// trustSets takes a set to be correct if the last Apply left it with the elements that are wanted now, and the kernel
// counts as many. The policy is the same, but the addresses of the node can be others.
func (s *State) trustSets(lastApplied nft.Ruleset) error {
	for _, w := range s.want.Sets {
		name, ok := s.inUse[w.Name]
		if !ok {
			continue
		}
		set := s.table.sets[name]
		if !s.unchanged && !lastApplied.Tables[0].Set(w.Name).SameElements(w) {
			s.diffs = append(s.diffs, fmt.Sprintf("set %s has the addresses of before", name))
			continue
		}
		var diffs []string
		if !w.Learned && set.Counted && int(set.Count) != kernelCount(w) {
			var err error
			diffs, err = compare(s.conn, set, w)
			if err != nil {
				return err
			}
		}
		if len(diffs) == 0 {
			s.correct[w.Name] = set
		}
		s.diffs = append(s.diffs, diffs...)
	}
	return nil
}

// kernelCount returns how many elements of a set the kernel counts: half of its bounds, rounded down. An interval that
// reaches the last address has one bound instead of two, so that it does not count.
func kernelCount(w nft.Set) int {
	n := len(w.Prefixes)
	if n > 0 && !nfnetlink.PrefixRange(w.Prefixes[n-1]).Last.Next().IsValid() {
		return n - 1
	}
	return w.Len()
}

// compareSets reads and compares the elements of sets. If another policy is in force than the wanted one, which has
// this hash, it compares only maps, and their differences do not count: what differs is filled anew.
func (s *State) compareSets(hash string) error {
	installed, _ := s.Installed()
	other := installed.Hash != hash
	for _, w := range s.want.Sets {
		name, ok := s.inUse[w.Name]
		if !ok || other && w.Mappings == nil {
			continue
		}
		diffs, err := compare(s.conn, s.table.sets[name], w)
		if err != nil {
			return err
		}
		if len(diffs) == 0 {
			s.correct[w.Name] = s.table.sets[name]
		}
		if !other {
			s.diffs = append(s.diffs, diffs...)
		}
	}
	return nil
}

// nameInUse returns the name of the kernel's set that is used for a wanted one, "" for none. It is that on side B only
// if there is none on side A, or a rule of a wanted chain refers to it.
func (s *State) nameInUse(w nft.Set) (name string) {
	for _, side := range []string{w.Name + nft.SideA, w.Name + nft.SideB} {
		existing, ok := s.table.sets[side]
		if ok && sameDeclaration(existing, w.KernelSet(*s.want, side)) && (name == "" || s.wantedRuleRefersTo(side)) {
			name = side
		}
	}
	return name
}

// nameToUse returns the name of the set that the new rules refer to: the correct one if there is one, otherwise the
// name that no rule uses, so that the set can be filled while the old one serves packets.
func (s *State) nameToUse(w nft.Set) string {
	if correct, ok := s.correct[w.Name]; ok {
		return correct.Name
	}
	current := s.nameInUse(w)
	_, taken := s.table.sets[w.Name+nft.SideA]
	if current == w.Name+nft.SideA || current == "" && taken {
		return w.Name + nft.SideB
	}
	return w.Name + nft.SideA
}

// wantedRuleRefersTo reports whether a rule of a wanted chain refers to a set of the kernel.
func (s *State) wantedRuleRefersTo(set string) bool {
	for _, c := range s.table.chains {
		if c.wanted && c.refersTo(set) {
			return true
		}
	}
	return false
}

// likeOurs reports whether a set is of one of the kinds that we create. A set of another kind may do more than match.
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

// sameDeclaration compares sets without their elements: also the comment, but no other user data.
func sameDeclaration(a, b nfnetlink.Set) bool {
	const comment = byte(userdata.NFTNL_UDATA_SET_COMMENT)
	return a.Flags == b.Flags && a.KeyType == b.KeyType && a.KeyLen == b.KeyLen &&
		a.DataType == b.DataType && (a.DataLen == b.DataLen || a.DataType == unix.NFT_DATA_VERDICT) && a.Size == b.Size &&
		slices.Equal(a.Special, b.Special) &&
		nfnetlink.UserData(a.UserData, comment) == nfnetlink.UserData(b.UserData, comment)
}
