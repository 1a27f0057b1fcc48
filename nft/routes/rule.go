package routes

import (
	"fmt"
	"slices"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/node"
)

// Attributes of rules since Linux 6.15: the bits of a port that are compared.
const sportMask, dportMask = 28, 29 // FRA_SPORT_MASK, FRA_DPORT_MASK

// selectsMore reports whether a rule of policy routing (ip-rule(8)) selects by more than addresses,
// interfaces and the mark: by what a packet of which no more is known may have or not. Packets
// that others send have no user.
func selectsMore(rule node.Message, ofNode bool) bool {
	const tosAt = 3 // struct fib_rule_hdr
	more := rule.Head[tosAt] != 0
	for attr := range rule.All() {
		switch attr {
		case unix.FRA_UID_RANGE:
			more = more || ofNode
		case unix.FRA_IP_PROTO, unix.FRA_SPORT_RANGE, unix.FRA_DPORT_RANGE, unix.FRA_TUN_ID, sportMask, dportMask:
			more = true
		default:
			more = more || attr > unix.FRA_DPORT_RANGE
		}
	}
	return more
}

// Leftovers returns the commands that remove the rules of policy routing which a fork of
// ip-masq-agent for Oracle's cloud has not removed.
func Leftovers() ([]string, error) { return read("routing rules", reader.leftovers) }

func (r reader) leftovers() (commands []string) {
	const bitsAt, flagsAt, priority = 1, 8, 20 // struct fib_rule_hdr
	plain := []uint16{unix.FRA_PRIORITY, unix.FRA_TABLE, unix.FRA_SUPPRESS_PREFIXLEN, unix.FRA_PROTOCOL, unix.FRA_DST}
	for _, rule := range r.rules(unix.AF_UNSPEC) {
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

// rules lists the rules of policy routing of a family, or with AF_UNSPEC of all.
func (r reader) rules(family byte) []node.Message {
	head := make([]byte, unix.SizeofRtMsg) // struct fib_rule_hdr is as long
	head[0] = family
	return r.Request(unix.RTM_GETRULE, netlink.Dump, head)
}
