package trace

import (
	"strings"

	"golang.org/x/sys/unix"

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

	// These are not reported.
	nothing   Code = ""
	jumps     Code = "jumps"
	goes      Code = "goes"
	returns   Code = "returns"
	chooses   Code = "chooses" // by a map of verdicts
	marks     Code = "marks"
	templates Code = "templates" // tells connection tracking something about the packet, such as its zone
)

const (
	drop   = 0 // NF_DROP
	accept = 1 // NF_ACCEPT
)

// An effect is what a statement does to a packet that meets it.
type effect struct {
	code  Code
	chain string // to which it jumps or goes
}

// statement returns the effect of a statement, and whether the packet gets past it. There is no
// other place that knows what an expression does.
func (t *Tracer) statement(c *Chain, s rule.Statement) (e effect, is Truth) {
	code, chain, ends := s.Expr.Verdict()
	switch is = Yes; {
	case ends:
		e = verdict(code, chain)
	case s.NAT != nil && s.NAT.Masquerade:
		e.code = Masquerades
	case s.NAT != nil:
		e.code, is = Translates, truthOf(t.ofFamily(s.NAT.Family))
	case s.Expr.JumpsByMap():
		e.code = chooses
	case s.Write != nil:
		e.code = Rewrites
	case rule.Untracks(s.Expr):
		e.code = Untracks
	case s.NewMark != nil:
		e.code = marks
	case s.Field != "":
		is = t.holds(c, s)
	case c.Own && s.Expr.Name == "dynset": // ours has neither a limit nor, for long, no room
	default:
		e, is = other(s)
	}
	return e, is
}

// verdicts are those of rules and of elements of maps. Others, such as queue, are unknown.
var verdicts = map[int32]Code{
	drop: Drops, accept: Accepts, unix.NFT_CONTINUE: nothing, unix.NFT_RETURN: returns, unix.NFT_JUMP: jumps,
	unix.NFT_GOTO: goes,
}

func verdict(code int32, chain string) effect {
	is, known := verdicts[code]
	if !known {
		is = Unknown
	}
	return effect{is, chain}
}

// other returns the effect of an expression that neither compares nor ends by a verdict. Those of
// xtables are named as iptables writes them, named objects as nft does.
func other(s rule.Statement) (effect, Truth) {
	name := s.Expr.Name
	switch name {
	case "match":
		name = "-m " + s.Expr.Str(unix.NFTA_MATCH_NAME)
	case "target":
		name = "-j " + s.Expr.Str(unix.NFTA_TARGET_NAME)
	case "objref":
		name, _, _ = strings.Cut(s.String(), " name ")
	}
	switch name {
	case "counter", "log", "last", "meta", "dup", "flow_offload", "payload", "-m comment", "-j LOG", "-j NFLOG",
		"-j TCPMSS", "-j CHECKSUM", "-j CLASSIFY", "-j DSCP", "-j TOS", "-j TTL", "-j HL", "-j TEE", "-j AUDIT", "-j TRACE",
		"-j IDLETIMER", "-j LED", "-j RATEEST", "-j SECMARK", "-j CONNSECMARK", "-j CONNMARK", "-j TCPOPTSTRIP",
		"-j ECN", "ct helper set", "ct expectation set", "meta secmark set":
		return effect{}, Yes
	case "ct", "-j CT", "ct timeout set":
		return effect{code: templates}, Yes
	case "limit", "quota", "connlimit", "ct count", "dynset", "exthdr", "rt", "socket", "osf", "cmp", "range", "lookup":
		return effect{}, Maybe
	case "reject", "-j REJECT", "-j TARPIT", "-j DELUDE":
		return effect{code: Rejects}, Yes
	}
	if s.Expr.Name == "match" {
		return effect{}, Maybe
	}
	return effect{code: Unknown}, Maybe
}
