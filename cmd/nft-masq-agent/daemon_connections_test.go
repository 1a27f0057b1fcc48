package main

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
	"nft-masq-agent/nft/nfttest"
)

func TestConnectionsFromBeforeTheAgentAreReported(t *testing.T) {
	t.Parallel()
	n := newTrafficNode(t)
	nfttest.NFT(t, n.top.Node, "table inet t { chain c { type filter hook forward priority 0; ct state new accept; }; }",
		"-f", "-")
	n.open(nfttest.UDP, "203.0.113.9:5000")
	n.open(nfttest.UDP, "10.9.0.9:5000")
	if got := n.run("connections", "--stale"); got.code != exitFailed ||
		!strings.Contains(got.stderr, "the kernel has no rules") {
		t.Errorf("without rules: %+v", got)
	}
	d := n.start("--resync-interval=3600")
	if line := d.await("stale_connections"); line["connections"] != 1.0 {
		t.Errorf("the log has %v", line)
	}
}

func TestPortPressureIsInTheMetrics(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	n := newTrafficNode(t)
	n.enforce("", "--to-ports=20000-20009")
	for range 5 {
		n.open(nfttest.UDP, "203.0.113.9:53")
	}
	d := n.start("--resync-interval=3600", "--http-address="+httpAddress, "--conntrack-interval=1",
		"--to-ports=20000-20009")
	d.await("rules_in_place")
	d.until("half of the ports are taken", func() bool {
		return n.metric(`nft_masq_agent_snat_ports_used_ratio_max{family="ipv4",protocol="udp"}`) == "0.5"
	})
	// Perhaps including the test's own connections to the metrics.
	if entries, err := strconv.Atoi(n.metric("nft_masq_agent_conntrack_entries")); err != nil || entries < 5 {
		t.Errorf("%d entries are counted, want 5: %v", entries, err)
	}
	d.stop()
	d = n.start("--resync-interval=3600", "--http-address="+httpAddress, "--to-ports=20000-20009")
	d.answers()
	d.await("rules_in_place")
	if v := n.metric("nft_masq_agent_conntrack_entries"); v != "" {
		t.Errorf("without the flag %s connections are counted", v)
	}
}

func TestStaleConnectionsAreDeletedIfConfigured(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	for _, tt := range []struct {
		which   string
		deleted float64
	}{{"keep", 0}, {"udp", 2}, {"all", 4}} {
		t.Run(tt.which, func(t *testing.T) {
			t.Parallel()
			n := newTrafficNode(t)
			nfttest.NFT(t, n.top.Node, `table ip other { chain post { type nat hook postrouting priority srcnat; ip daddr 192.168.0.0/16 masquerade; }; }`, "-f", "-")
			stale := "staleConnections: " + tt.which + "\n"
			n.swap(stale + "nonMasqueradeCIDRs: [10.0.0.0/8]")
			d := n.start("--resync-interval=3600")
			d.began(wants(t, "nonMasqueradeCIDRs: [10.0.0.0/8]"))
			for i, dst := range []string{"203.0.113.9", "203.0.113.8", "10.9.0.9", "192.168.9.9"} {
				n.open(nfttest.UDP, fmt.Sprintf("%s:%d", dst, 5000+i))
			}
			n.open(nfttest.TCP, "203.0.113.9:6000")
			n.open(nfttest.SCTP, "203.0.113.9:6001")
			n.swap(stale + "nonMasqueradeCIDRs: [203.0.113.0/24, 10.0.0.0/8, 192.168.0.0/16]")
			if tt.deleted > 0 {
				if line := d.await("stale_connections_deleted"); line["connections"] != tt.deleted {
					t.Errorf("the log has %v", line)
				}
			}
			if tt.deleted < 4 {
				if line := d.await("stale_connections"); line["connections"] != 4-tt.deleted {
					t.Errorf("the log has %v", line)
				}
			}
			all := n.connections()
			if len(all) != 6-int(tt.deleted) {
				t.Errorf("left: %+v", all)
			}
			for _, kept := range []string{"10.9.0.9:5002", "192.168.9.9:5003"} {
				if !slices.ContainsFunc(all, func(c answer.Connection) bool { return c.Destination == kept }) {
					t.Errorf("the connection to %s was deleted", kept)
				}
			}
		})
	}
}
