package kernel

import (
	"context"
	"fmt"
	"slices"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/xtables"
)

// A Removal selects what Cleanup removes.
type Removal int

// The removals.
const (
	Ours      Removal = iota // what any of our modes installed
	WithOlder                // also the chains of iptables-based agents
	OlderOnly                // only those
)

// Cleanup removes rules in one transaction, then the table of a trace, and returns the names of what it removed. If the
// kernel rejects the first, nothing was removed; if only the trace stays, the error comes with the names of the rest.
// Next to programs that write all the time the error is [nfnetlink.ErrBusy].
func (k *Kernel) Cleanup(ctx context.Context, removal Removal) (removed []string, err error) {
	var s *State
	err = nfnetlink.Again(ctx, func() error {
		s, err = k.removable(ctx, removal, s)
		if err != nil {
			return err
		}
		removed = names(s.Differences())
		return s.retryIfOthersWrote(s.stageAndSwitch(ctx))
	})
	if err != nil {
		return nil, fmt.Errorf("remove: %w", err)
	}
	if removal == OlderOnly {
		return removed, nil
	}
	traced, err := RemoveTrace(k.In(ctx))
	if err != nil {
		return removed, fmt.Errorf("remove %s: %w", traceName, err)
	}
	if traced {
		removed = append(removed, traceName)
	}
	return removed, nil
}

// Removable returns the names of what [Kernel.Cleanup] would remove, without writing.
func (k *Kernel) Removable(ctx context.Context, removal Removal) (found []string, err error) {
	err = nfnetlink.Again(ctx, func() error {
		s, err := k.removable(ctx, removal, nil)
		if err != nil {
			return err
		}
		found = names(s.Differences())
		traced, err := abandonedTrace(k.In(ctx))
		if traced && removal != OlderOnly {
			found = append(found, traceName)
		}
		return err
	})
	return found, err
}

// removable reads what can be removed, with the state of an earlier attempt.
func (k *Kernel) removable(ctx context.Context, removal Removal, earlier *State) (*State, error) {
	depth := nft.TakeOver
	if removal == Ours {
		depth = nft.WithLeftovers
	}
	s, err := k.read(ctx, nft.Ruleset{}, depth, earlier)
	if err == nil && removal == OlderOnly {
		s.modes = make([]nft.KernelState, len(s.modes))
		s.leftover = slices.DeleteFunc(s.leftover, func(l xtables.OlderChain) bool { return l.Ours })
	}
	return s, err
}

func names(diffs []nft.Difference) (list []string) {
	for _, d := range diffs {
		if d.Kind == nft.OlderAgents {
			list = append(list, d.String())
		} else {
			list = append(list, d.Text)
		}
	}
	return list
}
