package routes

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/node"
)

// Traffic is a kind of packets: what rules of policy routing (ip-rule(8)) can select besides
// addresses and interfaces. The zero value is UDP without a mark.
type traffic struct {
	attrs []netlink.Attribute // of a request for the route; of two of a type the last one counts
	open  bool                // there is more, which no such request has
	rules []string            // that select it, for use in messages
}

// selectors are the attributes of rules by which they select, and those of requests for a
// route that carry the same.
var selectors = []struct {
	rule, request uint16
}{
	{unix.FRA_FWMASK, unix.RTA_MARK}, // of a rule for packets without a mark
	{unix.FRA_FWMARK, unix.RTA_MARK},
	{unix.FRA_UID_RANGE, unix.RTA_UID}, // of the node's own packets
	{unix.FRA_IP_PROTO, unix.RTA_IP_PROTO},
	{unix.FRA_SPORT_RANGE, unix.RTA_SPORT},
	{unix.FRA_DPORT_RANGE, unix.RTA_DPORT},
}

// Attributes of rules since Linux 6.15: the bits of a port that are compared.
const sportMask, dportMask = 28, 29 // FRA_SPORT_MASK, FRA_DPORT_MASK

// kindsOf returns the kinds of packets that a rule selects: two with the ends of ranges, as
// another rule may have one of them; none if it selects by addresses and interfaces alone.
// With `not`, it selects all others.
func kindsOf(rule node.Message) (kinds []traffic) {
	const tosAt = 3 // struct fib_rule_hdr
	for end := range 2 {
		k := traffic{open: rule.Head[tosAt] != 0, rules: []string{fmt.Sprintf("ip rule %d", rule.Number(unix.FRA_PRIORITY))}}
		for _, s := range selectors {
			value := rule.Attr(s.rule)
			if value == nil {
				continue
			}
			switch s.rule {
			case unix.FRA_UID_RANGE: // struct fib_rule_uid_range
				value = value[4*end:][:4]
			case unix.FRA_SPORT_RANGE, unix.FRA_DPORT_RANGE: // struct fib_rule_port_range
				value = binary.BigEndian.AppendUint16(nil, binary.NativeEndian.Uint16(value[2*end:]))
			case unix.FRA_IP_PROTO: // a request has few of them
				k.open = k.open || value[0] != unix.IPPROTO_TCP && value[0] != unix.IPPROTO_UDP
			}
			k.attrs = append(k.attrs, netlink.Attribute{Type: s.request, Data: value})
		}
		for attr := range rule.All() {
			k.open = k.open || attr == unix.FRA_TUN_ID || attr > unix.FRA_DPORT_RANGE && attr != sportMask && attr != dportMask
		}
		if k.attrs != nil || k.open {
			kinds = append(kinds, k)
		}
	}
	return kinds
}

// Leftovers returns the commands that remove the rules of policy routing which a fork of
// ip-masq-agent for Oracle's cloud has not removed.
func Leftovers() ([]string, error) { return read("routing rules", reader.leftovers) }

func (r reader) leftovers() (commands []string) {
	const bitsAt, flagsAt, priority = 1, 8, 20 // struct fib_rule_hdr
	plain := []uint16{unix.FRA_PRIORITY, unix.FRA_TABLE, unix.FRA_SUPPRESS_PREFIXLEN, unix.FRA_PROTOCOL, unix.FRA_DST}
	for _, rule := range slices.Concat(r.rules(unix.AF_INET), r.rules(unix.AF_INET6)) {
		to := rule.Address(unix.FRA_DST)
		left := to.IsValid() && node.Number(rule.Head[flagsAt:])&unix.FIB_RULE_INVERT != 0 &&
			rule.Number(unix.FRA_PRIORITY) == priority && rule.Number(unix.FRA_TABLE) == unix.RT_TABLE_MAIN
		for attr := range rule.All() {
			left = left && slices.Contains(plain, attr)
		}
		if left {
			family := map[bool]string{false: "-4", true: "-6"}[to.Is6()]
			commands = append(commands, fmt.Sprintf("ip %s rule del priority %d not to %s/%d lookup main",
				family, priority, to, rule.Head[bitsAt]))
		}
	}
	return commands
}

func (r reader) rules(family byte) []node.Message {
	head := make([]byte, unix.SizeofRtMsg) // struct fib_rule_hdr is as long
	head[0] = family
	return r.Request(unix.RTM_GETRULE, netlink.Dump, head)
}
