package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
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

// TestRejectedRulesAreRetriedUntilAccepted makes another program own the table:
// then the kernel rejects changes until that program exits.
func TestRejectedRulesAreRetriedUntilAccepted(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	inEachMode(t, func(t *testing.T, mode nft.Mode, flag string) {
		const owned = 2 // NFT_TABLE_F_OWNER, since Linux 5.12
		n := newNode(t)
		family, table := nfnetlink.Inet, nft.TableName
		if mode == nft.ModeIPTables {
			family, table = nfnetlink.IPv4, "nat"
		}
		owner := nfttest.Own(t, n.NS, byte(family), table, owned)
		defer func() { _ = owner.Close() }()

		d := n.start(flag, "--http-address", httpAddress)
		d.await("starting")
		d.answers()
		line := d.await("rules_rejected")
		if line["level"] != "error" || !strings.Contains(line.Text("error"), "operation not permitted") ||
			!strings.Contains(line.Text("hint"), "another process owns the table") {
			t.Errorf("refused: %v", line)
		}
		d.until("a second try", func() bool {
			return n.number(`nft_masq_agent_applies_total{reason="retry",result="refused"}`) >= 1
		})
		if code, body := n.get("/readyz"); code != 503 || !strings.HasPrefix(body, "the kernel rejected the rules: ") {
			t.Errorf("readyz returned %d %s", code, body)
		}
		d.silent()
		// A config from the meantime is the one that applies.
		n.swap(exempting("10.1.0.0/16"))
		d.until("the check of the new file", func() bool {
			return n.number(`nft_masq_agent_applies_total{reason="config",result="refused"}`)+
				n.number(`nft_masq_agent_applies_total{reason="start",result="refused"}`) >= 2
		})
		n.check(owner.Close()) // its table is deleted with it
		d.await("rules_accepted")
		d.await("config_applied")
		d.await("config_file_appeared")
		n.holds(wants(t, exempting("10.1.0.0/16"), flag))
		d.until("it is ready", func() bool { code, _ := n.get("/readyz"); return code == 200 })
		d.silent()
		d.stop()
	})
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
