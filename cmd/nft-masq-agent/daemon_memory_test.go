package main

import (
	"fmt"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfttest"
)

// postrouting returns a table ip nat whose chain POSTROUTING has these rules.
func postrouting(before, rules string) string {
	return "table ip nat {\n" + before + "chain POSTROUTING { type nat hook postrouting priority 100;\n" +
		rules + "\n}\n}\n"
}

// each joins n lines of a format, which gets the number of the line and two bytes of it.
func each(n int, format string) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, format+"\n", i, i>>8&0xff, i&0xff)
	}
	return b.String()
}

const masquerading = `ip saddr 10.%[2]d.%[3]d.0/24 ip daddr 172.16.0.0/24 masquerade comment "rule %[1]d of others"`

// manyForeignRules are rules of other programs, as many as n.
func manyForeignRules() map[string]func(n int) string {
	all := map[string]func(n int) string{
		"POSTROUTING": func(n int) string { return postrouting("", each(n, masquerading)) },
		"a chain that POSTROUTING jumps to": func(n int) string {
			return postrouting("chain behind {\n"+each(n, masquerading)+"}\n", "jump behind")
		},
		"chains of three": func(n int) string {
			return postrouting(each(n/3, "chain pod%[1]d {\n"+masquerading+"\n"+masquerading+"\n"+masquerading+"\n}"),
				each(n/3, "ip saddr 10.%[2]d.%[3]d.0/24 jump pod%[1]d"))
		},
		"long ones": func(n int) string {
			return postrouting("", each(n/4, strings.Repeat("ip saddr != 198.51.100.0/24 ", 38)+masquerading))
		},
		"sets, with the most addresses that are read": func(n int) string {
			return postrouting(each(n/1000, "set s%[1]d { type ipv4_addr; elements = { "+
				strings.ReplaceAll(each(10_000, "10.0.%[2]d.%[3]d,"), "\n", " ")+"} }"),
				each(n/1000, "ip daddr @s%[1]d masquerade"))
		},
		"some that accept, as many that masquerade": func(n int) string {
			return postrouting("", each(n/5, "ip daddr 10.%[2]d.%[3]d.0/24 accept\nip saddr 192.0.2.%[3]d masquerade"))
		},
		"a verdict map": func(n int) string {
			return postrouting(each(100, "chain pod%[1]d { ip daddr 10.0.0.0/8 masquerade; }")+
				"map pods { type ipv4_addr : verdict; elements = { "+
				each(min(2*n, 1<<16), "10.0.%[2]d.%[3]d : jump pod7,")+"} }\n", "ip saddr vmap @pods")
		},
		"chains reached on many paths": func(n int) string {
			chains := "chain c15 {\n" + each(n/16, "ip saddr 10.%[2]d.%[3]d.0/24 udp dport %[1]d masquerade") + "}\n"
			for i := 14; i > 0; i-- {
				chains += fmt.Sprintf("chain c%d {\n", i) + each(15, "tcp dport %[1]d jump c"+strconv.Itoa(i+1)) + "}\n"
			}
			return postrouting(chains, "jump c1")
		},
	}
	if !nfttest.Long() {
		delete(all, "chains reached on many paths") // which takes a minute, however few
	}
	return all
}

func TestManyForeignRulesFitTheMemoryLimit(t *testing.T) {
	nfttest.SkipIfShort(t)
	sizes := []int{400}
	if nfttest.Long() {
		sizes = []int{50_000, 120_000}
	}
	for name, text := range manyForeignRules() {
		for _, size := range sizes {
			for _, mode := range modes[:nfttest.FullRounds(1, len(modes))] { // the search is the same in each mode
				t.Run(fmt.Sprint(name, " ", size, " ", mode), func(t *testing.T) {
					newNode(t).fitsIntoTheMemoryLimit(t, text(size), string(mode))
				})
			}
		}
	}
}

func (n *testNode) fitsIntoTheMemoryLimit(t *testing.T, text, mode string) {
	nfttest.NFT(t, n.NS, text, "-f", "-")
	cmd, limit := n.limited(t, "run", "--log-format", "json", "--v", "4", "--probe-socket", n.socket, "--config", n.path,
		"--mode", mode)
	d := n.startCommand(cmd)
	d.await("starting")
	d.await("config_applied")
	d.await("legacy_rules_checked")
	d.signal(unix.SIGHUP) // read everything again
	d.await("legacy_rules_checked")
	peak, _ := d.memory()
	t.Logf("peak %d MiB of %d", peak>>20, limit>>20)
	if peak > limit && !nfttest.Race {
		t.Error("more than the limit")
	}
	for _, command := range []string{"status", "explain --live 198.51.100.9 --from 10.1.2.3"} {
		n.fitsNextTo(t, d, append(strings.Fields(command), "--config", n.path))
	}
	d.stop()
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
	if t.Logf("%s: peak %d MiB, agent %d MiB", args[0], peak>>20, agent>>20); peak+agent > limit && !nfttest.Race ||
		!cmd.ProcessState.Exited() {
		t.Errorf("%s: %s with %d MiB", args[0], cmd.ProcessState, peak>>20)
	}
}
