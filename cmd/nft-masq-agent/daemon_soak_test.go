package main

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/agent"
	"nft-masq-agent/nft/nfttest/script"
	"nft-masq-agent/nft/xtables"
)

var soak = flag.Duration("soak", 0, "how long random attacks last; 0: a few seconds")

func soakTime() time.Duration {
	if *soak > 0 {
		return *soak
	}
	return 2 * time.Second
}

// An assailant randomly does what may harm the agent.
type assailant struct {
	*meddler
	*daemon
	test  *testing.T
	mode  nft.Mode
	conns []net.Conn     // on which the agent is kept waiting
	done  map[string]int // attacks by name
	log   gate
}

// A gate passes the log while it is not locked.
type gate struct{ sync.Mutex }

// Write implements [io.Writer].
func (g *gate) Write(p []byte) (int, error) {
	g.Lock()
	defer g.Unlock()
	return len(p), nil
}

// An assault is one attack; the kernel may reject it.
type assault struct {
	name string
	do   func(*assailant)
}

// assaults are those of testdata/assaults.txt, which are transactions of nft or words for iptables, and others.
func assaults(t *testing.T) (all []assault) {
	t.Helper()
	for _, c := range script.Read(t, filepath.Join(root, "testdata", "assaults.txt")) {
		all = append(all, assault{c.Name, func(a *assailant) { a.script(c.Text()) }})
	}
	operation := assault{"operation on the config", func(a *assailant) { a.operation() }}
	return append(all, []assault{
		operation, operation, operation,
		{"large config", (*assailant).largeConfig},
		{"hostile config", (*assailant).hostileConfig},
		{"flood of elements", (*assailant).floodElements},
		{"flood of rules", (*assailant).floodRules},
		{"foreign rules", (*assailant).foreignRules},
		{"owned table", (*assailant).ownTable},
		{"idle connections", (*assailant).idle},
		{"unread log", (*assailant).holdLog},
		{"hangup", func(a *assailant) { _ = a.Signal(unix.SIGHUP) }},
		{"scrape", func(a *assailant) { a.get("/metrics") }},
	}...)
}

// script runs a transaction of nft, or iptables. SET stands for a set of ours, if there is one.
func (a *assailant) script(text string) {
	if words := strings.Fields(text); words[0] == "iptables" {
		_, _ = a.NS.Output("", "iptables-nft", append([]string{"-t", "nat"}, words[1:]...)...)
		return
	}
	set := []string{"non-masq-v4-a", "non-masq-v4-b"}[a.IntN(2)]
	_, _ = a.NS.Output(strings.NewReplacer("TABLE", "inet "+nft.TableName, "SET", set).Replace(text), "nft", "-f", "-")
}

func (a *assailant) largeConfig() {
	most := 15_000
	if a.mode == nft.ModeIPTables {
		most = xtables.MaxCIDRs
	}
	_ = a.swapFile(slash24s(a.IntN(most)))
}

// hostileConfig returns a config of up to four times the size of a ConfigMap.
func (a *assailant) hostileConfig() {
	n := a.IntN(4 << 20)
	part := []string{
		"- 10.0.0.0/8\n", "- 1\n", "? ", "- *a\n", "- - - -\n", "a:\n", "nonMasqueradeCIDRs: [1,1,1,", "\x00",
		"password: hunter2\n", "{",
	}[a.IntN(10)]
	_ = a.swapFile("nonMasqueradeCIDRs: [&a 10.0.0.0/8]\n" + strings.Repeat(part, n/len(part)))
}

func (a *assailant) commit(b *nfnetlink.Batch) {
	c := a.connect()
	defer c.Close()
	_ = c.Commit(b)
}

func (a *assailant) floodElements() {
	var ps []netip.Prefix
	for i := range a.IntN(20_000) {
		ps = append(ps, netip.PrefixFrom(netip.AddrFrom4([4]byte{100, byte(i >> 15), byte(i >> 7), byte(i << 1)}), 32))
	}
	b := &nfnetlink.Batch{}
	b.AddElements(nfnetlink.Inet, nft.TableName, []string{"non-masq-v4-a", "non-masq-v4-b"}[a.IntN(2)], ps)
	a.commit(b)
}

func (a *assailant) floodRules() {
	r := nfnetlink.Rule{Family: nfnetlink.Inet, Table: nft.TableName, Chain: native.BaseChain}
	if a.mode == nft.ModeIPTables {
		r.Family, r.Table, r.Chain = nfnetlink.IPv4, xtables.NATTable, "IP-MASQ-AGENT"
	}
	b := &nfnetlink.Batch{}
	for range a.IntN(5_000) {
		b.AddRule(r)
	}
	a.commit(b)
}

// foreignRules are rules of another program that lead to many others.
func (a *assailant) foreignRules() {
	var s strings.Builder
	s.WriteString("add table ip others; delete table ip others; table ip others {\n chain base { type nat hook " +
		"postrouting priority 90;\n")
	for i := range a.IntN(3_000) {
		fmt.Fprintf(&s, "ip saddr 10.%d.%d.0/24 masquerade comment \"\u202e%d\"\n", i>>8, i&0xff, i)
	}
	a.script(s.String() + "}\n}\n")
}

// ownTable replaces our table with one owned by nft. It is deleted when nft
// exits, without a new generation.
func (a *assailant) ownTable() {
	table := "inet " + nft.TableName
	if a.mode == nft.ModeIPTables {
		table = "ip nat"
	}
	a.script("delete table " + table)
	a.script("table " + table + " { flags owner; chain foreign { type filter hook forward priority 0; }; }")
}

// idle opens connections that send little or nothing.
func (a *assailant) idle() {
	for len(a.conns) > 40 {
		_ = a.conns[0].Close()
		a.conns = a.conns[1:]
	}
	begins := []string{
		"", "GET", "GET /readyz HTTP/1.1\r\n", "GET /metrics HTTP/1.1\r\nHost: a\r\nX: " + strings.Repeat("x", 1<<16),
		"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x12\x04\x00\x00\x00\x00\x00",
		"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + strings.Repeat("\x00", 200),
		"POST /readyz HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\nabc", "GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n",
	}
	for range 20 {
		c, err := a.DialContext(context.Background(), "tcp", httpAddress)
		if err != nil {
			continue
		}
		_ = c.SetDeadline(time.Now().Add(time.Second))
		_, _ = c.Write([]byte(begins[a.IntN(len(begins))]))
		if t, ok := c.(*net.TCPConn); ok && a.IntN(3) == 0 {
			_ = t.CloseWrite()
		}
		a.conns = append(a.conns, c)
	}
}

// holdLog stops reading the log for a while.
func (a *assailant) holdLog() {
	a.log.Lock()
	time.AfterFunc(time.Duration(a.IntN(3000))*time.Millisecond, a.log.Unlock)
}

// awaitReader waits until the log is read again.
func (a *assailant) awaitReader() {
	a.log.Lock()
	defer a.log.Unlock()
}

// relent stops all attacks and leaves a valid config.
func (a *assailant) relent() nft.Ruleset {
	a.t.Helper()
	for _, c := range a.conns {
		_ = c.Close()
	}
	a.conns = nil
	a.awaitReader()
	_ = os.RemoveAll(a.path)
	a.check(a.swapFile(a.good()))
	_ = a.Signal(unix.SIGHUP) // reads what belongs to the other mode, too
	want, err := a.settles(nft.Ruleset{}, []string{"--mode=" + string(a.mode), "--enable-ipv6"})
	a.check(err)
	return want
}

// attacks runs for the given time, and reports the state of the agent.
func (a *assailant) attacks(long time.Duration) {
	a.t.Helper()
	all, socket := assaults(a.test), a.socket()
	for end := time.Now().Add(long); time.Now().Before(end); {
		attack := all[a.IntN(len(all))]
		attack.do(a)
		a.done[attack.name]++
		select {
		case <-a.Done():
			a.t.Fatalf("the agent ended with %v after: %s; seed %d", a.Wait(), attack.name, *seed)
		default:
		}
		if a.IntN(50) == 0 {
			if r := a.run("ready", "--alive", "--probe-socket", socket); r.code != 0 {
				a.t.Fatalf("the liveness probe printed %s%s after: %s; seed %d", r.stdout, r.stderr, attack.name, *seed)
			}
		}
	}
}

func (a *assailant) socket() string { return filepath.Join(filepath.Dir(a.dir), "probe.sock") }

// manifestMemory returns the memory limit and GOMEMLIMIT of the manifests.
func manifestMemory(t *testing.T) (limit int64, gomemlimit string) {
	t.Helper()
	text, err := os.ReadFile("../../manifests/base/daemonset.yaml")
	nfttest.NoError(t, err)
	found := regexp.MustCompile(`(?s)GOMEMLIMIT\s+value: (\w+).*limits:\s+memory: (\d+)Mi`).FindSubmatch(text)
	if found == nil {
		t.Fatal("no memory limit in the base")
	}
	mebibytes, err := strconv.ParseInt(string(found[2]), 10, 64)
	nfttest.NoError(t, err)
	return mebibytes << 20, string(found[1])
}

// memoryCgroup creates a cgroup with a memory limit; "" if that is not permitted.
func memoryCgroup(t *testing.T, limit string) string {
	t.Helper()
	root, file := "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
	if _, err := os.Stat(root); err != nil { // version 2
		root, file = "/sys/fs/cgroup", "memory.max"
	}
	//nolint:usetesting // a cgroup cannot be in the test's directory
	dir, err := os.MkdirTemp(root, "nft-masq-agent-test-")
	if err == nil {
		t.Cleanup(func() { _ = os.Remove(dir) })
		err = os.WriteFile(filepath.Join(dir, file), []byte(limit), 0)
	}
	if err != nil {
		t.Logf("no cgroup, only the agent's own memory is held to the limit: %v", err)
		return ""
	}
	return dir
}

// limited returns the command that runs the program within the limits of the
// manifests.
func (n *testNode) limited(t *testing.T, args ...string) (cmd *exec.Cmd, limit int64) {
	t.Helper()
	limit, gomemlimit := manifestMemory(t)
	cmd = nfttest.Command(agent.Program(t), args...)
	cmd.Env = append(os.Environ(), "GOMEMLIMIT="+gomemlimit)
	if cgroup := memoryCgroup(t, strconv.FormatInt(limit, 10)); cgroup != "" {
		env := cmd.Env
		cmd = nfttest.Command("sh", append([]string{"-c", `echo $$ >"$0/cgroup.procs" && exec "$@"`, cgroup, cmd.Path},
			args...)...)
		cmd.Env = env
	}
	return cmd, limit
}

// TestRandomAttacksEndInTheRenderedState attacks the config, the rules, the log and
// the port of an agent within the memory limit of its manifest.
func TestRandomAttacksEndInTheRenderedState(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	for _, mode := range modes {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			m := &meddler{Rand: rand.New(rand.NewPCG(*seed, 1)), node: n, dir: filepath.Dir(n.path), mode: mode}
			a := &assailant{meddler: m, test: t, mode: mode, done: map[string]int{}}
			args := []string{
				"run", "--log-format", "json", "--config", n.path, "--mode", string(mode), "--enable-ipv6", "--http-address",
				httpAddress, "--probe-socket", a.socket(),
			}
			cmd, limit := n.limited(t, args...)
			cmd.Stdout = &a.log
			a.daemon = n.startCommand(cmd)
			a.await("starting")
			a.attacks(soakTime() / 10) // until caches and pools have their final size
			a.relent()
			a.checks("resync") // the first scrape opens the connection for the counters
			held := a.openFiles
			files, goroutines := held(), n.number("go_goroutines")
			a.attacks(soakTime())
			want := a.relent()
			a.until("no more open files than before", func() bool { return held() <= files })
			a.until("no more goroutines than before", func() bool { // but for idle HTTP connections
				return n.number("go_goroutines") <= goroutines+5
			})
			n.holds(want)
			peak, _ := a.memory()
			t.Logf("seed %d: peak %d MiB of %d, %d open files, %d lines of the log, attacks: %v", *seed, peak>>20, limit>>20,
				files, a.Lines(), a.done)
			if peak > limit {
				t.Errorf("%d MiB of memory, more than the limit of %d", peak>>20, limit>>20)
			}
			a.stop()
		})
	}
}
