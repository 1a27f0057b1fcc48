package main

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/agent"
)

// mostMemory is what check may take. As text it takes less than 70 MB, and how much less
// depends on when garbage is collected.
const mostMemory = 80 << 20

// largestConfigs are the shapes of a config with as many values as possible that take the most memory.
func largestConfigs() []string {
	const key = "nonMasqueradeCIDRs:\n"
	block := key + networks(0, 121_000, "- %s\n")
	return []string{
		"forceMasqueradeCIDRs:\n" + networks(0, 60_000, "- %s\n") + key + networks(60_000, 120_000, "- %s\n"),
		`{"nonMasqueradeCIDRs": [` + networks(0, 100_000, `"%s", `) + `"10.0.0.0/8"]}`,
		block, "enableIPv6: true\n" + key + networks6(121_000), key + networks(0, 121_000, "- '%s'\n"),
		key + networks(0, 40_000, "- %s # the office\n"), strings.ReplaceAll(block, "\n", "\r\n"),
		key + "- 10.0.0.0/12\n" + networks(0, 121_000, "- %s\n"), "forceMasqueradeCIDRs:\n" + networks(0, 121_000, "- %s\n"),
		"nonMasqueradeCIDRs: [" + networks(0, 100_000, "%s, ") + "]\n",
	}
}

// networks writes networks of 10.0.0.0/8 by a format.
func networks(from, to int, format string) string {
	var b strings.Builder
	for i := from; i < to; i++ {
		fmt.Fprintf(&b, format, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 12), byte(i >> 4), byte(i << 4)}), 28))
	}
	return b.String()
}

// networks6 writes IPv6 networks.
func networks6(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "- 2001:db8:%x:%x::/64\n", i>>16, i&0xffff)
	}
	return b.String()
}

// A usage is the most that the program may take with arguments.
type usage struct {
	args   []string
	code   int
	memory int64
	time   time.Duration // of the processor
}

func (u usage) holds(t *testing.T) {
	t.Helper()
	forgetPeak(t)
	cmd := nfttest.Command(agent.Program(t), u.args...)
	// On one processor the collector is not left behind when other tests take the time.
	cmd.Env = append(os.Environ(), "GOMAXPROCS=1")
	out, err := cmd.CombinedOutput()
	state := cmd.ProcessState
	if code := state.ExitCode(); code != u.code {
		t.Fatalf("%s: %v: %.1000s", u.args, err, out)
	}
	// The peak is that of the process or, if it is larger, of the one that it has started to read the config.
	took, peak := state.UserTime()+state.SystemTime(), state.SysUsage().(*syscall.Rusage).Maxrss<<10
	t.Logf("%s: %v, %d MiB", u.args[0], took, peak>>20)
	if (took > u.time || int64(peak) > u.memory) && !nfttest.Race { //nolint:unconvert // 32 bits on arm
		t.Errorf("%s took %v of processor time and %d MiB", u.args, took, peak>>20)
	}
}

func TestLargestConfigsFitTheMemoryOfCheck(t *testing.T) {
	nfttest.SkipIfShort(t)
	all := largestConfigs()
	for i, text := range all[:nfttest.FullRounds(2, len(all))] {
		path := writeFile(t, text)
		for j, output := range []string{"text", "json"} {
			if i != j && !nfttest.Long() {
				continue // the shape decides what is read, and the output what is written
			}
			usage{[]string{"check", "--config", path, "-o", output}, exitDone, mostMemory, time.Minute}.holds(t)
		}
	}
}

func writeFile(t *testing.T, text string) (path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "config")
	nfttest.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

// Entries of snatRules are compared with each other, and a YAML alias makes them long for
// a few bytes. Processor time does not depend on other tests.
func TestLongEntriesOfSNATRulesAreQuick(t *testing.T) {
	nfttest.SkipIfShort(t)
	entries := func(n int, lists func(i int) string) string {
		text := "snatRules:\n"
		for i := range n {
			text += fmt.Sprintf("- {%s, addresses: [198.51.100.%d]}\n", lists(i), i+1)
		}
		return text
	}
	long := func(from int) string {
		return entries(12, func(i int) string {
			at := from + 512*i
			return "from: [" + networks(at, at+512, "%s, ") + "], to: [" + networks(at+100, at+612, "%s, ") + "]"
		})
	}
	shared := "nonMasqueradeCIDRs: &all [" + networks(0, 190, "%s, ") + "]\n" +
		entries(64, func(int) string { return "from: *all, to: *all" })
	usage{[]string{"diff", writeFile(t, long(0)), writeFile(t, long(300))}, exitFailed, 64 << 20, time.Second}.holds(t)
	usage{[]string{"check", "--config", writeFile(t, shared)}, exitDone, 64 << 20, time.Second}.holds(t)
}
