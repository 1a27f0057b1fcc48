package nfnetlink

import (
	"fmt"
	"slices"
	"strings"

	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"
)

// Target returns the chain that a rule jumps or goes to.
func (r Rule) Target() (chain string, ok bool) {
	for _, e := range r.Exprs {
		if _, chain, ok := e.Verdict(); ok && chain != "" {
			return chain, true
		}
	}
	return "", false
}

// Returns reports whether a rule returns to the calling chain.
func (r Rule) Returns() bool {
	for _, e := range r.Exprs {
		if code, _, ok := e.Verdict(); ok && code == unix.NFT_RETURN {
			return true
		}
	}
	return false
}

// Packets returns what the rule's own counter has counted; false if it has none.
func (r Rule) Packets() (uint64, bool) {
	for _, e := range r.Exprs {
		if e.Name == "counter" {
			return e.Uint64(unix.NFTA_COUNTER_PACKETS), true
		}
	}
	return 0, false
}

// Sets returns the names of the sets and maps that a rule refers to: those in which it looks for an element, to which
// it adds one, or from which it takes an object.
func (r Rule) Sets() []string {
	var names []string
	for _, e := range r.Exprs {
		if set := e.Set(); set != "" {
			names = append(names, set)
		}
	}
	return names
}

// TranslatesSources reports whether a rule translates source addresses.
func (r Rule) TranslatesSources() bool {
	return slices.ContainsFunc(r.Exprs, func(e Expr) bool {
		switch e.Name {
		case "masq":
			return true
		case "nat":
			return e.Uint32(unix.NFTA_NAT_TYPE) == unix.NFT_NAT_SNAT
		case "target":
			return slices.Contains([]string{"MASQUERADE", "SNAT", "NETMAP"}, e.Str(unix.NFTA_TARGET_NAME))
		}
		return false
	})
}

// Name names a rule in messages: by its handle, and by its comment if it has one.
func (r Rule) Name() string {
	name := fmt.Sprintf("handle %d", r.Handle)
	if comment := r.Comment(); comment != "" {
		name += ", comment " + Quote(comment)
	}
	return name
}

// CommentData is the type of nft's comment in the user data of a rule.
const CommentData = 0 // NFTNL_UDATA_RULE_COMMENT

// Comment returns what -m comment has, or else nft's comment.
func (r Rule) Comment() string {
	for _, e := range r.Exprs {
		if e.Name == "match" && e.Str(unix.NFTA_MATCH_NAME) == "comment" {
			return e.Str(unix.NFTA_MATCH_INFO)
		}
	}
	return UserData(r.UserData, CommentData)
}

// Signature is the user data of each rule that we write into a table which other programs use,
// too. It distinguishes them from rules with the same text, which ip-masq-agent up to v2.0.0
// writes. iptables and nft do not know its type: they neither show nor preserve it.
func Signature() []byte { return userdata.AppendString(nil, signatureType, signature) }

// SignatureWith is a [Signature] with the hash of the policy.
func SignatureWith(hash string) []byte { return userdata.AppendString(Signature(), hashType, hash) }

const (
	signatureType = 200
	signature     = "nft-masq-agent"
	hashType      = 201
)

// Hash returns the hash of the policy that a rule of ours has, or "".
func (r Rule) Hash() string { return UserData(r.UserData, hashType) }

// Signed reports whether a rule has our [Signature].
func (r Rule) Signed() bool { return UserData(r.UserData, signatureType) == signature }

// UserData returns a string from the type, length, value entries that
// programs attach to an object. Any program may have written them: the library's
// reader panics if a length is wrong.
func UserData(b []byte, typ byte) string {
	for len(b) >= 2 && len(b) >= 2+int(b[1]) {
		if b[0] == typ {
			return strings.TrimRight(string(b[2:2+int(b[1])]), "\x00")
		}
		b = b[2+int(b[1]):]
	}
	return ""
}
