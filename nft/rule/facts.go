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
		switch e.Name {
		case "lookup":
			names = append(names, e.Str(unix.NFTA_LOOKUP_SET))
		case "dynset":
			names = append(names, e.Str(unix.NFTA_DYNSET_SET_NAME))
		case "objref":
			if set := e.Str(unix.NFTA_OBJREF_SET_NAME); set != "" {
				names = append(names, set)
			}
		}
	}
	return names
}

// RandomFully reports whether a rule translates source addresses and takes any free
// port for it.
func RandomFully(r nfnetlink.Rule) bool {
	m, _ := Masquerades(r)
	return m.RandomFully()
}

// A Masquerade is what a rule masquerades, or translates with snat, and how.
type Masquerade struct {
	NAT
	Protocol byte // 0: any
}

// Masquerades returns how a rule masquerades or translates with snat; false if it does
// neither.
func Masquerades(r nfnetlink.Rule) (Masquerade, bool) {
	protocol := byte(0)
	for s := range Statements(r) {
		if s.Field == "meta l4proto" && len(s.Value) == 1 {
			protocol = s.Value[0]
		}
		if s.Source {
			return Masquerade{s.NAT, protocol}, true
		}
	}
	return Masquerade{}, false
}
