package trace

import (
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/rule"
)

// A Code says what a rule does to a packet.
type Code string

// The codes. A rule of code Unknown may do anything.
const (
	Masquerades Code = "foreign-masquerade"
	Translates  Code = "translated"     // to another address, or to its own
	Accepts     Code = "accepted-first" // it ends a chain of type nat early
	Rewrites    Code = "rewritten"      // without NAT
	Untracks    Code = "untracked"
	Drops       Code = "dropped"
	Rejects     Code = "rejected"
	Unknown     Code = "unknown"
	Ours        Code = "ours" // the packet meets a chain of this agent, whose rules were not read
)

const (
	drop   = 0 // NF_DROP
	accept = 1 // NF_ACCEPT
)

// An effect is what a statement does to a packet that meets it.
type effect struct {
	code    Code // empty: nothing to report
	verdict int32
	chain   string // of a jump or goto
	nat     rule.NAT
	mark    *rule.NewMark
	to      rule.Write
	byMap   bool // the verdict comes from a map
}

// nothing is the effect of a comparison.
func nothing() effect { return effect{verdict: unix.NFT_CONTINUE} }

// statement returns the effect of a statement, and whether the packet gets past it. There is no
// other place that knows what an expression does.
func (t *Tracer) statement(c *Chain, s rule.Statement) (effect, Truth) {
	e := nothing()
	code, chain, ends := s.Expr.Verdict()
	switch {
	case ends:
		return verdict(code, chain), Yes
	case s.Source || s.Destination:
		e.nat, e.verdict, e.code = s.NAT, accept, Translates
		if s.Masquerade {
			e.code = Masquerades
		}
		return e, truthOf(t.ofFamily(s.NAT.Family))
	case s.Expr.JumpsByMap():
		e.byMap = true
		return e, Yes
	case s.Write.Field != "":
		e.code, e.to = Rewrites, s.Write
		return e, Yes
	case rule.Untracks(s.Expr):
		e.code = Untracks
		return e, Yes
	case s.NewMark != nil:
		e.mark = s.NewMark
		return e, Yes
	case s.Field != "":
		return e, t.holds(c, s)
	}
	if c.Own && s.Expr.Name == "dynset" { // ours has neither a limit nor, for long, no room
		return e, Yes
	}
	return other(s.Expr)
}

// verdict returns the effect of a verdict, of a rule or of an element of a map.
func verdict(code int32, chain string) effect {
	e := effect{verdict: code, chain: chain}
	switch code {
	case drop:
		e.code = Drops
	case accept:
		e.code = Accepts
	case unix.NFT_CONTINUE, unix.NFT_RETURN, unix.NFT_JUMP, unix.NFT_GOTO:
	default: // queue
		e.code = Unknown
	}
	return e
}

// Expressions, and targets of xtables, by what they do. Of the others nothing is known.
var (
	harmless = words("counter", "log", "last", "meta", "ct", "dup", "flow_offload", "payload",
		"-j LOG", "-j NFLOG", "-j TCPMSS", "-j CHECKSUM", "-j CLASSIFY", "-j DSCP", "-j TOS", "-j TTL", "-j HL",
		"-j TEE", "-j AUDIT", "-j TRACE", "-j IDLETIMER", "-j LED", "-j RATEEST", "-j SECMARK", "-j CONNSECMARK",
		"-j CT", "-j CONNMARK", "-j TCPOPTSTRIP", "-j ECN", "-m comment")
	conditional = words("limit", "quota", "connlimit", "dynset", "exthdr", "rt", "socket", "osf", "cmp", "range", "lookup",
		"match")
	rejecting = words("reject", "-j REJECT", "-j TARPIT", "-j DELUDE")
	marking   = words("-j MARK", "-j HMARK", "-j SET")
)

func words(all ...string) map[string]bool {
	m := map[string]bool{}
	for _, w := range all {
		m[w] = true
	}
	return m
}

// other returns the effect of an expression that neither compares nor ends by a verdict.
func other(x nfnetlink.Expr) (effect, Truth) {
	e, name := nothing(), x.Name
	switch {
	case name == "target":
		name = "-j " + x.Str(unix.NFTA_TARGET_NAME)
	case name == "match" && x.Str(unix.NFTA_MATCH_NAME) == "comment":
		name = "-m comment"
	case name == "objref" && x.Attr(unix.NFTA_OBJREF_SET_NAME) == nil:
		name = objects[x.Uint32(unix.NFTA_OBJREF_IMM_TYPE)]
	}
	switch {
	case harmless[name]:
		return e, Yes
	case conditional[name]:
		return e, Maybe
	case rejecting[name]:
		e.code, e.verdict = Rejects, drop
		return e, Yes
	case marking[name]:
		e.mark = &rule.NewMark{Unknown: allBits}
		return e, Yes
	case name == "-j SNPT" || name == "-j DNPT": // IPv6 prefix translation without NAT
		e.code, e.to.Field = Rewrites, map[string]string{"-j SNPT": "ip6 saddr", "-j DNPT": "ip6 daddr"}[name]
		return e, Yes
	}
	e.code = Unknown
	return e, Maybe
}

// objects are the expressions that named objects stand for.
var objects = map[uint32]string{
	unix.NFT_OBJECT_COUNTER: "counter", unix.NFT_OBJECT_QUOTA: "quota", unix.NFT_OBJECT_LIMIT: "limit",
	unix.NFT_OBJECT_CONNLIMIT: "connlimit", unix.NFT_OBJECT_CT_HELPER: "ct", unix.NFT_OBJECT_CT_TIMEOUT: "ct",
	unix.NFT_OBJECT_CT_EXPECT: "ct", unix.NFT_OBJECT_SECMARK: "meta", unix.NFT_OBJECT_SYNPROXY: "synproxy",
}
