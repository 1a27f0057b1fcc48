package agent

import (
	"context"
	"net/netip"
	"slices"

	"go.uber.org/zap"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/node"
)

// addresses is what the loop knows about the addresses of this node.
type addresses struct {
	changes    <-chan node.Change // nil until a policy has snatAddresses
	known      []netip.Addr
	unreadable bool            // the last change was an error
	missing    map[string]bool // families without an address, as last logged
}

// placeOnNode completes the wanted ruleset with the addresses of this node. They are
// followed from the first time on; a resync also lists them.
func (a *Agent) placeOnNode(ctx context.Context, resync bool) error {
	if !a.policy.want.Policy.HasSNAT() {
		return nil
	}
	if followed := a.addresses.changes != nil; !followed || resync {
		known, err := a.in.Addresses()
		if err != nil && !followed {
			return err
		}
		if err == nil {
			a.addresses.known = known
		}
		if !followed {
			a.addresses.changes = a.in.Follow(ctx)
		}
	}
	want := a.policy.want.On(a.addresses.known)
	a.progress.moved = a.progress.moved || a.held != "" && !a.fresh && !want.Same(*a.policy.want)
	a.policy.want = &want
	return nil
}

// addressesChanged handles a change of this node's addresses: a removed one is
// removed from the kernel at once, because no replies reach it.
func (a *Agent) addressesChanged(ctx context.Context, c node.Change) {
	if c.Err != nil {
		if !a.addresses.unreadable {
			a.log.Warn("cannot follow the addresses of this node; retrying, with the last known addresses until then",
				zap.String("event", "addresses_unreadable"), zap.Error(c.Err))
		}
		a.addresses.unreadable = true
		return
	}
	a.addresses.unreadable, a.addresses.known = false, c.Addresses
	if a.policy.want == nil || a.policy.want.On(c.Addresses).Same(*a.policy.want) {
		return
	}
	a.progress.moved = true
	a.sync(ctx, onAddresses, layout.Ours)
}

// logMoved logs which source addresses connections have after a change of the
// node's addresses.
func (a *Agent) logMoved(from nft.Policy) {
	var added, removed []string
	for _, f := range a.policy.want.Policy.Families {
		before := from.SNATOf(f.IPv6).Present
		added = append(added, without(f.SNAT.Present, before)...)
		removed = append(removed, without(before, f.SNAT.Present)...)
	}
	a.log.Info("the addresses of this node changed; connections leave from those that it has", zap.String("event", "snat_addresses_changed"),
		zap.Strings("added", firstFew(added)), zap.Int("added_count", len(added)),
		zap.Strings("removed", firstFew(removed)), zap.Int("removed_count", len(removed)), zap.String("hash", a.policy.want.Hash()))
}

// without returns the addresses that are not in others.
func without(addresses, others []netip.Addr) (out []string) {
	for _, addr := range addresses {
		if !slices.Contains(others, addr) {
			out = append(out, addr.String())
		}
	}
	return out
}

// logMissing logs for which families the node has none of snatAddresses, once
// until that changes.
func (a *Agent) logMissing(p nft.Policy) {
	missing := map[string]bool{}
	for _, f := range p.Families {
		family := familyName(f.IPv6)
		if missing[family] = len(f.SNAT.CIDRs) > 0 && len(f.SNAT.Present) == 0; missing[family] == a.addresses.missing[family] {
			continue
		}
		if missing[family] {
			a.log.Warn("this node has none of snatAddresses: connections are masqueraded with the address of the interface",
				zap.String("event", "snat_addresses_missing"), zap.String("family", family))
		} else if len(f.SNAT.Present) > 0 {
			a.log.Info("this node has one of snatAddresses again", zap.String("event", "snat_addresses_found"), zap.String("family", family))
		}
	}
	a.addresses.missing = missing
}
