// Package neighbors tells what other programs' rules on this node do to the connections of a
// policy, of all packets ([State.Others], [State.Judge]) and of one ([State.Tracer]). It reads
// what the kernel has next to our rules: those of other programs, and interfaces, networks and
// addresses. The loop does not need it.
package neighbors

import (
	"context"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/kernel"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/older"
	"nft-masq-agent/nft/routes"
	"nft-masq-agent/nft/rule"
	"nft-masq-agent/nft/trace"
	"nft-masq-agent/nft/xtables"
)

// A Node is a kernel with what else there is on this node. It is for one goroutine, like
// the kernel.
type Node struct {
	*kernel.Kernel
	// These read what is not nftables in the thread's namespace.
	interfaces func() ([]routes.Interface, error)
	networks   func() ([]routes.Network, error)
	local      func() ([]netip.Prefix, error)
	running    func(ipv6 bool) ([]netip.Addr, error) // pods
}

// Open returns the node of the network namespace in which the first request is made.
func Open() *Node { return Of(kernel.Open(rule.String)) }

// Of is Open for the caller's kernel.
func Of(k *kernel.Kernel) *Node {
	return &Node{k, routes.Interfaces, routes.Networks, routes.LocalPrefixes, addressesOfPods}
}

// New uses the caller's kernel, and reads nothing but rules.
func New(k *kernel.Kernel) *Node {
	pods := func(bool) ([]netip.Addr, error) { return nil, nil }
	return &Node{k, none[routes.Interface], none[routes.Network], none[netip.Prefix], pods}
}

func addressesOfPods(ipv6 bool) (all []netip.Addr, err error) {
	pods, err := routes.Pods(ipv6)
	for _, pod := range pods {
		all = append(all, pod.Address)
	}
	return all, err
}

func none[T any]() ([]T, error) { return nil, nil }

// OthersTranslate reports whether another program has rules in chains of type nat. Our jump is none,
// nor is that of an older agent.
func (n *Node) OthersTranslate(ctx context.Context) (others bool, err error) {
	c := n.In(ctx)
	err = nfnetlink.Again(ctx, func() error {
		l, err := trace.List(c)
		for _, base := range l.Chains {
			ours := base.Family == nfnetlink.Inet && base.Table == nft.TableName
			if err != nil || others || ours || !l.InForce(base) || base.Hook.Type != "nat" {
				continue
			}
			err = c.EachRule(base.Family, base.Table, base.Name, func(r nfnetlink.Rule) error {
				if _, jumps := xtables.JumpOf(r); jumps {
					return nil
				}
				others = true
				return nfnetlink.ErrEnough
			})
		}
		return err
	})
	return others, err
}

// A State is the state of our rules, with the rules of other programs that concern
// masquerading.
type State struct {
	*kernel.State
	node   *Node
	older  []older.Chain
	others *trace.Rules
	// passed reads the rules that packets of pods pass, of all hooks: those before postrouting may set
	// marks that decide there.
	passed func() (*trace.Rules, error)
}

// Survey reads the kernel with the rules of other programs, to compare it with the wanted
// ruleset.
func (n *Node) Survey(ctx context.Context, want nft.Ruleset) (*State, error) {
	ours, err := n.Read(ctx, want, layout.Everything)
	if err != nil {
		return nil, err
	}
	return n.beside(ctx, ours)
}

// Around reads the rules of other programs alone, as an observer of the loop, which reads ours.
func (n *Node) Around(ctx context.Context, want nft.Ruleset) (*State, error) {
	return n.beside(ctx, kernel.Unread(want))
}

func (n *Node) beside(ctx context.Context, ours *kernel.State) (*State, error) {
	s, c := &State{State: ours, node: n}, n.In(ctx)
	s.passed = func() (r *trace.Rules, err error) {
		err = nfnetlink.Again(ctx, func() error {
			r, err = trace.Read(c, trace.Scope{Own: s.Want.Owns, Reads: passes})
			return err
		})
		return r, err
	}
	return s, nfnetlink.Again(ctx, func() (err error) {
		if s.others, err = trace.Read(c, trace.Scope{Own: s.Want.Owns, Reads: concerns}); err == nil {
			s.older, err = older.Find(c, s.Want)
			s.older = slices.DeleteFunc(s.older, func(l older.Chain) bool { return l.Ours })
		}
		return err
	})
}

// passes reports whether packets of pods to other hosts pass a base chain.
func passes(c nfnetlink.Chain) bool {
	switch c.Hook.Number {
	case unix.NF_INET_PRE_ROUTING, unix.NF_INET_FORWARD, unix.NF_INET_POST_ROUTING:
		return true
	}
	return false
}

// concerns reports whether a base chain can decide about connections of a policy: those of
// postrouting, those of prerouting, which may set marks, and those of forwarding that drop by policy.
// Destinations are translated for the packets of Services.
func concerns(c nfnetlink.Chain) bool {
	switch h := c.Hook; h.Number {
	case unix.NF_INET_POST_ROUTING:
		return true
	case unix.NF_INET_PRE_ROUTING:
		return h.Type != "nat"
	case unix.NF_INET_FORWARD:
		return c.Policy == 0 // NF_DROP
	}
	return false
}
