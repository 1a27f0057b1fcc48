package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/netns"
)

// Each of the pods has a block of its own, in each family.
const (
	podCount   = 50
	blockSize  = 250
	podSources = `masqueradeSrcCIDRs: [10.244.0.0/16, "fd00:10:244::/48"]`
)

// portsNamePods changes the file and the addresses of the node while fifty pods connect. Each packet
// says which pod has sent it: the port must name that pod, without anything from the node.
func portsNamePods(ctx context.Context, b *bench) (err error) {
	p, err := policies(4, snatKey, podSources, fmt.Sprintf("portsPerPod: %d", blockSize))
	if err != nil {
		return err
	}
	if err := b.write(p[0]); err != nil {
		return err
	}
	a, err := b.startAgent(nft.ModeNFTables)
	if err != nil {
		return err
	}
	if err := awaitPolicy(ctx, a, p[0].ruleset[nft.ModeNFTables]); err != nil {
		return err
	}
	f, err := startPods(b.top)
	if err != nil {
		return err
	}
	defer func() {
		var stopErr error
		b.tally, stopErr = f.stop()
		err = errors.Join(err, stopErr, b.namesPods(f))
	}()
	here := map[string]bool{}
	for b.more(ctx) && !f.stopping.Load() {
		b.updates++
		moving := floating[b.updates%len(floating)]
		here[moving] = !here[moving]
		if err := b.float(moving, here[moving]); err != nil {
			return err
		}
		now := p[b.updates%2]
		if err := b.write(now); err != nil {
			return err
		}
		if err := awaitPolicy(ctx, a, now.ruleset[nft.ModeNFTables]); err != nil {
			return err
		}
	}
	return nil
}

// namesPods has the agent's program name one port of each pod, where the rules are not.
func (b *bench) namesPods(f *pods) error {
	for i, seen := range f.samples {
		node := netip.PrefixFrom(f.all[i], f.all[i].BitLen()-8).Masked()
		out, err := b.top.Outside.Output("", b.binary, "connections", "--config", b.config,
			"--seen-as", seen.String(), "--pod-cidr", node.String())
		line, _, _ := strings.Cut(out, "\n")
		if err != nil || !strings.HasSuffix(line, ": "+f.all[i].String()) {
			return errors.Join(err, fmt.Errorf("%s, which is of %s, is decoded as %q", seen, f.all[i], line))
		}
	}
	return nil
}

// pods send UDP packets, each of which begins a connection, until they are stopped.
type pods struct {
	top     *nfttest.Topology
	blocks  nft.PortBlocks
	all     []netip.Addr // the families in turn
	refused uint64       // packets, before the start

	counts  [2]nfttest.Count       // by family; Node are those of which the port names the pod
	samples map[int]netip.AddrPort // as what a pod was seen

	stopping, draining atomic.Bool
	running            sync.WaitGroup // sender
	reading            sync.WaitGroup // receiver
	sendErr, readErr   error
}

func startPods(top *nfttest.Topology) (*pods, error) {
	f := &pods{top: top, blocks: nft.NewPortBlocks(blockSize, nil), samples: map[int]netip.AddrPort{}}
	for i, dst := range masqueraded {
		f.counts[i].Target = nfttest.Target{Proto: nfttest.UDP, Dst: netip.MustParseAddr(dst), Masqueraded: true}
	}
	for i := range len(f.counts) * podCount {
		pod := netip.AddrFrom4([4]byte{10, 244, 1, byte(10 + i/2)})
		if i%2 == 1 {
			pod = netip.MustParseAddr(fmt.Sprintf("fd00:10:244:1::%x", 10+i/2))
		}
		if err := top.AddAddr(top.Pod, pod); err != nil {
			return nil, err
		}
		f.all = append(f.all, pod)
	}
	// Otherwise the table of connections would be full.
	if err := top.Node.Sysctl("net.netfilter.nf_conntrack_udp_timeout", "1"); err != nil {
		return nil, err
	}
	var err error
	if f.refused, err = nfttest.ConntrackStat(top.Node, "drop"); err != nil {
		return nil, err
	}
	tap, err := top.Outside.OpenTap(netns.OfProtocol(unix.IPPROTO_UDP))
	if err != nil {
		return nil, err
	}
	if err := tap.SetBuffer(64 << 20); err != nil { // tens of thousands of packets
		return nil, errors.Join(err, tap.Close())
	}
	f.reading.Go(func() { f.readErr = errors.Join(f.read(tap), tap.Close()) })
	f.running.Go(func() {
		f.sendErr = top.Pod.Do(f.send)
		f.stopping.Store(true)
	})
	return f, nil
}

// stop stops the pods, reads what is on its way, and returns the result.
func (f *pods) stop() (nfttest.Tally, error) {
	f.stopping.Store(true)
	f.running.Wait()
	f.draining.Store(true)
	f.reading.Wait()
	refused, err := nfttest.ConntrackStat(f.top.Node, "drop")
	return nfttest.Tally{Counts: f.counts[:], Refused: refused - f.refused}, errors.Join(f.sendErr, f.readErr, err)
}

// send sends from each pod in turn. No two packets of a pod have the same pair of ports.
func (f *pods) send() error {
	for src := 10_000; src <= 65535 && !f.stopping.Load(); src++ {
		if err := f.sendFrom(src); err != nil {
			return fmt.Errorf("send from port %d: %w", src, err)
		}
	}
	return nil
}

func (f *pods) sendFrom(src int) error {
	sockets := make([]int, len(f.all))
	for i, pod := range f.all {
		family, at := unix.AF_INET, unix.Sockaddr(&unix.SockaddrInet4{Addr: to4(pod), Port: src})
		if pod.Is6() {
			family, at = unix.AF_INET6, &unix.SockaddrInet6{Addr: pod.As16(), Port: src}
		}
		fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		if err := unix.Bind(fd, at); err != nil {
			return err
		}
		sockets[i] = fd
	}
	to := [2]unix.Sockaddr{}
	for dst := 1; dst <= 2000 && !f.stopping.Load(); dst++ {
		to[0] = &unix.SockaddrInet4{Addr: to4(f.counts[0].Dst), Port: dst}
		to[1] = &unix.SockaddrInet6{Addr: f.counts[1].Dst.As16(), Port: dst}
		for i, fd := range sockets {
			err := unix.Sendto(fd, binary.BigEndian.AppendUint16(nil, uint16(i)), 0, to[i%2])
			for errors.Is(err, unix.EINTR) {
				err = unix.Sendto(fd, binary.BigEndian.AppendUint16(nil, uint16(i)), 0, to[i%2])
			}
			if err != nil {
				return err
			}
			f.counts[i%2].Sent++
		}
	}
	return nil
}

// to4 returns the bytes of an IPv4 address, of IPv6 zeros.
func to4(a netip.Addr) (b [4]byte) {
	if a.Is4() {
		b = a.As4()
	}
	return b
}

// read counts packets until no more arrive after the end.
func (f *pods) read(tap *netns.Tap) error {
	buf := make([]byte, 64)
	for {
		packet, err := tap.Receive(buf)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded) && f.draining.Load():
			return nil
		case errors.Is(err, os.ErrDeadlineExceeded):
		case err != nil:
			return fmt.Errorf("receive: %w", err)
		default:
			f.judge(packet)
		}
	}
}

func (f *pods) judge(packet []byte) {
	seen, ok := netns.Source(packet)
	if !ok {
		return
	}
	sender := int(binary.BigEndian.Uint16(packet[len(packet)-2:]))
	if sender >= len(f.all) {
		return
	}
	pod, count := f.all[sender], &f.counts[sender%2]
	block, ok := f.blocks.Owner(seen.Port())
	switch {
	case seen.Addr() == pod:
		count.Pod++
	case !ok || block != f.blocks.Of(pod):
		count.Other++
	default:
		count.Node++
		f.samples[sender] = seen
	}
}
