package main

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// A place for rules of others: the chain in which they stand, and what makes the way there.
var foreignPlaces = map[string]func(rules []string) string{
	"POSTROUTING": func(rules []string) string {
		return "table ip nat {\n chain POSTROUTING { type nat hook postrouting priority 100;\n" + strings.Join(rules, "\n") + "\n}\n}\n"
	},
	"a chain behind POSTROUTING": func(rules []string) string {
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

func TestManyForeignRulesFitIntoTheMemoryLimit(t *testing.T) {
	rules := make([]string, often(1_000, 30_000, 120_000))
	for i := range rules {
		rules[i] = fmt.Sprintf("ip saddr 10.%d.%d.0/24 ip daddr 172.16.%d.0/24 counter masquerade comment \"rule %d of others\"", i>>8&0xff, i&0xff, i>>16, i)
	}
	for place, text := range foreignPlaces {
		for _, mode := range modes {
			t.Run(place+", "+string(mode), func(t *testing.T) {
				n := newNode(t)
				if _, err := n.Output(text(rules), "nft", "-f", "-"); err != nil {
					t.Fatal(err)
				}
				socket := filepath.Join(t.TempDir(), "probe.sock")
				flags := []string{"--config", n.path, "--mode", string(mode)}
				cmd, limit := n.limited(t, mode, append([]string{"run", "--log-format", "json", "--http-address", httpAddress, "--probe-socket", socket}, flags...)...)
				d := n.startCommand(cmd)
				d.await("starting")
				d.await("config_applied")
				d.signal(unix.SIGHUP) // all is read again
				d.until("a further look", func() bool { return d.looks("sighup") == "1" })
				peak, _ := d.memory()
				t.Logf("peak %d MiB of %d", peak>>20, limit>>20)
				if peak > limit {
					t.Error("more than the limit")
				}
				d.stop()
			})
		}
	}
}
