package nfnetlink

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// Buffers of a connection. The whole batch must fit the send buffer. Without
// CAP_NET_ADMIN in the initial user namespace the kernel caps the buffers at
// net.core.wmem_max and rmem_max, whose defaults fit 4,000 prefixes per batch.
const (
	sendBuffer    = 8 << 20
	receiveBuffer = 1 << 20
	// PageSize is the most that the kernel puts into one part of a dump. With a
	// smaller buffer it walks a set from the start more often.
	PageSize = 32 << 10
)

// A Conn is a connection to nf_tables in the network namespace of the thread that
// dialed it. It is safe for concurrent use, one request at a time.
type Conn struct {
	*socket
	ctx context.Context // ends reads, see [Conn.In]
}

// A socket is what several connections share.
type socket struct {
	dial     func() (*netlink.Conn, error)
	requests sync.Mutex // held for the time of a request
	mu       sync.Mutex
	nl       *netlink.Conn // nil after a socket error; then dialed again
}

// Dial returns a long-lived connection: closing a netlink socket that deleted
// something waits for an RCU grace period, about 12 ms. The socket is opened by
// the first request, which returns the error if that fails.
func Dial() *Conn { return New(dial) }

// New returns a connection that uses the given dialer, which is called again
// whenever the socket has failed.
func New(dial func() (*netlink.Conn, error)) *Conn {
	return &Conn{&socket{dial: dial}, context.Background()}
}

// In returns the same connection for reads that end soon after the context does, with its error: before the next object
// of a list. If a list was not read to its end, the socket is closed.
func (c *Conn) In(ctx context.Context) *Conn { return &Conn{c.socket, ctx} }

// Another returns a connection by the same dialer, for requests that must not wait for those of c. Its socket is opened
// by its first request.
func (c *Conn) Another() *Conn { return New(c.dial) }

// Settle waits until other programs' transactions that have begun are finished or aborted, and the kernel has
// destroyed what earlier ones deleted. From Linux 5.12 on it does so before it closes a socket.
func (c *Conn) Settle() error {
	nl, err := c.dial()
	if err != nil {
		return err
	}
	return nl.Close()
}

// AwaitPackets waits until no packet is on its way through the rules that an earlier
// transaction replaced, about 10 ms: a processor of a virtual machine may stop in the middle
// of a chain for longer than a transaction takes. membarrier(2), with MEMBARRIER_CMD_GLOBAL of
// Linux 4.3, waits for an RCU grace period, and packets pass the chains of a hook in one
// read-side critical section. With one processor it returns at once: the caller runs, so no
// packet does, unless the kernel preempted it (CONFIG_PREEMPT) while a process of the node
// sent it. Kernels with nohz_full reject it, and seccomp may: then it
// waits 100 ms, which is no proof.
func AwaitPackets() {
	const global = 1 // MEMBARRIER_CMD_GLOBAL
	if _, _, errno := unix.Syscall(unix.SYS_MEMBARRIER, global, 0, 0); errno != 0 {
		time.Sleep(100 * time.Millisecond)
	}
}

func dial() (*netlink.Conn, error) {
	nl, err := netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{MessageBufferSize: PageSize})
	if err != nil {
		return nil, fmt.Errorf("netlink socket: %w", err)
	}
	// Without CapAcknowledge each error includes the message that caused it, and
	// a few of those with elements fill the receive buffer.
	err = errors.Join(nl.SetWriteBuffer(sendBuffer), nl.SetReadBuffer(receiveBuffer),
		nl.SetOption(netlink.CapAcknowledge, true))
	if err != nil {
		_ = nl.Close()
		return nil, fmt.Errorf("netlink socket: %w", err)
	}
	// The kernel learns the size of the buffer from what is received. Before, a part
	// of a dump has less than 4 KiB, and a longer rule ends the dump as if it and all
	// rules after it were not there.
	_, _ = nl.Execute(message(unix.NFPROTO_UNSPEC, unix.NFT_MSG_GETGEN, 0, nil))
	return nl, nil
}

// answerTimeout bounds the wait for a reply that the kernel had no room for. It
// is longer than the dump of any set takes.
const answerTimeout = 5 * time.Minute

// bounded sets a deadline for the replies to the next message. The connection of a test may not support deadlines.
func bounded(nl *netlink.Conn) *netlink.Conn {
	_ = nl.SetReadDeadline(time.Now().Add(answerTimeout))
	return nl
}

func (s *socket) open() (*netlink.Conn, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.nl == nil {
		nl, err := s.dial()
		if err != nil {
			return nil, err
		}
		s.nl = nl
	}
	return s.nl, nil
}

// Close closes the socket. It does not wait for a request, which then fails.
func (s *socket) Close() error {
	s.mu.Lock()
	nl := s.nl
	s.nl = nil
	s.mu.Unlock()
	if nl == nil {
		return nil
	}
	return nl.Close()
}

// fail closes a socket in which unread replies may be queued. The next request opens another one.
func (s *socket) fail() { _ = s.Close() }

// ErrReadAgain means that what was read does not hold any more, or that a list is perhaps incomplete: read again, then
// decide again. [Again] does so.
var ErrReadAgain = errors.New("what was read changed meanwhile")

// Generation returns the number that the kernel increments with each transaction
// in the network namespace.
func (c *Conn) Generation() (uint32, error) {
	var generation uint32
	err := c.Exchange(message(unix.NFPROTO_UNSPEC, unix.NFT_MSG_GETGEN, 0, nil), func(m netlink.Message) error {
		generation = generationOf(m)
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("cannot read nftables: %w", err)
	}
	return generation, nil
}

// generationOf returns the number in a reply to NFT_MSG_GETGEN, 0 if it is another message.
func generationOf(m netlink.Message) uint32 {
	if m.Header.Type != netlink.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWGEN) || len(m.Data) < headerLen {
		return 0
	}
	return Attrs(m.Data[headerLen:]).Uint32(unix.NFTA_GEN_ID)
}

// Commit sends the batch as one transaction, which the kernel accepts or rejects as a whole. If the batch has
// preconditions, they hold when it takes effect: they are checked just before, and the kernel rejects the batch if
// anybody has committed in between. Then both are repeated for a few seconds, after which the error is ERESTART.
//
// The error wraps the kernel's errno (errors.Is) and names the message that was rejected. After ENOBUFS it is unknown
// whether the transaction took effect.
func (c *Conn) Commit(b *Batch) error {
	if b.Len() == 0 {
		return nil
	}
	if len(b.preconditions) == 0 {
		return c.transact(b, 0)
	}
	start := time.Now()
	for n := 1; ; n++ {
		generation, err := c.check(b.preconditions)
		if err != nil {
			return err
		}
		err = c.transact(b, generation)
		var rejected *RejectedError // otherwise the batch may have taken effect
		if !errors.As(err, &rejected) || !errors.Is(rejected, unix.ERESTART) {
			return err
		}
		if n >= attempts && time.Since(start) > patience {
			return err
		}
	}
}

// check returns a generation at which preconditions hold.
func (c *Conn) check(preconditions []Precondition) (generation uint32, err error) {
	generation, err = c.Generation()
	if err != nil {
		return 0, err
	}
	if err := c.AwaitCommit(); err != nil {
		return 0, err
	}
	for _, x := range preconditions {
		if err := x.Check(c); err != nil {
			return 0, err
		}
	}
	return generation, nil
}

// AwaitCommit waits until a transaction that the kernel is committing is in force, and lists show it: its generation
// can be read a moment before (nf_tables_commit). It sends an empty transaction, which has to wait for its turn.
func (c *Conn) AwaitCommit() error {
	err := c.transact(&Batch{}, 0)
	if errors.As(err, new(*RejectedError)) && !errors.Is(err, unix.ENOMEM) {
		return nil // it is committed or rejected in its turn
	}
	return err
}

// transact sends a batch which the kernel rejects at another generation, or at none if that is 0.
func (c *Conn) transact(b *Batch, generation uint32) error {
	c.requests.Lock()
	defer c.requests.Unlock()
	nl, err := c.open()
	if err != nil {
		return err
	}
	msgs := envelope(b, generation)
	// This needs CAP_NET_ADMIN in the initial user namespace. Without it, a batch that is too large is not sent.
	if n := size(msgs); n > sendBuffer {
		_ = nl.SetWriteBuffer(n)
	}
	sent, err := nl.SendMessages(msgs)
	if err != nil {
		c.fail()
		if err := unsent(err); errors.Is(err, unix.ENOMEM) {
			return &RejectedError{Op: "send transaction", Err: err}
		}
		return fmt.Errorf("send transaction: %w", err)
	}
	return c.outcome(nl, b, sent)
}

// unsent returns why a message was not sent. ENOBUFS means then that the kernel had no memory for it
// (netlink_sendmsg), and not, as it does for a reply, that one was lost.
func unsent(err error) error {
	if errors.Is(err, unix.ENOBUFS) {
		return unix.ENOMEM
	}
	return err
}

// envelope returns the messages of a transaction: those of the batch, between a begin with the generation and an end.
func envelope(b *Batch, generation uint32) []netlink.Message {
	head := []byte{unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, unix.NFNL_SUBSYS_NFTABLES} // struct nfgenmsg, res_id big-endian
	begin := Attrs(head)
	if generation != 0 {
		begin.AddUint32(unix.NFNL_BATCH_GENID, generation)
	}
	msgs := make([]netlink.Message, 0, b.Len()+2)
	msgs = append(msgs, netlink.Message{
		Header: netlink.Header{Type: unix.NFNL_MSG_BATCH_BEGIN, Flags: netlink.Request},
		Data:   begin,
	})
	msgs = append(msgs, b.msgs...)
	return append(msgs, netlink.Message{
		Header: netlink.Header{Type: unix.NFNL_MSG_BATCH_END, Flags: netlink.Request},
		Data:   head,
	})
}

// size returns the bytes that messages take in the send buffer.
func size(msgs []netlink.Message) int {
	n := 0
	for _, m := range msgs {
		n += unix.NLMSG_HDRLEN + len(m.Data)
	}
	return n
}

// outcome reads the kernel's replies to a transaction: errors and, after success, the tables and sets that it created,
// with their handles (flag ECHO). Messages are not acknowledged one by one, because that could overrun the receive
// buffer and hide the outcome. So a request is sent after the transaction, and its reply marks the end.
func (c *Conn) outcome(nl *netlink.Conn, b *Batch, sent []netlink.Message) error {
	marker, err := nl.Send(message(unix.NFPROTO_UNSPEC, unix.NFT_MSG_GETGEN, 0, nil))
	if err != nil {
		c.fail()
		return fmt.Errorf("read outcome: %w", err)
	}
	var first error
	for {
		msgs, err := bounded(nl).Receive()
		var op *netlink.OpError
		switch {
		case err == nil:
			for _, m := range msgs {
				if m.Header.Sequence == marker.Header.Sequence {
					b.Generation = generationOf(m)
					return first
				}
				b.recordHandle(m)
			}
		case errors.As(err, &op) && op.Sequence != 0 && op.Sequence != marker.Header.Sequence:
			if first == nil {
				first = rejection(sent, op)
			}
		default:
			c.fail()
			return errors.Join(first, fmt.Errorf("read outcome: %w", err))
		}
	}
}

// An Op is what a message of a transaction does.
type Op string

// The operations that callers distinguish when a transaction is rejected.
const (
	CreateTable Op = "create table"
	CreateChain Op = "create chain"
	CreateRule  Op = "create rule"
)

// A RejectedError is the message of a transaction that the kernel rejected, and
// the reason. Nothing of the transaction took effect.
type RejectedError struct {
	Op  Op
	Err error
}

func (e *RejectedError) Error() string { return string(e.Op) + ": " + e.Err.Error() }

// Unwrap returns the reason, which wraps the kernel's errno.
func (e *RejectedError) Unwrap() error { return e.Err }

func rejection(sent []netlink.Message, op *netlink.OpError) error {
	for _, m := range sent {
		if m.Header.Sequence == op.Sequence {
			return &RejectedError{Op: opOf(m.Header.Type), Err: op.Err}
		}
	}
	return &RejectedError{Op: "transaction", Err: op.Err}
}

var ops = map[uint16]Op{
	unix.NFT_MSG_NEWTABLE: CreateTable, unix.NFT_MSG_DELTABLE: "delete table",
	unix.NFT_MSG_NEWCHAIN: CreateChain, unix.NFT_MSG_DELCHAIN: "delete chain",
	unix.NFT_MSG_NEWRULE: CreateRule, unix.NFT_MSG_DELRULE: "delete rule",
	unix.NFT_MSG_NEWSET: "create set", unix.NFT_MSG_DELSET: "delete set", unix.NFT_MSG_NEWSETELEM: "add elements",
	unix.NFT_MSG_NEWOBJ: "create counter", unix.NFT_MSG_DELOBJ: "delete counter",
}

func opOf(t netlink.HeaderType) Op {
	if t>>8 != unix.NFNL_SUBSYS_NFTABLES {
		return "transaction"
	}
	return ops[uint16(t&0xff)]
}

// Exchange sends one request and calls do for each message of the reply, of which only a dump
// has several. If do fails, or the context ends, the rest of the reply is not read: the socket
// is closed, so that the kernel stops the dump. The error is [ErrReadAgain] if what was
// listed has changed meanwhile.
func (c *Conn) Exchange(m netlink.Message, do func(netlink.Message) error) error {
	if err := c.ctx.Err(); err != nil {
		return err
	}
	c.requests.Lock()
	defer c.requests.Unlock()
	nl, err := c.open()
	if err != nil {
		return err
	}
	request, err := bounded(nl).Send(m)
	if err != nil {
		c.fail()
		return unsent(err)
	}
	interrupted := false
	begun := time.Now()
	for reply, err := range nl.ReceiveIter() {
		if err != nil {
			var op *netlink.OpError
			if !errors.As(err, &op) || op.Sequence != request.Header.Sequence {
				c.fail()
			}
			return err
		}
		if reply.Header.Sequence != request.Header.Sequence || len(reply.Data) < headerLen {
			err = errors.New("reply to another request")
		} else {
			err = errors.Join(c.ctx.Err(), do(reply))
		}
		if err != nil {
			c.fail()
			return err
		}
		if m.Header.Flags&netlink.Dump == 0 {
			// The iterator discards the rest of a multipart reply, and ctnetlink marks also single messages as that,
			// without ever sending the end. A deadline that has passed makes the iterator return.
			_ = nl.SetReadDeadline(time.Unix(1, 0))
			return nil
		}
		interrupted = interrupted || reply.Header.Flags&netlink.DumpInterrupted != 0
		if time.Since(begun) > answerTimeout/2 { // do may be slow; not each time, because a deadline costs more than do
			begun = time.Now()
			bounded(nl)
		}
	}
	if interrupted {
		return ErrReadAgain
	}
	return nil
}

// IsNotExist reports whether the error means that the object does not exist.
func IsNotExist(err error) bool { return errors.Is(err, os.ErrNotExist) }
