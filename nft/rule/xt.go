package rule

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/iprange"
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
		s := Statement{text: "-j " + nfnetlink.Printable(e.Str(unix.NFTA_TARGET_NAME)) + xtTarget(e, family)}
		if r, ok := xtNATRange(e.Attr(unix.NFTA_TARGET_INFO), family); ok && e.Str(unix.NFTA_TARGET_NAME) == "SNAT" {
			s.To = iprange.Range{From: r.min, To: r.max}
		}
		s.NewMark = xtNewMark(e)
		return s, true
	}
	return Statement{}, false
}

// xtNewMark returns the mark that a target sets, nil if it sets none.
func xtNewMark(e nfnetlink.Expr) *NewMark {
	const restore = 2                                 // XT_CONNMARK_RESTORE
	info, modeAt := e.Attr(unix.NFTA_TARGET_INFO), 12 // struct xt_connmark_tginfo1
	if e.Uint32(unix.NFTA_TARGET_REV) == 2 {
		modeAt = 14
	}
	switch target := e.Str(unix.NFTA_TARGET_NAME); {
	case target == "MARK" && len(info) == 8: // struct xt_mark_tginfo2
		return &NewMark{Keep: ^nativeUint32(info[4:]), Xor: nativeUint32(info)}
	case target == "CONNMARK" && len(info) > modeAt && info[modeAt] == restore:
		mask := nativeUint32(info[8:])
		return &NewMark{Keep: ^mask, Unknown: mask}
	}
	return nil
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
	return name == "NOTRACK" || name == "CT" && len(info) >= 2 && binary.NativeEndian.Uint16(info)&notrack != 0 // struct xt_ct_target_info
}

// xtMatch goes by the size of the parameters, which distinguishes the revisions.
func xtMatch(name string, info []byte) Statement {
	s := Statement{text: "-m " + nfnetlink.Printable(name) + unknownInfo}
	switch {
	case name == "comment":
		s.text = "-m comment --comment " + strconv.Quote(unix.ByteSliceToString(info))
	case name == "mark" && len(info) >= 9 && len(info) <= 16: // struct xt_mark_mtinfo1
		s = Statement{Field: "meta mark", kind: kindMark, Value: info[:4], Mask: info[4:8], Op: either(info[8] != 0, "!=", "==")}
		s.text = "-m mark " + either(info[8] != 0, "! ", "") + "--mark " + xtMark(info)
	case name == "addrtype" && len(info) == 8: // struct xt_addrtype_info_v1
		return xtAddrType(info)
	case name == "statistic" && len(info) >= 8 && binary.NativeEndian.Uint16(info) == 0: // XT_STATISTIC_MODE_RANDOM
		not := either(binary.NativeEndian.Uint16(info[2:])&1 != 0, "! ", "")
		s.text = fmt.Sprintf("-m statistic --mode random %s--probability %.11f", not, float64(nativeUint32(info[4:]))/(1<<31))
	}
	return s
}

func xtMark(info []byte) string { return kindMark.word(info[:4]) + "/" + kindMark.word(info[4:8]) }

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
				types = append(types, strings.ToUpper(kindAddrType.name(n)))
				s = Statement{Field: "fib " + side[:1] + "addr type", kind: kindAddrType, Value: binary.NativeEndian.AppendUint32(nil, n)}
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

func xtTarget(e nfnetlink.Expr, family nfnetlink.Family) string {
	info := e.Attr(unix.NFTA_TARGET_INFO)
	r, ok := xtNATRange(info, family)
	switch name := e.Str(unix.NFTA_TARGET_NAME); {
	case name == "MARK" && len(info) == 8: // struct xt_mark_tginfo2
		return " --set-xmark " + xtMark(info)
	case ok && (name == "MASQUERADE" || name == "REDIRECT"):
		return r.words("--to-ports")
	case ok && name == "SNAT":
		return r.words("--to-source")
	case ok && name == "DNAT":
		return r.words("--to-destination")
	}
	return unknownInfo
}

// An xtNAT is what the targets that translate addresses hold.
type xtNAT struct {
	flags    uint32
	min, max netip.Addr
	ports    [2]uint16
}

// xtNATRange reads struct nf_nat_range or the shorter one for IPv4 only, struct nf_nat_ipv4_multi_range_compat with one range.
func xtNATRange(info []byte, family nfnetlink.Family) (r xtNAT, ok bool) {
	addr, next, ports := 8, 4, 16
	switch {
	case len(info) >= 40:
		addr, next, ports = 4, 16, 36
	case len(info) < 20:
		return r, false
	}
	size := 4
	if family == nfnetlink.IPv6 {
		size = next
	}
	r.flags = nativeUint32(info[addr-4:])
	r.min, _ = netip.AddrFromSlice(info[addr : addr+size])
	r.max, _ = netip.AddrFromSlice(info[addr+next : addr+next+size])
	r.ports = [2]uint16{binary.BigEndian.Uint16(info[ports:]), binary.BigEndian.Uint16(info[ports+2:])}
	return r, true
}

func (r xtNAT) words(option string) string {
	to := ""
	if r.flags&nfnetlink.NATAddresses != 0 {
		to = r.min.String()
		if r.max != r.min {
			to += "-" + r.max.String()
		}
	}
	if r.flags&nfnetlink.NATPorts != 0 {
		if to != "" {
			to += ":"
		}
		to += fmt.Sprint(r.ports[0])
		if r.ports[1] != r.ports[0] {
			to += fmt.Sprintf("-%d", r.ports[1])
		}
	}
	if to != "" {
		to = " " + option + " " + to
	}
	flags := strings.ReplaceAll(natFlags(r.flags), "fully-random", "random-fully")
	return to + strings.ReplaceAll(flags, " ", " --")
}
