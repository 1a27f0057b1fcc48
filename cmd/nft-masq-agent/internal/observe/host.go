package observe

import (
	"context"

	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/nft-masq-agent/internal/agent"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/kernel"
	"nft-masq-agent/nft/neighbors"
	"nft-masq-agent/nft/older"
	"nft-masq-agent/nft/routes"
)

// A Host is what observers read, next to the loop, which does not wait for it: a [Node], or
// a fake in tests.
type Host interface {
	Others(context.Context, nft.Ruleset) (neighbors.Others, error)
	// XTables is fast, and returns the same about legacy ip_tables as Others.
	XTables() ([]older.XTable, error)
	Stale(context.Context, nft.Ruleset) (conntrack.Stale, error)
	Flush(r nft.Ruleset, which config.Stale, listed func(int, *conntrack.Judge)) Flush
	Interfaces() ([]routes.Interface, error)
	Pressure(conntrack.Ports) (conntrack.Pressure, error)
}

// A Node is the kernel of this network namespace.
//
// It reads other programs' rules on a connection of its own, so that the loop never waits
// for it, and one task at a time, because they can take half of the memory.
type Node struct {
	*kernel.Kernel
	accepted []string // chains of --accept-foreign
	busy     chan struct{}
}

// NewNode returns a node for a kernel. Conflicts in the accepted chains count as
// accepted.
func NewNode(k *kernel.Kernel, accepted []string) *Node {
	return &Node{k, accepted, make(chan struct{}, 1)}
}

// alone calls a task when no other one is running, and gives its memory back.
func (h *Node) alone(ctx context.Context, task func() error) error {
	select {
	case h.busy <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() {
		agent.GiveBack()
		<-h.busy
	}()
	return task()
}

// apart reads others' rules with a connection of its own, and calls a task.
func (h *Node) apart(ctx context.Context, want nft.Ruleset, task func(*neighbors.State) error) error {
	return h.alone(ctx, func() error {
		n := neighbors.Open()
		defer func() { _ = n.Close() }()
		s, err := n.Around(ctx, want)
		if err != nil {
			return err
		}
		return task(s)
	})
}

// Interfaces lists those of this node.
func (h *Node) Interfaces() ([]routes.Interface, error) { return routes.Interfaces() }

// Pressure reads how many source ports are in use.
func (h *Node) Pressure(ports conntrack.Ports) (conntrack.Pressure, error) {
	return conntrack.Open().Pressure(ports)
}

// Others reads other programs' rules.
func (h *Node) Others(ctx context.Context, want nft.Ruleset) (others neighbors.Others, err error) {
	err = h.apart(ctx, want, func(s *neighbors.State) (err error) {
		others, err = s.Others()
		return err
	})
	others.Accept(h.accepted)
	return others, err
}

// Stale counts the connections that contradict the policy of our ruleset in the kernel. It reads
// other programs' rules only if some may.
func (h *Node) Stale(ctx context.Context, r nft.Ruleset) (stale conntrack.Stale, err error) {
	candidates, err := neighbors.Candidates(r.Policy)
	if err != nil {
		return stale, err
	}
	if stale, err = conntrack.Open().CountStale(candidates); err != nil || stale.Count == 0 {
		return stale, err
	}
	err = h.apart(ctx, r, func(s *neighbors.State) error {
		j, err := s.Judge()
		if err == nil {
			stale, err = conntrack.Open().CountStale(j)
		}
		return err
	})
	return stale, err
}

// Flush begins a pass. listed is called when its connections are known.
func (h *Node) Flush(r nft.Ruleset, which config.Stale, listed func(int, *conntrack.Judge)) Flush {
	p := conntrack.Pass{
		Tracker: conntrack.Open(),
		Matches: func(e *conntrack.Entry) bool {
			return which == config.StaleAll || e.Original.Protocol == unix.IPPROTO_UDP
		},
		Read: func(ctx context.Context) (j *conntrack.Judge, err error) {
			err = h.apart(ctx, r, func(s *neighbors.State) (err error) {
				j, err = s.Judge()
				return err
			})
			return j, err
		},
		Listed: listed,
	}
	return func(ctx context.Context) (int, error) {
		err := p.Run(ctx)
		return p.Deleted, err
	}
}
