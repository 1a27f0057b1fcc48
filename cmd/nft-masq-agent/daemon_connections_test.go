package main

import (
	"strconv"
	"testing"

	"nft-masq-agent/nft/nfttest"
)

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
