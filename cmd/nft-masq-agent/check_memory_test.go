package main

import (
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/agent"
)

// mostMemory is what check may take. It takes less than 64 MB, and how much less
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

// peakOf returns the most memory of a process or, if that is larger, of the one that
// it has started to read the config for it, in bytes.
func peakOf(t *testing.T, pid int) (most int64) {
	t.Helper()
	pids := []int{pid}
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	if err != nil {
		t.Error(err)
	}
	for _, thread := range threads {
		children, _ := os.ReadFile(thread) // a thread may have ended
		for _, child := range strings.Fields(string(children)) {
			n, err := strconv.Atoi(child)
			if err != nil {
				t.Error(err)
			}
			pids = append(pids, n)
		}
	}
	for _, p := range pids {
		peak, _, err := agent.Memory(p)
		if err != nil || peak == 0 {
			t.Fatalf("no peak of process %d: %v", p, err)
		}
		most = max(most, peak)
	}
	return most
}

func TestLargestConfigsFitTheMemoryOfCheck(t *testing.T) {
	nfttest.SkipIfShort(t)
	program := agent.Program(t)
	check := func(t *testing.T, text, output string) {
		t.Run(output, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "config")
			if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			whole, err := nfttest.Command(program, "check", "--config", path, "-o", output).Output()
			if err != nil {
				t.Fatal(err)
			}
			cmd := nfttest.Command(program, "check", "--config", path, "-o", output)
			// On one processor the collector is not left behind when other tests take the time.
			cmd.Env = append(os.Environ(), "GOMAXPROCS=1")
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			// The rest does not fit the pipe, so the program has not exited.
			const rest = 1 << 20
			if _, err := io.CopyN(io.Discard, out, int64(len(whole)-rest)); err != nil {
				t.Error(err)
			}
			peak := peakOf(t, cmd.Process.Pid)
			if _, err := io.Copy(io.Discard, out); err != nil {
				t.Error(err)
			}
			if err := cmd.Wait(); err != nil {
				t.Error(err)
			}
			t.Logf("%d KiB", peak>>10)
			if peak > mostMemory {
				t.Errorf("%d MiB of memory", peak>>20)
			}
		})
	}
	all := largestConfigs()
	for _, text := range all[:nfttest.FullRounds(2, len(all))] {
		t.Run(text[:40], func(t *testing.T) {
			check(t, text, "text")
			check(t, text, "json")
		})
	}
}

// Entries of snatRules are compared with each other, and a YAML alias makes them long for
// a few bytes. Processor time does not depend on other tests.
func TestLongEntriesOfSNATRulesAreQuick(t *testing.T) {
	program, dir := agent.Program(t), t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
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
	for _, args := range [][]string{
		{"diff", write("old", long(0)), write("new", long(300))},
		{"check", "--config", write("shared", shared)},
	} {
		forgetPeak(t)
		cmd := nfttest.Command(program, args...)
		out, err := cmd.CombinedOutput()
		state := cmd.ProcessState
		if code := state.ExitCode(); code != map[string]int{"diff": 1}[args[0]] {
			t.Fatalf("%s: %v: %s", args[0], err, out)
		}
		took, peak := state.UserTime()+state.SystemTime(), state.SysUsage().(*syscall.Rusage).Maxrss<<10
		t.Logf("%s: %v, %d MiB", args[0], took, peak>>20)
		if took > time.Second || peak > 64<<20 {
			t.Errorf("%s took %v of processor time and %d MiB", args[0], took, peak>>20)
		}
	}
}
