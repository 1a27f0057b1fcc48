package main

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/netns"
)

// The pod closes a connection whose entry was deleted because it was stale.
func TestFINOfADeletedConnectionLeavesOnlyWithoutDropInvalid(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	const dst = "203.0.113.9"
	for _, drop := range []bool{false, true} {
		key := fmt.Sprintf("masqueradeSrcCIDRs: [10.244.0.0/16]\ndropInvalid: %t\n", drop)
		before, after := key+"nonMasqueradeCIDRs: [203.0.113.0/24]\n", key+"nonMasqueradeCIDRs: []\n"
		for name, change := range map[string]func(n trafficNode, open func()){
			"staleConnections": func(n trafficNode, open func()) {
				const all = "staleConnections: all\n"
				n.swap(all + before)
				d := n.start("--resync-interval=3600")
				d.began(wants(n.t, before))
				open()
				n.swap(all + after)
				if line := d.await("stale_connections_deleted"); line["connections"] != 1.0 {
					n.t.Errorf("the log has %v", line)
				}
			},
			"flush": func(n trafficNode, open func()) {
				n.enforce(before)
				open()
				n.enforce(after)
				got := n.run(append([]string{"connections", "--flush", "--yes", "--stale"}, *n.flags...)...)
				if got.code != exitDone || len(n.connections(*n.flags...)) > 0 {
					n.t.Errorf("%+v", got)
				}
			},
		} {
			t.Run(fmt.Sprintf("%s, dropInvalid %t", name, drop), func(t *testing.T) {
				t.Parallel()
				n := newTrafficNode(t)
				var l net.Listener
				n.check(n.top.Outside.Do(func() (err error) {
					l, err = net.Listen("tcp", dst+":7000")
					return err
				}))
				defer l.Close()
				var c net.Conn
				change(n, func() {
					var err error
					c, err = n.top.Pod.DialContext(t.Context(), "tcp", l.Addr().String())
					n.check(err)
				})
				tap, err := n.top.Outside.OpenTap(netns.Between(n.top.PodV4, netip.MustParseAddr(dst)))
				n.check(err)
				defer tap.Close()
				n.check(c.Close())
				seen, dropped := false, false
				for end := time.Now().Add(timeout); !seen && !dropped && time.Now().Before(end); {
					_, err := tap.Receive(make([]byte, 100), time.Millisecond)
					seen = err == nil
					dropped = drop && !strings.Contains(
						nfttest.NFT(t, n.top.Node, "", "list", "counter", "inet", nft.TableName, "invalid-v4"), "packets 0 ")
				}
				if seen == drop || dropped != drop {
					t.Errorf("seen with the pod's address: %t, dropped: %t", seen, dropped)
				}
			})
		}
	}
}
