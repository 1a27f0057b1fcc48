package conntrack

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

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

// errInterrupted reports that a dump is incomplete because the table was resized.
var errInterrupted = errors.New("the table was resized while it was read")

// tries bounds how often an interrupted dump is started.
const tries = 5

// pageSize is the most that the kernel puts into one part of a dump.
const pageSize = 32 << 10

// answerTimeout bounds the wait for one part of a reply.
const answerTimeout = 10 * time.Second

// longAgo, set as a deadline, makes the library stop reading a reply.
var longAgo = time.Unix(1, 0)

// A Table is the connection-tracking table of a network namespace.
type Table struct {
	dial   func() (*netlink.Conn, error)
	sample int // the most entries of a sample
}

// Open returns the table of the network namespace in which its methods are called. Each call
// opens a connection of its own.
func Open() *Table { return &Table{dial, sampleSize} }

func dial() (*netlink.Conn, error) {
	return netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{MessageBufferSize: pageSize})
}

func (t *Table) with(fn func(*netlink.Conn) error) error {
	nl, err := t.dial()
	if err != nil {
		return fmt.Errorf("netlink socket: %w", err)
	}
	defer func() { _ = nl.Close() }()
	return fn(nl)
}

// exchange sends a request and calls fn with the body of each message of the reply,
// of which only a dump has several.
func exchange(nl *netlink.Conn, request netlink.Message, fn func(body []byte) error) error {
	_ = nl.SetReadDeadline(time.Now().Add(answerTimeout))
	sent, err := nl.Send(request)
	if err != nil {
		return err
	}
	part := 0
	for m, err := range nl.ReceiveIter() {
		switch {
		case err != nil:
		case m.Header.Flags&netlink.DumpInterrupted != 0:
			err = errInterrupted
		case m.Header.Sequence != sent.Header.Sequence || len(m.Data) < headerLen:
			err = errors.New("reply to another request")
		default:
			err = fn(m.Data[headerLen:])
		}
		if err != nil || request.Header.Flags&netlink.Dump == 0 {
			// Otherwise the iterator reads the rest of a dump, and waits for the end of
			// replies that the kernel marks as multipart although they have none.
			_ = nl.SetReadDeadline(longAgo)
			return err
		}
		if part++; part%64 == 0 { // the visitor may be slow
			_ = nl.SetReadDeadline(time.Now().Add(answerTimeout))
		}
	}
	return nil
}

// A Filter selects the entries of a dump. The zero Filter selects all of them.
type Filter struct {
	Family     uint8 // unix.AF_INET or AF_INET6; 0: both
	Translated bool  // those whose source was translated
}

// errStop ends a dump without an error.
var errStop = errors.New("stop")

// Dump visits the entries that match, in the kernel's hash order. An interrupted
// dump is restarted a few times: each time start is called, which returns the
// function that visits the entries. Any error from that function ends the dump.
func (t *Table) Dump(f Filter, start func() func(*Entry) error) error {
	var err error
	for range tries {
		err = t.dump(f, start())
		if !errors.Is(err, unix.ENOBUFS) && !errors.Is(err, errInterrupted) {
			break
		}
	}
	if errors.Is(err, errStop) {
		return nil
	}
	return described("read connections", err)
}

func (t *Table) dump(f Filter, visit func(*Entry) error) error {
	var status []netlink.Attribute
	if f.Translated {
		status = []netlink.Attribute{attr(ctaStatus, uint32(SrcNAT)), attr(ctaStatusMask, uint32(SrcNAT))}
	}
	return t.with(func(nl *netlink.Conn) error {
		var e Entry
		return exchange(nl, message(msgGet, netlink.Dump, f.Family, status...), func(body []byte) error {
			if err := e.decode(body); err != nil || f.Translated && e.Status&SrcNAT == 0 {
				return err
			}
			return visit(&e)
		})
	})
}

// Stats are the counters of connection tracking.
type Stats struct {
	Entries, Limit uint64 // Limit is 0 before Linux 4.19
	// InsertFailed, Drop and EarlyDrop count since the namespace was created.
	// They are sums over all CPUs, each of which has a 32-bit counter.
	InsertFailed, Drop, EarlyDrop uint64
}

// Stats reads the counters.
func (t *Table) Stats() (s Stats, err error) {
	sums := map[uint16]*uint64{
		ctaStatsInsertFailed: &s.InsertFailed, ctaStatsDrop: &s.Drop, ctaStatsEarlyDrop: &s.EarlyDrop,
	}
	totals := map[uint16]*uint64{ctaStatsEntries: &s.Entries, ctaStatsLimit: &s.Limit}
	err = t.with(func(nl *netlink.Conn) error {
		err := exchange(nl, message(msgStatsCPU, netlink.Dump, unix.AF_UNSPEC), addTo(sums))
		if err != nil {
			return err
		}
		return exchange(nl, message(msgStats, 0, unix.AF_UNSPEC), addTo(totals))
	})
	return s, described("read connection statistics", err)
}

// addTo adds the numbers of a message, by the types of their attributes.
func addTo(sums map[uint16]*uint64) func(body []byte) error {
	return func(body []byte) error {
		return nfnetlink.Each(body, func(typ uint16, data []byte) error {
			if sum := sums[typ]; sum != nil {
				*sum += uint64(number(data))
			}
			return nil
		})
	}
}

// described wraps an error with the operation and, if known, the cause.
func described(what string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("%s: %w: %w", what, ErrNotPermitted, err)
	case errors.Is(err, unix.EPROTONOSUPPORT), errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EINVAL):
		// nfnetlink returns EINVAL for a subsystem that is not registered.
		return fmt.Errorf("%s: %w: %w", what, ErrUnsupported, err)
	}
	return fmt.Errorf("%s: %w", what, err)
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
	ctaStatsEarlyDrop    = 11

	ctaStatsEntries = 1
	ctaStatsLimit   = 2
)

const headerLen = 4 // struct nfgenmsg

func message(kind uint16, flags netlink.HeaderFlags, family uint8, attrs ...netlink.Attribute) netlink.Message {
	body, _ := netlink.MarshalAttributes(attrs) // fails for more than 64 KiB
	return netlink.Message{
		Header: netlink.Header{
			Type: netlink.HeaderType(unix.NFNL_SUBSYS_CTNETLINK<<8 | kind), Flags: netlink.Request | flags,
		},
		Data: append([]byte{family, unix.NFNETLINK_V0, 0, 0}, body...),
	}
}

func attr(typ uint16, v uint32) netlink.Attribute {
	return netlink.Attribute{Type: typ, Data: binary.BigEndian.AppendUint32(nil, v)}
}
