package answer

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/neighbors"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/routes"
	"nft-masq-agent/nft/trace"
)

var postrouting = &trace.Chain{Chain: nfnetlink.Chain{Name: "post", Hook: &nfnetlink.Hook{}}}

func TestHeadlineListsWhatDependsOnTheRoute(t *testing.T) {
	pod, dst := netip.MustParseAddr("10.244.1.2"), netip.MustParseAddr("203.0.113.9")
	path := func(out, masqueraded string, depends ...string) neighbors.Path {
		n := neighbors.Path{
			Packet:  trace.Packet{Src: pod, Dst: dst, DstType: unix.RTN_UNICAST, Out: routes.Interface{Name: out}},
			Depends: depends,
		}
		n.Source.Findings = []trace.Finding{{Code: trace.Masquerades, Base: postrouting, Sure: true, Own: true}}
		n.Masqueraded, _ = netip.ParseAddr(masqueraded)
		return n
	}
	exempt := func(depends ...string) neighbors.Path {
		n := path("", "", depends...)
		n.Source = trace.Result{Keeps: trace.Yes}
		return n
	}
	perhaps := func(masqueraded string, depends ...string) neighbors.Path {
		n := path("eth0", masqueraded, depends...)
		n.Source.Keeps, n.Source.Unknown = trace.Maybe, []string{"meta mark 0x77"}
		return n
	}
	of := func(typ int, depends string) neighbors.Path {
		n := exempt(depends)
		n.Packet.DstType = typ
		return n
	}
	const byMark, byPort = "ip rule 9", "ip rule 10"
	const by0 = "192.0.2.1, the address of eth0: masqueraded by this agent."
	const by1 = "198.51.100.1, the address of eth1: masqueraded by this agent."
	eth0, eth1 := path("eth0", "192.0.2.1"), path("eth1", "198.51.100.1", byMark)
	for _, tt := range []struct {
		paths            []neighbors.Path
		code, sees, on   string
		headline, listed string
		note             string
	}{
		{paths: []neighbors.Path{eth0}, code: "masqueraded", sees: "192.0.2.1", headline: "203.0.113.9 sees " + by0},
		{
			paths: []neighbors.Path{eth0, eth1}, code: "unknown", on: byMark, headline: "it depends on ip rule 9.",
			listed: by0 + "\n" + by1,
		},
		{
			paths: []neighbors.Path{eth0, eth1, path("", "", byPort, byMark)}, code: "unknown", on: byPort + "; " + byMark,
			headline: "it depends on ip rule 10; ip rule 9.", listed: "an address that is not known by this agent",
		},
		{
			paths: []neighbors.Path{eth0, path("eth1", "192.0.2.1", byMark)}, code: "masqueraded",
			sees: "192.0.2.1", headline: "eth0",
		},
		{
			paths: []neighbors.Path{perhaps("192.0.2.1"), perhaps("198.51.100.1", byMark)}, code: "unknown",
			on: byMark + "; meta mark 0x77", headline: "it depends on ip rule 9; meta mark 0x77.",
			listed: "198.51.100.1 by this agent",
		},
		{paths: []neighbors.Path{exempt(), exempt(byMark)}, code: "exempt", sees: "10.244.1.2", headline: "sees 10.244.1.2"},
		{
			paths: []neighbors.Path{eth0, exempt(byMark)}, code: "unknown", on: byMark, headline: "ip rule 9",
			listed: "10.244.1.2, the source's own address: no rule of this node translates it.",
		},
		{
			paths: []neighbors.Path{eth0, of(unix.RTN_LOCAL, byPort), of(unix.RTN_UNSPEC, byMark)}, code: "masqueraded",
			sees: "192.0.2.1", headline: "eth0",
			note: "Some packets do not go there, depending on ip rule 10; ip rule 9.",
		},
		{
			paths: []neighbors.Path{of(unix.RTN_UNSPEC, ""), eth1}, code: "unknown", on: "; " + byMark, headline: "ip rule 9",
			listed: "This node has no route to 203.0.113.9.\n" + by1,
		},
	} {
		x := Explanation{to: dst.String()}
		x.Follow(tt.paths)
		got := []string{x.Why.Code, x.Sees, strings.Join(x.Why.Unknown, "; "), strings.ReplaceAll(x.Notes.Error(), "\n", " ")}
		if diff := cmp.Diff([]string{tt.code, tt.sees, tt.on, tt.note}, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", x.Headline, diff)
		}
		listed := strings.Join(x.Possible, "\n")
		lists := strings.Contains(listed, tt.listed) && (listed == "") == (tt.listed == "")
		if !strings.Contains(x.Headline, tt.headline) || !lists {
			t.Errorf("%+v: %q %q", tt, x.Headline, x.Possible)
		}
	}
}

// Without connection tracking there is no NAT, but a rule can still write another source.
func TestHeadlineIsWhatIsWrittenIntoAnUntrackedPacket(t *testing.T) {
	pod, dst := netip.MustParseAddr("10.244.1.2"), netip.MustParseAddr("203.0.113.9")
	to := netip.MustParseAddr("192.0.2.7")
	untracks := trace.Finding{Code: trace.Untracks, Base: postrouting, Sure: true}
	writes := untracks
	writes.Code, writes.To = trace.Rewrites, []iprange.Range{{From: to, To: to}}
	for _, tt := range []struct {
		found      []trace.Finding
		code, sees string
	}{
		{[]trace.Finding{untracks}, "untracked", "10.244.1.2"},
		{[]trace.Finding{untracks, writes}, "rewritten", "192.0.2.7"},
		{[]trace.Finding{writes, untracks}, "rewritten", "192.0.2.7"},
	} {
		x := Explanation{to: dst.String()}
		x.Follow([]neighbors.Path{{
			Packet: trace.Packet{Src: pod, Dst: dst, DstType: unix.RTN_UNICAST},
			Source: trace.Result{Findings: tt.found, Keeps: trace.Yes, Untracked: trace.Yes},
		}})
		if x.Why.Code != tt.code || x.Sees != tt.sees {
			t.Errorf("%v: %s, sees %s: %s", tt.found, x.Why.Code, x.Sees, x.Headline)
		}
	}
}
