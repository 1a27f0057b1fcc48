package rule

import (
	"encoding/binary"
	"fmt"
	"math"
	"net/netip"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfnetlink"
)

// unknownInfo stands for parameters that are not decoded.
const unknownInfo = " <...>"

// decodeXT words a match or target of xtables. Matches of the mark and of the
// type of an address are comparisons, like the native ones.
func decodeXT(e nfnetlink.Expr, family nfnetlink.Family) (Statement, bool) {
	switch e.Name {
	case "match":
		return xtMatch(e.Str(unix.NFTA_MATCH_NAME), e.Attr(unix.NFTA_MATCH_INFO)), true
	case "target":
		return xtTarget(e, family), true
	}
	return Statement{}, false
}

// Untracks reports whether an expression turns off connection tracking for the packet.
func Untracks(e nfnetlink.Expr) bool {
	const notrack = 1 // XT_CT_NOTRACK
	switch {
	case e.Name == "notrack":
		return true
	case e.Name != "target":
		return false
	}
	info := e.Attr(unix.NFTA_TARGET_INFO)
	name := e.Str(unix.NFTA_TARGET_NAME)
	// struct xt_ct_target_info
	return name == "NOTRACK" || name == "CT" && len(info) >= 2 && binary.NativeEndian.Uint16(info)&notrack != 0
}

// xtMatch goes by the size of the parameters, which distinguishes the revisions.
func xtMatch(name string, info []byte) Statement {
	s := Statement{text: "-m " + nfnetlink.Printable(name) + unknownInfo}
	switch {
	case name == "comment":
		s.text = "-m comment --comment " + strconv.Quote(unix.ByteSliceToString(info))
	case name == "mark" && len(info) >= 9 && len(info) <= 16: // struct xt_mark_mtinfo1
		s = Statement{
			Field: metaMark, format: formatMark, Value: info[:4], Mask: info[4:8], Op: either(info[8] != 0, "!=", "=="),
		}
		s.text = "-m mark " + either(info[8] != 0, "! ", "") + "--mark " + xtMark(info)
	case name == "conntrack" && len(info) > 152 && info[146] == 1 && info[147]&^0x20 == 0:
		// struct xt_conntrack_mtinfo3 with the flags XT_CONNTRACK_STATE and, by -m state, …_STATE_ALIAS
		return xtState(s, info[150:152], info[148] != 0)
	case name == "addrtype" && len(info) == 8: // struct xt_addrtype_info_v1
		return xtAddrType(info)
	case name == "statistic" && len(info) >= 8 && binary.NativeEndian.Uint16(info) == 0: // XT_STATISTIC_MODE_RANDOM
		not := either(binary.NativeEndian.Uint16(info[2:])&1 != 0, "! ", "")
		s.text = fmt.Sprintf("-m statistic --mode random %s--probability %.11f", not, float64(nativeUint32(info[4:]))/(1<<31))
	}
	return s
}

// xtState reads a set of states, whose bits are nft's, but for those of NAT and of what is not
// tracked.
func xtState(unknown Statement, states []byte, not bool) Statement {
	bits := nativeUint32(states)
	if bits&^0xf != 0 {
		return unknown
	}
	text := strings.ToUpper(formatCTState.word(binary.NativeEndian.AppendUint32(nil, bits)))
	return Statement{
		Field: "ct state", format: formatCTState, Value: make([]byte, 4), Mask: binary.NativeEndian.AppendUint32(nil, bits),
		Op: either(not, "==", "!="), text: "-m conntrack " + either(not, "! ", "") + "--ctstate " + text,
	}
}

func xtMark(info []byte) string { return formatMark.word(info[:4]) + "/" + formatMark.word(info[4:8]) }

// xtAddrType reads two sets of RTN_ numbers, of source and destination, and
// flags that invert them or restrict them to an interface.
func xtAddrType(info []byte) Statement {
	var s Statement
	words, flags := []string{"-m addrtype"}, nativeUint32(info[4:])
	for i, side := range []string{"src", "dst"} {
		set := binary.NativeEndian.Uint16(info[2*i:])
		var types []string
		for n := range uint32(16) {
			if set&(1<<n) != 0 {
				types = append(types, strings.ToUpper(formatAddrType.name(n)))
				s = Statement{
					Field: "fib " + side[:1] + "addr type", format: formatAddrType,
					Value: binary.NativeEndian.AppendUint32(nil, n),
				}
			}
		}
		if set != 0 {
			s.Op = either(flags&(1<<i) != 0, "!=", "==")
			words = append(words, either(s.Op == "!=", "! ", "")+"--"+side+"-type "+strings.Join(types, ","))
		}
		if len(types) > 1 {
			s.Field = ""
		}
	}
	for i, limit := range []string{"--limit-iface-in", "--limit-iface-out"} {
		if flags&(4<<i) != 0 {
			words = append(words, limit)
		}
	}
	if len(words) != 2 { // more than one comparison
		s = Statement{}
	}
	s.text = strings.Join(words, " ")
	return s
}

// xtNAT are the targets that translate addresses, with the option that iptables has
// for the new ones.
var xtNAT = map[string]struct {
	NAT
	option string
}{
	"MASQUERADE": {NAT{Source: true, Masquerade: true}, "--to-ports"},
	"SNAT":       {NAT{Source: true}, "--to-source"},
	"DNAT":       {NAT{Destination: true}, "--to-destination"},
	"REDIRECT":   {NAT{Destination: true}, "--to-ports"},
	"NETMAP":     {NAT{Source: true, Destination: true}, ""},
}

func xtTarget(e nfnetlink.Expr, family nfnetlink.Family) Statement {
	const restore = 2 // XT_CONNMARK_RESTORE
	name, info, modeAt := e.Str(unix.NFTA_TARGET_NAME), e.Attr(unix.NFTA_TARGET_INFO), 12
	if e.Uint32(unix.NFTA_TARGET_REV) == 2 {
		modeAt = 14
	}
	nat, translates := xtNAT[name]
	words, mark := unknownInfo, (*NewMark)(nil)
	switch {
	case name == "MARK" && len(info) == 8: // struct xt_mark_tginfo2
		words = " --set-xmark " + xtMark(info)
		mark = &NewMark{Keep: ^nativeUint32(info[4:]), Xor: nativeUint32(info)}
	case name == "CONNMARK" && len(info) > modeAt && info[modeAt] == restore: // struct xt_connmark_tginfo1
		mask := nativeUint32(info[4:]) | nativeUint32(info[8:]) // the kernel XORs bits that it does not clear
		if modeAt == 14 && info[13] != 0 {                      // it shifts them
			mask = math.MaxUint32
		}
		mark = &NewMark{Keep: ^mask, Unknown: mask}
	case name == "MARK", name == "HMARK", name == "SET":
		mark = &NewMark{Unknown: math.MaxUint32}
	case nat.option != "" && nat.xtRange(info, family):
		words = nat.xtWords(nat.option)
	}
	s := Statement{text: "-j " + nfnetlink.Printable(name) + words, NewMark: mark}
	if translates {
		s.NAT = &nat.NAT
	}
	if field, is := map[string]string{"SNPT": "ip6 saddr", "DNPT": "ip6 daddr"}[name]; is { // of a prefix, without NAT
		s.Write = &Write{Field: field}
	}
	return s
}

// xtRange adds struct nf_nat_range or the shorter one for IPv4 only, struct nf_nat_ipv4_multi_range_compat with one
// range.
func (n *NAT) xtRange(info []byte, family nfnetlink.Family) (ok bool) {
	addr, next, ports := 8, 4, 16
	switch {
	case len(info) >= 40:
		addr, next, ports = 4, 16, 36
	case len(info) < 20:
		return false
	}
	size := 4
	if family == nfnetlink.IPv6 {
		size = next
	}
	n.Flags = nativeUint32(info[addr-4:])
	if n.Flags&nfnetlink.NATAddresses != 0 {
		n.To.From, _ = netip.AddrFromSlice(info[addr : addr+size])
		n.To.To, _ = netip.AddrFromSlice(info[addr+next : addr+next+size])
	}
	if n.Flags&nfnetlink.NATPorts != 0 {
		n.MinPort, n.MaxPort = binary.BigEndian.Uint16(info[ports:]), binary.BigEndian.Uint16(info[ports+2:])
	}
	return true
}

func (n NAT) xtWords(option string) string {
	to := ""
	if n.To.From.IsValid() {
		to = n.To.From.String()
		if n.To.To != n.To.From {
			to += "-" + n.To.To.String()
		}
	}
	if n.Flags&nfnetlink.NATPorts != 0 {
		if to != "" {
			to += ":"
		}
		to += fmt.Sprint(n.MinPort)
		if n.MaxPort != n.MinPort {
			to += fmt.Sprintf("-%d", n.MaxPort)
		}
	}
	if to != "" {
		to = " " + option + " " + to
	}
	flags := strings.ReplaceAll(natFlags(n.Flags), "fully-random", "random-fully")
	return to + strings.ReplaceAll(flags, " ", " --")
}
