package main

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
)

// The lists lie between these two addresses, where nothing of the topology is.
var (
	firstAddr = netip.MustParseAddr("11.0.0.0")
	lastAddr  = netip.MustParseAddr("100.0.0.0")
	oneMore   = netip.MustParsePrefix("100.0.0.0/24") // what a change adds or takes away
)

// defaultSize stands for the config of a node without a file.
const defaultSize = 0

// list gives n networks of /24 to /32, spread evenly over their room.
func list(n int) []netip.Prefix {
	out := make([]netip.Prefix, n)
	for i := range out {
		out[i] = netip.PrefixFrom(spread32(i, n, 0), 24+i%9)
	}
	return out
}

// spread32 gives the start of the i-th /24 of n, or an address behind it.
func spread32(i, n int, behind uint32) netip.Addr {
	low, high := number(firstAddr), number(lastAddr)
	at := low + uint32(uint64(high-low)*uint64(i)/uint64(n))
	return addr(at&^0xff + behind)
}

func number(a netip.Addr) uint32 {
	b := a.As4()
	return binary.BigEndian.Uint32(b[:])
}

func addr(n uint32) netip.Addr {
	return netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, n)))
}

// destinations gives some addresses that are in the list of n networks, or
// between them, spread over the whole list.
func destinations(n int, exempt bool) []netip.Addr {
	const some = 500
	out := make([]netip.Addr, min(n, some))
	for i := range out {
		at := i * n / len(out)
		if exempt {
			out[i] = spread32(at, n, 0)
		} else {
			out[i] = spread32(at, n, 0x100)
		}
	}
	return out
}

// shuffled gives the networks of a file of that size, with one more or without,
// in no order. For the default size they are those of the default config.
func shuffled(n int, more bool) []netip.Prefix {
	networks := list(n)
	if n == defaultSize {
		for _, c := range config.Default(config.Defaults{}).NonMasqueradeCIDRs {
			networks = append(networks, c.Prefix)
		}
	}
	rand.New(rand.NewPCG(1, uint64(n))).Shuffle(len(networks), func(i, j int) {
		networks[i], networks[j] = networks[j], networks[i]
	})
	if more {
		networks = append(networks, oneMore)
	}
	return networks
}

// text writes the config file.
func text(networks []netip.Prefix) string {
	var b strings.Builder
	b.WriteString("nonMasqueradeCIDRs:\n")
	for _, p := range networks {
		fmt.Fprintf(&b, "- %s\n", p)
	}
	return b.String()
}

// ruleset compiles what the file says, without the file: that of a million
// networks would be larger than one may be.
func ruleset(networks []netip.Prefix, mode nft.Mode) nft.Ruleset {
	c := config.Default(config.Defaults{})
	c.NonMasqueradeCIDRs = make([]config.CIDR, len(networks))
	for i, p := range networks {
		c.NonMasqueradeCIDRs[i].Prefix = p
	}
	if mode == nft.ModeIPTables {
		return nft.Compile(c, nft.Options{Mode: mode, Chain: "IP-MASQ-AGENT"})
	}
	return nft.Compile(c, nft.Options{Mode: mode, RandomFully: true})
}
