package routes

import (
	"fmt"
	"net/netip"

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

func inverted(rule node.Message) bool {
	const flagsAt = 8 // struct fib_rule_hdr
	return node.Number(rule.Head[flagsAt:])&unix.FIB_RULE_INVERT != 0
}

// selectsByAddress reports whether a rule selects by source and destination alone.
func selectsByAddress(rule node.Message) bool {
	for attr := range rule.All() {
		switch attr {
		case unix.FRA_SRC, unix.FRA_DST, unix.FRA_PRIORITY, unix.FRA_TABLE, unix.FRA_SUPPRESS_PREFIXLEN, unix.FRA_PROTOCOL:
		default:
			return false
		}
	}
	return true
}

// A SourceRule is a rule of policy routing that leads packets from a network to another one by a
// table of its own, and selects by nothing else.
type SourceRule struct {
	From, To        netip.Prefix // To is everything if the rule does not name it
	Priority, Table uint32
}

func (r SourceRule) String() string {
	return fmt.Sprintf("ip rule %d: from %s to %s lookup %d", r.Priority, r.From, r.To, r.Table)
}

// SourceRules returns these rules, in the kernel's order for each family.
func SourceRules() ([]SourceRule, error) { return read("routing rules", reader.sourceRules) }

func (r reader) sourceRules() (all []SourceRule) {
	for _, rule := range r.rules(unix.AF_UNSPEC) {
		from, to, table := rule.Address(unix.FRA_SRC), rule.Address(unix.FRA_DST), rule.Number(unix.FRA_TABLE)
		common := table == 0 || table >= unix.RT_TABLE_DEFAULT && table <= unix.RT_TABLE_LOCAL
		if !from.IsValid() || common || inverted(rule) || !selectsByAddress(rule) {
			continue
		}
		found := SourceRule{
			From: netip.PrefixFrom(from, int(rule.Head[srcBitsAt])), To: netip.PrefixFrom(to, int(rule.Head[dstBitsAt])),
			Priority: rule.Number(unix.FRA_PRIORITY), Table: table,
		}
		if !to.IsValid() {
			found.To, _ = from.Prefix(0)
		}
		all = append(all, found)
	}
	return all
}

// rules lists the rules of policy routing of a family, or with AF_UNSPEC of all.
func (r reader) rules(family byte) []node.Message {
	head := make([]byte, unix.SizeofRtMsg) // struct fib_rule_hdr is as long
	head[0] = family
	return r.Request(unix.RTM_GETRULE, netlink.Dump, head)
}
