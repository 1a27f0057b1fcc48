package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/nfttest"
)

// A trafficNode is a node between a pod and an outside host.
type trafficNode struct {
	*testNode
	top   *nfttest.Topology
	port  *uint16   // of the last connection: the kernel may choose one twice
	flags *[]string // of the policy that enforce applied
}

// test returns the test, for what is no benchmark.
func (n trafficNode) test() *testing.T { return n.t.(*testing.T) }

// nft loads a ruleset of another program.
func (n trafficNode) nft(rules string) {
	n.t.Helper()
	nfttest.NFT(n.t, n.NS, rules, "-f", "-")
}

func newTrafficNode(t *testing.T) trafficNode {
	t.Helper()
	top := nfttest.NewTopology(t)
	return trafficNode{nodeIn(t, top.Node), top, new(uint16), new([]string)}
}

// lasting makes timeouts of connections longer, which are shorter than a test on a slow machine. A user namespace may
// lack them.
func (n trafficNode) lasting() {
	for _, name := range []string{
		"udp_timeout", "udp_timeout_stream", "sctp_timeout_cookie_wait", "sctp_timeout_cookie_echoed",
		"sctp_timeout_established", "sctp_timeout_closed", "sctp_timeout_shutdown_sent", "sctp_timeout_shutdown_recd",
		"sctp_timeout_shutdown_ack_sent", "tcp_timeout_close", "tcp_timeout_time_wait", "tcp_timeout_fin_wait",
		"tcp_timeout_close_wait", "tcp_timeout_last_ack",
	} {
		_ = n.top.Node.Sysctl("net.netfilter.nf_conntrack_"+name, "600")
	}
}

// enforce applies the rules of a config, and leaves its file for the commands.
func (n trafficNode) enforce(text string, flags ...string) nft.Ruleset {
	n.t.Helper()
	n.swap(text)
	*n.flags = append([]string{"--config", n.path}, flags...)
	return n.applied(text, flags...)
}

// applied applies the rules of a config.
func (n trafficNode) applied(text string, flags ...string) nft.Ruleset {
	n.t.Helper()
	want := wants(n.t, text, flags...)
	k := n.kernel()
	defer k.Close()
	_, err := k.Apply(n.t.Context(), want, nft.Contents)
	n.check(err)
	return want
}

// open opens a connection from the pod, or sends its first packet, and returns it
// as seen by both ends. TCP stays open.
func (n trafficNode) open(proto nfttest.Proto, dst string) nfttest.Sighting {
	n.t.Helper()
	to := netip.MustParseAddrPort(dst)
	if proto != nfttest.TCP {
		*n.port++
		src := netip.AddrPortFrom(netip.Addr{}, 30_000+*n.port)
		return nfttest.MustSend(n.t, n.top, nfttest.Flow{Proto: proto, From: n.top.Pod, To: n.top.Outside, Src: src, Dst: to})
	}
	var l net.Listener
	n.check(n.top.Outside.Do(func() (err error) {
		l, err = new(net.ListenConfig).Listen(n.t.Context(), "tcp", fmt.Sprintf(":%d", to.Port()))
		return err
	}))
	defer l.Close()
	ctx, cancel := context.WithTimeout(n.t.Context(), timeout)
	defer cancel()
	c, err := n.top.Pod.DialContext(ctx, "tcp", dst)
	n.check(err)
	n.t.Cleanup(func() { _ = c.Close() })
	seen, err := l.Accept()
	n.check(err)
	n.t.Cleanup(func() { _ = seen.Close() })
	port := func(a net.Addr) netip.AddrPort {
		ap := a.(*net.TCPAddr).AddrPort()
		return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
	}
	return nfttest.Sighting{Sent: port(c.LocalAddr()), Seen: port(seen.RemoteAddr())}
}

// connections runs the command.
func (n trafficNode) connections(args ...string) []answer.Connection {
	n.t.Helper()
	got := n.run(slices.Concat([]string{"connections", "-o", "json"}, *n.flags, args)...)
	if got.code != exitDone {
		n.t.Fatalf("connections %v: %+v", args, got)
	}
	return parseConnections(n.t, got.stdout)
}

func parseConnections(t testing.TB, text string) []answer.Connection {
	t.Helper()
	var c answer.Connections
	d := json.NewDecoder(strings.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(&c); err != nil {
		t.Fatalf("%q: %v", text, err)
	}
	return c.Connections
}

// protocols are the protocols with ports.
var protocols = []nfttest.Proto{nfttest.UDP, nfttest.TCP, nfttest.SCTP}

// service translates destinations before us, as kube-proxy does.
const service = `table inet service {
	chain pre {
		type nat hook prerouting priority dstnat;
		ip daddr 198.18.0.10 dnat ip to 203.0.113.9
		ip daddr 198.18.0.11 dnat ip to 10.9.0.9
		ip6 daddr 2001:db8:2::10 dnat ip6 to 2001:db8:1::1
		ip6 daddr 2001:db8:2::11 dnat ip6 to fd00:9::9
	}
}
`

func TestConnectionsAreFoundByTheSourceThatTheDestinationSees(t *testing.T) {
	t.Parallel()
	n := newTrafficNode(t)
	n.lasting()
	nfttest.NFT(t, n.top.Node, service, "-f", "-")
	n.enforce("", "--enable-ipv6")
	for _, proto := range protocols {
		for i, dst := range []string{"203.0.113.9", "198.18.0.10", "10.9.0.9", "[2001:db8:1::1]", "[2001:db8:2::10]"} {
			dst = fmt.Sprintf("%s:%d", dst, 5000+i)
			s := n.open(proto, dst)
			got := n.connections("--seen-as", s.Seen.String())
			if len(got) != 1 || got[0].Source != s.Sent.String() || got[0].SeenAs != s.Seen.String() ||
				got[0].Protocol != string(proto) {
				t.Errorf("%s to %s, seen as %s: %+v", proto, dst, s.Seen, got)
			}
			if asked := got[0].Requested; asked != "" && asked != dst || (asked == "") != (i%3 != 1) && i != 4 {
				t.Errorf("%s to %s: %+v", proto, dst, got)
			}
		}
	}
	for args, want := range map[string]int{
		"":                                15,
		"203.0.113.9":                     6, // with and without DNAT
		"203.0.113.0/24":                  6,
		"198.18.0.10":                     3,
		"2001:db8::/32":                   6,
		"--from 10.244.1.2":               9,
		"--from 10.244.0.0/16 10.0.0.0/8": 3,
		"--from fd00:10:244:1::2":         6,
		"--seen-as 192.0.2.1":             6,
		"--from 10.244.1.3":               0,
	} {
		if got := n.connections(strings.Fields(args)...); len(got) != want {
			t.Errorf("%s: %d connections, want %d: %+v", args, len(got), want, got)
		}
	}
}

// A port without a connection is answered by its block: next to the rules by a pod of this node, if the node has the
// address, and elsewhere by the config alone.
func TestAPortWithoutAConnectionIsAnsweredByItsBlock(t *testing.T) {
	t.Parallel()
	const plain = "masqueradeSrcCIDRs: [10.244.0.0/16]\n"
	const blocks = plain + "portsPerPod: 250\n"
	byPod := wants(t, blocks).Policy.PortBlocks(false)
	port := byPod.Block(byPod.BlockOfPod(netip.MustParseAddr("10.244.1.2"))).Min
	block := fmt.Sprintf("192.0.2.1:%d", port)
	for _, tt := range []struct {
		rules, config, args string
		code                int
		said                string // IDs of problems and notes
		pods                []string
	}{
		{blocks, blocks, "--seen-as " + block, exitDone, "no-match own-traffic", []string{"10.244.1.2"}},
		{blocks, blocks, "--seen-as 192.0.2.1", exitFailed, "no-match", nil},
		{plain, plain, "--seen-as " + block, exitFailed, "no-match", nil},
		{blocks, blocks, fmt.Sprintf("--seen-as 192.0.2.77:%d", port), exitFailed, "no-address", nil},
		{"", blocks, "--seen-as " + block, exitDone, "another-node own-traffic", nil},
		{"", blocks, "--seen-as " + block + " --from 10.244.1.2", exitFailed, "no-match", nil},
		{"", blocks, "--seen-as " + block + " 203.0.113.9", exitFailed, "no-match", nil},
		{"", blocks, "--seen-as 192.0.2.1", exitFailed, "no-match", nil},
		{"", plain, "--seen-as " + block, exitFailed, "no-match", nil},
	} {
		t.Run(tt.args+" of "+tt.rules+tt.config, func(t *testing.T) {
			t.Parallel()
			n := newTrafficNode(t)
			if tt.rules != "" {
				n.enforce(tt.rules)
				n.open(nfttest.UDP, "10.9.0.9:53") // the node knows its pod
			}
			n.swap(tt.config)
			var c answer.Connections
			got := n.here(&c, append([]string{"connections", "--config", n.path}, strings.Fields(tt.args)...)...)
			var said, pods []string
			for _, p := range slices.Concat(c.Errors, c.Warnings, c.Notes) {
				said = append(said, p.ID)
			}
			slices.Sort(said)
			if c.Block != nil {
				pods = c.Block.Pods
			}
			if got.code != tt.code || strings.Join(said, " ") != tt.said || !slices.Equal(pods, tt.pods) {
				t.Errorf("%q and pods %v, want %q and %v: %+v", said, pods, tt.said, tt.pods, got)
			}
		})
	}
}

func TestAListOfConnectionsIsBounded(t *testing.T) {
	l := listing{connectionsFlags: new(connectionsFlags)}
	nfttest.NoError(t, l.add(&conntrack.Entry{}))
	l.begin() // a dump that was interrupted begins anew
	for range maxListed + 5 {
		nfttest.NoError(t, l.add(&conntrack.Entry{}))
	}
	r := answer.Connections{Head: cli.NewHead("connections")}
	l.show(&r)
	if len(r.Connections) != maxListed || r.Total != maxListed+5 || len(r.Notes) != 1 || r.Notes[0].ID != "limited" {
		t.Errorf("%d connections of %d: %v", len(r.Connections), r.Total, r.Notes)
	}
	for _, stale := range []bool{false, true} {
		none := answer.Connections{Head: cli.NewHead("connections")}
		(&listing{connectionsFlags: &connectionsFlags{stale: stale}}).show(&none)
		if len(none.Connections) > 0 || len(none.Notes) > 0 != stale {
			t.Errorf("none, stale %t: %+v", stale, none)
		}
	}
}

// Which connections are stale is not known next to rules that do not say of which policy they are.
func TestStaleConnectionsNextToRulesWithoutAHashAreUnknown(t *testing.T) {
	t.Parallel()
	n := newTrafficNode(t)
	n.swap("")
	n.nft("table inet nft-masq-agent { chain postrouting { type nat hook postrouting priority 95; masquerade; }; }")
	got := n.run("connections", "--stale", "--config", n.path)
	const want = "nft-masq-agent connections: The kernel has rules of this agent without the hash of their policy: " +
		"which connections are stale is unknown"
	if got.code != exitFailed || !strings.HasPrefix(got.stderr, want) {
		t.Errorf("%+v, want %q", got, want)
	}
}

func TestOwnConnectionsOfTheNodeAreNotStale(t *testing.T) {
	t.Parallel()
	n := newTrafficNode(t)
	n.enforce("nonMasqueradeCIDRs: []", "--enable-ipv6")
	for _, flow := range []nfttest.Flow{
		{From: n.top.Node, Dst: netip.MustParseAddrPort("10.9.0.9:5001")},
		{From: n.top.Node, Dst: netip.MustParseAddrPort("10.9.0.9:5002"), Src: netip.AddrPortFrom(n.top.GatewayV4, 0)},
		{From: n.top.Pod, Dst: netip.AddrPortFrom(n.top.NodeV4, 5003)},
		{From: n.top.Pod, Dst: netip.AddrPortFrom(n.top.GatewayV6, 5004)},
		{From: n.top.Node, Dst: netip.MustParseAddrPort("224.0.0.251:5353"), Dev: "eth0"},
	} {
		flow.Proto = nfttest.UDP
		nfttest.MustSend(t, n.top, flow)
	}
	for _, text := range []string{"nonMasqueradeCIDRs: [0.0.0.0/0, '::/0']", "forceMasqueradeCIDRs: [0.0.0.0/0, '::/0']"} {
		n.enforce(text, "--enable-ipv6")
		if got := n.connections("--stale"); len(got) > 0 {
			t.Errorf("%s: %+v", text, got)
		}
	}
}
