package nfttest

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfttest/netns"
)

// Target is a destination that a Hammer sends to, and the expected verdict for
// the pod's connections to it.
type Target struct {
	Proto       Proto // UDP or TCP
	Dst         netip.Addr
	Masqueraded bool
}

// Targets returns destinations, each over UDP and TCP.
func Targets(masqueraded func(netip.Addr) bool, destinations ...string) (all []Target) {
	for _, proto := range []Proto{UDP, TCP} {
		for _, dst := range destinations {
			addr := netip.MustParseAddr(dst)
			all = append(all, Target{proto, addr, masqueraded(addr)})
		}
	}
	return all
}

// TargetsOfBothKinds returns those of both families, of which private destinations are exempt.
func TargetsOfBothKinds() []Target {
	public := func(a netip.Addr) bool { return !a.IsPrivate() }
	return Targets(public, "198.51.100.1", "10.9.0.9", "2001:db8:1::1", "fd00:9::9")
}

// Count is the result for the flows to one target. A flow is one UDP packet with
// unique ports, or one TCP connection.
type Count struct {
	Target
	Sent  uint64
	Pod   uint64 // seen with the pod's address
	Node  uint64 // seen with the node's address
	Other uint64 // seen with any other address
}

// Seen returns how many flows the far end saw.
func (c Count) Seen() uint64 { return c.Pod + c.Node + c.Other }

// Wrong returns how many of them had a wrong source address.
func (c Count) Wrong() uint64 {
	if c.Masqueraded {
		return c.Pod + c.Other
	}
	return c.Node + c.Other
}

// Tally is the result of a Hammer.
type Tally struct {
	Counts []Count // in the order of the targets
	// Dropped is how many packets the node's connection tracking dropped,
	// probably because its table was full. They prove nothing.
	Dropped uint64
}

func (t Tally) sum(of func(Count) uint64) (n uint64) {
	for _, c := range t.Counts {
		n += of(c)
	}
	return n
}

// Sent returns how many flows were sent.
func (t Tally) Sent() uint64 { return t.sum(func(c Count) uint64 { return c.Sent }) }

// Seen returns how many of them the far end saw. The others were lost on the way
// or in a receive buffer.
func (t Tally) Seen() uint64 { return t.sum(Count.Seen) }

// Leaked returns how many flows that must be masqueraded were not.
func (t Tally) Leaked() uint64 { return t.wrong(true) }

// Wronged returns how many flows that must keep the pod's address did not.
func (t Tally) Wronged() uint64 { return t.wrong(false) }

func (t Tally) wrong(masqueraded bool) uint64 {
	return t.sum(func(c Count) uint64 { return map[bool]uint64{true: c.Wrong()}[c.Masqueraded == masqueraded] })
}

// Err returns an error if something is wrong: a wrong source, a packet that
// proves nothing, or a target for which nothing was seen.
func (t Tally) Err() error {
	for _, c := range t.Counts {
		if c.Seen() == 0 {
			return fmt.Errorf("no %s to %s seen: %s", c.Proto, c.Dst, t)
		}
	}
	if t.Leaked()+t.Wronged()+t.Dropped > 0 {
		return errors.New(t.String())
	}
	return nil
}

// String returns the tally in one line.
func (t Tally) String() string {
	return fmt.Sprintf("%d flows sent, %d seen, %d leaked, %d wrongly masqueraded, %d dropped by conntrack",
		t.Sent(), t.Seen(), t.Leaked(), t.Wronged(), t.Dropped)
}

// Hammer sends flows from the pod to its targets, as fast as it can, until it is
// stopped. It sends UDP packets to each target in turn, from a thread pinned to
// one CPU, on which each packet also passes the node: changes to the rules then
// run on another CPU at the same time. TCP connections are opened concurrently,
// one after the other.
type Hammer struct {
	top     *Topology
	counts  []counters
	dropped uint64 // packets, before the start
	node    atomic.Pointer[[]netip.Addr]
	pods    Pods

	pause    atomic.Int64 // of senders, before each target has its next flow
	stopping atomic.Bool  // senders return
	draining atomic.Bool  // receivers return when there is nothing more to read
	senders  sync.WaitGroup
	readers  sync.WaitGroup

	mu  sync.Mutex
	err error
}

type counters struct {
	Target
	sent, pod, node, other atomic.Uint64
}

func (c *counters) seen() uint64 { return c.pod.Load() + c.node.Load() + c.other.Load() }

// Pods are addresses of the pod that UDP packets come from in turn, each to the targets of its family. Node reports
// whether what the far end sees is how the node must translate one of them, by its index.
type Pods struct {
	Addrs []netip.Addr
	Node  func(pod int, seen netip.AddrPort) bool
}

// StartPods is StartHammer for several pods, to targets over UDP.
func (t *Topology) StartPods(pods Pods, targets ...Target) (*Hammer, error) {
	return t.startHammer(&Hammer{pods: pods}, nil, targets)
}

// StartHammer starts sending. No two targets may be the same, and only one Hammer
// may run in a Topology. It shortens the node's connection-tracking timeouts, so
// that the table does not fill up.
func (t *Topology) StartHammer(targets ...Target) (*Hammer, error) {
	return t.StartHammerFrom([]netip.Addr{t.NodeV4, t.NodeV6}, targets...)
}

// StartHammerFrom is StartHammer if other addresses than NodeV4 and NodeV6 count as the
// node's.
func (t *Topology) StartHammerFrom(node []netip.Addr, targets ...Target) (*Hammer, error) {
	return t.startHammer(&Hammer{}, node, targets)
}

func (t *Topology) startHammer(h *Hammer, node []netip.Addr, targets []Target) (*Hammer, error) {
	h.top, h.counts = t, make([]counters, len(targets))
	h.LeavesFrom(node...)
	if err := Part(func() { h.start(targets) }); err != nil {
		_, stopErr := h.Stop()
		return nil, fmt.Errorf("hammer: %w", errors.Join(err, stopErr))
	}
	return h, nil
}

func (h *Hammer) start(targets []Target) {
	for i, target := range targets {
		h.counts[i].Target = target
		Check(h.top.AddAddr(h.top.Outside, target.Dst))
	}
	for _, pod := range h.pods.Addrs {
		Check(h.top.AddAddr(h.top.Pod, pod))
	}
	h.dropped = Must(ConntrackStat(h.top.Node, "drop"))
	for _, name := range []string{
		"udp_timeout", "tcp_timeout_close", "tcp_timeout_time_wait",
		// Otherwise an entry from the time of a change would decide for the
		// connection that uses the same port tens of thousands of flows later.
		"tcp_timeout_syn_sent", "tcp_timeout_syn_recv", "tcp_timeout_established", "tcp_timeout_fin_wait",
		"tcp_timeout_close_wait", "tcp_timeout_last_ack", "tcp_timeout_max_retrans", "tcp_timeout_unacknowledged",
	} {
		// A user namespace may lack them. Then Dropped shows whether the table
		// was too small.
		_ = h.top.Node.Sysctl("net.netfilter.nf_conntrack_"+name, "1")
	}
	// A connection that was started before the rules changed must not be
	// established a second later by a retransmission.
	Check(h.top.Outside.Sysctl("net.ipv4.tcp_synack_retries", "0"))
	h.startUDP()
	h.startTCP()
}

// of returns the counters of the targets of one protocol.
func (h *Hammer) of(proto Proto) (found []*counters) {
	for i := range h.counts {
		if h.counts[i].Proto == proto {
			found = append(found, &h.counts[i])
		}
	}
	return found
}

// firstPort is the first source port of flows.
const firstPort = 10000

// judge counts one flow of the pod that the far end saw.
func (h *Hammer) judge(c *counters, seen netip.Addr) {
	pod, node := seen == h.top.PodV4 || seen == h.top.PodV6, slices.Contains(*h.node.Load(), seen)
	c.count(pod, node)
}

func (c *counters) count(pod, node bool) {
	switch {
	case pod:
		c.pod.Add(1)
	case node:
		c.node.Add(1)
	default:
		c.other.Add(1)
	}
}

// LeavesFrom sets the addresses that count as the node's from now on.
func (h *Hammer) LeavesFrom(addresses ...netip.Addr) { h.node.Store(&addresses) }

// Ease makes it send at most a thousand flows a second to each target from now on, unless tests may take long: next to
// an agent that is started again and again, most of the others tell the same.
func (h *Hammer) Ease() {
	if !Long() {
		h.pause.Store(int64(time.Millisecond))
	}
}

// rest waits for the next round of flows.
func (h *Hammer) rest() {
	if pause := h.pause.Load(); pause > 0 {
		time.Sleep(time.Duration(pause))
	}
}

// send runs a sender in the pod.
func (h *Hammer) send(loop func() error) {
	h.senders.Go(func() { h.fail(h.top.Pod.Do(loop)) })
}

// read runs a receiver.
func (h *Hammer) read(loop func() error) {
	h.readers.Go(func() { h.fail(loop()) })
}

// fail records an error for Stop, and stops all senders.
func (h *Hammer) fail(err error) {
	if err == nil {
		return
	}
	h.stopping.Store(true)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.err = errors.Join(h.err, err)
}

// Wait waits until that many flows to every target have been sent since the call
// and seen.
func (h *Hammer) Wait(ctx context.Context, flows uint64) error {
	return h.until(ctx, flows, (*counters).seen)
}

// Sent is Wait, but whether they are seen or not.
func (h *Hammer) Sent(ctx context.Context, flows uint64) error {
	return h.until(ctx, flows, func(c *counters) uint64 { return c.sent.Load() })
}

func (h *Hammer) until(ctx context.Context, flows uint64, count func(*counters) uint64) error {
	goals := make([]uint64, len(h.counts))
	for i := range h.counts {
		goals[i] = h.counts[i].sent.Load() + flows
	}
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for i := range h.counts {
		for count(&h.counts[i]) < goals[i] {
			if h.stopping.Load() {
				return errors.New("hammer: stopped")
			}
			select {
			case <-ctx.Done():
				return fmt.Errorf("hammer: %s %s: %w", h.counts[i].Proto, h.counts[i].Dst, ctx.Err())
			case <-tick.C:
			}
		}
	}
	return nil
}

// Stop stops sending, reads what is still on its way and returns the result. It
// may be called again. The error is one of the Hammer itself; wrong sources are
// in the Tally.
func (h *Hammer) Stop() (Tally, error) {
	h.stopping.Store(true)
	h.senders.Wait()
	h.draining.Store(true)
	h.readers.Wait()

	tally := h.SoFar()
	dropped, err := ConntrackStat(h.top.Node, "drop")
	tally.Dropped = dropped - h.dropped
	return tally, errors.Join(h.err, err)
}

// SoFar returns the counts of a running Hammer, without Dropped, which only Stop
// reads.
func (h *Hammer) SoFar() Tally {
	var tally Tally
	for i := range h.counts {
		c := &h.counts[i]
		tally.Counts = append(tally.Counts, Count{c.Target, c.sent.Load(), c.pod.Load(), c.node.Load(), c.other.Load()})
	}
	return tally
}

// ConntrackStat returns a count of the namespace's connection tracking, by the name of its column:
// of packets, "drop" has all that it dropped, and "insert_failed" those without a free source port,
// too.
func ConntrackStat(n *NS, name string) (total uint64, err error) {
	// Not /proc/net, which shows the namespace of the process.
	text, err := netns.In(n, func() ([]byte, error) { return os.ReadFile("/proc/thread-self/net/stat/nf_conntrack") })
	if err == nil {
		total, err = sum(string(text), name)
	}
	if err != nil {
		return 0, fmt.Errorf("%s: conntrack statistics: %w", n, err)
	}
	return total, nil
}

// sum sums up a column of the kernel's connection-tracking statistics: a line of names, then a line
// of hexadecimal numbers per CPU.
func sum(text, name string) (total uint64, err error) {
	names, values, _ := strings.Cut(text, "\n")
	column := slices.Index(strings.Fields(names), name)
	for line := range strings.Lines(values) {
		fields := strings.Fields(line)
		if column < 0 || len(fields) <= column {
			return 0, fmt.Errorf("no column %s in %q", name, line)
		}
		v, err := strconv.ParseUint(fields[column], 16, 64)
		if err != nil {
			return 0, err
		}
		total += v
	}
	return total, nil
}

// OneProcessor pins the calling thread to one CPU, the first on which it may run,
// until restore is called.
func OneProcessor() (restore func(), err error) {
	var all, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &all); err != nil {
		return nil, fmt.Errorf("processors: %w", err)
	}
	first := 0
	for !all.IsSet(first) {
		first++
	}
	one.Set(first)
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		return nil, fmt.Errorf("processor %d: %w", first, err)
	}
	return func() { _ = unix.SchedSetaffinity(0, &all) }, nil
}
