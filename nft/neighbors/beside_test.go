package neighbors

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/kernel"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/rule"
)

func apply(t *testing.T, n *Node, want nft.Ruleset) {
	t.Helper()
	_, err := n.Apply(t.Context(), want, layout.Everything)
	must(t, err)
}

// Each of these programs masquerades the traffic of its own containers or machines, which here
// includes the pods.
func TestRulesThatComeAfterEnforcedExemptionsAreOverridden(t *testing.T) {
	t.Parallel()
	for name, replace := range map[string][]string{
		"docker-iptables":  {"-s 172.17.0.0/16 ! -o docker0", "! -o docker0"},
		"docker-nftables":  {`"docker0"`, `"pod0"`, "172.17.0.0/16", "0.0.0.0/0"},
		"libvirt":          {"-s 192.168.122.0/24 ! -d 192.168.122.0/24", "! -d 192.168.122.0/24"},
		"flannel-iptables": nil,
		"flannel-nftables": nil,
		"calico-nftables":  nil,
		"cni-bridge": {
			"-s 10.88.0.5", "-s 10.244.1.2", "-s 10.88.0.6", "-s 10.99.0.6", "-s fd00:88::5", "-s fd00:10:244:1::2",
		},
	} {
		ns := nfttest.NewNS(t, "node")
		nfttest.LoadForeign(t, ns, filepath.Join("../../testdata/foreign", name), strings.NewReplacer(replace...).Replace)
		for _, enforced := range []bool{false, true} {
			c := config.Config{
				EnableIPv6: true, NonMasqueradeCIDRs: cases.CIDRs("10.0.0.0/8", "fd00::/8"),
				MasqueradeSrcCIDRs: cases.CIDRs("10.244.0.0/16", "fd00:10:244::/48"),
			}
			if enforced {
				c.Enforce = &config.Position{}
			}
			o := others(t, open(t, ns), nft.Compile(c, nft.Options{Layout: native.Layout{}}))
			if (len(o.Conflicts) > 0) == enforced || (len(o.Overridden) > 0) != enforced {
				t.Errorf("%s, enforced %t: conflicts %v, overridden %v", name, enforced, o.Conflicts, o.Overridden)
			}
		}
	}
}

// The chain that drops is not the one that masquerades, nor is the one that enforces: another
// program's translation is too early or too late for the latter.
func TestRulesOfOthersAreComparedWithTheChainThatMasquerades(t *testing.T) {
	t.Parallel()
	at := &config.Position{}
	for _, c := range []config.Config{{Enforce: at}, {DropInvalid: at}} {
		for priority, early := range map[int32]bool{nft.SrcNAT + 5: true, nft.SrcNAT + 15: false} {
			c.MasqueradeSrcCIDRs = cases.CIDRs("10.244.0.0/16")
			ns := nfttest.NewNS(t, "node")
			n, want := open(t, ns), nft.Compile(c, nft.Options{Layout: native.Layout{}})
			apply(t, n, want)
			nfttest.NFT(t, ns, fmt.Sprintf("table ip cni { chain post { type nat hook postrouting priority %d; "+
				"ip daddr 203.0.113.0/24 snat to 192.0.2.7; }; }", priority), "-f", "-")
			o := others(t, n, want)
			if (len(o.Of(Translates)) == 1) != early {
				t.Errorf("priority %d: %v", priority, o)
			}
		}
	}
}

// Its rules look like those of the older agents, but for their signature.
func TestRenamedChainOfOursIsNoConflict(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNS(t, "node")
	n, want := open(t, ns), cases.Load(t, "all-policies").Compile(nft.ModeIPTables)
	apply(t, n, want)
	nfttest.Run(t, ns, "", "iptables-nft", "-t", "nat", "-E", cases.DefaultChain, "RENAMED")
	if o := others(t, n, want); len(o.Legacy)+len(o.Conflicts) > 0 {
		t.Errorf("others are %+v", o)
	}
	apply(t, n, want)
	if o := others(t, n, want); len(o.Legacy)+len(o.Conflicts) > 0 {
		t.Errorf("once restored, others are %+v", o)
	}
}

// The kernel lists no rule of more than 32 KiB, nor those after it.
func TestRulesAfterALongOneAreFoundOrCounted(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ matches, conflicts, unread int }{{1, 1, 0}, {8, 1, 0}, {50, 1, 0}, {60, 0, 2}} {
		ns := nfttest.NewNS(t, "node")
		args := []string{"-t", "nat", "-I", "POSTROUTING"}
		for range tt.matches {
			args = append(args, "-m", "bpf", "--bytecode", "64,"+strings.Repeat("0 0 0 0,", 63)+"6 0 0 1")
		}
		nfttest.Run(t, ns, "", "iptables-nft", append(args, "-j", "ACCEPT")...)
		nfttest.Run(t, ns, "", "iptables-nft", "-t", "nat", "-A", "POSTROUTING", "-j", "MASQUERADE")
		s := survey(t, open(t, ns), cases.Load(t, "default").Compile(nft.ModeNFTables))
		o, err := s.Others()
		must(t, err)
		got := fmt.Sprint(len(o.Conflicts), o.Unread)
		if spared := nfttest.In(t, ns, s.Evidence).Spared; (len(spared) > 0) != (tt.unread > 0) {
			t.Errorf("%d matches: spared are %q", tt.matches, spared)
		}
		if want := fmt.Sprint(tt.conflicts, tt.unread); got != want {
			t.Errorf("%d matches: conflicts and unread rules %s, want %s", tt.matches, got, want)
		}
	}
}

// Chains alone do not translate, and our own rules are no other program's, in either mode.
func TestOthersTranslateByTheirRules(t *testing.T) {
	for _, mode := range cases.Modes() {
		ns := nfttest.NewNS(t, "node")
		n := open(t, ns)
		want := func(want bool, when string) {
			t.Helper()
			if got, err := n.OthersTranslate(t.Context()); err != nil || got != want {
				t.Errorf("mode %s, %s: %t, %v", mode, when, got, err)
			}
		}
		want(false, "without rules")
		apply(t, n, cases.Load(t, "default").Compile(mode))
		want(false, "with only ours")
		nfttest.NFT(t, ns, "add table ip other; add chain ip other n { type nat hook prerouting priority -100; }", "-f", "-")
		want(false, "next to an empty chain")
		nfttest.NFT(t, ns, "add rule ip other n tcp dport 53 redirect", "-f", "-")
		want(true, "next to another program's rule")
	}
	ns := nfttest.NewNS(t, "node")
	nfttest.NFT(t, ns, "table ip t { chain a { type nat hook prerouting priority 0; }; chain b { type nat hook output "+
		"priority 0; }; }", "-f", "-")
	for at, done := 0, false; !done; at++ { // whatever request fails, there is no answer
		asked := 0
		dial := func() (*netlink.Conn, error) { return nfttest.DialNetfilter(ns) }
		n := New(kernel.New(nfnetlink.New(nfttest.Through(dial, func(*netlink.Message) error {
			if asked++; asked == at+1 {
				return unix.EPERM
			}
			return nil
		}, nil)), rule.String))
		_, err := n.OthersTranslate(t.Context())
		if done = asked <= at; (err == nil) != done {
			t.Errorf("request %d of %d fails: %v", at+1, asked, err)
		}
		must(t, n.Close())
	}
}
