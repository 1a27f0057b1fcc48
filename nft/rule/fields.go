package rule

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"net/netip"
	"strings"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfnetlink"
)

// A format is how to read the bytes of a field.
type format int

const (
	formatRaw format = iota
	formatIPv4
	formatIPv6
	formatName     // of an interface
	formatBig      // a number in network order
	formatEther    // ETH_P_, in network order
	formatMark     // a number in the machine's order, as all below
	formatNumber   //
	formatIfindex  //
	formatFamily   // NFPROTO_
	formatProtocol // IPPROTO_
	formatAddrType // RTN_
	formatCTState  // bits
	formatCTStatus // bits
)

var names = map[format]map[uint32]string{
	formatEther:    {unix.ETH_P_IP: "ip", unix.ETH_P_IPV6: "ip6"},
	formatIfindex:  {1: `"lo"`}, // in every network namespace
	formatFamily:   {unix.NFPROTO_IPV4: "ipv4", unix.NFPROTO_IPV6: "ipv6"},
	formatProtocol: {1: "icmp", 6: "tcp", 17: "udp", 33: "dccp", 58: "ipv6-icmp", 132: "sctp", 136: "udplite"},
	formatAddrType: {
		1: "unicast", 2: "local", 3: "broadcast", 4: "anycast", 5: "multicast", 6: "blackhole",
		7: "unreachable", 8: "prohibit",
	},
	formatCTState:  {1: "invalid", 2: "established", 4: "related", 8: "new", 64: "untracked"},
	formatCTStatus: {1: "expected", 2: "seen-reply", 4: "assured", 8: "confirmed", 16: "snat", 32: "dnat", 512: "dying"},
}

func (f format) word(b []byte) string {
	n := nativeUint32(b)
	switch f {
	case formatRaw:
		return fmt.Sprintf("%#x", b)
	case formatIPv4, formatIPv6:
		addr, ok := netip.AddrFromSlice(b)
		if !ok {
			return fmt.Sprintf("%#x", b)
		}
		return addr.String()
	case formatName:
		if name, _, whole := bytes.Cut(b, []byte{0}); whole {
			return fmt.Sprintf("%q", name)
		}
		return fmt.Sprintf("%q", string(b)+"*")
	case formatBig, formatEther:
		n = uint32(nfnetlink.Number(b))
	case formatMark:
		return fmt.Sprintf("%#x", n)
	case formatCTState, formatCTStatus:
		var words []string
		for bit := uint32(1); bit != 0; bit <<= 1 {
			if n&bit != 0 {
				words = append(words, f.name(bit))
			}
		}
		return strings.Join(words, ",")
	}
	return f.name(n)
}

func (f format) name(n uint32) string {
	if name, ok := names[f][n]; ok {
		return name
	}
	return fmt.Sprint(n)
}

func nativeUint32(b []byte) uint32 {
	switch {
	case len(b) >= 4:
		return binary.NativeEndian.Uint32(b)
	case len(b) >= 2:
		return uint32(binary.NativeEndian.Uint16(b))
	case len(b) == 1:
		return uint32(b[0])
	}
	return 0
}

// addresses are those of a header, by the offsets of RFC 791, section 3.1, and RFC 8200, section 3.
var addresses = []struct {
	field
	not      nfnetlink.Family // the family whose packets do not have it
	at, size uint32
}{
	{field{"ip saddr", formatIPv4}, nfnetlink.IPv6, 12, 4},
	{field{"ip daddr", formatIPv4}, nfnetlink.IPv6, 16, 4},
	{field{"ip6 saddr", formatIPv6}, nfnetlink.IPv4, 8, 16},
	{field{"ip6 daddr", formatIPv6}, nfnetlink.IPv4, 24, 16},
}

// payload names the part of a packet that is loaded. Less than an address is a prefix of it.
// within is the address that the part overlaps, or else the same name.
func (d *decoder) payload(e nfnetlink.Expr) (f field, within string) {
	base, offset, n := e.Uint32(unix.NFTA_PAYLOAD_BASE), e.Uint32(unix.NFTA_PAYLOAD_OFFSET),
		e.Uint32(unix.NFTA_PAYLOAD_LEN)
	switch network := base == unix.NFT_PAYLOAD_NETWORK_HEADER; {
	case network && d.family != nfnetlink.IPv6 && offset == 9 && n == 1:
		f = field{"ip protocol", formatProtocol}
	case base == unix.NFT_PAYLOAD_TRANSPORT_HEADER && (offset == 0 || offset == 2) && n == 2:
		f = field{[...]string{"th sport", "th dport"}[offset/2], formatBig}
	case network:
		for _, a := range addresses {
			if a.not == d.family || offset >= a.at+a.size || offset+n <= a.at {
				continue
			}
			if within = cmp.Or(within, a.name); offset == a.at && n <= a.size {
				f = a.field
			}
		}
	}
	if f.name == "" {
		header := map[uint32]string{
			unix.NFT_PAYLOAD_LL_HEADER: "ll", unix.NFT_PAYLOAD_NETWORK_HEADER: "nh",
			unix.NFT_PAYLOAD_TRANSPORT_HEADER: "th",
		}[base]
		f.name = fmt.Sprintf("@%s,%d,%d", header, uint64(offset)*8, uint64(n)*8)
	}
	return f, cmp.Or(within, f.name)
}

// A field is a name in nft's words and how to read its bytes.
type field struct {
	name   string
	format format
}

// keyFields are what an expression loads, by its key.
var keyFields = map[string]map[uint32]field{
	"meta": {
		unix.NFT_META_PROTOCOL: {"meta protocol", formatEther},
		unix.NFT_META_MARK:     {metaMark, formatMark},
		unix.NFT_META_IIF:      {"iif", formatIfindex},
		unix.NFT_META_OIF:      {"oif", formatIfindex},
		unix.NFT_META_IIFNAME:  {"iifname", formatName},
		unix.NFT_META_OIFNAME:  {"oifname", formatName},
		unix.NFT_META_NFPROTO:  {"meta nfproto", formatFamily},
		unix.NFT_META_L4PROTO:  {"meta l4proto", formatProtocol},
	},
	"ct": {
		unix.NFT_CT_STATE:  {"ct state", formatCTState},
		unix.NFT_CT_STATUS: {"ct status", formatCTStatus},
		unix.NFT_CT_MARK:   {"ct mark", formatMark},
	},
}

const metaMark = "meta mark"

func keyField(e nfnetlink.Expr, attr uint16) field {
	key := e.Uint32(attr)
	if f, ok := keyFields[e.Name][key]; ok {
		return f
	}
	return field{name: fmt.Sprintf("<%s %d>", e.Name, key)}
}

func fibField(e nfnetlink.Expr) field {
	var key []string
	for i, word := range []string{"saddr", "daddr", "mark", "iif", "oif"} {
		if e.Uint32(unix.NFTA_FIB_FLAGS)&(1<<i) != 0 {
			key = append(key, word)
		}
	}
	name := "fib " + strings.Join(key, " . ")
	switch e.Uint32(unix.NFTA_FIB_RESULT) {
	case unix.NFT_FIB_RESULT_OIF:
		return field{name + " oif", formatIfindex}
	case unix.NFT_FIB_RESULT_OIFNAME:
		return field{name + " oifname", formatName}
	case unix.NFT_FIB_RESULT_ADDRTYPE:
		return field{name + " type", formatAddrType}
	}
	return field{name: name + " <result>"}
}

func limit(e nfnetlink.Expr) string {
	unit := e.Uint64(unix.NFTA_LIMIT_UNIT)
	per, ok := map[uint64]string{1: "second", 60: "minute", 3600: "hour", 86400: "day"}[unit]
	if !ok {
		per = fmt.Sprintf("%d seconds", unit)
	}
	over := either(e.Uint32(unix.NFTA_LIMIT_FLAGS)&unix.NFT_LIMIT_F_INV != 0, "over ", "")
	bytes := either(e.Uint32(unix.NFTA_LIMIT_TYPE) == unix.NFT_LIMIT_PKT_BYTES, " bytes", "")
	return fmt.Sprintf("limit rate %s%d%s/%s", over, e.Uint64(unix.NFTA_LIMIT_RATE), bytes, per)
}

var verdicts = map[int32]string{
	0: "drop", 1: "accept", // NF_DROP, NF_ACCEPT
	unix.NFT_CONTINUE: "continue", unix.NFT_RETURN: "return", unix.NFT_JUMP: "jump ", unix.NFT_GOTO: "goto ",
}

func verdict(code int32, chain string) string {
	word, ok := verdicts[code]
	switch {
	case !ok:
		return fmt.Sprintf("<verdict %d>", code)
	case code == unix.NFT_JUMP || code == unix.NFT_GOTO:
		return word + nfnetlink.Printable(chain)
	}
	return word
}

func natFlags(flags uint32) string {
	words := ""
	if flags&nfnetlink.NATRandom != 0 {
		words += " random"
	}
	if flags&nfnetlink.NATRandomFully != 0 {
		words += " fully-random"
	}
	if flags&nfnetlink.NATPrefix != 0 {
		words += " prefix"
	}
	if flags&nfnetlink.NATPersistent != 0 {
		words += " persistent"
	}
	return words
}

// What other expressions are in nft's words, without their parameters.
var (
	actions = map[string]string{
		"reject": "reject", "tproxy": "tproxy", "synproxy": "synproxy", "queue": "queue", "log": "log", "dup": "dup",
		"fwd": "fwd", "quota": "quota", "connlimit": "ct count", "last": "last", "flow_offload": "flow add",
	}
	objects = map[uint32]string{
		unix.NFT_OBJECT_COUNTER: "counter", unix.NFT_OBJECT_QUOTA: "quota", unix.NFT_OBJECT_CT_HELPER: "ct helper set",
		unix.NFT_OBJECT_LIMIT: "limit", unix.NFT_OBJECT_CONNLIMIT: "ct count", unix.NFT_OBJECT_CT_TIMEOUT: "ct timeout set",
		unix.NFT_OBJECT_SECMARK: "meta secmark set", unix.NFT_OBJECT_CT_EXPECT: "ct expectation set",
		unix.NFT_OBJECT_SYNPROXY: "synproxy",
	}
	dynsets = map[uint32]string{
		unix.NFT_DYNSET_OP_ADD: "add", unix.NFT_DYNSET_OP_UPDATE: "update", 2: "delete",
	}
)
