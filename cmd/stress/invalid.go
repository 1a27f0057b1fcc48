package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/netns"
)

// entriesVanish changes the file while connections lose their entry in conntrack before
// they are closed, and the pod sends segments without a connection. With dropInvalid none
// of these may be seen with the pod's address, and no segment of a connection that keeps
// its entry may get lost. Without it some must be seen, or the scenario proves nothing.
func entriesVanish(on bool) func(context.Context, *bench) {
	return func(ctx context.Context, b *bench) {
		p := policies(4, `masqueradeSrcCIDRs: [10.244.0.0/16, "fd00:10:244::/48"]`, fmt.Sprintf("dropInvalid: %t", on))
		a := b.serve(ctx, nft.ModeNFTables, p)
		s := strays{bench: b}
		err := nfttest.Part(func() {
			nfttest.Check(s.start())
			// Some of each kind, however short the scenario is.
			for b.more(ctx) || ctx.Err() == nil && s.err.Load() == nil && s.rounds.Load() < 3 {
				b.updates++
				b.change(ctx, a, nft.ModeNFTables, p[b.updates%2])
			}
		})
		nfttest.Check(errors.Join(err, s.stop()))
		b.flows(ctx, 1)
		leaked := s.leaked.Load()
		b.note = fmt.Sprintf("%d packets without a connection, of %d rounds of 5 and a FIN, were seen with the pod's address",
			leaked, s.rounds.Load())
		switch {
		case on && leaked > 0:
			nfttest.Check(fmt.Errorf("%d packets without a connection were seen with the pod's address", leaked))
		case !on && leaked == 0:
			nfttest.Check(errors.New("no packet without a connection was seen: this run proves nothing"))
		}
		b.inSync(ctx, p[b.updates%2].ruleset[nft.ModeNFTables])
	}
}

// strayPort is the port to which they are sent. keptPort is the one of connections that
// keep their entry.
const (
	strayPort = 30000
	keptPort  = 1999
)

// betweenStrays keeps the ports of connections that cannot be closed properly, each for a
// minute, from running out.
const betweenStrays = 10 * time.Millisecond

// strays are packets of the pod that belong to no connection, and connections next to
// them that keep their entry.
type strays struct {
	*bench
	leaked atomic.Uint64 // seen with the pod's address
	rounds atomic.Uint64
	err    atomic.Pointer[error]

	senders, readers sync.WaitGroup
	stopping, drain  atomic.Bool
	listeners        []net.Listener
}

func (s *strays) start() error {
	// Below the ports that the hammer binds to.
	if err := s.top.Pod.Sysctl("net.ipv4.ip_local_port_range", "2000 9999"); err != nil {
		return err
	}
	rules := strings.NewReplacer("KEPT", strconv.Itoa(keptPort), "DST", strconv.Itoa(strayPort)).Replace(passing)
	if _, err := s.top.Node.Output(rules, "nft", "-f", "-"); err != nil {
		return err
	}
	for _, text := range masqueraded {
		dst := netip.AddrPortFrom(netip.MustParseAddr(text), strayPort)
		pod := s.top.PodV4
		if dst.Addr().Is6() {
			pod = s.top.PodV6
		}
		tap, err := s.top.Outside.OpenTap(netns.Between(pod, dst.Addr()))
		if err != nil {
			return err
		}
		s.readers.Go(func() { s.fail(errors.Join(s.count(tap), tap.Close())) })
		var l net.Listener
		err = s.top.Outside.Do(func() (err error) {
			l, err = net.Listen("tcp", dst.String())
			return err
		})
		if err != nil {
			return err
		}
		s.listeners = append(s.listeners, l)
		s.readers.Go(func() { echo(l) })
		s.senders.Go(func() { s.fail(s.send(netip.AddrPortFrom(pod, 0), dst)) })
		s.senders.Go(func() { s.fail(s.keep(pod, dst)) })
	}
	return nil
}

func (s *strays) fail(err error) {
	if err != nil {
		s.err.CompareAndSwap(nil, &err)
	}
}

func (s *strays) stop() error {
	s.stopping.Store(true)
	s.senders.Wait()
	s.fail(s.lost())
	s.drain.Store(true)
	for _, l := range s.listeners {
		_ = l.Close()
	}
	s.readers.Wait()
	if err := s.err.Load(); err != nil {
		return *err
	}
	return nil
}

// count counts what a tap captures.
func (s *strays) count(tap *netns.Tap) error {
	buf := make([]byte, 2048)
	for {
		_, err := tap.Receive(buf, 100*time.Millisecond)
		switch {
		case err == nil:
			s.leaked.Add(1)
		case !errors.Is(err, os.ErrDeadlineExceeded):
			return err
		case s.drain.Load():
			return nil
		}
	}
}

// send sends segments without a connection, and closes connections without an entry.
func (s *strays) send(pod, dst netip.AddrPort) error {
	const fin, syn, rst, ack = 1, 2, 4, 16
	for !s.stopping.Load() {
		for _, flags := range []byte{fin, rst, rst | ack, syn | ack, fin | ack} {
			f := nfttest.Flow{Proto: nfttest.TCP, From: s.top.Pod, Src: pod, Dst: dst, Flags: flags}
			if err := f.Emit(); err != nil {
				return err
			}
		}
		c, err := s.dial(dst, nil)
		if err != nil {
			return err
		}
		from := c.LocalAddr().(*net.TCPAddr).AddrPort() //nolint:forcetypeassert // a TCP connection has no other
		if err := errors.Join(s.forget(netip.AddrPortFrom(from.Addr().Unmap(), from.Port()), dst), c.Close()); err != nil {
			return err
		}
		s.rounds.Add(1)
		time.Sleep(betweenStrays)
	}
	return nil
}

// dial opens a connection from an address of the pod; nil: from any.
func (s *strays) dial(dst netip.AddrPort, from *net.TCPAddr) (c net.Conn, err error) {
	err = s.top.Pod.Do(func() error {
		c, err = net.DialTCP("tcp", from, net.TCPAddrFromAddrPort(dst))
		return err
	})
	return c, err
}

// keep sends data over one connection. Nothing of it may be lost, because the node dropped it.
func (s *strays) keep(pod netip.Addr, dst netip.AddrPort) error {
	c, err := s.dial(dst, net.TCPAddrFromAddrPort(netip.AddrPortFrom(pod, keptPort)))
	if err != nil {
		return err
	}
	defer c.Close()
	var b [1]byte
	for !s.stopping.Load() {
		if _, err := c.Write(b[:]); err != nil {
			return err
		}
		if _, err := c.Read(b[:]); err != nil {
			return err
		}
	}
	return nil
}

// passing counts the segments that the pod sends over the connections of keep, before and
// after everything that the node does to them.
const passing = `table inet passing {
	counter in { }
	counter out { }
	chain in {
		type filter hook prerouting priority raw
		tcp sport KEPT tcp dport DST counter name in
	}
	chain out {
		type filter hook postrouting priority 300
		meta l4proto tcp ct direction original ct original proto-src KEPT ct original proto-dst DST counter name out
	}
}`

var packetCount = regexp.MustCompile(`packets (\d+)`)

// lost returns an error if the node did not let each of those segments pass. What the ends
// sent again does not tell: on a busy machine a segment may just be late.
func (s *strays) lost() error {
	var list string
	for range 20 {
		var err error
		if list, err = s.top.Node.Output("", "nft", "list", "counters", "table", "inet", "passing"); err != nil {
			return err
		}
		counts := packetCount.FindAllStringSubmatch(list, -1)
		if len(counts) == 2 && counts[0][1] != "0" && counts[0][1] == counts[1][1] {
			return nil
		}
		time.Sleep(100 * time.Millisecond) // some are on their way
	}
	return fmt.Errorf("connections that kept their entry: some of their segments were lost on the node:\n%s", list)
}

// echo answers connections with what they send.
func echo(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			var b [1]byte
			for {
				if _, err := c.Read(b[:]); err != nil {
					return
				}
				if _, err := c.Write(b[:]); err != nil {
					return
				}
			}
		}()
	}
}

// forget lets the entry of a connection in the node's connection tracking expire, by which the kernel
// finds it no longer.
func (s *strays) forget(src, dst netip.AddrPort) error {
	h, err := s.top.Node.Netlink()
	if err != nil {
		return err
	}
	tuple := func(src, dst netip.AddrPort) netlink.IPTuple {
		return netlink.IPTuple{
			Protocol: unix.IPPROTO_TCP,
			SrcIP:    src.Addr().AsSlice(), SrcPort: src.Port(), DstIP: dst.Addr().AsSlice(), DstPort: dst.Port(),
		}
	}
	family := uint8(netns.Family(src.Addr()))
	return h.ConntrackUpdate(netlink.ConntrackTable, netlink.InetFamily(family),
		&netlink.ConntrackFlow{FamilyType: family, Forward: tuple(src, dst), Reverse: tuple(dst, src), TimeOut: 0})
}
