package native

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
)

// Differences implements [nft.KernelState].
func (s *State) Differences() []nft.Difference {
	var diffs []nft.Difference
	add := func(kind nft.DifferenceKind, format string, args ...any) {
		diffs = append(diffs, nft.Difference{Kind: kind, Text: fmt.Sprintf(format, args...)})
	}
	switch {
	case !s.table.exists && s.want == nil:
		return nil
	case !s.table.exists:
		add(nft.Drift, "%s is missing", tableName())
		return diffs
	case s.want == nil:
		add(nft.Leftover, "%s", tableName())
		return diffs
	case s.table.flooded:
		add(nft.Drift, "%s has more than %d rules that are not in the config", tableName(), slack)
	}
	for _, text := range s.table.unexpected() {
		add(nft.Unexpected, "%s", text)
	}
	s.chainDifferences(add)
	s.setDifferences(add)
	s.objectDifferences(add)
	return diffs
}

func (s *State) chainDifferences(add func(nft.DifferenceKind, string, ...any)) {
	for _, w := range s.want.Chains {
		got := s.table.chains[w.Name]
		if got == nil {
			add(nft.Drift, "chain %s is missing", w.Name)
			continue
		}
		if !got.Hook.Equal(w.Hook) {
			add(nft.Drift, "chain %s has another hook or priority", w.Name)
		}
		if got.Hook != nil && got.Policy != nfnetlink.Accept {
			add(nft.Drift, "chain %s has another policy than accept", w.Name)
		}
		switch {
		case !got.unread:
			if text := w.Difference("chain "+w.Name, w.Bytecode(*s.want, s.inUse), got.rules, nft.SameRule); text != "" {
				add(nft.Drift, "%s", text)
			}
		case !s.unchanged:
			add(nft.Drift, "chain %s is to be written again", w.Name)
		}
	}
	var others []string
	for name, c := range s.table.chains {
		if !c.wanted && !(c.staysEmpty() && len(c.rules) == 0 && c.Policy == nfnetlink.Accept) {
			others = append(others, name)
		}
	}
	slices.Sort(others)
	for _, name := range others {
		add(nft.Drift, "chain %s is not in the config", nfnetlink.Quote(name))
	}
}

func (s *State) setDifferences(add func(nft.DifferenceKind, string, ...any)) {
	wanted := map[string]bool{}
	for _, w := range s.want.Sets {
		name, ok := s.inUse[w.Name]
		if !ok {
			add(nft.Drift, "set %s is missing", w.Name)
			continue
		}
		wanted[name] = true
	}
	for _, text := range s.diffs {
		add(nft.Drift, "%s", text)
	}
	for _, name := range slices.Sorted(maps.Keys(s.table.sets)) {
		if !wanted[name] && likeOurs(s.table.sets[name]) {
			add(nft.Drift, "set %s is not in the config", nfnetlink.Quote(name))
		}
	}
}

func (s *State) objectDifferences(add func(nft.DifferenceKind, string, ...any)) {
	lacking := slices.Clone(s.want.Counters)
	for _, x := range s.table.objects {
		if x.Type != unix.NFT_OBJECT_COUNTER {
			continue
		}
		position := slices.Index(lacking, x.Name)
		if position < 0 {
			add(nft.Drift, "object %s is not in the config", nfnetlink.Quote(x.Name))
			continue
		}
		lacking = slices.Delete(lacking, position, position+1)
	}
	if len(lacking) > 0 {
		add(nft.Drift, "counters are missing: %s", strings.Join(lacking, ", "))
	}
}
