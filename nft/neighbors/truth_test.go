package neighbors

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/routes"
	"nft-masq-agent/nft/trace"
)

// The answer about a packet is what the far end sees of it: next to the rules of each program,
// packets between addresses near those that the rules name, and others.
func TestTheFarEndSeesWhatIsTraced(t *testing.T) {
	t.Parallel()
	dirs, err := os.ReadDir(recorded)
	must(t, err)
	for i, dir := range dirs {
		if i%nfttest.Rounds(3, 1, 1) > 0 {
			continue
		}
		t.Run(dir.Name(), func(t *testing.T) {
			t.Parallel()
			top := nfttest.NewTopology(t)
			nfttest.LoadForeign(t, top.Node, filepath.Join(recorded, dir.Name()), nil)
			n, want := open(t, top.Node), exempting(defaultExempt)
			apply(t, n, want)
			s := survey(t, n, want)
			tracer, err := s.Tracer(t.Context(), want)
			must(t, err)
			l := lab{t, top, tracer, tracer.rules.Ends(perSet), rand.New(rand.NewPCG(47, 1)), map[string]int{}}
			for range nfttest.Rounds(5, 50, 3000) {
				l.try()
			}
			t.Log(l.seen)
		})
	}
}

// A lab sends packets from a pod to the outside host, and compares.
type lab struct {
	*testing.T
	top  *nfttest.Topology
	of   *Tracer
	ends trace.Ends
	r    *rand.Rand
	seen map[string]int // how many packets, by whether the answer was certain
}

// near returns an address next to one that rules name, or in one of some networks.
func (l lab) near(ends []netip.Addr, ipv6 bool) netip.Addr {
	networks := []string{
		"10.0.0.0", "10.244.1.0", "10.96.0.0", "172.17.0.0", "192.168.0.0", "203.0.113.0", "198.51.100.0", "8.8.8.0",
	}
	if ipv6 {
		networks = []string{"fd00:10:244:1::", "fd00::", "2001:db8:9::", "2001:db8:244::"}
	}
	a := netip.MustParseAddr(networks[l.r.IntN(len(networks))])
	if named := ends[l.r.IntN(len(ends))]; named.Is6() == ipv6 && l.r.IntN(2) == 0 {
		a = named
	}
	for range l.r.IntN(6) {
		a = a.Next()
	}
	if a.IsValid() && l.r.IntN(4) == 0 {
		a = a.Prev()
	}
	return a
}

// strange reports whether no packet comes from or goes to an address in this lab.
func (l lab) strange(a netip.Addr) bool {
	onLink := []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("2001:db8::/64")}
	return !a.IsGlobalUnicast() || a.Is4In6() || a == l.top.PodV4 || a == l.top.PodV6 ||
		a == l.top.GatewayV4 || a == l.top.GatewayV6 ||
		slices.ContainsFunc(onLink, func(p netip.Prefix) bool { return p.Contains(a) }) || iprange.Contains(nowhere, a) ||
		a.Is4() && a.As4()[0] >= 240
}

// try sends one packet.
func (l lab) try() {
	ipv6 := l.r.IntN(3) == 0
	src, dst := l.top.PodV4, l.near(l.ends.Dst, ipv6)
	if ipv6 {
		src = l.top.PodV6
	}
	if other := l.near(l.ends.Src, ipv6); l.r.IntN(2) == 0 && !l.strange(other) {
		src = other
	}
	if l.strange(dst) || src == dst {
		return
	}
	ask := func(q routes.Query) routes.Routes {
		return nfttest.In(l.T, l.top.Node, func() (routes.Routes, error) { return routes.Lookup(q) })
	}
	to := ask(routes.Query{Src: src, Dst: dst})
	mark, open := l.of.Mark(src, dst, to)
	if to = ask(routes.Query{Src: src, Dst: dst, Mark: mark, Open: open}); len(to.Ways) != 1 ||
		to.Ways[0].Type != unix.RTN_UNICAST {
		return
	}
	to.Back.Interface = routes.Interface{Name: "pod0", Index: to.Back.Interface.Index}
	p := l.of.Trace(src, dst, to)[0]
	answer := l.answerOf(p)
	if answer.elsewhere {
		return
	}
	flow := nfttest.Flow{
		Proto: nfttest.UDP, From: l.top.Pod, To: l.top.Outside, Src: netip.AddrPortFrom(src, 0), Foreign: true,
		Dst: netip.AddrPortFrom(dst, uint16(5000+l.r.IntN(1000))),
	}
	if answer.lost != trace.No {
		flow.Timeout = 20 * time.Millisecond // if it comes later, less is tested
	}
	s, err := nfttest.Send(flow)
	seen := iprange.Range{From: s.Seen.Addr(), To: s.Seen.Addr()}
	switch {
	case err != nil && !errors.Is(err, nfttest.ErrNotSeen):
		l.Fatal(err)
	case err != nil && answer.lost == trace.No, err == nil && answer.lost == trace.Yes,
		err == nil && !answer.any && len(iprange.Intersect(answer.among, []iprange.Range{seen})) == 0:
		l.Errorf("%s to %s: %v, %v is seen, traced was %+v", src, dst, err, s.Seen, p.Source)
	}
	certain := len(answer.among) == 1 && answer.among[0].From == answer.among[0].To && answer.lost == trace.No
	l.seen[fmt.Sprintf("certain %t", certain || answer.lost == trace.Yes)]++
}

// An answer is what the far end may see.
type answer struct {
	among     []iprange.Range
	any       bool        // an address that no rule names
	lost      trace.Truth // whether it sees nothing
	elsewhere bool        // another destination may see it
}

func (l lab) answerOf(p Path) (a answer) {
	for _, f := range slices.Concat(p.Destination.Findings, p.Source.Findings) {
		switch {
		case f.OfDestination:
			a.elsewhere = true
		case f.Ends() && f.Sure:
			a.lost = trace.Yes
		case f.Ends(), f.Code == trace.Unknown:
			a.lost = max(a.lost, trace.Maybe)
		}
	}
	by, itself := p.Source.Seen()
	for _, f := range by {
		switch {
		case f.Keeps:
			itself = true
		case f.Code == trace.Masquerades:
			a.among = append(a.among, iprange.Range{From: p.Masqueraded, To: p.Masqueraded})
		case len(f.To) == 0:
			a.any = true
		}
		a.among = append(a.among, f.To...)
	}
	if itself {
		a.among = append(a.among, iprange.Range{From: p.Packet.Src, To: p.Packet.Src})
	}
	a.among = iprange.Normal(a.among)
	return a
}
