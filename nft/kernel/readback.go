package kernel

import (
	"context"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/layout"
)

// ReadBack returns the ruleset that a previous run, in any mode, left in the
// kernel; false if there is none, or none that this version could have written.
// Its CIDRs have no position in a file.
func (k *Kernel) ReadBack(ctx context.Context) (nft.Ruleset, bool, error) {
	f, err := k.found(ctx, "", false, func(f *layout.Found) bool { return f.Ours })
	if f == nil {
		return nft.Ruleset{}, false, err
	}
	return f.Ruleset, true, nil
}

// Live returns the policy that is effective in the kernel, even if another
// program changed the elements of a set since, or wrote the rules of mode
// iptables-nft; false if there are no rules, or if no config of this version
// compiles to them.
func (k *Kernel) Live(ctx context.Context) (nft.Policy, bool, error) {
	f, err := k.found(ctx, "", true, func(*layout.Found) bool { return true })
	if f == nil {
		return nft.Policy{}, false, err
	}
	return f.Policy, f.Exact, nil
}

// Held returns our ruleset in the kernel, even if other programs changed it
// since; false if there is none. The chain is that of mode iptables-nft. With
// alike it need not be ours: an older agent may have written it.
func (k *Kernel) Held(ctx context.Context, chain string, alike bool) (nft.Ruleset, bool, error) {
	f, err := k.found(ctx, chain, alike, func(*layout.Found) bool { return true })
	if f == nil {
		return nft.Ruleset{}, false, err
	}
	return f.Ruleset, true, nil
}

// found reads back the first acceptable ruleset, nil if there is none.
func (k *Kernel) found(ctx context.Context, chain string, alike bool, good func(*layout.Found) bool) (*layout.Found, error) {
	for _, r := range k.readers {
		f, err := again(ctx, func() (*layout.Found, error) { return r.ReadBack(ctx, chain, alike) })
		if err != nil || f != nil && good(f) {
			return f, err
		}
	}
	return nil, nil
}

// Counters reads the number of connections by verdict; nothing if there are no rules.
func (k *Kernel) Counters(l nft.Layout) ([]nft.Counts, error) {
	return k.reader(nft.Ruleset{Layout: l}).Counters(l)
}
