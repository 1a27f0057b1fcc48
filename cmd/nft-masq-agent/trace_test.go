package main

import (
	"bufio"
	"bytes"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/kernel"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
)

// A tracing is a command that traces.
type tracing struct {
	*nfttest.Process
	cmd    *exec.Cmd
	stdout *bytes.Buffer
	stderr *bufio.Reader
}

// startTrace starts explain with --trace, and returns when packets are traced.
func startTrace(t *testing.T, n *testNode, args ...string) tracing {
	t.Helper()
	var stdout bytes.Buffer
	p := startTraceTo(t, n, &stdout, args...)
	p.stdout = &stdout
	return p
}

// startTraceTo is startTrace with another standard output.
func startTraceTo(t *testing.T, n *testNode, stdout io.Writer, args ...string) tracing {
	t.Helper()
	cmd := n.command(nil, append([]string{"explain"}, args...)...)
	cmd.Stdout = stdout
	stderr, err := cmd.StderrPipe()
	n.check(err)
	p, err := n.Start(cmd)
	n.check(err)
	t.Cleanup(func() {
		_ = p.Kill() // it may have ended
		_ = p.Wait()
	})
	r := bufio.NewReader(stderr)
	line, err := r.ReadString('\n')
	if err != nil || !strings.HasPrefix(line, "waiting up to ") {
		t.Fatalf("%q: %v", line, err)
	}
	return tracing{Process: p, cmd: cmd, stderr: r}
}

// traceTables returns what the node has of a trace.
func traceTables(t *testing.T, n *testNode) bool {
	t.Helper()
	return strings.Contains(nfttest.NFT(t, n.NS, "", "list", "tables"), kernel.TraceTable)
}

const anotherMasquerades = `table ip cni { chain post { type nat hook postrouting priority 100;
	ip saddr 10.244.0.0/16 masquerade comment "cni"; }; }`

func TestExplainTracesTheNextConnection(t *testing.T) {
	t.Parallel()
	top := nfttest.NewTopology(t)
	n := nodeIn(t, top.Node)
	nfttest.NFT(t, n.NS, anotherMasquerades, "-f", "-")
	dst := netip.MustParseAddrPort("10.9.0.9:80")
	for _, tt := range []struct{ args, want string }{
		{
			"10.9.0.9:80 --trace", "10.9.0.9:80 sees 192.0.2.1:PORT, not the sender's 10.244.1.2:PORT: another program's " +
				"rule with handle 2 in chain ip cni post masquerades it\n" +
				"  comment: cni\n  on the node: nft -a list chain ip cni post\n" +
				"  if the destination should see the sender: turn this rule off, or set enforceNonMasquerade\n",
		},
		{"--trace 10.9.0.9 --from 10.244.1.2", "in chain ip cni post masquerades it\n"},
		{"--trace 1m 10.9.0.9:80", "in chain ip cni post masquerades it\n"},
		{"10.9.0.9:80 --trace=1m -o json", `"outcome":"translated"`},
	} {
		p := startTrace(t, n, strings.Fields(tt.args)...)
		saw := nfttest.MustSend(t, top, nfttest.Flow{Proto: nfttest.TCP, From: top.Pod, Dst: dst})
		n.check(p.Wait())
		_, port, _ := strings.Cut(saw.Seen.String(), ":")
		got := p.stdout.String()
		if text := strings.ReplaceAll(got, port, "PORT"); !strings.Contains(text, tt.want) {
			t.Errorf("%s: %s", tt.args, text)
		}
		validate(t, append([]string{"explain"}, strings.Fields(tt.args)...), got)
	}
	if traceTables(t, n) {
		t.Error("the table is left")
	}
}

// The next trace deletes what a killed one left, and so does cleanup.
func TestTheTableOfATraceGoesHoweverTheCommandEnds(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	n := newNode(t)
	deletes := [][]string{{"explain", "10.9.0.9", "--trace=1ms"}, {"cleanup"}}
	for _, signal := range []unix.Signal{unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGKILL, unix.SIGKILL} {
		p := startTrace(t, n, "10.9.0.9", "--trace", "10m")
		if !traceTables(t, n) {
			t.Fatal("nothing is traced")
		}
		n.check(p.cmd.Process.Signal(signal))
		_ = p.Wait()
		if signal == unix.SIGKILL {
			n.run(deletes[0]...)
			deletes = deletes[1:]
		}
		if traceTables(t, n) {
			t.Errorf("%v leaves the table", signal)
		}
		if code := p.cmd.ProcessState.ExitCode(); signal != unix.SIGKILL && code != exitFailed {
			t.Errorf("%v: exit code %d", signal, code)
		}
	}
}

func TestATraceIsNoDriftToTheAgent(t *testing.T) {
	t.Parallel()
	inEachMode(t, func(t *testing.T, _ nft.Mode, flag string) {
		n := newNode(t)
		const config = "nonMasqueradeCIDRs: [10.0.0.0/8]\n"
		n.write(config)
		d := n.start(flag, "--resync-interval=3600", "--http-address", httpAddress)
		want := wants(t, config, flag)
		d.began(want)
		written := n.generation()
		check := func(what string, transactions uint32, left bool) {
			t.Helper()
			written += transactions
			looks := n.checks("sighup")
			d.signal(unix.SIGHUP)
			d.until("a full check", func() bool { return n.checks("sighup") != looks })
			if traceTables(t, n) != left || n.generation() != written {
				t.Errorf("%s: the table is there: %t, transactions: %d too many", what, !left, n.generation()-written)
			}
			if got := n.run("status"); !strings.Contains(got.stdout, "in sync") {
				t.Errorf("%s: status: %+v", what, got)
			}
		}
		leave := func() { nfttest.NFT(t, n.NS, "", "add", "table", "inet", kernel.TraceTable) }
		leave()
		check("a table that a trace left", 2, false)
		lock := nfttest.In(t, n.NS, kernel.LockTrace)
		leave()
		check("a trace that has just begun", 1, true)
		n.check(lock.Close())
		check("its end", 1, false)
		p := startTrace(t, n, "10.9.0.9", "--trace", "10m")
		check("a trace that runs", 1, true)
		n.check(p.cmd.Process.Signal(unix.SIGINT))
		_ = p.Wait()
		check("the end of a trace", 1, false)
		if repairs := n.metric("nft_masq_agent_drift_repairs_total"); repairs != "0" {
			t.Errorf("%q repairs", repairs)
		}
		d.silent()
		n.holds(want)
		d.stop()
	})
}

func TestABrokenPipeLeavesNoTable(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	top := nfttest.NewTopology(t)
	n := nodeIn(t, top.Node)
	broken := func() *os.File {
		reader, writer, err := os.Pipe()
		n.check(err)
		n.check(reader.Close())
		t.Cleanup(func() { _ = writer.Close() })
		return writer
	}
	cmd := n.command(nil, "explain", "10.9.0.9", "--trace", "10m")
	cmd.Stderr = broken() // where it says that it waits
	if err := n.Run(cmd); err == nil || traceTables(t, n) {
		t.Errorf("stderr: %v, the table is left: %t", err, traceTables(t, n))
	}
	p := startTraceTo(t, n, broken(), "10.9.0.9", "--trace", "10m")
	nfttest.MustSend(t, top, nfttest.Flow{
		Proto: nfttest.UDP, From: top.Pod, Dst: netip.MustParseAddrPort("10.9.0.9:53"),
	})
	if err := p.Wait(); err == nil || traceTables(t, n) {
		t.Errorf("stdout: %v, the table is left: %t", err, traceTables(t, n))
	}
}

func TestATraceSaysWhyThereIsNone(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	for _, tt := range []struct {
		args, want string
		code       int
	}{
		{
			"203.0.113.9:443 --from 10.244.1.2 --trace 1ms", "a new connection from 10.244.1.2 to 203.0.113.9:443 did " +
				"not come within 1ms: while the trace runs, open one, such as: kubectl exec POD -- nc -z -w 3 203.0.113.9 443",
			exitFailed,
		},
		{"2001:db8:1::1 --protocol icmp --trace 1ms", "kubectl exec POD -- ping -c 1 2001:db8:1::1", exitFailed},
		{"203.0.113.9:53 --protocol udp --trace 1ms", "sh -c 'echo | nc -u -w 1 203.0.113.9 53'", exitFailed},
		{"203.0.113.9 --trace=0", "--trace: must be a duration up to 10m0s, such as 30s", exitUsage},
		{"203.0.113.9 --trace=11m", "must be a duration up to 10m0s", exitUsage},
		{"203.0.113.9 --trace soon", `unexpected argument "soon"`, exitUsage},
		{"--trace", "ADDRESS[:PORT] is missing", exitUsage},
		{"203.0.113.9 --trace --out eth0", "--trace and --out exclude each other", exitUsage},
	} {
		// In this process, a program that is just being started would keep the lock of the trace before open.
		got := n.runCommand(n.command(nil, append([]string{"explain"}, strings.Fields(tt.args)...)...))
		if got.code != tt.code || !strings.Contains(got.stderr, tt.want) || got.stdout != "" {
			t.Errorf("%s: %+v", tt.args, got)
		}
	}
	startTrace(t, n, "10.9.0.9", "--trace", "10m")
	var answer struct{ Errors []struct{ Message string } }
	got := n.here(&answer, "explain", "10.9.0.9", "--trace")
	const want = "another trace is running on this node"
	if len(answer.Errors) != 1 || answer.Errors[0].Message != want || got.code != exitFailed {
		t.Errorf("a second trace: %+v", got)
	}
}

func TestATraceDoesNotPrintNamesRaw(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	top := nfttest.NewTopology(t)
	n := nodeIn(t, top.Node)
	b := &nfnetlink.Batch{}
	b.AddTable(nfnetlink.IPv4, evil)
	b.AddChain(nfnetlink.Chain{
		Family: nfnetlink.IPv4, Table: evil, Name: evil, Policy: nfnetlink.Accept,
		Hook: &nfnetlink.Hook{Type: "nat", Number: unix.NF_INET_POST_ROUTING, Priority: 100},
	})
	b.AddRule(nfnetlink.Rule{
		Family: nfnetlink.IPv4, Table: evil, Chain: evil, Exprs: nfnetlink.Marshal(nfnetlink.IPv4, &expr.Masq{}),
		UserData: userdata.AppendString(nil, userdata.TypeComment, evil),
	})
	c := n.connect()
	defer c.Close()
	n.check(c.Commit(b))
	for _, format := range []string{outputText, outputJSON} {
		p := startTrace(t, n, "10.9.0.9", "--trace", "10m", "-o", format)
		nfttest.MustSend(t, top, nfttest.Flow{
			Proto: nfttest.UDP, From: top.Pod, Dst: netip.MustParseAddrPort("10.9.0.9:53"),
		})
		n.check(p.Wait())
		got := p.stdout.String()
		if obeyed(got) != "" || strings.Contains(got, "\nin sync") || !strings.Contains(got, "[2J") {
			t.Errorf("%s: %q in\n%q", format, obeyed(got), got)
		}
	}
}
