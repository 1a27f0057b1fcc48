package main

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfttest"
)

// foreignRules are rules of another program.
type foreignRules struct {
	name       string
	count      int
	conditions int // additional conditions in each rule
}

func manyForeignRules() []foreignRules {
	if nfttest.Long() {
		return []foreignRules{{"50,000", 50_000, 0}, {"120,000", 120_000, 0}, {"30,000 long ones", 30_000, 38}}
	}
	return []foreignRules{{"30,000", 30_000, 0}}
}

func (f foreignRules) text() []string {
	rules := make([]string, f.count)
	for i := range rules {
		rules[i] = strings.Repeat("ip saddr != 198.51.100.0/24 ", f.conditions) +
			fmt.Sprintf("ip saddr 10.%d.%d.0/24 ip daddr 172.16.%d.0/24 counter masquerade comment \"rule %d of others\"", i>>8&0xff, i&0xff, i>>16, i)
	}
	return rules
}

// A place for foreign rules: their chain, and the rules that lead to it.
var foreignPlaces = map[string]func(rules []string) string{
	"POSTROUTING": func(rules []string) string {
		return "table ip nat {\n chain POSTROUTING { type nat hook postrouting priority 100;\n" + strings.Join(rules, "\n") + "\n}\n}\n"
	},
	"a chain that POSTROUTING jumps to": func(rules []string) string {
		return "table ip nat {\n chain behind {\n" + strings.Join(rules, "\n") + "\n}\n chain POSTROUTING { type nat hook postrouting priority 100; jump behind; }\n}\n"
	},
	"chains of three": func(rules []string) string {
		var chains, jumps strings.Builder
		for i := 0; i+3 <= len(rules); i += 3 {
			fmt.Fprintf(&chains, "chain pod%d {\n%s\n}\n", i, strings.Join(rules[i:i+3], "\n"))
			fmt.Fprintf(&jumps, "ip saddr 10.%d.%d.0/24 jump pod%d\n", i>>8&0xff, i&0xff, i)
		}
		return "table ip nat {\n" + chains.String() + " chain POSTROUTING { type nat hook postrouting priority 100;\n" + jumps.String() + "}\n}\n"
	},
}

// fiftySets returns rules that refer to sets with the most addresses that are read.
func fiftySets() string {
	var sets, rules strings.Builder
	for set := range 50 {
		fmt.Fprintf(&sets, "set s%d { type ipv4_addr; elements = { ", set)
		for i := range 10_000 {
			fmt.Fprintf(&sets, "10.%d.%d.%d, ", set, i>>7, i<<1&0xff)
		}
		sets.WriteString("} }\n")
		fmt.Fprintf(&rules, "ip daddr @s%d masquerade\n", set)
	}
	return "table ip nat {\n" + sets.String() + "chain POSTROUTING { type nat hook postrouting priority 100;\n" + rules.String() + "}\n}\n"
}

func TestManyForeignRulesFitTheMemoryLimit(t *testing.T) {
	nfttest.SkipIfShort(t)
	for _, f := range manyForeignRules() {
		for place, text := range foreignPlaces {
			fitsIntoTheMemoryLimit(t, f.name+", "+place, text(f.text()))
		}
	}
	fitsIntoTheMemoryLimit(t, "10,000 long ones, POSTROUTING", foreignPlaces["POSTROUTING"](foreignRules{"", 10_000, 38}.text()))
	fitsIntoTheMemoryLimit(t, "fifty sets", fiftySets())
}

func fitsIntoTheMemoryLimit(t *testing.T, name, text string) {
	t.Helper()
	for _, mode := range modes {
		t.Run(name+", "+string(mode), func(t *testing.T) {
			n := newNode(t)
			if _, err := n.Output(text, "nft", "-f", "-"); err != nil {
				t.Fatal(err)
			}
			socket := filepath.Join(t.TempDir(), "probe.sock")
			flags := []string{"--config", n.path, "--mode", string(mode)}
			cmd, limit := n.limited(t, mode, append([]string{"run", "--log-format", "json", "--http-address", httpAddress, "--probe-socket", socket}, flags...)...)
			d := n.startCommand(cmd)
			d.await("starting")
			d.await("config_applied")
			d.signal(unix.SIGHUP) // read everything again
			d.until("a further look", func() bool { return d.checks("sighup") == "1" })
			peak, _ := d.memory()
			t.Logf("peak %d MiB of %d", peak>>20, limit>>20)
			if peak > limit {
				t.Error("more than the limit")
			}
			d.stop()
		})
	}
}
