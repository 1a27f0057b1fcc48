package conntrack

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfnetlink"
)

// Status is the set of IPS_* flags of an entry (linux/netfilter/nf_conntrack_common.h).
type Status uint32

// Flags of a status.
const (
	Expected  Status = 1 << 0 // by a helper, such as that of FTP
	SeenReply Status = 1 << 1
	SrcNAT    Status = 1 << 4
)

// A Tuple is one direction of a connection. For ICMP, which has no ports, both
// are the identifier.
type Tuple struct {
	Src, Dst netip.AddrPort
	Protocol uint8
}

// A Key identifies an entry. The kernel's ID alone does not distinguish it from a
// later one: it is a hash of the original tuple and of the entry's address in memory,
// which the kernel reuses at once.
type Key struct {
	Original, Reply Tuple
	ID              uint32
}

// An Entry is a tracked connection. Copy one visited by a dump to keep it.
type Entry struct {
	Key
	Status  Status
	Timeout uint32    // seconds
	Zone    uint16    // of both directions, or of the one that has a zone other than 0
	Started time.Time // zero unless the sysctl nf_conntrack_timestamp is 1
	State   string    // for TCP and SCTP, as the kernel names it; otherwise ""

	tuple []byte // CTA_TUPLE_ORIG as the kernel sent it, valid during the visit
}

// Destination is the actual destination of the connection: after DNAT, such as
// that of a Service.
func (e *Entry) Destination() netip.AddrPort { return e.Reply.Src }

// SeenAs is the source that the destination sees.
func (e *Entry) SeenAs() netip.AddrPort { return e.Reply.Dst }

// HostPort returns an address and its port, if it has one, and "" for the zero value.
func HostPort(a netip.AddrPort) string {
	switch {
	case !a.Addr().IsValid():
		return ""
	case a.Port() == 0:
		return a.Addr().String()
	}
	return a.String()
}

// protocols maps the protocols that pods use to their names in /etc/protocols.
var protocols = map[uint8]string{
	unix.IPPROTO_ICMP: "icmp", unix.IPPROTO_TCP: "tcp", unix.IPPROTO_UDP: "udp", unix.IPPROTO_DCCP: "dccp",
	unix.IPPROTO_GRE: "gre", unix.IPPROTO_ICMPV6: "icmpv6", unix.IPPROTO_SCTP: "sctp", unix.IPPROTO_UDPLITE: "udplite",
}

// ParseProtocol returns the protocol of a name, 0 if it is not known.
func ParseProtocol(name string) uint8 {
	for p, n := range protocols {
		if n == name {
			return p
		}
	}
	return 0
}

// PortProtocols are those whose packets have ports, at the same place.
var PortProtocols = [...]uint8{
	unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP, unix.IPPROTO_DCCP, unix.IPPROTO_UDPLITE,
}

// HasPorts reports whether packets of a protocol have ports.
func HasPorts(p uint8) bool {
	return slices.Contains(PortProtocols[:], p)
}

// ProtocolName returns the name of a protocol, or its number.
func ProtocolName(p uint8) string {
	if name, ok := protocols[p]; ok {
		return name
	}
	return fmt.Sprint(p)
}

// Attributes of an entry (linux/netfilter/nfnetlink_conntrack.h).
const (
	ctaTupleOrig  = 1
	ctaTupleReply = 2
	ctaStatus     = 3
	ctaProtoInfo  = 4
	ctaTimeout    = 7
	ctaID         = 12
	ctaZone       = 18
	ctaTimestamp  = 20

	ctaTimestampStart = 1

	ctaTupleIP    = 1
	ctaTupleProto = 2
	ctaTupleZone  = 3

	ctaIPv4Src = 1
	ctaIPv4Dst = 2
	ctaIPv6Src = 3
	ctaIPv6Dst = 4

	ctaProtoNum      = 1
	ctaProtoSrcPort  = 2
	ctaProtoDstPort  = 3
	ctaProtoICMPID   = 4
	ctaProtoICMPv6ID = 7

	ctaProtoInfoTCP  = 1
	ctaProtoInfoSCTP = 3
	ctaState         = 1 // of both
)

// states are the names of the states in /proc/net/nf_conntrack.
var states = map[uint16][]string{
	ctaProtoInfoTCP: {
		"NONE", "SYN_SENT", "SYN_RECV", "ESTABLISHED", "FIN_WAIT", "CLOSE_WAIT", "LAST_ACK", "TIME_WAIT", "CLOSE",
		"SYN_SENT2",
	},
	ctaProtoInfoSCTP: {
		"NONE", "CLOSED", "COOKIE_WAIT", "COOKIE_ECHOED", "ESTABLISHED", "SHUTDOWN_SENT", "SHUTDOWN_RECD",
		"SHUTDOWN_ACK_SENT", "HEARTBEAT_SENT",
	},
}

func (e *Entry) decode(b nfnetlink.Attrs) error {
	*e = Entry{}
	return nfnetlink.Each(b, func(typ uint16, data []byte) error {
		switch typ {
		case ctaTupleOrig:
			e.tuple = data
			return e.decodeTuple(&e.Original, data)
		case ctaTupleReply:
			return e.decodeTuple(&e.Reply, data)
		case ctaStatus:
			e.Status = Status(nfnetlink.Number(data))
		case ctaTimeout:
			e.Timeout = uint32(nfnetlink.Number(data))
		case ctaID:
			e.ID = uint32(nfnetlink.Number(data))
		case ctaZone:
			e.Zone = uint16(nfnetlink.Number(data))
		case ctaTimestamp:
			return nfnetlink.Each(data, func(typ uint16, data []byte) error {
				if typ == ctaTimestampStart && len(data) == 8 {
					e.Started = time.Unix(0, int64(nfnetlink.Number(data)))
				}
				return nil
			})
		case ctaProtoInfo:
			return nfnetlink.Each(data, func(protocol uint16, data []byte) error {
				return nfnetlink.Each(data, func(typ uint16, data []byte) error {
					names := states[protocol]
					n := int(nfnetlink.Number(data))
					if typ == ctaState && n < len(names) {
						e.State = names[n]
					}
					return nil
				})
			})
		}
		return nil
	})
}

func (e *Entry) decodeTuple(t *Tuple, b []byte) error {
	var src, dst netip.Addr
	var srcPort, dstPort uint16
	err := nfnetlink.Each(b, func(part uint16, data []byte) error {
		if part == ctaTupleZone {
			e.Zone = uint16(nfnetlink.Number(data))
			return nil
		}
		return nfnetlink.Each(data, func(typ uint16, data []byte) error {
			switch part<<8 | typ {
			case ctaTupleIP<<8 | ctaIPv4Src, ctaTupleIP<<8 | ctaIPv6Src:
				src, _ = netip.AddrFromSlice(data)
			case ctaTupleIP<<8 | ctaIPv4Dst, ctaTupleIP<<8 | ctaIPv6Dst:
				dst, _ = netip.AddrFromSlice(data)
			case ctaTupleProto<<8 | ctaProtoNum:
				t.Protocol = uint8(nfnetlink.Number(data))
			case ctaTupleProto<<8 | ctaProtoSrcPort:
				srcPort = uint16(nfnetlink.Number(data))
			case ctaTupleProto<<8 | ctaProtoDstPort:
				dstPort = uint16(nfnetlink.Number(data))
			case ctaTupleProto<<8 | ctaProtoICMPID, ctaTupleProto<<8 | ctaProtoICMPv6ID:
				srcPort = uint16(nfnetlink.Number(data))
				dstPort = srcPort
			}
			return nil
		})
	})
	t.Src = netip.AddrPortFrom(src, srcPort)
	t.Dst = netip.AddrPortFrom(dst, dstPort)
	return err
}

// Open reports whether further packets of the connection are expected.
func (e *Entry) Open() bool {
	switch e.State {
	case "TIME_WAIT", "CLOSE":
		return false
	case "CLOSED": // of SCTP: also before the reply to the first packet
		return e.Status&SeenReply == 0
	}
	return true
}

// request returns a request about the entry with its addresses and ports, in zone 0.
func (e *Entry) request(kind uint16, flags netlink.HeaderFlags) netlink.Message {
	family := uint8(unix.AF_INET)
	if e.Original.Src.Addr().Is6() {
		family = unix.AF_INET6
	}
	var a nfnetlink.Attrs
	a.AddBytes(ctaTupleOrig|unix.NLA_F_NESTED, e.tuple)
	a.AddUint32(ctaID, e.ID)
	return request(kind, flags, family, a)
}
