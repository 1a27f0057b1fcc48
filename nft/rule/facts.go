package rule

import (
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfnetlink"
)

// Target returns the chain that a rule jumps or goes to.
func Target(r nfnetlink.Rule) (chain string, ok bool) {
	for _, e := range r.Exprs {
		if _, chain, ok := e.Verdict(); ok && chain != "" {
			return chain, true
		}
	}
	return "", false
}

// Returns reports whether a rule returns to the calling chain.
func Returns(r nfnetlink.Rule) bool {
	for _, e := range r.Exprs {
		if code, _, ok := e.Verdict(); ok && code == unix.NFT_RETURN {
			return true
		}
	}
	return false
}

// Packets returns what the rule's own counter has counted; false if it has none.
func Packets(r nfnetlink.Rule) (uint64, bool) {
	for _, e := range r.Exprs {
		if e.Name == "counter" {
			return e.Uint64(unix.NFTA_COUNTER_PACKETS), true
		}
	}
	return 0, false
}

// Sets names the sets that a rule refers to: whose elements it asks for, adds, or
// takes an object from.
func Sets(r nfnetlink.Rule) []string {
	var names []string
	for _, e := range r.Exprs {
		if set := e.Set(); set != "" {
			names = append(names, set)
		}
	}
	return names
}

// RandomFully reports whether a rule translates source addresses and takes any free
// port for it.
func RandomFully(r nfnetlink.Rule) bool {
	n, _ := SourceNAT(r)
	return n.RandomFully()
}

// SourceNAT returns how a rule translates source addresses; false if it does not.
func SourceNAT(r nfnetlink.Rule) (NAT, bool) {
	for s := range Statements(r) {
		if s.Source {
			return s.NAT, true
		}
	}
	return NAT{}, false
}
