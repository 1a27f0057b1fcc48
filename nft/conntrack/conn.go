package conntrack

import (
	"context"
	"errors"
	"fmt"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfnetlink"
)

// Causes that an operator can remove.
var (
	ErrNotPermitted = errors.New("the capability NET_ADMIN is missing in this network namespace")
	ErrUnsupported  = errors.New("the kernel lacks nf_conntrack_netlink (CONFIG_NF_CT_NETLINK): " +
		"modprobe nf_conntrack_netlink on the node")
)

// A Tracker is the connection tracking of a network namespace.
type Tracker struct {
	dial        func() *nfnetlink.Conn
	sampleLimit int // entries
	noteLimit   int // entries
}

// New returns the connection tracking of the network namespace in which its methods are called. Each call of a method
// opens a connection of its own.
func New() *Tracker { return &Tracker{nfnetlink.Dial, sampleSize, maxNoted} }

// errStop ends a dump without an error.
var errStop = errors.New("stop")

// Dump visits the entries, in the kernel's hash order. It calls begin first, and
// again if the dump was interrupted and is restarted. Any error of visit ends the dump.
func (t *Tracker) Dump(ctx context.Context, begin func(), visit func(*Entry) error) error {
	c := t.dial()
	defer func() { _ = c.Close() }()
	var e Entry
	err := nfnetlink.Again(ctx, func() error {
		begin()
		return exchange(c.In(ctx), request(msgGet, netlink.Dump, unix.AF_UNSPEC, nil), func(body nfnetlink.Attrs) error {
			err := e.decode(body)
			if err != nil {
				return err
			}
			return visit(&e)
		})
	})
	if errors.Is(err, errStop) {
		return nil
	}
	return described("read connections", err)
}

func exchange(c *nfnetlink.Conn, m netlink.Message, do func(body nfnetlink.Attrs) error) error {
	return c.Exchange(m, func(m netlink.Message) error { return do(m.Data[headerLen:]) })
}

// Stats are the counters of connection tracking.
type Stats struct {
	Entries, Limit uint64 // Limit is 0 before Linux 4.19
	// InsertFailed and Drop count since the namespace was created.
	// They are sums over all CPUs, each of which has a 32-bit counter.
	InsertFailed, Drop uint64
}

// Stats reads the counters.
func (t *Tracker) Stats() (s Stats, err error) {
	sums := map[uint16]*uint64{ctaStatsInsertFailed: &s.InsertFailed, ctaStatsDrop: &s.Drop}
	totals := map[uint16]*uint64{ctaStatsEntries: &s.Entries, ctaStatsLimit: &s.Limit}
	c := t.dial()
	defer func() { _ = c.Close() }()
	err = exchange(c, request(msgStatsCPU, netlink.Dump, unix.AF_UNSPEC, nil), addTo(sums))
	if err == nil {
		err = exchange(c, request(msgStats, 0, unix.AF_UNSPEC, nil), addTo(totals))
	}
	return s, described("read connection statistics", err)
}

// addTo adds the numbers of a message, by the types of their attributes.
func addTo(sums map[uint16]*uint64) func(nfnetlink.Attrs) error {
	return func(body nfnetlink.Attrs) error {
		return nfnetlink.Each(body, func(typ uint16, data []byte) error {
			if sum := sums[typ]; sum != nil {
				*sum += nfnetlink.Number(data)
			}
			return nil
		})
	}
}

// described wraps an error with the operation and, if known, the cause.
func described(operation string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("%s: %w: %w", operation, ErrNotPermitted, err)
	case errors.Is(err, unix.EPROTONOSUPPORT), errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EINVAL):
		// nfnetlink returns EINVAL for a subsystem that is not registered.
		return fmt.Errorf("%s: %w: %w", operation, ErrUnsupported, err)
	}
	return fmt.Errorf("%s: %w", operation, err)
}

// Messages of ctnetlink, and attributes of its statistics
// (linux/netfilter/nfnetlink_conntrack.h).
const (
	msgGet      = 1
	msgDelete   = 2
	msgStatsCPU = 4
	msgStats    = 5

	ctaStatsInsertFailed = 9
	ctaStatsDrop         = 10

	ctaStatsEntries = 1
	ctaStatsLimit   = 2
)

const headerLen = 4 // struct nfgenmsg

func request(kind uint16, flags netlink.HeaderFlags, family uint8, a nfnetlink.Attrs) netlink.Message {
	return nfnetlink.Request(unix.NFNL_SUBSYS_CTNETLINK<<8|kind, nfnetlink.Family(family), flags, a)
}
