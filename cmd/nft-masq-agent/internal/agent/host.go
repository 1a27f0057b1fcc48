package agent

import (
	"context"
	"fmt"
	"net/netip"
	"runtime/debug"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/kernel"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/node"
	"nft-masq-agent/nft/older"
)

// A Kernel is what the loop reads and writes: a [Host], or a fake in tests.
type Kernel interface {
	Apply(context.Context, nft.Ruleset, layout.Depth) (kernel.Applied, error)
	Installed(context.Context) (layout.Installed, bool, error)
	Older(context.Context) (kernel.Others, error)
	Counters(nft.Layout) ([]nft.Counts, error)
	// XTables is fast, and returns the same about legacy ip_tables as Others.
	XTables() ([]older.XTable, error)

	// These run next to the others, which do not wait for them.
	Others(context.Context, nft.Ruleset) (kernel.Others, error)
	Stale(context.Context, nft.Ruleset) (conntrack.Stale, error)
	Flush(r nft.Ruleset, which config.Stale, listed func(int, *conntrack.Judge)) Flush
}

// A Host is the kernel of this network namespace.
//
// It reads other programs' rules on a connection of its own, so that repairs do not
// wait for it, and one task at a time, because they can take half of the memory.
type Host struct {
	*kernel.Kernel
	accepted []string // chains of --accept-foreign
	busy     chan struct{}
}

// NewHost returns a host for a kernel. Conflicts in the accepted chains count as
// accepted.
func NewHost(k *kernel.Kernel, accepted []string) *Host {
	return &Host{k, accepted, make(chan struct{}, 1)}
}

// Apply is one of these tasks if it reads more than our rules.
func (h *Host) Apply(ctx context.Context, want nft.Ruleset, depth layout.Depth) (a kernel.Applied, err error) {
	if depth <= layout.Ours {
		return h.Kernel.Apply(ctx, want, depth)
	}
	err = h.alone(ctx, func() error {
		a, err = h.Kernel.Apply(ctx, want, depth)
		return err
	})
	return a, err
}

// alone calls a task when no other one is running, and gives its memory back.
func (h *Host) alone(ctx context.Context, task func() error) error {
	select {
	case h.busy <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() {
		giveBack()
		<-h.busy
	}()
	return task()
}

// apart reads the kernel with a connection of its own, and calls a task.
func (h *Host) apart(ctx context.Context, want nft.Ruleset, task func(*kernel.State) error) error {
	return h.alone(ctx, func() error {
		k := kernel.Open()
		defer func() { _ = k.Close() }()
		s, err := k.Read(ctx, want, layout.Beside)
		if err != nil {
			return err
		}
		return task(s)
	})
}

// giveBack returns memory to the system after a delay.
func giveBack() { time.AfterFunc(time.Second, debug.FreeOSMemory) }

// Others reads other programs' rules.
func (h *Host) Others(ctx context.Context, want nft.Ruleset) (others kernel.Others, err error) {
	err = h.apart(ctx, want, func(s *kernel.State) (err error) {
		others, err = s.Others()
		return err
	})
	others.Accept(h.accepted)
	return others, err
}

// Stale counts the connections that contradict the policy of our ruleset in the kernel.
func (h *Host) Stale(ctx context.Context, r nft.Ruleset) (stale conntrack.Stale, err error) {
	err = h.apart(ctx, r, func(s *kernel.State) error {
		j, err := Judge(s)
		if err == nil {
			stale, err = conntrack.Open().CountStale(j)
		}
		return err
	})
	return stale, err
}

// Flush begins a pass. listed is called when its connections are known.
func (h *Host) Flush(r nft.Ruleset, which config.Stale, listed func(int, *conntrack.Judge)) Flush {
	p := conntrack.Pass{
		Table: conntrack.Open(),
		Matches: func(e *conntrack.Entry) bool {
			return which == config.StaleAll || e.Original.Protocol == unix.IPPROTO_UDP
		},
		Read: func(ctx context.Context) (j *conntrack.Judge, err error) {
			err = h.apart(ctx, r, func(s *kernel.State) (err error) {
				j, err = Judge(s)
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

// Judge returns a judge of connections for the policy that is wanted on this node.
func Judge(s *kernel.State) (*conntrack.Judge, error) {
	e, err := Evidence(s)
	if err != nil {
		return nil, err
	}
	return conntrack.NewJudge(s.Want.Policy, e), nil
}

// Evidence returns what a judge must know of this node. If anything cannot be read, no
// connection is certain to be stale.
func Evidence(s *kernel.State) (e conntrack.Evidence, err error) {
	if e.Local, err = node.LocalPrefixes(); err != nil {
		return e, err
	}
	rewrites := s.Rewrites()
	if rewrites.Everything() {
		e.Spared = append(e.Spared, "other programs have too many rules: they may translate any connection")
	}
	legacy := map[bool]bool{} // by whether it is IPv6
	for _, family := range []nfnetlink.Family{nfnetlink.IPv4, nfnetlink.IPv6} {
		rules, err := older.LegacyRules("/proc/thread-self/net", family)
		if err != nil {
			return e, err
		}
		if rules > 0 {
			legacy[family == nfnetlink.IPv6] = true
			e.Spared = append(e.Spared, fmt.Sprintf("%stables-legacy -t nat -S lists rules of other programs: "+
				"they may translate any connection of the family", family))
		}
	}
	e.Others = func(src, dst netip.Addr, dnat bool) bool { return legacy[dst.Is6()] || rewrites.Meet(src, dst, dnat) }
	return e, nil
}
