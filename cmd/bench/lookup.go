package main

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"nft-masq-agent/nft"
)

const groupLookup = "one new connection through the node, by the form of the set"

// A form is another way to write the rules of a list of networks for nft.
type form struct {
	name  string
	set   string // its declaration; the elements follow
	entry string // format of an element
	rules string
}

// The rules of the agent without their counters, and forms of the set that nf_tables also has. The networks of this
// group are single addresses, so that one hash table has them all; networks of other lengths would need one for each.
func forms() []form {
	const (
		interval = "type ipv4_addr; flags interval"
		toNode   = `meta nfproto ipv4 fib daddr type local return`
		set      = "ip daddr @cidrs return"
	)
	return []form{
		{"the set alone", interval, "%s", set},
		{"the set, then fib", interval, "%s", set + "\n" + toNode},
		{"fib, then the set", interval, "%s", toNode + "\n" + set},
		{
			"fib, then a concatenation", "type inet_proto . ipv4_addr; flags interval", "udp . %s",
			toNode + "\nmeta l4proto . ip daddr @cidrs return",
		},
		{"fib, then a hash table", "type ipv4_addr", "%s", toNode + "\n" + set},
	}
}

func (f form) text(networks []netip.Prefix) string {
	elements := make([]string, len(networks))
	for i, p := range networks {
		elements[i] = fmt.Sprintf(f.entry, p.Addr())
	}
	return fmt.Sprintf(`table inet bare {
	set cidrs {
		%s
		elements = { %s }
	}
	chain postrouting {
		type nat hook postrouting priority srcnat + 10; policy accept
		%s
		masquerade fully-random
	}
}`, f.set, strings.Join(elements, ", "), f.rules)
}

// lookup measures what a new connection pays for the largest list: to the kernel's lookup, by the form of the set, and
// to the other rules.
func (b *bench) lookup(ctx context.Context) {
	n := slices.Max(b.sizes)
	networks := reachable(n)
	dsts := destinations(networks, false)
	shuffle(networks)
	all := []rules{ofNft(bareMasquerade), ofNft(ruleset(networks, nft.ModeNFTables).String())}
	names := []string{"the agent's rules"}
	for _, f := range forms() {
		all = append(all, ofNft(f.text(networks)))
		names = append(names, f.name)
	}
	s := b.onNodes(ctx, 1, all, nil, dsts) // a concatenation takes fifty times as long
	for i, name := range names {
		r := newRow(groupLookup, n, name, "µs", s[i+1])
		b.add(r.against("bare masquerade", s[i+1], s[0]))
	}
}
