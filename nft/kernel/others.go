package kernel

import (
	"context"
	"net/netip"
	"slices"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/foreign"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/nfnetlink"
)

// Others are rules of other programs that concern masquerading on this node.
type Others struct {
	// Legacy are chains and jumps of iptables-based agents.
	Legacy []foreign.LegacyChain
	// Conflicts are rules that masquerade what the policy exempts.
	Conflicts []foreign.Conflict
	// Overruled are rules that override the policy for what it masquerades, or
	// did so with an older agent.
	Overruled []foreign.Conflict
	// Overridden are rules that would masquerade what the policy exempts if it
	// did not enforce exemptions.
	Overridden []foreign.Conflict
	// Podless are rules that masquerade what the policy exempts, but not from
	// pods according to the policy.
	Podless []foreign.Conflict
	// Accepted are those of Conflicts and Overruled that [Others.Accept] has accepted.
	Accepted []foreign.Conflict
	// XTables are chains of such agents in legacy ip_tables.
	XTables []foreign.XTChain
	// Unread counts rules that were not examined because there are too many.
	Unread int
}

// Of returns the rules of Overruled that are of a kind.
func (o Others) Of(kind foreign.Kind) []foreign.Conflict {
	return slices.DeleteFunc(slices.Clone(o.Overruled), func(c foreign.Conflict) bool { return c.Kind != kind })
}

// Accept moves rules in chains that the operator accepts, each written as FAMILY
// TABLE CHAIN, from Conflicts and Overruled to Accepted.
func (o *Others) Accept(chains []string) {
	accepted := func(c foreign.Conflict) bool {
		is := slices.Contains(chains, c.Table()+" "+c.Chain())
		if is {
			o.Accepted = append(o.Accepted, c)
		}
		return is
	}
	o.Conflicts = slices.DeleteFunc(o.Conflicts, accepted)
	o.Overruled = slices.DeleteFunc(o.Overruled, accepted)
}

// OlderAgentDecides reports whether packets reach rules of an iptables-based agent.
func (o Others) OlderAgentDecides() bool {
	return slices.ContainsFunc(o.Legacy, foreign.LegacyChain.Decides) || slices.ContainsFunc(o.XTables, foreign.XTChain.Decides)
}

// XTables finds the chains of iptables-based agents in legacy ip_tables. Their
// changes do not affect the generation of the ruleset.
func (k *Kernel) XTables() ([]foreign.XTChain, error) { return k.legacyChains() }

// Others reads other programs' rules: every chain that is reachable from a
// postrouting chain of type nat, and no other.
func (k *Kernel) Others(ctx context.Context, want nft.Ruleset) (Others, error) {
	xtables, err := k.legacyChains()
	if err != nil {
		return Others{}, err
	}
	snapshot, err := k.snapshot(ctx, want)
	if err != nil {
		return Others{}, err
	}
	masquerading, rest := foreign.Conflicts(snapshot, want.Policy.ExemptDestinations())
	conflicts, podless, overridden := enforced(want.Policy, masquerading)
	overruled, more := foreign.Overruled(snapshot, share(want))
	return Others{
		XTables:    xtables,
		Legacy:     foreign.Legacy(snapshot),
		Conflicts:  conflicts,
		Overruled:  overruled,
		Overridden: overridden,
		Podless:    podless,
		Unread:     snapshot.Unread + max(rest, more),
	}, nil
}

// Older reads only the rules of iptables-based agents, wherever Others finds them.
func (k *Kernel) Older(ctx context.Context) (Others, error) {
	xtables, err := k.legacyChains()
	if err != nil {
		return Others{}, err
	}
	snapshot, err := k.snapshot(ctx, nft.Ruleset{})
	if err != nil {
		return Others{}, err
	}
	return Others{XTables: xtables, Legacy: foreign.Legacy(snapshot)}, nil
}

// enforced separates conflicts that come too late because the policy enforces its
// exemptions, and those that affect no pod, from the others. It drops those that
// are both.
func enforced(p nft.Policy, all []foreign.Conflict) (conflicts, podless, overridden []foreign.Conflict) {
	for _, c := range all {
		late, meets := c.Priority > nft.EnforcePriority, false
		for _, f := range p.Families {
			if c.Rule.Family != nfnetlink.Inet && c.Rule.Family != f.Family() {
				continue
			}
			late = late && p.Enforces(f)
			pods := f.List(config.KeyMasqueradeSrcCIDRs).Prefixes()
			meets = meets || len(pods) == 0 || c.From(pods)
		}
		switch {
		case late && meets:
			overridden = append(overridden, c)
		case late:
		case meets:
			conflicts = append(conflicts, c)
		default:
			podless = append(podless, c)
		}
	}
	return conflicts, podless, overridden
}

// Rewrites finds all rules of other programs that can rewrite a source address. Rules
// of the given ruleset are ours; without one, what the kernel has of ours is read.
func (k *Kernel) Rewrites(ctx context.Context, held nft.Ruleset) (foreign.Rewrites, error) {
	snapshot, err := k.snapshot(ctx, held)
	if err != nil {
		return nil, err
	}
	return foreign.FindRewrites(snapshot), nil
}

func (k *Kernel) snapshot(ctx context.Context, want nft.Ruleset) (snapshot foreign.Snapshot, err error) {
	err = again(ctx, func() error {
		s, err := k.read(ctx, want, layout.Everything, nil)
		if err == nil {
			snapshot, err = foreign.Read(ctx, k.conn.In(ctx), s.owns)
		}
		return err
	})
	return snapshot, err
}

// share returns what a ruleset masquerades, and in which chain.
func share(want nft.Ruleset) foreign.Share {
	s := foreign.Share{}
	for _, t := range want.Tables {
		s.Shared = t.Name != nft.TableName
		for _, c := range t.Chains {
			if c.Hook != nil {
				s.Priority = c.Hook.Priority
			}
		}
	}
	for _, f := range want.Policy.Families {
		var src, dst, force, notSrc []netip.Prefix
		limited := false
		for _, q := range f.Questions {
			switch source := q.Asks == config.SourceAddress; {
			case source && q.Outside:
				src, limited = append(src, q.Prefixes()...), true
			case source:
				notSrc = append(notSrc, q.Prefixes()...)
			case q.Masquerade:
				force = append(force, q.Prefixes()...)
			default:
				dst = append(dst, q.Prefixes()...)
			}
		}
		m := foreign.Masqueraded{Dst: foreign.And(foreign.Except(f.IPv6, dst), force), Src: foreign.Except(f.IPv6, notSrc)}
		if limited {
			m.Src = foreign.Within(m.Src, src)
		}
		if f.IPv6 {
			s.IPv6 = m
		} else {
			s.IPv4 = m
		}
	}
	return s
}
