package main

import (
	"bufio"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfttest"
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
		nft.ModeIPTables: "insert rule ip nat IP-MASQ-AGENT accept",
	} {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.swap("nonMasqueradeCIDRs: [10.0.0.0/8]")
			d := n.start("--mode="+string(mode), "--resync-interval=3600")
			d.began(wants(t, "nonMasqueradeCIDRs: [10.0.0.0/8]", "--mode="+string(mode)))
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
