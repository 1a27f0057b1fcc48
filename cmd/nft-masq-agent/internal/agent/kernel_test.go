package agent

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/nft-masq-agent/internal/options"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/kernel"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
)

func TestMain(m *testing.M) { os.Exit(nfttest.Main(m)) }

func openKernel(t *testing.T, ns *nfttest.NS) *kernel.Kernel {
	k := kernel.New(nfnetlink.New(func() (nl *netlink.Conn, err error) {
		err = ns.Do(func() error {
			nl, err = netlink.Dial(unix.NETLINK_NETFILTER, nil)
			return err
		})
		return nl, err
	}), nil)
	t.Cleanup(func() {
		if err := k.Close(); err != nil {
			t.Error(err)
		}
	})
	return k
}

func TestMetricsCountConnections(t *testing.T) {
	for _, mode := range []nft.Mode{nft.ModeNFTables, nft.ModeIPTables} {
		t.Run(string(mode), func(t *testing.T) {
			topo := nfttest.NewTopology(t)
			k := openKernel(t, topo.Node)
			files := make(chan Files, 1)
			files <- Files{Sources: []config.Source{{
				Name: "config",
				Data: []byte("enableIPv6: true\nnonMasqueradeCIDRs: [10.9.0.0/16, 'fd00:9::/32']\n"),
			}}}
			log, lines := logLines()
			a := New(Inputs{
				Files: files, Generation: func() (uint32, error) { return 0, nil }, Processor: ThreadTime,
				Lock:   func() (io.Closer, error) { return nil, unix.EADDRINUSE },
				Later:  func() (io.Closer, error) { return nil, unix.EADDRINUSE },
				Holder: func() (int, bool) { return 0, false },
			}, nodeKernel{k, t, topo.Node}, testSettings(options.Options{Mode: mode, Chain: "IP-MASQ-AGENT"}), log)
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan struct{})
			go func() {
				defer close(done)
				a.Run(ctx)
			}()
			defer func() { cancel(); <-done }()
			a.Handler() // counting starts here
			for line := range lines {
				if strings.Contains(line, `"applied"`) {
					break
				}
			}
			sendCounted(t, topo)
			wantMetrics(t, a, countedBy(mode), "connections_total", "connection_read_errors_total")
		})
	}
}

// A nodeKernel is the kernel of a node in a test.
type nodeKernel struct {
	*kernel.Kernel
	t    *testing.T
	node *nfttest.NS
}

// Counters uses a new kernel each time, because one caches the result for a while.
func (k nodeKernel) Counters(l nft.Layout) ([]nft.Counts, error) {
	return openKernel(k.t, k.node).Counters(l)
}

// sendCounted sends connections of both families, a different number for each
// verdict.
func sendCounted(t *testing.T, topo *nfttest.Topology) {
	for n, to := range []string{"198.51.100.1", "10.9.0.9", "2001:db8:1::1", "fd00:9::9"} {
		for i := range n + 1 {
			nfttest.MustSend(t, topo, nfttest.Flow{
				Proto: nfttest.UDP, From: topo.Pod, Dst: netip.AddrPortFrom(netip.MustParseAddr(to), uint16(5000+i)),
			})
		}
	}
	for _, to := range []netip.Addr{topo.NodeV4, netip.IPv6Loopback()} {
		c, err := topo.Node.DialContext(t.Context(), "udp", netip.AddrPortFrom(to, 5000).String())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Write([]byte("x")); err != nil {
			t.Error(err)
		}
		_ = c.Close()
	}
}

func countedBy(mode nft.Mode) string {
	text := "connection_read_errors_total 0\n"
	line := func(family string, verdict nft.Verdict, n int) {
		text += fmt.Sprintf("connections_total{family=%q,verdict=%q} %d\n", family, verdict, n)
	}
	line("ipv4", nft.Exempt, 2)
	if mode == nft.ModeNFTables {
		line("ipv4", nft.Local, 1)
	}
	line("ipv4", nft.Masqueraded, 1)
	line("ipv6", nft.Exempt, 4)
	if mode == nft.ModeNFTables {
		line("ipv6", nft.Local, 1)
	}
	line("ipv6", nft.Masqueraded, 3)
	return text
}
