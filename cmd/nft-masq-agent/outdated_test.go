package main

import (
	"context"
	"slices"
	"strings"
	"testing"

	"nft-masq-agent/config"
	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/nfttest"
)

// tracked are the connections of a node that have ports, as "PROTOCOL DESTINATION" before DNAT.
func (n trafficNode) tracked() (all []string) {
	n.t.Helper()
	n.check(n.NS.Do(func() error {
		return conntrack.New().Dump(context.Background(), func() { all = nil }, func(e *conntrack.Entry) error {
			if e.Original.Src.Port() == 0 { // a bridge joins multicast groups
				return nil
			}
			all = append(all, conntrack.ProtocolName(e.Original.Protocol)+" "+e.Original.Dst.String())
			return nil
		})
	}))
	return sorted(all)
}

// An agent deletes what the policy before decided and the new one decides otherwise. In testdata/outdated.txt these
// are "stale". Without staleConnections they stay, and are counted.
func TestDaemonDeletesWhatAChangeOutdates(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	nfttest.Require(t, "iptables-legacy")
	for i, s := range situations(t, "outdated") {
		for _, which := range []config.Stale{config.StaleKeep, config.StaleUDP, config.StaleAll} {
			if i > 0 && which != config.StaleAll {
				continue
			}
			t.Run(s.place+" "+string(which), func(t *testing.T) {
				t.Parallel()
				node := newTrafficNode
				if s.of("bridge") != nil {
					node = newBridgeNode
				}
				o := &opening{trafficNode: node(t), situation: s, port: 5000}
				o.lasting()
				o.changes(which)
			})
		}
	}
}

// changes plays the lines with an agent.
func (o *opening) changes(which config.Stale) {
	o.t.Helper()
	var d *daemon
	for _, line := range o.lines {
		o.step(line[0], line[1], func(text string) {
			text = "staleConnections: " + string(which) + "\n" + text
			o.swap(text)
			if d == nil {
				d = o.start("--resync-interval=3600", "--enable-ipv6")
				d.began(wants(o.test(), text, "--enable-ipv6"))
			}
		})
	}
	left := slices.DeleteFunc(slices.Clone(o.stale), func(s string) bool {
		return which == config.StaleAll || which == config.StaleUDP && strings.HasPrefix(s, "udp ")
	})
	if deleted := float64(len(o.stale) - len(left)); deleted > 0 {
		d.await("stale_connections_deleting")
		line := d.await("stale_connections_deleted")
		if line["connections"] != deleted || line["complete"] != true {
			o.t.Errorf("%v, want %v", line, deleted)
		}
	}
	if len(left) > 0 {
		line := d.await("stale_connections")
		for line["connections"] == 0.0 { // it may be said first of what contradicted the policy at the start
			line = d.await("stale_connections")
		}
		if n, _ := line["connections"].(float64); n < float64(len(left)) { // others contradicted the policy before, too
			o.t.Errorf("%v, want at least %d", line, len(left))
		}
	}
	if got, want := o.tracked(), sorted(append(left, o.left...)); !slices.Equal(got, want) {
		o.t.Errorf("left: %q, want %q", got, want)
	}
}
