package kernel

import (
	"context"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/layout"
)

// ReadBack gives the ruleset that a previous run, of whichever mode, left in
// the kernel; false where there is none, or none that this version could have
// written. Its CIDRs have no place in a file.
func (k *Kernel) ReadBack(ctx context.Context) (nft.Ruleset, bool, error) {
	f, err := k.found(ctx, "", false, func(f *layout.Found) bool { return f.Ours })
	if f == nil {
		return nft.Ruleset{}, false, err
	}
	return f.Ruleset, true, nil
}

// Live gives the policy by which the kernel decides now, also where somebody
// has changed the elements of a set since, or wrote the rules of mode iptables-nft in
// our place; false where there are no rules, or others than some config of this
// version yields.
func (k *Kernel) Live(ctx context.Context) (nft.Policy, bool, error) {
	f, err := k.found(ctx, "", true, func(*layout.Found) bool { return true })
	if f == nil {
		return nft.Policy{}, false, err
	}
	return f.Policy, f.Exact, nil
}

// Held gives what the kernel holds of ours, whatever somebody has done to it since;
// false where there is nothing. The chain is where mode iptables-nft would be. With
// alike it need not be ours: an older agent may have written it.
func (k *Kernel) Held(ctx context.Context, chain string, alike bool) (nft.Ruleset, bool, error) {
	f, err := k.found(ctx, chain, alike, func(*layout.Found) bool { return true })
	if f == nil {
		return nft.Ruleset{}, false, err
	}
	return f.Ruleset, true, nil
}

// found reads back the first ruleset that is good enough, nil if there is none.
func (k *Kernel) found(ctx context.Context, chain string, alike bool, good func(*layout.Found) bool) (*layout.Found, error) {
	release, err := k.acquire(ctx)
	if err != nil {
		return nil, err
	}
	defer release()
	for _, r := range k.readers {
		f, err := again(ctx, func() (*layout.Found, error) {
			k.seen.Forget()
			return r.ReadBack(ctx, chain, alike)
		})
		if err != nil || f != nil && good(f) {
			return f, err
		}
	}
	return nil, nil
}

// Counters reads how many connections went which way; nothing if no rules are there.
func (k *Kernel) Counters(l nft.Layout) ([]nft.Counts, error) {
	for _, r := range k.readers {
		if c, err := r.Counters(l); c != nil || err != nil {
			return c, err
		}
	}
	return nil, nil
}
