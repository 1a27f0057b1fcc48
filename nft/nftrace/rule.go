package nftrace

import (
	"fmt"
	"regexp"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/xtables"
)

// A reader reads the chains and rules that events name. One that was deleted meanwhile has its name only.
type reader struct {
	conn *nfnetlink.Conn
	ipv6 bool // the packet's family
}

// base describes a base chain.
func (r reader) base(id nfnetlink.ChainID) Chain {
	chain := Chain{Family: id.Family.String(), Table: id.Table, Name: id.Name, Rules: []Rule{}}
	c, err := r.conn.Chain(id.Family, id.Table, id.Name)
	if err == nil && c.Hook != nil {
		chain.Hook = hookName(c.Family, c.Hook.Number)
		chain.Priority = int(c.Hook.Priority)
		chain.Type = c.Hook.Type
	}
	return chain
}

// rule describes a rule that matched. It has no action if it has no effect on the packet.
func (r reader) rule(e event) Rule {
	result := Rule{
		Family: e.chain.Family.String(), Table: e.chain.Table, Chain: e.chain.Name, Handle: e.handle,
		Action: verdictName(e.code), Target: e.target, Owner: ownerOf(e.chain), Command: Command(e.chain),
	}
	rule, err := r.conn.Rule(e.chain.Family, e.chain.Table, e.chain.Name, e.handle)
	if err != nil {
		return result
	}
	result.Comment = rule.Comment()
	if rule.Signed() {
		result.Owner = Agent
	} else if result.Owner != Agent && xtables.IsOlder(rule) {
		result.Owner = Older
	}
	if statement := r.action(rule, e.code); statement != "" {
		result.Action = statement
	}
	return result
}

// rewrite is the action of a rule that writes a source into the packet itself: nothing tracks that.
const rewrite = "saddr set"

// action returns the statement of a rule that had the effect on the packet, "" if that is the verdict itself.
func (r reader) action(rule nfnetlink.Rule, code int32) (statement string) {
	for _, e := range rule.Exprs {
		name := e.Name
		if name == "target" {
			name = e.Str(unix.NFTA_TARGET_NAME)
		}
		switch found := statements[name]; {
		case name == "nat" && e.Uint32(unix.NFTA_NAT_TYPE) == unix.NFT_NAT_SNAT && code == accept:
			statement = "snat"
		case name == "nat" && code == accept:
			statement = "dnat"
		case name == "NETMAP" && code == accept:
			statement = netmap(rule)
		case name == "payload" && r.rewrites(e):
			statement = rewrite
		case name == "meta" && e.Attr(unix.NFTA_META_SREG) != nil && e.Uint32(unix.NFTA_META_KEY) == unix.NFT_META_MARK:
			statement = "mark"
		case found.code == code && found.statement != "":
			statement = found.statement
		}
	}
	return statement
}

// rewrites reports whether an expression writes at least a part of the packet's source: RFC 791, section 3.1, and
// RFC 8200, section 3.
func (r reader) rewrites(e nfnetlink.Expr) bool {
	first := uint32(12)
	last := uint32(15)
	if r.ipv6 {
		first = 8
		last = 23
	}
	offset := e.Uint32(unix.NFTA_PAYLOAD_OFFSET)
	return e.Attr(unix.NFTA_PAYLOAD_SREG) != nil && e.Uint32(unix.NFTA_PAYLOAD_BASE) == unix.NFT_PAYLOAD_NETWORK_HEADER &&
		offset <= last && offset+e.Uint32(unix.NFTA_PAYLOAD_LEN) > first
}

// netmap returns whether an xt target NETMAP translates the destination or the source: iptables makes only these base
// chains.
func netmap(r nfnetlink.Rule) string {
	if r.Chain == "PREROUTING" || r.Chain == "OUTPUT" {
		return "dnat"
	}
	return "snat"
}

// statements are those of expressions and xt targets, and the verdict with which they have taken effect.
var statements = map[string]struct {
	code      int32
	statement string
}{
	"masq": {accept, "masquerade"}, "MASQUERADE": {accept, "masquerade"}, "SNAT": {accept, "snat"},
	"DNAT": {accept, "dnat"}, "redir": {accept, "redirect"}, "REDIRECT": {accept, "redirect"},
	"tproxy": {accept, "tproxy"}, "TPROXY": {accept, "tproxy"},
	"reject": {drop, "reject"}, "REJECT": {drop, "reject"},
	"notrack": {unix.NFT_CONTINUE, "notrack"}, "CT": {unix.NFT_CONTINUE, "notrack"},
	"NOTRACK": {unix.NFT_CONTINUE, "notrack"}, "MARK": {unix.NFT_CONTINUE, "mark"},
}

// verdictNames are the verdicts as nft names them; "" is to go on with the next rule.
var verdictNames = map[int32]string{
	drop: "drop", accept: "accept", unix.NFT_RETURN: "return", unix.NFT_JUMP: "jump", unix.NFT_GOTO: "goto",
	unix.NFT_CONTINUE: "",
}

// verdictName returns the name of a verdict, or its number.
func verdictName(code int32) string {
	name, known := verdictNames[code]
	switch {
	case known:
		return name
	case code&0xff == queue:
		return "queue"
	}
	return fmt.Sprintf("verdict %d", code)
}

// ownerOf returns whose a chain is, by its table.
func ownerOf(id nfnetlink.ChainID) Owner {
	if id.Family == nfnetlink.Inet && id.Table == nft.TableName {
		return Agent
	}
	return Other
}

// identifier is a name that nft accepts, and no shell and no terminal takes for its own.
var identifier = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_./-]*$`)

// Command returns the command that shows a chain with the handles of its rules. Programs may give names that
// nft does not accept in a command: then it shows the whole table, or all tables of the family.
func Command(id nfnetlink.ChainID) string {
	switch {
	case !identifier.MatchString(id.Table):
		return "nft -a list ruleset " + id.Family.String()
	case !identifier.MatchString(id.Name):
		return fmt.Sprintf("nft -a list table %s %s", id.Family, id.Table)
	}
	return fmt.Sprintf("nft -a list chain %s %s %s", id.Family, id.Table, id.Name)
}

// hookName returns the name of a hook.
func hookName(family nfnetlink.Family, number uint32) string {
	names := []string{"prerouting", "input", "forward", "output", "postrouting"}
	if family == unix.NFPROTO_NETDEV {
		names = []string{"ingress", "egress"}
	}
	if int(number) < len(names) {
		return names[number]
	}
	return fmt.Sprint("hook ", number)
}
