package kernel

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/mdlayher/netlink"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/layouts"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
)

// An interposedSocket calls a function before one of the transactions.
type interposedSocket struct {
	*faultySocket
	left   *int // transactions before it
	before func()
}

func (s *interposedSocket) SendMessages(m []netlink.Message) error {
	if *s.left--; *s.left == 0 {
		s.before()
	}
	return s.faultySocket.SendMessages(m)
}

// interpose opens a Kernel that lets another program act before its n-th transaction.
func interpose(ns *nfttest.NS, n int, before func()) *Kernel {
	return New(nfnetlink.New(func() (*netlink.Conn, error) {
		nl, err := dialIn(ns)()
		if err != nil {
			return nil, err
		}
		return netlink.NewConn(&interposedSocket{&faultySocket{real: nl, faults: &faults{}}, &n, before}, nl.PID()), nil
	}))
}

// Handles begin again when a table is created again: a rule of another program then has
// the one that was to be deleted.
func TestRulesThatTookTheHandlesOfOlderAgentsRulesStay(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft", "iptables-nft-restore", "ip6tables-nft-restore")
	agent := loadOlder(t, "ip-masq-agent-v2.9")
	agent.rules[nfnetlink.IPv6] = strings.NewReplacer("169.254.0.0/16", "fe80::/10", "10.0.0.0/8", "fd00::/8",
		"172.16.0.0/12", "fd01::/16", "192.168.0.0/16", "fd02::/16").Replace(agent.rules[nfnetlink.IPv4])
	takesOver := func(mode nft.Mode) func(context.Context, *Kernel) ([]string, error) {
		return applies(nft.Compile(agent.config, nft.Options{Layout: layouts.Of(mode, "TAKES-OVER")}), Look{Others: true, TakeOver: true})
	}
	// The older agent is about to come back: its chain exists, and other rules.
	var reload strings.Builder
	for _, f := range []string{"ip", "ip6"} {
		fmt.Fprintf(&reload, "delete table %s nat; table %[1]s nat { chain IP-MASQ-AGENT { }; chain POSTROUTING { type nat hook postrouting priority 100; ", f)
		for i := range 40 {
			fmt.Fprintf(&reload, "meta mark %d accept; ", i)
		}
		reload.WriteString("}; }\n")
	}
	for _, tt := range []struct {
		name         string
		transactions int // the last one deletes
		do           func(context.Context, *Kernel) ([]string, error)
	}{
		{"take-over in mode nftables", 2, takesOver(nft.ModeNFTables)},
		{"take-over in mode iptables-nft", 1, takesOver(nft.ModeIPTables)},
		{"cleanup --legacy", 1, cleansUp(WithLegacy)},
		{"cleanup --legacy-only", 1, cleansUp(LegacyOnly)},
	} {
		for _, reloads := range []bool{true, false} { // or else the control
			t.Run(fmt.Sprint(tt.name, ", reloads ", reloads), func(t *testing.T) {
				t.Parallel()
				ns := nfttest.NewNS(t, "node")
				agent.install(t, ns, nil)
				var before map[string][]nfnetlink.Rule
				acted := false
				k := interpose(ns, tt.transactions, func() {
					if acted = true; reloads {
						nfttest.NFT(t, ns, reload.String(), "-f", "-")
						before = foreignRules(t, ns)
					}
				})
				t.Cleanup(func() { _ = k.Close() })
				if _, err := tt.do(t.Context(), k); err != nil || !acted {
					t.Errorf("%v; acted %t", err, acted)
				}
				after := foreignRules(t, ns)
				for name := range after {
					if strings.Contains(name, "TAKES-OVER") {
						delete(after, name)
					}
				}
				for _, f := range []string{"ip", "ip6"} { // our jump
					post := f + " nat POSTROUTING"
					if n := len(after[post]); n > 0 && leadsTo(after[post][n-1]) == "TAKES-OVER" {
						after[post] = after[post][:n-1]
					}
					if len(after[post]) == 0 {
						delete(after, post)
					}
				}
				if diff := cmp.Diff(before, after); reloads && diff != "" {
					t.Errorf("rules (-reloaded +left):\n%s", diff)
				} else if !reloads && len(after) > 0 {
					t.Errorf("left: %v", after)
				}
			})
		}
	}
}
