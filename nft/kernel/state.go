package kernel

import (
	"context"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/xtables"
)

// A State is what the kernel has at one generation: our rules, compared with the wanted ones, and the chains of agents
// that are to go.
type State struct {
	Want       nft.Ruleset
	depth      nft.Depth
	conn       *nfnetlink.Conn
	generation uint32
	modes      []nft.KernelState    // by reader; nil if that mode was not read
	wanted     nft.KernelState      // nil: no rules are wanted
	leftover   []xtables.OlderChain // to be removed: ours that are not wanted, and with [nft.TakeOver] older agents'
	findAgain  bool                 // a transaction failed, so leftover may have changed since it was read
}

// A reader reads the rules of a mode. Of a [nft.Frame], lastApplied has the wanted policy. earlier is nil, or the state
// of an earlier attempt to write.
type reader struct {
	mode nft.Mode
	read func(c *nfnetlink.Conn, want, lastApplied nft.Ruleset, depth nft.Depth, earlier nft.KernelState) (
		nft.KernelState, error)
}

// readers returns the readers of all modes, in the order in which their changes are in a transaction.
func readers() []reader {
	return []reader{{nft.ModeNFTables, native.Read}, {nft.ModeIPTables, xtables.Read}}
}

// read reads the kernel's state. With that of an earlier attempt to write, it reads no elements, because they were
// compared or written then, and it looks for leftovers again only if they may have changed.
func (k *Kernel) read(ctx context.Context, want nft.Ruleset, depth nft.Depth, earlier *State) (*State, error) {
	c := k.conn.In(ctx)
	generation, err := c.Generation() // first, because a state is as old as its oldest part
	if err != nil {
		return nil, err
	}
	if earlier == nil {
		if err := c.AwaitCommit(); err != nil {
			return nil, err
		}
	}
	s := &State{Want: want, depth: depth, conn: k.conn, generation: generation}
	for i, r := range readers() {
		var attempted, current nft.KernelState
		if earlier != nil {
			attempted = earlier.modes[i]
		}
		if r.mode == want.Mode() || depth >= nft.WithLeftovers {
			current, err = r.read(c, want, k.lastApplied, depth, attempted)
			if err != nil {
				return nil, err
			}
		}
		s.modes = append(s.modes, current)
		if r.mode == want.Mode() {
			s.wanted = current
		}
	}
	// A policy without IPv6 in mode iptables-nft has no table ip6: our chain there is a leftover.
	withoutIPv6 := want.Mode() == nft.ModeIPTables && len(want.Tables) == 1
	if depth < nft.WithLeftovers && !(depth == nft.Contents && withoutIPv6) {
		return s, nil
	}
	if earlier != nil && !earlier.findAgain {
		s.leftover = earlier.leftover
		return s, nil
	}
	found, err := xtables.FindOlder(c, want)
	if err != nil {
		return nil, err
	}
	for _, l := range found {
		if l.Ours || depth >= nft.TakeOver && l.Doubt == "" {
			s.leftover = append(s.leftover, l)
		}
	}
	return s, nil
}

// Installed reads our rules that the kernel has; see [State.Installed].
func (k *Kernel) Installed(ctx context.Context) (found nft.Installed, ok bool, err error) {
	s, err := k.Read(ctx, nft.Ruleset{}, nft.WithLeftovers)
	if err == nil {
		found, ok = s.Installed()
	}
	return found, ok, err
}

// Installed returns our rules that the kernel has, of any mode and whatever other programs
// have done to them since; false if there are none.
func (s *State) Installed() (found nft.Installed, ok bool) {
	for _, m := range s.modes {
		if m == nil {
			continue
		}
		found, ok = m.Installed()
		if ok {
			return found, true
		}
	}
	for _, l := range s.leftover {
		if l.Ours && l.Reached() {
			return nft.Installed{Layout: xtables.Layout{ChainName: l.Name}, Hash: l.Hash}, true
		}
	}
	return nft.Installed{}, false
}

// Differences describes how the state differs from the wanted one.
func (s *State) Differences() (diffs []nft.Difference) {
	for _, l := range s.leftover {
		kind := nft.OlderAgents
		if l.Ours {
			kind = nft.Leftover
		}
		diffs = append(diffs, nft.Difference{Kind: kind, Text: l.String()})
	}
	for _, m := range s.modes {
		if m != nil {
			diffs = append(diffs, m.Differences()...)
		}
	}
	return diffs
}
