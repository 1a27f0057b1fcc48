package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfttest"
)

const groupPackets = "one new connection through the node"

// flowsPerTurn is how many connections one turn opens, from one port of the pod: firstPort, then the next.
const (
	flowsPerTurn = 10_000
	firstPort    = 10_000
)

// bareMasquerade and bareReturn are the smallest rules that do the same to a
// packet as ours. Without a masquerade in the chain there is no connection
// tracking, and nothing to compare.
const (
	bareMasquerade = `table inet bare {
	chain postrouting {
		type nat hook postrouting priority srcnat + 10; policy accept
		masquerade fully-random
	}
	}`
	bareReturn = `table inet bare {
	chain postrouting {
		type nat hook postrouting priority srcnat + 10; policy accept
		return
		masquerade fully-random
	}
	}`
	// The far end drops what arrives, so that it sends no replies.
	farEnd = `table inet sink {
	chain prerouting {
		type filter hook prerouting priority raw; policy accept
		meta l4proto udp drop
	}
	}`
)

// A path is a pod, a node with some rules, and an outside host.
type path struct {
	top  *nfttest.Topology
	port uint16 // of the next turn's connections
}

// Rules load themselves in a namespace.
type rules func(*nfttest.NS) error

// ofProgram are rules that a program loads.
func ofProgram(text, program string, args ...string) rules {
	return func(ns *nfttest.NS) error {
		_, err := runProgram(ns, strings.NewReader(text), program, args...)
		return err
	}
}

// ofNft are rules for nft.
func ofNft(text string) rules { return ofProgram(text, "nft", "-f", "-") }

func openPath(r rules, addresses ...netip.Addr) (*path, error) {
	top, err := nfttest.OpenTopology()
	if err != nil {
		return nil, fmt.Errorf("%w (this program needs root)", err)
	}
	p := &path{top: top, port: firstPort}
	if err := p.prepare(r, addresses); err != nil {
		return nil, errors.Join(err, p.close())
	}
	return p, nil
}

func (p *path) prepare(r rules, addresses []netip.Addr) error {
	if _, err := p.top.Outside.Output(farEnd, "nft", "-f", "-"); err != nil {
		return err
	}
	// A turn's connections must expire before the table is full.
	for _, name := range []string{"udp_timeout", "udp_timeout_stream"} {
		if err := p.top.Node.Sysctl("net.netfilter.nf_conntrack_"+name, "1"); err != nil {
			return err
		}
	}
	for _, a := range addresses {
		if err := p.top.Node.AddAddr("lo", netip.PrefixFrom(a, a.BitLen())); err != nil {
			return err
		}
	}
	return r(p.top.Node)
}

func (p *path) close() error { return p.top.Close() }

// contender opens connections from the pod to the destinations in turn: one
// packet each, which the kernel forwards through the node before the send call
// returns. Each goes to a port of its own, so that none meets a source port which an earlier turn's
// connection still has: what a full block costs is measured by itself.
func (p *path) contender(dsts []netip.Addr) contender {
	to := make([]unix.SockaddrInet4, len(dsts))
	return p.sender(func() {
		for i, at := range rand.Perm(len(dsts)) {
			to[i].Addr = dsts[at].As4()
		}
	}, func(fd int) error {
		turn := int(p.port) - firstPort
		for i := range flowsPerTurn {
			dst := &to[i%len(to)]
			dst.Port = 1 + (turn*(flowsPerTurn/len(to)+1)+i/len(to))%65_000
			if err := unix.Sendto(fd, nil, 0, dst); err != nil {
				return fmt.Errorf("send: %w", err)
			}
		}
		return nil
	})
}

// sender sends the packets of a turn from one UDP socket of the pod, on one processor.
func (p *path) sender(prepare func(), send func(fd int) error) contender {
	return contender{
		prepare: func() error {
			prepare()
			p.port++
			return nil
		},
		run: func() (took time.Duration, err error) {
			err = p.top.Pod.Do(func() error {
				took, err = timeTurn(p.port, send)
				return err
			})
			return took / flowsPerTurn, err
		},
	}
}

func timeTurn(port uint16, send func(fd int) error) (time.Duration, error) {
	undo, err := nfttest.OneProcessor()
	if err != nil {
		return 0, err
	}
	defer undo()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer func() { _ = unix.Close(fd) }()
	if err := unix.Bind(fd, &unix.SockaddrInet4{Port: int(port)}); err != nil {
		return 0, err
	}
	start := time.Now()
	err = send(fd)
	return time.Since(start), err
}

// packets measures the cost of a new connection with our rules, compared with
// rules that only do the same.
func (b *bench) packets(ctx context.Context) {
	for _, n := range b.sizes {
		for _, exempt := range []bool{false, true} {
			b.packetsN(ctx, n, exempt)
		}
	}
	b.packetsFrom(ctx, 1, 8)
}

// packetsFrom measures what fixed source addresses add to masquerading. The address of a
// pod is in a map if there are several.
func (b *bench) packetsFrom(ctx context.Context, counts ...int) {
	networks := reachable(targetSmall)
	dsts := destinations(networks, false)
	plain := ruleset(networks, nft.ModeNFTables)
	all := []rules{ofNft(plain.String())}
	addresses := sources(slices.Max(counts))
	for _, n := range counts {
		from := plain.Policy
		from.Families = slices.Clone(from.Families)
		network := config.CIDR{Prefix: netip.PrefixFrom(firstSource, 24).Masked()}
		from.Families[0].SNAT = []nft.SNATRule{{Addresses: nft.NewList([]config.CIDR{network})}}
		all = append(all, ofNft(nft.CompilePolicy(from.WithAddresses(addresses[:n]), plain.Layout).String()))
	}
	s := b.onNodes(ctx, 5, all, addresses, dsts)
	for i, n := range counts {
		r := newRow(groupPackets, targetSmall, fmt.Sprintf("from one of %d fixed addresses", n), "µs", s[i+1])
		b.add(bounded(r.against("masqueraded", s[i+1], s[0]), map[int]float64{targetSmall: 1.02}))
	}
}

// firstSource is the first of the fixed addresses.
var firstSource = netip.MustParseAddr("203.0.113.1")

func (b *bench) packetsN(ctx context.Context, n int, exempt bool) {
	what, bare, bareName, bound := "masqueraded", bareMasquerade, "bare masquerade", 1.1
	if exempt {
		what, bare, bareName, bound = "exempt", bareReturn, "bare return", 1.2
	}
	networks := reachable(n)
	dsts := destinations(networks, exempt)
	shuffle(networks)
	ours, chain := ruleset(networks, nft.ModeNFTables), ruleset(networks, nft.ModeIPTables)
	all := []rules{ofNft(ours.String()), ofNft(bare)}
	if n <= iptablesUpTo {
		all = append(all, ofProgram(chain.String(), "iptables-nft-restore", "--noflush"))
	}
	s := b.onNodes(ctx, 3, all, nil, dsts)
	r := newRow(groupPackets, n, what, "µs", s[0])
	b.add(bounded(r.against(bareName, s[0], s[1]), map[int]float64{targetLarge: bound}))
	if n <= iptablesUpTo {
		chainRow := newRow(groupPackets, n, what+", the iptables chain", "µs", s[2])
		b.add(chainRow.against(bareName, s[2], s[1]))
	}
}

// onNodes measures new connections to the destinations by turns on nodes, each of which has
// the addresses and other rules. A turn is short: a round has several.
func (b *bench) onNodes(
	ctx context.Context, times int, all []rules, addresses, dsts []netip.Addr,
) (s []series) {
	var contenders []contender
	for _, r := range all {
		p := nfttest.Must(openPath(r, addresses...))
		defer func() { nfttest.Check(p.close()) }()
		contenders = append(contenders, p.contender(dsts))
	}
	return takeTurns(ctx, times*b.rounds, contenders...)
}
