package observe

import (
	"context"

	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/nft-masq-agent/internal/agent"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/kernel"
	"nft-masq-agent/nft/xtables"
)

// A Host is what observers read, next to the loop, which does not wait for it: a [Kernel], or
// a fake in tests.
type Host interface {
	// Older finds chains of iptables-based agents.
	Older(context.Context, nft.Ruleset) ([]xtables.OlderChain, error)
	// LegacyTables finds those in legacy ip_tables, and is fast.
	LegacyTables() ([]xtables.LegacyTable, error)
	// Note returns which connections contradict a policy that has come into force, and whether there are more.
	Note(context.Context, nft.Policy) (earlier map[uint32]bool, full bool, err error)
	// Gather compares the connections with a policy.
	Gather(context.Context, nft.Policy, conntrack.History) (conntrack.Evidence, error)
	// Flush deletes the connections that a change of the policy outdates, in one pass. It returns how many.
	Flush(ctx context.Context, prior, inForce nft.Policy, stale config.Stale) (deleted int, err error)
	// Stats reads the counters of connection tracking, and is fast.
	Stats() (conntrack.Stats, error)
}

// A Kernel is the kernel of this network namespace.
//
// It reads other programs' rules on a connection of its own, so that the loop never waits
// for it.
type Kernel struct{ *kernel.Kernel }

// Stats implements [Host].
func (k Kernel) Stats() (conntrack.Stats, error) { return conntrack.New().Stats() }

// Older implements [Host].
func (k Kernel) Older(ctx context.Context, want nft.Ruleset) (found []xtables.OlderChain, err error) {
	defer agent.FreeMemorySoon()
	other := k.Another()
	defer func() { _ = other.Close() }()
	return other.Older(ctx, want)
}

// Note implements [Host].
func (k Kernel) Note(ctx context.Context, p nft.Policy) (earlier map[uint32]bool, full bool, err error) {
	c, err := conntrack.ReadComparison(p)
	if err != nil {
		return nil, false, err
	}
	return conntrack.New().Note(ctx, c)
}

// Gather implements [Host].
func (k Kernel) Gather(ctx context.Context, p nft.Policy, history conntrack.History) (conntrack.Evidence, error) {
	return conntrack.ReadEvidence(ctx, p, history)
}

// Flush implements [Host].
func (k Kernel) Flush(ctx context.Context, prior, inForce nft.Policy, stale config.Stale) (deleted int, err error) {
	node, err := conntrack.ReadNode()
	if err != nil {
		return 0, err
	}
	change := conntrack.Change{
		Before: conntrack.NewComparison(prior, node), InForce: conntrack.NewComparison(inForce, node),
	}
	return conntrack.New().Delete(ctx, func(e *conntrack.Entry) bool {
		return (stale == config.StaleAll || e.Original.Protocol == unix.IPPROTO_UDP) && change.Outdated(e)
	})
}
