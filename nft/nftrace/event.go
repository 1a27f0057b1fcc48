package nftrace

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/nfnetlink"
)

// An event is a message of the kernel about a traced packet: that a rule matched it, or that a chain ended.
type event struct {
	packet uint32 // identifies the packet
	chain  nfnetlink.ChainID
	kind   uint32
	handle uint64 // of the rule
	code   int32  // of the verdict
	target string // of a jump or goto
	head   *head  // of the first event of each base chain
	// loopback means that the packet leaves by the loopback interface.
	loopback bool
}

// A head is what the packet's headers have.
type head struct {
	protocol uint8
	src, dst netip.AddrPort // of ICMP, the port is the identifier
}

// enum nft_trace_attributes and nft_trace_types of include/uapi/linux/netfilter/nf_tables.h.
const (
	traceTable           = 1
	traceChain           = 2
	traceHandle          = 3
	traceType            = 4
	traceVerdict         = 5
	traceID              = 6
	traceNetworkHeader   = 8
	traceTransportHeader = 9
	traceOutType         = 13 // ARPHRD_…
	tracePolicy          = 16

	endsWithPolicy = 1
)

func parseEvent(m netlink.Message) (event, bool) {
	if m.Header.Type != unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_TRACE || len(m.Data) < 4 {
		return event{}, false
	}
	a := nfnetlink.Attrs(m.Data[4:])
	verdict := a.Attr(traceVerdict)
	e := event{
		packet: a.Uint32(traceID),
		chain: nfnetlink.ChainID{
			Family: nfnetlink.Family(m.Data[0]), Table: a.Str(traceTable), Name: a.Str(traceChain),
		},
		kind: a.Uint32(traceType), handle: a.Uint64(traceHandle),
		code: int32(verdict.Uint32(unix.NFTA_VERDICT_CODE)), target: verdict.Str(unix.NFTA_VERDICT_CHAIN),
		loopback: a.Uint32(traceOutType) == unix.ARPHRD_LOOPBACK,
	}
	if e.kind == endsWithPolicy {
		e.code = int32(a.Uint32(tracePolicy))
	}
	if network := a.Attr(traceNetworkHeader); network != nil {
		e.head = parseHead(network, a.Attr(traceTransportHeader))
	}
	return e, true
}

// The verdicts that a rule or a policy can have (include/uapi/linux/netfilter.h and nf_tables.h).
const (
	drop   = 0
	accept = 1
	queue  = 3
)

// drops reports whether the packet ends here.
func (e event) drops() bool { return e.code == drop }

// parseHead reads the beginning of a packet: RFC 791, section 3.1, and RFC 8200, section 3. The kernel
// skips extension headers of IPv6, whose protocol is then not known.
func parseHead(network, transport []byte) *head {
	var h head
	var src, dst netip.Addr
	switch {
	case len(network) >= 20 && network[0]>>4 == 4:
		h.protocol = network[9]
		src, _ = netip.AddrFromSlice(network[12:16])
		dst, _ = netip.AddrFromSlice(network[16:20])
	case len(network) >= 40 && network[0]>>4 == 6:
		h.protocol = network[6]
		src, _ = netip.AddrFromSlice(network[8:24])
		dst, _ = netip.AddrFromSlice(network[24:40])
	}
	var srcPort, dstPort uint16
	if len(transport) >= 8 {
		switch {
		case conntrack.HasPorts(h.protocol):
			srcPort = binary.BigEndian.Uint16(transport)
			dstPort = binary.BigEndian.Uint16(transport[2:])
		case h.protocol == unix.IPPROTO_ICMP, h.protocol == unix.IPPROTO_ICMPV6:
			srcPort = binary.BigEndian.Uint16(transport[4:])
		}
	}
	h.src = netip.AddrPortFrom(src, srcPort)
	h.dst = netip.AddrPortFrom(dst, dstPort)
	return &h
}

// listenBuffer fits the events of a few packets that meet some thousand rules each.
const listenBuffer = 4 << 20

// listen returns a connection that receives the events of all traced packets in the network namespace.
func listen() (*netlink.Conn, error) {
	nl, err := netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{MessageBufferSize: nfnetlink.PageSize})
	if err != nil {
		return nil, fmt.Errorf("netlink socket: %w", err)
	}
	err = errors.Join(nl.SetReadBuffer(listenBuffer), nl.JoinGroup(unix.NFNLGRP_NFTRACE))
	if err != nil {
		_ = nl.Close()
		return nil, fmt.Errorf("listen for traced packets: %w", err)
	}
	return nl, nil
}

// receive waits for events until a time. There are none if the kernel had to drop some.
func receive(nl *netlink.Conn, deadline time.Time) ([]event, error) {
	if err := nl.SetReadDeadline(deadline); err != nil {
		return nil, err
	}
	msgs, err := nl.Receive()
	if errors.Is(err, unix.ENOBUFS) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var events []event
	for _, m := range msgs {
		if e, ok := parseEvent(m); ok {
			events = append(events, e)
		}
	}
	return events, nil
}
