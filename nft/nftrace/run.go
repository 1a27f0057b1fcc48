package nftrace

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/kernel"
	"nft-masq-agent/nft/nfnetlink"
)

// A Query selects the packets to trace.
type Query struct {
	From     netip.Addr     // the source; not valid: any
	To       netip.AddrPort // the destination as it was sent, before DNAT; port 0: any
	Protocol uint8          // 0: any
}

// Errors of a trace.
var (
	// ErrNoPacket means that no new connection was opened in time.
	ErrNoPacket = errors.New("no packet of a new connection came")
	// ErrRunning means that another process traces in this network namespace.
	ErrRunning = errors.New("another trace is running on this node")
	// ErrUnsupported means that the kernel cannot trace.
	ErrUnsupported = errors.New("this kernel does not trace packets through nf_tables (Linux 4.6, CONFIG_NF_TABLES_INET)")
)

// Run traces the next packet of a new connection, until the context ends. It calls ready once the rules are
// installed that trace packets. The table is deleted before it returns.
func Run(ctx context.Context, q Query, ready func()) (t Trace, err error) {
	lock, err := kernel.LockTrace()
	if errors.Is(err, unix.EADDRINUSE) {
		return Trace{}, ErrRunning
	}
	if err != nil {
		return Trace{}, fmt.Errorf("lock the trace: %w", err)
	}
	defer func() { _ = lock.Close() }()
	c := nfnetlink.Dial()
	defer func() { _ = c.Close() }()
	nl, err := listen()
	if err != nil {
		return Trace{}, unsupported(err)
	}
	defer func() { _ = nl.Close() }()
	if err := create(c, q); err != nil {
		return Trace{}, unsupported(err)
	}
	defer func() { err = errors.Join(err, remove(c)) }()
	ready()
	events, err := await(ctx, nl)
	if err != nil {
		return Trace{}, err
	}
	return describe(c, events), nil
}

// create creates the table. One that a killed trace left is deleted first: this process has the lock.
func create(c *nfnetlink.Conn, q Query) error {
	removal := remove(c)
	err := c.Commit(q.table())
	if err != nil {
		return fmt.Errorf("create table inet %s: %w", kernel.TraceTable, errors.Join(err, removal))
	}
	return nil
}

// remove deletes the table, if there is one.
func remove(c *nfnetlink.Conn) error {
	b := &nfnetlink.Batch{}
	b.DelTable(nfnetlink.Inet, kernel.TraceTable)
	err := c.Commit(b)
	if err != nil && !nfnetlink.IsNotExist(err) {
		return fmt.Errorf("delete table inet %s: %w", kernel.TraceTable, err)
	}
	return nil
}

func unsupported(err error) error {
	if nfnetlink.IsAny(err, unix.EINVAL, unix.EOPNOTSUPP, unix.ENOENT, unix.EPROTONOSUPPORT, unix.EAFNOSUPPORT) {
		return fmt.Errorf("%w: %w", ErrUnsupported, err)
	}
	return err
}

// Bounds of what is kept until a packet is at its end.
const (
	maxPackets = 64
	maxEvents  = 10_000
	// quiet is for how long no event of a packet comes before it counts as ended, such as one without a route.
	quiet = time.Second
	// egressTime is how long a packet that left the node may meet rules of egress.
	egressTime = 100 * time.Millisecond
)

// A packet is what was received about one.
type packet struct {
	events      []event
	began, last time.Time
	new         bool // it is not of an established connection
	// arrived means that it left the node or was received by it, dropped that a rule dropped it.
	arrived, dropped bool
	// head and loopback are those of the last event that has them.
	head     head
	loopback bool
}

// await returns the events of the first packet of a new connection that was dropped, left the node, was
// received by it, or went no further.
func await(ctx context.Context, nl *netlink.Conn) ([]event, error) {
	packets := map[uint32]*packet{}
	for {
		deadline := time.Now().Add(egressTime)
		if end, ok := ctx.Deadline(); ok && end.Before(deadline) {
			deadline = end
		}
		events, err := receive(nl, deadline)
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return nil, fmt.Errorf("trace packets: %w", err)
		}
		for _, e := range events {
			take(packets, e)
		}
		over := ctx.Err() != nil
		if p := answer(packets, over); p != nil {
			return p.events, nil
		}
		if over {
			return nil, ErrNoPacket
		}
	}
}

// answer returns the first packet of which no further events are expected, nil if there is none. Those of known
// connections are forgotten. over means that the time of the trace is over.
func answer(packets map[uint32]*packet, over bool) (first *packet) {
	for id, p := range packets {
		switch {
		case !p.ended(over):
		case !p.new && !p.dropped:
			delete(packets, id)
		case first == nil || p.began.Before(first.began):
			first = p
		}
	}
	return first
}

// ended reports whether no further events of a packet are expected.
func (p *packet) ended(over bool) bool {
	patience := quiet
	switch {
	case p.arrived && over:
		patience = 0
	case p.arrived, over:
		patience = egressTime
	}
	return p.dropped || time.Since(p.last) > patience
}

// take adds an event to its packet.
func take(packets map[uint32]*packet, e event) {
	own := e.chain.Family == nfnetlink.Inet && e.chain.Table == kernel.TraceTable
	p := packets[e.packet]
	if p == nil {
		// Packets that another program traces do not begin in this table.
		if !own || len(packets) == maxPackets {
			return
		}
		p = continued(packets, e)
		packets[e.packet] = p
	}
	if e.head != nil {
		p.head = *e.head
		p.loopback = e.loopback
	}
	if len(p.events) < maxEvents {
		p.events = append(p.events, e)
	}
	p.last = time.Now()
	p.dropped = p.dropped || e.drops()
	p.new = p.new || own && strings.HasPrefix(e.chain.Name, afterTracking)
	// What leaves by the loopback interface comes back, and is received.
	p.arrived = p.arrived || own && p.new && !p.loopback && strings.HasPrefix(e.chain.Name, endOf)
}

// continued returns the packet that an event continues with another identity, otherwise a new one. The interface where a
// packet arrived is a part of its identity. What leaves by the loopback interface begins again; what a bridge hands to
// its own interface has met the chains of prerouting before (br_netfilter).
func continued(packets map[uint32]*packet, e event) *packet {
	goesOn := strings.HasPrefix(e.chain.Name, afterRouting)
	for _, p := range packets {
		if e.head != nil && p.head == *e.head && (p.loopback || goesOn && !p.arrived) {
			return p
		}
	}
	return &packet{began: time.Now()}
}
