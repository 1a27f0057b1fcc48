package main

import (
	"encoding/binary"
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfttest"
)

// What a node does with packets beside the chains: a flowtable passes them on without any, and
// a queue keeps them for a program. seesAll is a rule that sees each packet that a chain sees.
const (
	seesAll   = "table inet aside {\nchain forward {\ntype filter hook forward priority 0\ncounter\n"
	flowtable = "table inet aside {\nflowtable f {\nhook ingress priority 0\ndevices = { pod0, eth0 }\n}\n}\n"
	queue     = "ip daddr 192.0.2.100 udp dport 5000 queue num 0\n"
)

// knows reports whether this kernel has what is loaded: the machine of the tests may lack both
// modules, and make test-kernels has them.
func knows(t *testing.T, text string) bool {
	t.Helper()
	ns := nfttest.NewNS(t, "tried")
	for _, dev := range []string{"pod0", "eth0"} {
		nfttest.Run(t, ns, "", "ip", "link", "add", dev, "type", "veth", "peer", "name", dev+"peer")
	}
	_, err := ns.Output(text, "nft", "-f", "-")
	return err == nil
}

// An exchange is a UDP socket of the pod, and one outside that replies to it.
type exchange struct {
	trafficNode
	pod, outside net.PacketConn
}

func (n trafficNode) exchange() exchange {
	n.t.Helper()
	x := exchange{trafficNode: n}
	for ns, e := range map[*nfttest.NS]struct {
		c  *net.PacketConn
		at string
	}{n.top.Pod: {&x.pod, "10.244.1.2:4000"}, n.top.Outside: {&x.outside, "192.0.2.100:5000"}} {
		n.check(ns.Do(func() (err error) {
			*e.c, err = new(net.ListenConfig).ListenPacket(n.t.Context(), "udp4", e.at)
			return err
		}))
		n.t.Cleanup(func() { _ = (*e.c).Close() })
		n.check((*e.c).SetDeadline(time.Now().Add(timeout)))
	}
	return x
}

// send sends a packet of the pod.
func (x exchange) send() {
	x.t.Helper()
	_, err := x.pod.WriteTo([]byte{0}, x.outside.LocalAddr())
	x.check(err)
}

// seen sends a packet of the pod and a reply, and returns the address that outside sees.
func (x exchange) seen() netip.Addr {
	x.t.Helper()
	x.send()
	_, from, err := x.outside.ReadFrom(make([]byte, 1))
	x.check(err)
	_, err = x.outside.WriteTo([]byte{0}, from)
	x.check(err)
	_, _, err = x.pod.ReadFrom(make([]byte, 1))
	x.check(err)
	return from.(*net.UDPAddr).AddrPort().Addr().Unmap()
}

// talks sends bytes over a TCP connection, each after the reply to the one before.
func (n trafficNode) talks(times int) {
	n.t.Helper()
	var l net.Listener
	n.check(n.top.Outside.Do(func() (err error) {
		l, err = new(net.ListenConfig).Listen(n.t.Context(), "tcp4", "192.0.2.100:6000")
		return err
	}))
	defer l.Close()
	from, err := n.top.Pod.DialContext(n.t.Context(), "tcp4", l.Addr().String())
	n.check(err)
	defer from.Close()
	to, err := l.Accept()
	n.check(err)
	defer to.Close()
	for i := range 2 * times {
		_, err := from.Write([]byte{byte(i)})
		n.check(err)
		n.check(to.SetReadDeadline(time.Now().Add(timeout)))
		_, err = to.Read(make([]byte, 1))
		n.check(err)
		from, to = to, from
	}
}

// packets is the counter of the rule that sees what chains see.
func (x exchange) packets() int {
	x.t.Helper()
	text := nfttest.NFT(x.t, x.top.Node, "", "list", "chain", "inet", "aside", "forward")
	n, err := strconv.Atoi(regexp.MustCompile(`counter packets (\d+)`).FindStringSubmatch(text)[1])
	x.check(err)
	return n
}

// A flowtable keeps the translation of a connection, and its packets pass no chain: a changed
// policy reaches it as it reaches any other, when the connection is deleted.
func TestAChangedPolicyReachesConnectionsInAFlowtable(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	const before, after = "nonMasqueradeCIDRs: [10.0.0.0/8]", "nonMasqueradeCIDRs: [10.0.0.0/8, 192.0.2.0/24]"
	const drop = "dropInvalid: true\nmasqueradeSrcCIDRs: [10.244.0.0/16]\n"
	const bridged = "beside a flowtable of a bridge" // into which packets go that its ports pass on, not those from them
	tables := map[string]string{"forwarded": seesAll + "}\n}\n"}
	if knows(t, flowtable) {
		tables["in a flowtable"] = flowtable + seesAll + "ct state established flow add @f\n}\n}\n"
		tables[bridged] = strings.ReplaceAll(tables["in a flowtable"], "pod0", "cni0")
	} else {
		t.Log("this kernel has no flowtables: make test-kernels")
	}
	for name, table := range tables {
		for _, how := range []string{"keep", "all", "flush"} {
			t.Run(name+", "+how, func(t *testing.T) {
				n := newTrafficNode(t)
				if strings.Contains(table, "cni0") {
					n = newBridgeNode(t)
				}
				nfttest.NFT(t, n.top.Node, table, "-f", "-")
				stale := map[bool]string{true: "staleConnections: all\n"}[how == "all"] + drop
				n.swap(stale + before)
				*n.flags = []string{"--config", n.path}
				d := n.start("--resync-interval=3600")
				d.began(wants(t, stale+before))
				x := n.exchange()
				for range 3 {
					if from := x.seen(); from != n.top.NodeV4 {
						t.Fatalf("outside sees %s", from)
					}
				}
				count := x.packets()
				x.seen()
				if passed := x.packets() - count; name != bridged && (passed == 0) == (name == "forwarded") {
					t.Fatalf("%d packets pass the chain", passed)
				}
				count = x.packets()
				n.talks(20)
				if passed := x.packets() - count; passed > 20 && name == "in a flowtable" {
					t.Errorf("%d packets of TCP pass the chain", passed)
				}
				want := map[bool]netip.Addr{true: n.top.NodeV4, false: n.top.PodV4}[how == "keep"]
				n.swap(stale + after)
				if how == "all" {
					d.await("stale_connections_deleted")
				} else {
					d.await("stale_connections")
				}
				if how == "flush" {
					got := n.run(slices.Concat([]string{"connections", "--flush", "--yes"}, *n.flags)...)
					if got.code != exitDone {
						t.Errorf("%+v", got)
					}
				}
				if from := x.seen(); from != want {
					t.Errorf("after the change outside sees %s, want %s", from, want)
				}
			})
		}
	}
}

// waiting is how many packets a queue holds.
func waiting(t *testing.T, ns *nfttest.NS) (n int) {
	t.Helper()
	text := nfttest.Run(t, ns, "", "cat", "/proc/thread-self/net/netfilter/nfnetlink_queue")
	if fields := strings.Fields(text); len(fields) > 2 {
		n, _ = strconv.Atoi(fields[2])
	}
	return n
}

// Linux drops all packets that wait in queues of a network namespace when any base chain of it
// is deleted: a change of the policy deletes none.
func TestAChangedPolicyLosesNoPacketsThatWaitInAQueue(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	n := newTrafficNode(t)
	const lists = "masqueradeSrcCIDRs: [10.244.0.0/16]\nnonMasqueradeCIDRs: "
	const keys = "dropInvalid: true\nenforceNonMasquerade: true\n"
	text := seesAll + "}\n}\n"
	queues := knows(t, seesAll+queue+"}\n}\n")
	if queues {
		text = seesAll + queue + "}\n}\n"
	}
	nfttest.NFT(t, n.top.Node, text, "-f", "-")
	n.enforce(keys + lists + "[10.0.0.0/8]")
	x := n.exchange()
	if !queues {
		t.Log("this kernel has no queues: make test-kernels")
		x.seen()
		return
	}
	nl, err := nfttest.DialNetfilter(n.top.Node)
	n.check(err)
	defer nl.Close()
	for _, attr := range [][]byte{
		{8, 0, 1, 0, 1, 0, 0, 0},             // NFQA_CFG_CMD: bind
		{9, 0, 2, 0, 0, 0, 0, 0, 1, 0, 0, 0}, // NFQA_CFG_PARAMS: copy nothing but the meta data
	} {
		if binary.NativeEndian.Uint16([]byte{1, 0}) != 1 {
			attr[0], attr[1], attr[2], attr[3] = attr[1], attr[0], attr[3], attr[2]
		}
		_, err := nl.Execute(netlink.Message{
			Header: netlink.Header{
				Type:  unix.NFNL_SUBSYS_QUEUE<<8 | 2, // NFQNL_MSG_CONFIG
				Flags: netlink.Request | netlink.Acknowledge,
			},
			Data: append([]byte{unix.AF_INET, 0, 0, 0}, attr...),
		})
		n.check(err)
	}
	const sent = 8
	for _, change := range []string{
		keys + lists + "[10.0.0.0/8, 203.0.113.0/24]", keys + lists + "[]", lists + "[]", "", "cleanup",
	} {
		for waiting(t, n.top.Node) < sent {
			x.send()
		}
		if change == "cleanup" {
			n.run("cleanup")
		} else {
			n.enforce(change)
		}
		left := waiting(t, n.top.Node)
		t.Logf("%q: of %d packets in the queue %d are left", change, sent, left)
		if strings.HasPrefix(change, keys) && left < sent {
			t.Errorf("%q: %d of %d packets in the queue are lost", change, sent-left, sent)
		}
	}
}
