package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/nft-masq-agent/internal/options"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/notify"
	"nft-masq-agent/nft/xtables"
)

// monitors starts the command, and returns its output once it listens.
func (n *testNode) monitors(args ...string) (stdout *bufio.Reader, end func()) {
	n.t.Helper()
	cmd := n.command(nil, append([]string{"monitor"}, args...)...)
	out, err := cmd.StdoutPipe()
	n.check(err)
	errs, err := cmd.StderrPipe()
	n.check(err)
	p, err := n.Start(cmd)
	n.check(err)
	n.t.Cleanup(func() { _ = p.Kill() })
	if line, err := bufio.NewReader(errs).ReadString('\n'); err != nil || !strings.HasPrefix(line, "listening for ") {
		n.t.Fatalf("%q, %v", line, err)
	}
	return bufio.NewReader(out), func() {
		n.check(cmd.Process.Signal(unix.SIGTERM))
		n.check(p.Wait())
	}
}

func TestMonitorNamesTheProgramOfEachChange(t *testing.T) {
	t.Parallel()
	for mode, change := range map[nft.Mode]string{
		nft.ModeNFTables: "insert rule inet nft-masq-agent postrouting accept",
		nft.ModeIPTables: "insert rule ip nat IP-MASQ accept",
	} {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.swap("nonMasqueradeCIDRs: [10.0.0.0/8]")
			flags := []string{"--mode=" + string(mode), "--masq-chain=IP-MASQ"} // which the command does not have
			d := n.start(append(flags, "--resync-interval=3600")...)
			d.began(wants(t, "nonMasqueradeCIDRs: [10.0.0.0/8]", flags...))
			out, end := n.monitors("-o", "json")
			receive := func() (c rulesetChange) {
				t.Helper()
				line, err := out.ReadString('\n')
				n.check(err)
				validate(t, []string{"monitor", "-o", "json"}, line)
				decoder := json.NewDecoder(strings.NewReader(line))
				decoder.DisallowUnknownFields()
				n.check(decoder.Decode(&c))
				if _, err := time.Parse(time.RFC3339, c.Time); err != nil || c.Version != 1 || c.Lost || c.Messages == 0 {
					t.Errorf("%+v: %v", c, err)
				}
				return c
			}
			nfttest.NFT(t, n.NS, "", "add", "table", "ip", "another")
			if c := receive(); c.Program != "nft" || c.Ours || c.ByAgent || strings.Join(c.Tables, " ") != "ip another" {
				t.Errorf("another program's table: %+v", c)
			}
			nfttest.NFT(t, n.NS, "", strings.Fields(change)...)
			if c := receive(); c.Program != "nft" || !c.Ours || c.ByAgent {
				t.Errorf("another program changes our rules: %+v", c)
			}
			if c := receive(); !strings.HasPrefix(c.Program, program) || !c.Ours || !c.ByAgent || c.PID == 0 {
				t.Errorf("the repair: %+v", c)
			}
			end()
		})
	}
}

// A writerFunc is a function that is called with what is written.
type writerFunc func(text string) error

func (f writerFunc) Write(p []byte) (int, error) { return len(p), f(string(p)) }

// Another program makes a change as soon as the command listens.
func TestMonitorAnswersUntilItEnds(t *testing.T) {
	t.Parallel()
	n := newTrafficNode(t)
	process := regexp.MustCompile(` \(pid PID\)`) // if it has not ended
	for i, tt := range []struct {
		args, stdout string
		fails        error // of stdout
	}{
		{"monitor", "TIME  nft: 1 object in ip new0", nil},
		{"monitor -o json", `"tables":["ip new1"],"messages":1,"ours":false,"byAgent":false,"lost":false}`, nil},
		{"monitor", "TIME  nft: 1 object in ip new2", errors.New("full")},
		{"monitor --for 1ns", "", nil},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), timeout)
		var stdout string
		e := testEnvironment(t, writerFunc(func(text string) error {
			if stdout += text; tt.fails == nil {
				cancel()
			}
			return tt.fails
		}), writerFunc(func(text string) error {
			if strings.HasPrefix(text, "listening for ") && tt.stdout != "" {
				nfttest.NFT(t, n.NS, "", "add", "table", "ip", fmt.Sprint("new", i))
			}
			return nil
		}))
		args, code := strings.Fields(tt.args), 0
		n.check(n.Do(func() error {
			code = dispatch(ctx, commands(), args, e)
			return nil
		}))
		ended := tt.stdout == "" || tt.fails != nil // by itself
		if (ctx.Err() == nil) != ended || (code == exitDone) != (tt.fails == nil) {
			t.Errorf("%s: code %d, %v", tt.args, code, ctx.Err())
		}
		if cancel(); !ended {
			validate(t, args, stdout)
		}
		if got := process.ReplaceAllString(n.general(stdout), ""); !strings.HasSuffix(got, tt.stdout) {
			t.Errorf("%s: %q, want %q", tt.args, got, tt.stdout)
		}
	}
}

func TestMonitorTellsOurRulesFromOthers(t *testing.T) {
	f := monitorFlags{nodeFlags: &nodeFlags{Options: &options.Options{Chain: "OURS"}}}
	families := map[string]nfnetlink.Family{"ip": nfnetlink.IPv4, "ip6": nfnetlink.IPv6, "inet": nfnetlink.Inet}
	for _, tt := range []struct {
		chains, tables string
		ours           bool
	}{
		{"inet nft-masq-agent x, ip other y", "inet nft-masq-agent, ip other", true},
		{"ip nft-masq-agent x", "ip nft-masq-agent", false},
		{"inet x a, ip x a, inet x b", "inet x, ip x", false},
		{"ip6 nat POSTROUTING, ip nat OTHER", "ip6 nat, ip nat", false},
		{"ip nat OURS", "ip nat", true},
		{"ip nat " + xtables.WithSubchains("OURS")[0], "ip nat", true},
		{"ip raw OURS", "ip raw", false},
	} {
		c := notify.Change{}
		for chain := range strings.SplitSeq(tt.chains, ", ") {
			words := strings.Fields(chain)
			c.Chains = append(c.Chains, nfnetlink.ChainID{Family: families[words[0]], Table: words[1], Name: words[2]})
		}
		got := f.describe(c)
		if strings.Join(got.Tables, ", ") != tt.tables || got.Ours != tt.ours || got.ByAgent || got.PID != 0 {
			t.Errorf("%s: %+v", tt.chains, got)
		}
	}
	own := f.describe(notify.Change{Generation: nfnetlink.Generation{Process: program, Thread: uint32(unix.Gettid())}})
	if !own.ByAgent || own.PID != os.Getpid() {
		t.Errorf("%+v", own)
	}
}

func TestChangesAreALineOfText(t *testing.T) {
	c := rulesetChange{
		Time: "2026-01-02T03:04:05.006Z", Program: "nft", PID: 7, Tables: []string{"ip nat", "inet x"},
		Messages: 3,
	}
	for _, tt := range []struct {
		change func(*rulesetChange)
		want   string
	}{
		{func(*rulesetChange) {}, "nft (pid 7): 3 objects in ip nat, inet x"},
		{func(c *rulesetChange) { c.Ours = true }, "nft (pid 7): 3 objects in ip nat, inet x, this agent's rules among them"},
		{func(c *rulesetChange) { c.PID, c.Messages = 0, 1 }, "nft: 1 object in ip nat, inet x"},
		{func(c *rulesetChange) { c.Lost = true }, "more changes than the kernel could report"},
	} {
		changed := c
		tt.change(&changed)
		if got := changed.String(); got != c.Time+"  "+tt.want+"\n" {
			t.Errorf("%q, want %q", got, tt.want)
		}
	}
}
