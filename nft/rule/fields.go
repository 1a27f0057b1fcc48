package rule

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"strings"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfnetlink"
)

// A kind is how to read the bytes of a field.
type kind int

const (
	kindRaw kind = iota
	kindIPv4
	kindIPv6
	kindName     // of an interface
	kindBig      // a number in network order
	kindEther    // ETH_P_, in network order
	kindMark     // a number in the machine's order, as all below
	kindNumber   //
	kindIfindex  //
	kindFamily   // NFPROTO_
	kindProtocol // IPPROTO_
	kindAddrType // RTN_
	kindCTState  // bits
	kindCTStatus // bits
)

var names = map[kind]map[uint32]string{
	kindEther:    {unix.ETH_P_IP: "ip", unix.ETH_P_IPV6: "ip6"},
	kindIfindex:  {1: `"lo"`}, // in every network namespace
	kindFamily:   {unix.NFPROTO_IPV4: "ipv4", unix.NFPROTO_IPV6: "ipv6"},
	kindProtocol: {1: "icmp", 6: "tcp", 17: "udp", 33: "dccp", 58: "ipv6-icmp", 132: "sctp", 136: "udplite"},
	kindAddrType: {
		1: "unicast", 2: "local", 3: "broadcast", 4: "anycast", 5: "multicast", 6: "blackhole",
		7: "unreachable", 8: "prohibit",
	},
	kindCTState:  {1: "invalid", 2: "established", 4: "related", 8: "new", 64: "untracked"},
	kindCTStatus: {1: "expected", 2: "seen-reply", 4: "assured", 8: "confirmed", 16: "snat", 32: "dnat", 512: "dying"},
}

// word returns a value in words.
func (k kind) word(b []byte) string {
	n := nativeUint32(b)
	switch k {
	case kindRaw:
		return fmt.Sprintf("%#x", b)
	case kindIPv4, kindIPv6:
		addr, ok := netip.AddrFromSlice(b)
		if !ok {
			return fmt.Sprintf("%#x", b)
		}
		return addr.String()
	case kindName:
		if name, _, whole := bytes.Cut(b, []byte{0}); whole {
			return fmt.Sprintf("%q", name)
		}
		return fmt.Sprintf("%q", string(b)+"*")
	case kindBig, kindEther:
		n = 0
		for _, c := range b {
			n = n<<8 | uint32(c)
		}
	case kindMark:
		return fmt.Sprintf("%#x", n)
	case kindCTState, kindCTStatus:
		var words []string
		for bit := uint32(1); bit != 0; bit <<= 1 {
			if n&bit != 0 {
				words = append(words, k.name(bit))
			}
		}
		return strings.Join(words, ",")
	}
	return k.name(n)
}

func (k kind) name(n uint32) string {
	if name, ok := names[k][n]; ok {
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

// payload names the part of a packet that is loaded, by the offsets of RFC 791,
// section 3.1, and RFC 8200, section 3. Less than an address is a prefix of it.
func (d *decoder) payload(e nfnetlink.Expr) field {
	base, offset, n := e.Uint32(unix.NFTA_PAYLOAD_BASE), e.Uint32(unix.NFTA_PAYLOAD_OFFSET),
		e.Uint32(unix.NFTA_PAYLOAD_LEN)
	switch network := base == unix.NFT_PAYLOAD_NETWORK_HEADER; {
	case network && d.family != nfnetlink.IPv6 && offset == 9 && n == 1:
		return field{"ip protocol", kindProtocol}
	case network && d.family != nfnetlink.IPv6 && (offset == 12 || offset == 16) && n <= 4:
		return field{[...]string{"ip saddr", "ip daddr"}[(offset-12)/4], kindIPv4}
	case network && d.family != nfnetlink.IPv4 && (offset == 8 || offset == 24) && n <= 16:
		return field{[...]string{"ip6 saddr", "ip6 daddr"}[(offset-8)/16], kindIPv6}
	case base == unix.NFT_PAYLOAD_TRANSPORT_HEADER && (offset == 0 || offset == 2) && n == 2:
		return field{[...]string{"th sport", "th dport"}[offset/2], kindBig}
	}
	header := map[uint32]string{
		unix.NFT_PAYLOAD_LL_HEADER: "ll", unix.NFT_PAYLOAD_NETWORK_HEADER: "nh",
		unix.NFT_PAYLOAD_TRANSPORT_HEADER: "th",
	}[base]
	return field{name: fmt.Sprintf("@%s,%d,%d", header, uint64(offset)*8, uint64(n)*8)}
}

// A field is a name in nft's words and how to read its bytes.
type field struct {
	name string
	kind kind
}

// keyFields are what an expression loads, by its key.
var keyFields = map[string]map[uint32]field{
	"meta": {
		unix.NFT_META_PROTOCOL: {"meta protocol", kindEther},
		unix.NFT_META_MARK:     {metaMark, kindMark},
		unix.NFT_META_IIF:      {"iif", kindIfindex},
		unix.NFT_META_OIF:      {"oif", kindIfindex},
		unix.NFT_META_IIFNAME:  {"iifname", kindName},
		unix.NFT_META_OIFNAME:  {"oifname", kindName},
		unix.NFT_META_NFPROTO:  {"meta nfproto", kindFamily},
		unix.NFT_META_L4PROTO:  {"meta l4proto", kindProtocol},
	},
	"ct": {
		unix.NFT_CT_STATE:  {"ct state", kindCTState},
		unix.NFT_CT_STATUS: {"ct status", kindCTStatus},
		unix.NFT_CT_MARK:   {"ct mark", kindMark},
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
		return field{name + " oif", kindIfindex}
	case unix.NFT_FIB_RESULT_OIFNAME:
		return field{name + " oifname", kindName}
	case unix.NFT_FIB_RESULT_ADDRTYPE:
		return field{name + " type", kindAddrType}
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
