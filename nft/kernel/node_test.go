package kernel

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/layouts"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
)

func TestLoopbackWorks(t *testing.T) {
	nfttest.SkipIfShort(t)
	t.Parallel()
	nfttest.Require(t, "iptables-nft-restore")
	nothing := config.Config{MasqLinkLocal: true, EnableIPv6: true} // exempt
	forced := nothing
	forced.ForceMasqueradeCIDRs = cases.CIDRs("0.0.0.0/0", "::/0")
	sources := nothing
	sources.MasqueradeSrcCIDRs = cases.CIDRs("127.0.0.0/8", "::1/128")
	exempt := forced
	exempt.ExemptHost = &config.Position{}
	lonely := nfttest.NewNS(t, "lonely")
	top := nfttest.NewTopology(t)
	// kubelet drops packets from elsewhere to a loopback address.
	nfttest.Run(t, top.Node, testdata(t, "kube-firewall.iptables"), "iptables-nft-restore", "--noflush")
	for _, ns := range []*nfttest.NS{lonely, top.Node} {
		k := open(t, ns)
		for _, mode := range cases.Modes() {
			for name, c := range map[string]config.Config{
				"default": config.Default(config.Defaults{EnableIPv6: true}), "nothing": nothing, "node exempt": exempt,
				"forced": forced, "sources": sources,
			} {
				o := nft.Options{Layout: layouts.Of(mode, cases.DefaultChain), RandomFully: true}
				apply(t, k, nft.Compile(c, o), everything)
				for _, dst := range []string{"127.0.0.1:8080", "127.9.9.9:8080", "[::1]:8080"} {
					for _, proto := range []nfttest.Proto{nfttest.UDP, nfttest.TCP} {
						flow := nfttest.Flow{Proto: proto, From: ns, To: ns, Dst: netip.MustParseAddrPort(dst)}
						s, err := nfttest.Send(flow)
						if err != nil || s.Sent != s.Seen {
							t.Errorf("%s, mode %s, %s: %s to %s: sent from %s, seen from %s: %v", ns, mode, name, proto, dst, s.Sent, s.Seen,
								err)
						}
					}
				}
			}
		}
	}
}

func TestHintNamesTheMissingKernelFeature(t *testing.T) {
	for _, tt := range []struct {
		what  string
		errno unix.Errno
		names string // what the hint must mention; "" for no hint
	}{
		{"refused: create chain", unix.EOPNOTSUPP, "CONFIG_NFT_NAT"},
		{"refused: create chain", unix.ENOENT, "modprobe nft_chain_nat"},
		{"refused: create rule", unix.ENOENT, "NFT_MASQ, NFT_FIB_INET"},
		{"refused: create rule", unix.ENOENT, "xt_MASQUERADE"},
		{"list rules", unix.EPERM, "NET_ADMIN"},
		{"refused: create rule", unix.EPERM, "another process owns the table"},
		{"read generation", unix.EPROTONOSUPPORT, "CONFIG_NF_TABLES"},
		{"read generation", unix.EAFNOSUPPORT, "CONFIG_NF_TABLES"},
		{"send transaction", unix.EMSGSIZE, "net.core.wmem_max"},
		{"refused: add elements", unix.ENOMEM, "memory"},
		{"refused: delete set", unix.ENOENT, ""},
		{"refused: create set", unix.EBUSY, ""},
		{"refused: create rule", unix.ERESTART, ""},
	} {
		err := fmt.Errorf("apply: %w", fmt.Errorf("%s: %w", tt.what, &netlink.OpError{Op: "receive", Err: tt.errno}))
		if op, refused := strings.CutPrefix(tt.what, "refused: "); refused {
			err = fmt.Errorf("apply: %w", &nfnetlink.RefusedError{Op: nfnetlink.Op(op), Err: tt.errno})
		}
		if got := Hint(err); !strings.Contains(got, tt.names) || (tt.names == "") != (got == "") {
			t.Errorf("%v: hint %q, want one with %q", err, got, tt.names)
		}
	}
}

func TestCountersAreReadWhileTheKernelIsBusy(t *testing.T) {
	for _, m := range cases.Modes() {
		ns := nfttest.NewNS(t, "node")
		want := cases.Load(t, "default").Compile(m)
		apply(t, open(t, ns), want, layout.Ours)
		f := &faults{dial: dialIn(ns)}
		k := f.open()
		f.before = func(call, []netlink.Message) { // the request of a read that has begun
			f.before = nil
			if counts, err := k.Counters(want.Layout); err != nil || len(counts) == 0 {
				t.Errorf("mode %s: %v, %v", m, counts, err)
			}
		}
		if apply(t, k, want, layout.Ours); f.before != nil {
			t.Error("nothing was read")
		}
		if err := k.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestCountersSurviveChanges(t *testing.T) {
	nfttest.SkipIfShort(t)
	t.Parallel()
	wire := newWire(t)
	k := open(t, wire.Node)
	if got := counters(t, k); len(got) > 0 {
		t.Errorf("counters without a table: %v", got)
	}
	want := map[nft.Counts]uint64{}
	for _, name := range []string{"both-families", "ipv6", "all-policies", "both-families"} {
		c := cases.Load(t, name)
		apply(t, k, c.Compile(nft.ModeNFTables), layout.Ours)
		for _, p := range c.Packets {
			wire.send(t, p)
			want[nft.Counts{IPv6: p.Dst.Is6(), Verdict: p.Verdict}]++
		}
		if diff := cmp.Diff(want, counters(t, k)); diff != "" {
			t.Errorf("%s (-sent +counted):\n%s", name, diff)
		}
	}
}
