package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfttest"
)

// badText is a rejected config, with its problem after the file name.
const (
	badText    = "nonMasqueradeCIDRs: [10.0.0.1]\n"
	badProblem = `:1:22: "10.0.0.1" is an address, not a CIDR: write "10.0.0.1/32"`
)

// kernelText returns the ruleset, to compare later that it has not changed.
func (n *testNode) kernelText() string {
	n.t.Helper()
	return nfttest.NFT(n.t, n.NS, "", "-a", "list", "ruleset")
}

// tamper removes our rules.
func tamper(n *testNode, mode nft.Mode) {
	n.t.Helper()
	if mode == nft.ModeNFTables {
		nfttest.NFT(n.t, n.NS, "", "delete", "table", "inet", nft.TableName)
		return
	}
	nfttest.NFT(n.t, n.NS, "", "flush", "chain", "ip", "nat", "IP-MASQ-AGENT")
}

// loadLegacy loads the rules of an older agent with a different chain name.
func loadLegacy(n *testNode) {
	n.t.Helper()
	rules, err := os.ReadFile(filepath.Join(root, "testdata/foreign/ip-masq-agent-custom-chain/rules.iptables"))
	n.check(err)
	nfttest.Run(n.t, n.NS, string(rules), "iptables-nft-restore", "--noflush")
}

func TestSecondAgentIsReported(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	first := n.start()
	first.began(wants(t, ""))
	other := &testNode{n.NS, t, n.path, n.socket + "-second"}
	second := other.start("--resync-interval=1", "--http-address", httpAddress)
	line := second.await("second_agent")
	if line["pid"] != float64(first.Pid) {
		t.Errorf("named: %v, want pid %d", line, first.Pid)
	}
	second.await("starting")
	second.await("rules_in_place")
	second.silent()
	first.silent()
	for _, of := range []*testNode{n, other} { // whichever is asked
		got := of.run("status")
		if got.code != exitFailed || !strings.HasPrefix(unwrap(got.stdout), "2 agents run here and overwrite each other") {
			t.Errorf("status: %+v", got)
		}
	}
	if got := n.metric("nft_masq_agent_second_agent"); got != "1" {
		t.Errorf("metric: %q", got)
	}
	first.stop()
	second.await("second_agent_gone")
	if got := n.metric("nft_masq_agent_second_agent"); got != "0" {
		t.Errorf("metric: %q after its end", got)
	}
	if got := other.run("status"); got.code != exitDone {
		t.Errorf("status after its end: %+v", got)
	}
	n.start().await("second_agent") // the second one has the lock now
}
