package main

import (
	"fmt"
	"os"
	"runtime/debug"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
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
	return []foreignRules{{"5,000", 5_000, 0}}
}

func (f foreignRules) text() []string {
	rules := make([]string, f.count)
	for i := range rules {
		rules[i] = strings.Repeat("ip saddr != 198.51.100.0/24 ", f.conditions) +
			fmt.Sprintf("ip saddr 10.%d.%d.0/24 ip daddr 172.16.%d.0/24 counter masquerade comment \"rule %d of others\"",
				i>>8&0xff, i&0xff, i>>16, i)
	}
	return rules
}

// A place for foreign rules: their chain, and the rules that lead to it.
var foreignPlaces = map[string]func(rules []string) string{
	"POSTROUTING": func(rules []string) string {
		return "table ip nat {\n chain POSTROUTING { type nat hook postrouting priority 100;\n" + strings.Join(rules, "\n") +
			"\n}\n}\n"
	},
	"a chain that POSTROUTING jumps to": func(rules []string) string {
		return "table ip nat {\n chain behind {\n" + strings.Join(rules, "\n") +
			"\n}\n chain POSTROUTING { type nat hook postrouting priority 100; jump behind; }\n}\n"
	},
	"chains of three": func(rules []string) string {
		var chains, jumps strings.Builder
		for i := 0; i+3 <= len(rules); i += 3 {
			fmt.Fprintf(&chains, "chain pod%d {\n%s\n}\n", i, strings.Join(rules[i:i+3], "\n"))
			fmt.Fprintf(&jumps, "ip saddr 10.%d.%d.0/24 jump pod%d\n", i>>8&0xff, i&0xff, i)
		}
		return "table ip nat {\n" + chains.String() + " chain POSTROUTING { type nat hook postrouting priority 100;\n" +
			jumps.String() + "}\n}\n"
	},
}

// manySets returns rules that refer to sets with the most addresses that are read.
func manySets() string {
	var sets, rules strings.Builder
	for set := range nfttest.FullRounds(10, 50) {
		fmt.Fprintf(&sets, "set s%d { type ipv4_addr; elements = { ", set)
		for i := range 10_000 {
			fmt.Fprintf(&sets, "10.%d.%d.%d, ", set, i>>7, i<<1&0xff)
		}
		sets.WriteString("} }\n")
		fmt.Fprintf(&rules, "ip daddr @s%d masquerade\n", set)
	}
	return "table ip nat {\n" + sets.String() + "chain POSTROUTING { type nat hook postrouting priority 100;\n" +
		rules.String() + "}\n}\n"
}

// acceptingAndMasquerading returns rules of which every second leaves one more
// hole in the destinations of those after it.
func acceptingAndMasquerading(pairs int) string {
	var rules strings.Builder
	for i := range pairs {
		fmt.Fprintf(&rules, "ip daddr 10.%d.%d.0/24 accept\nip saddr 192.0.2.%d masquerade\n", i>>7, i<<1&0xff, i&0xff)
	}
	return foreignPlaces["POSTROUTING"]([]string{rules.String()})
}

// verdictMap returns a verdict map with a number of elements.
func verdictMap(elements int) string {
	var m strings.Builder
	m.WriteString("table ip nat {\n")
	for i := range 100 {
		fmt.Fprintf(&m, "chain pod%d { ip daddr 10.0.0.0/8 masquerade; }\n", i)
	}
	m.WriteString("map pods { type ipv4_addr : verdict; elements = { ")
	for i := range elements {
		fmt.Fprintf(&m, "10.%d.%d.%d : jump pod%d, ", i>>16, i>>8&0xff, i&0xff, i%100)
	}
	return m.String() + "} }\nchain POSTROUTING { type nat hook postrouting priority 100; ip saddr vmap @pods; }\n}\n"
}

// jumpsOfJumps returns chains that are reached on many paths of many conditions.
func jumpsOfJumps() string {
	var t strings.Builder
	comment := strings.Repeat("x", 110)
	t.WriteString("table ip nat {\nchain c15 {\n")
	for i := range nfttest.FullRounds(500, 3000) {
		fmt.Fprintf(&t, "ip saddr 10.%d.%d.0/24 udp dport %d udp sport %d masquerade comment \"%s\"\n", i>>8, i&0xff, i+1, i+
			1, comment)
	}
	t.WriteString("}\n")
	for i := 14; i > 0; i-- {
		fmt.Fprintf(&t, "chain c%d {\n", i)
		for j := range 15 {
			fmt.Fprintf(&t, "tcp dport %d jump c%d comment \"%s\"\n", 1000+15*i+j, i+1, comment)
		}
		t.WriteString("}\n")
	}
	return t.String() + "chain POSTROUTING { type nat hook postrouting priority 100; jump c1; }\n}\n"
}

func TestManyForeignRulesFitTheMemoryLimit(t *testing.T) {
	nfttest.SkipIfShort(t)
	some := modes[:nfttest.FullRounds(1, len(modes))] // the search is the same in each mode
	for _, f := range manyForeignRules() {
		for place, text := range foreignPlaces {
			fitsIntoTheMemoryLimit(t, f.name+", "+place, text(f.text()), some)
		}
	}
	fitsIntoTheMemoryLimit(t, "long ones, POSTROUTING",
		foreignPlaces["POSTROUTING"](foreignRules{"", nfttest.FullRounds(1_000, 10_000), 38}.text()), some)
	fitsIntoTheMemoryLimit(t, "many sets", manySets(), some)
	fitsIntoTheMemoryLimit(t, "some that accept, as many that masquerade",
		acceptingAndMasquerading(nfttest.FullRounds(5_000, 10_000)), some)
	elements := nfttest.FullRounds(30_000, 100_000)
	fitsIntoTheMemoryLimit(t, fmt.Sprintf("verdict map of %d elements", elements), verdictMap(elements), some)
	fitsIntoTheMemoryLimit(t, "chains reached on many paths", jumpsOfJumps(), some)
}

func fitsIntoTheMemoryLimit(t *testing.T, name, text string, modes []nft.Mode) {
	t.Helper()
	for _, mode := range modes {
		t.Run(name+", "+string(mode), func(t *testing.T) {
			n := newNode(t)
			if _, err := n.Output(text, "nft", "-f", "-"); err != nil {
				t.Fatal(err)
			}
			socket := n.socket
			flags := []string{"--config", n.path, "--mode", string(mode)}
			cmd, limit := n.limited(t, append([]string{
				"run", "--log-format", "json", "--v", "4", "--http-address", httpAddress,
				"--probe-socket", socket,
			}, flags...)...)
			d := n.startCommand(cmd)
			d.await("starting")
			d.await("config_applied")
			d.await("foreign_rules_checked")
			d.signal(unix.SIGHUP) // read everything again
			d.await("foreign_rules_checked")
			peak, _ := d.memory()
			t.Logf("peak %d MiB of %d", peak>>20, limit>>20)
			if peak > limit {
				t.Error("more than the limit")
			}
			for _, command := range []string{"status", "explain --live 198.51.100.9 --from 10.1.2.3"} {
				n.fitsNextTo(t, d, append(strings.Fields(command), "--config", n.path))
			}
			d.stop()
		})
	}
}

// forgetPeak lets the peak of this process begin anew: a process begins with the peak of the
// one that started it.
func forgetPeak(t *testing.T) {
	t.Helper()
	debug.FreeOSMemory()
	if err := os.WriteFile("/proc/self/clear_refs", []byte("5"), 0); err != nil { // see proc_pid_clear_refs(5)
		t.Fatal(err)
	}
}

// fitsNextTo fails the test if a command, which runs in the agent's container,
// takes more memory than the agent leaves.
func (n *testNode) fitsNextTo(t *testing.T, d *daemon, args []string) {
	t.Helper()
	cmd, limit := n.limited(t, args...)
	forgetPeak(t)
	p, err := n.Start(cmd)
	n.check(err)
	_ = p.Wait() // 1 if something is wrong on this node
	_, agent := d.memory()
	peak := int64(cmd.ProcessState.SysUsage().(*syscall.Rusage).Maxrss) << 10 //nolint:unconvert // 32 bits on arm
	if t.Logf("%s: peak %d MiB, agent %d MiB", args[0], peak>>20, agent>>20); peak+agent > limit ||
		!cmd.ProcessState.Exited() {
		t.Errorf("%s: %s with %d MiB", args[0], cmd.ProcessState, peak>>20)
	}
}
