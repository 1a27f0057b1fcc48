package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
)

const groupEvidence = "evidence"

// evidence measures a pass over connections: its processor time, next to the dump alone, of which nothing is read, and
// the peak memory of a process that makes one.
func (b *bench) evidence(ctx context.Context) {
	none := b.peakOfStatus(ctx, 0)
	for _, connections := range []int{1000, 10_000, 100_000} {
		b.passes(ctx, connections)
		peak := b.peakOfStatus(ctx, connections)
		what := fmt.Sprintf("peak memory of status, %s connections", grouped(connections))
		b.add(newRow(groupEvidence, 10, what, "MB", peak).against("without connections", peak, none))
	}
}

// passes measures the processor time of passes over connections.
func (b *bench) passes(ctx context.Context, connections int) {
	n := nfttest.Must(openNode("evidence"))
	defer func() { nfttest.Check(n.close()) }()
	nfttest.Check(track(n.ns, connections))
	policy := ruleset(list(10), nft.ModeNFTables).Policy
	pass := func() error {
		node, err := conntrack.ReadNode()
		if err != nil {
			return err
		}
		e, err := conntrack.New().Gather(ctx, conntrack.NewComparison(policy, node), conntrack.History{})
		if err == nil && e.Examined != connections {
			err = errors.New("not all connections are examined")
		}
		return err
	}
	s := takeTurns(ctx, b.rounds, consumed(n, pass), consumed(n, func() error { return dumpOnly(ctx) }))
	what := fmt.Sprintf("processor time of a pass over %s connections", grouped(connections))
	b.add(newRow(groupEvidence, 10, what, "ms", s[0]).against("the dump alone", s[0], s[1]))
	beyond := make(series, len(s[0]))
	for i := range beyond {
		beyond[i] = max(0, s[0][i]-s[1][i])
	}
	more := newRow(groupEvidence, 10, "of which beyond the dump", "ms", beyond)
	if connections == 100_000 {
		more = more.targetOfMedian(60)
	}
	b.add(more)
}

// peakOfStatus measures the peak memory of status, which makes one pass, on a node with the agent's rules.
func (b *bench) peakOfStatus(ctx context.Context, connections int) (peak series) {
	n := nfttest.Must(openNode("evidence"))
	defer func() { nfttest.Check(n.close()) }()
	v := nfttest.Must(newVolume(text(list(10))))
	defer func() { nfttest.Check(v.Close()) }()
	nfttest.Must(timeToApplied(n, b.agent, v.Path()))
	nfttest.Check(track(n.ns, connections))
	for range b.rounds {
		nfttest.Check(ctx.Err())
		usage := nfttest.Must(measured(n.ns, b.agent, "status", "--config", v.Path()))
		peak = append(peak, float64(usage.Peak)/1e6)
	}
	return peak
}

// consumed returns a contender of which the processor time counts, in a namespace.
func consumed(n *node, task func() error) contender {
	return contender{run: func() (took time.Duration, err error) {
		err = n.ns.Do(func() error {
			before := processorTime()
			err := task()
			took = processorTime() - before
			return err
		})
		return took, err
	}}
}

func processorTime() time.Duration {
	var r unix.Rusage
	nfttest.Check(unix.Getrusage(unix.RUSAGE_SELF, &r))
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

// dumpOnly receives all connections, and reads none.
func dumpOnly(ctx context.Context) error {
	c := nfnetlink.Dial()
	defer func() { _ = c.Close() }()
	const get = unix.NFNL_SUBSYS_CTNETLINK<<8 | 1 // IPCTNL_MSG_CT_GET
	return c.In(ctx).Exchange(nfnetlink.Request(get, nfnetlink.AnyFamily, netlink.Dump, nil),
		func(netlink.Message) error { return nil })
}

// track creates connections of UDP, without packets: from 6 pods, to 10,000 addresses.
func track(ns *nfttest.NS, connections int) error {
	nl, err := nfttest.DialNetfilter(ns)
	if err != nil {
		return err
	}
	defer nl.Close()
	for i := range connections {
		pod := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 244, 1, byte(i / 50_000)}), uint16(1024+i%50_000))
		to := netip.AddrPortFrom(netip.AddrFrom4([4]byte{byte(10 + i%4), byte(i % 100), byte(i / 100), 9}), 53)
		const create = unix.NFNL_SUBSYS_CTNETLINK << 8 // IPCTNL_MSG_CT_NEW
		const original, reply, timeout = 1, 2, 7       // CTA_TUPLE_ORIG, CTA_TUPLE_REPLY, CTA_TIMEOUT
		var a nfnetlink.Attrs
		a.AddBytes(original|unix.NLA_F_NESTED, tuple(pod, to))
		a.AddBytes(reply|unix.NLA_F_NESTED, tuple(to, pod))
		a.AddUint32(timeout, 3600)
		m := nfnetlink.Request(create, nfnetlink.IPv4, netlink.Create|netlink.Excl|netlink.Acknowledge, a)
		if _, err := nl.Execute(m); err != nil {
			return err
		}
	}
	return nil
}

// tuple returns the attributes of one direction of a connection.
func tuple(src, dst netip.AddrPort) nfnetlink.Attrs {
	const addresses, protocol = 1, 2                    // CTA_TUPLE_IP, CTA_TUPLE_PROTO
	const number, sourcePort, destinationPort = 1, 2, 3 // CTA_PROTO_NUM, CTA_PROTO_SRC_PORT, CTA_PROTO_DST_PORT
	var ip, ports, all nfnetlink.Attrs
	ip.AddBytes(1, src.Addr().AsSlice()) // CTA_IP_V4_SRC
	ip.AddBytes(2, dst.Addr().AsSlice()) // CTA_IP_V4_DST
	ports.AddBytes(number, []byte{unix.IPPROTO_UDP})
	ports.AddBytes(sourcePort, binary.BigEndian.AppendUint16(nil, src.Port()))
	ports.AddBytes(destinationPort, binary.BigEndian.AppendUint16(nil, dst.Port()))
	all.AddBytes(addresses|unix.NLA_F_NESTED, ip)
	all.AddBytes(protocol|unix.NLA_F_NESTED, ports)
	return all
}
