package main

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/xtables"
)

// The lists are between these two addresses, which the topology does not use.
var (
	firstAddr = netip.MustParseAddr("11.0.0.0")
	lastAddr  = netip.MustParseAddr("100.0.0.0")
	oneMore   = netip.MustParsePrefix("100.0.0.0/24") // what a change adds or removes
)

// defaultSize stands for the config of a node without a file.
const defaultSize = 0

// list returns n networks of /24 to /32, spread evenly over the range.
func list(n int) []netip.Prefix {
	out := make([]netip.Prefix, n)
	for i := range out {
		out[i] = netip.PrefixFrom(spread32(i, n), 24+i%9)
	}
	return out
}

// spread32 returns the start of the i-th /24 of n.
func spread32(i, n int) netip.Addr {
	low, high := number(firstAddr), number(lastAddr)
	at := low + uint32(uint64(high-low)*uint64(i)/uint64(n))
	return addr(at &^ 0xff)
}

func number(a netip.Addr) uint32 {
	b := a.As4()
	return binary.BigEndian.Uint32(b[:])
}

func addr(n uint32) netip.Addr {
	return netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, n)))
}

// reachable returns n single addresses, spread evenly over the benchmark range
// (RFC 2544), the only one to which connections are opened.
func reachable(n int) []netip.Prefix {
	out := make([]netip.Prefix, n)
	for i := range out {
		at := uint64(i) << (32 - benchmarks.Bits()) / uint64(n)
		out[i] = netip.PrefixFrom(addr(number(benchmarks.Addr())+uint32(at)), 32)
	}
	return out
}

var benchmarks = netip.MustParsePrefix("198.18.0.0/15")

// destinations returns some of the addresses, or some between them, spread over
// the whole list.
func destinations(all []netip.Prefix, exempt bool) []netip.Addr {
	var from []netip.Addr
	for i, p := range all {
		next := p.Addr().Next()
		switch {
		case exempt:
			from = append(from, p.Addr())
		case i+1 == len(all) || all[i+1].Addr() != next:
			from = append(from, next)
		}
	}
	const some = 500
	out := make([]netip.Addr, min(len(from), some))
	for i := range out {
		out[i] = from[i*len(from)/len(out)]
	}
	return out
}

// shuffled returns the networks of a file of that size, optionally with one more,
// in random order. For the default size they are those of the default config.
func shuffled(n int, more bool) []netip.Prefix {
	networks := list(n)
	if n == defaultSize {
		for _, c := range config.Default(config.Defaults{}).NonMasqueradeCIDRs {
			networks = append(networks, c.Prefix)
		}
	}
	shuffle(networks)
	if more {
		networks = append(networks, oneMore)
	}
	return networks
}

func shuffle(networks []netip.Prefix) {
	rand.New(rand.NewPCG(1, uint64(len(networks)))).Shuffle(len(networks), func(i, j int) {
		networks[i], networks[j] = networks[j], networks[i]
	})
}

// text returns the config file.
func text(networks []netip.Prefix) string {
	var b strings.Builder
	b.WriteString("nonMasqueradeCIDRs:\n")
	for _, p := range networks {
		fmt.Fprintf(&b, "- %s\n", p)
	}
	return b.String()
}

// ruleset compiles the content of a file without a file: one with a million
// networks would exceed the size limit.
func ruleset(networks []netip.Prefix, mode nft.Mode) nft.Ruleset {
	c := listConfig(networks)
	if mode == nft.ModeIPTables {
		return nft.Compile(c, nft.Options{Layout: xtables.Layout{ChainName: "IP-MASQ-AGENT"}})
	}
	return nft.Compile(c, nft.Options{Layout: native.Layout{}, RandomFully: true})
}

// listConfig returns the config of a list.
func listConfig(networks []netip.Prefix) config.Config {
	c := config.Default(config.Defaults{})
	c.NonMasqueradeCIDRs = make([]config.CIDR, len(networks))
	for i, p := range networks {
		c.NonMasqueradeCIDRs[i].Prefix = p
	}
	return c
}
