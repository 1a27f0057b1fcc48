package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfttest"
)

const groupBlocks = "what portsPerPod costs"

// blockSize is that of the most blocks, and of the longest table.
const blockSize = 250

// podKeys are the keys without blocks, and with them.
var podKeys = [2]string{
	"masqueradeSrcCIDRs: [10.244.0.0/16]\n",
	fmt.Sprintf("masqueradeSrcCIDRs: [10.244.0.0/16]\nportsPerPod: %d\n", blockSize),
}

// keyed returns the ruleset of a file with these keys.
func keyed(networks []netip.Prefix, keys string) nft.Ruleset {
	plain := ruleset(networks, nft.ModeNFTables)
	b := nft.Build(config.Defaults{}, nft.Options{Layout: plain.Layout, RandomFully: true},
		config.Source{Name: "bench", Data: []byte(text(networks) + keys)})
	return *b.Ruleset
}

// blocks compares portsPerPod with the same rules without it.
func (b *bench) blocks(ctx context.Context) {
	networks := reachable(targetSmall)
	var all []rules
	for _, keys := range podKeys {
		all = append(all, ofNft(keyed(networks, keys).String()))
	}
	s := b.onNodes(ctx, 5, all, nil, destinations(networks, false))
	r := newRow(groupBlocks, targetSmall, "a new connection", "µs", s[1]).against("without portsPerPod", s[1], s[0])
	b.add(r.targetOfMedian(1.05))
	b.changeBlocks(ctx)
	b.fillBlocks(ctx)
}

// changeBlocks measures a change of one CIDR with and without blocks, by turns.
func (b *bench) changeBlocks(ctx context.Context) {
	const bound = 10 // ms more
	var contenders []contender
	for _, keys := range podKeys {
		f := nfttest.Must(openFollower(targetSmall, b.agent, keys))
		defer func() { nfttest.Check(f.close()) }()
		contenders = append(contenders, f.firstChange())
	}
	s := takeTurns(ctx, 3*b.rounds, contenders...)
	more := slices.Clone(s[1])
	for i := range more {
		more[i] -= s[0][i]
	}
	b.add(newRow(groupBlocks, targetSmall, "one CIDR changed, swap to kernel", "ms", s[1]).
		against("without portsPerPod", s[1], s[0]))
	b.add(newRow(groupBlocks, targetSmall, "the difference of these", "ms", more).targetOfMedian(bound))
}

// fillBlocks measures how many ports of a block connections to one destination take before a packet is
// lost, and how many packets are lost before they have all: the kernel tries at most 248 ports, at random.
func (b *bench) fillBlocks(ctx context.Context) {
	for _, size := range []int{blockSize, 500, 1000} {
		var before, lost series
		for range b.rounds {
			nfttest.Check(ctx.Err())
			first, all, err := fillBlock(size)
			nfttest.Check(err)
			before = append(before, float64(first)/float64(size))
			lost = append(lost, float64(all))
		}
		b.add(newRow(groupBlocks, targetSmall, fmt.Sprintf("a block of %d, full before a packet is lost", size), "%", before))
		b.add(newRow(groupBlocks, targetSmall, fmt.Sprintf("a block of %d, packets lost before it is full", size), "", lost))
	}
}

// fillBlock opens connections until a block is full, and returns how many there were before the first
// packet was lost, and how many packets were.
func fillBlock(size int) (first, lost int, err error) {
	r := keyed(reachable(targetSmall), fmt.Sprintf("masqueradeSrcCIDRs: [10.244.0.0/16]\nportsPerPod: %d\n", size))
	p, err := openPath(ofNft(r.String()))
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, p.close()) }()
	if err := p.top.Node.Sysctl("net.netfilter.nf_conntrack_udp_timeout", "300"); err != nil {
		return 0, 0, err
	}
	to := &unix.SockaddrInet4{Addr: benchmarks.Addr().Next().As4(), Port: 53}
	for port := 10_000; ; port++ {
		if err := p.top.Pod.Do(func() error {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			return errors.Join(unix.Bind(fd, &unix.SockaddrInet4{Port: port}), unix.Sendto(fd, nil, 0, to))
		}); err != nil {
			return 0, 0, err
		}
		failed, err := nfttest.ConntrackStat(p.top.Node, "insert_failed")
		if err != nil {
			return 0, 0, err
		}
		opened := port + 1 - 10_000 - int(failed)
		if failed == 0 {
			first = opened
		}
		if opened == size {
			return first, int(failed), nil
		}
	}
}
