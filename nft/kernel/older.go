package kernel

import (
	"context"
	"slices"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/xtables"
)

// LegacyTables finds the tables of legacy ip_tables with rules of iptables-based agents. Their
// changes do not affect the generation of the ruleset.
func (k *Kernel) LegacyTables() ([]xtables.LegacyTable, error) { return k.legacyTables() }

// Older finds the chains of iptables-based agents that are not ours by the wanted ruleset.
func (k *Kernel) Older(ctx context.Context, want nft.Ruleset) (found []xtables.OlderChain, err error) {
	err = nfnetlink.Again(ctx, func() error {
		found, err = xtables.FindOlder(k.In(ctx), want)
		return err
	})
	return slices.DeleteFunc(found, func(l xtables.OlderChain) bool { return l.Ours }), err
}

// OlderDecides reports whether packets reach rules of an iptables-based agent.
func (k *Kernel) OlderDecides(ctx context.Context) (bool, error) {
	tables, err := k.legacyTables()
	if err != nil || len(tables) > 0 {
		return len(tables) > 0, err
	}
	found, err := k.Older(ctx, nft.Ruleset{})
	return slices.ContainsFunc(found, xtables.OlderChain.Decides), err
}

// Doubtful returns the chains of iptables-based agents that Cleanup does not remove, because they
// may be another program's.
func (k *Kernel) Doubtful(ctx context.Context) ([]xtables.OlderChain, error) {
	found, err := k.Older(ctx, nft.Ruleset{})
	return slices.DeleteFunc(found, func(l xtables.OlderChain) bool { return l.Doubt == "" }), err
}
