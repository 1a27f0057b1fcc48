package kernel

import (
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfttest"
)

func TestRouteTypesAreThoseOfTheKernel(t *testing.T) {
	top := nfttest.NewTopology(t)
	want := map[netip.Addr]int{
		top.NodeV4:                                unix.RTN_LOCAL,
		top.NodeV6:                                unix.RTN_LOCAL,
		netip.MustParseAddr("127.1.2.3"):          unix.RTN_LOCAL,
		netip.MustParseAddr("::1"):                unix.RTN_LOCAL,
		top.OutsideV4:                             unix.RTN_UNICAST,
		top.OutsideV6:                             unix.RTN_UNICAST,
		netip.MustParseAddr("192.0.2.255"):        unix.RTN_BROADCAST,
		netip.MustParseAddr("224.0.0.1"):          unix.RTN_MULTICAST,
		netip.MustParseAddr("fe80::1%whatever"):   unix.RTN_LOCAL,
		netip.MustParseAddr("2001:db8:ffff::1%x"): unix.RTN_UNICAST,
	}
	for a, typ := range want {
		err := top.Node.Do(func() error {
			got, err := RouteTo(a)
			if got.Type != typ || got.Interface == "" {
				t.Errorf("%s: %+v, want type %d", a, got, typ)
			}
			return err
		})
		if err != nil {
			t.Error(err)
		}
	}
}

func TestNoRouteHasNoType(t *testing.T) {
	ns := nfttest.NewNS(t, "alone")
	for _, a := range []string{"198.51.100.1", "2001:db8::1"} {
		err := ns.Do(func() error {
			got, err := RouteTo(netip.MustParseAddr(a))
			if got != (Route{}) {
				t.Errorf("%s: %+v", a, got)
			}
			return err
		})
		if err != nil {
			t.Error(err)
		}
	}
}

func TestLocalPrefixesAreTheNodesAddresses(t *testing.T) {
	top := nfttest.NewTopology(t)
	anyAddr := netip.MustParseAddr("198.51.100.77")
	nfttest.Run(t, top.Node, "", "ip", "route", "add", "local", "198.51.100.64/26", "dev", "lo")
	var local []netip.Prefix
	err := top.Node.Do(func() (err error) {
		local, err = LocalPrefixes()
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	holds := func(a netip.Addr) bool {
		return slices.ContainsFunc(local, func(p netip.Prefix) bool { return p.Contains(a) })
	}
	for _, a := range []netip.Addr{top.NodeV4, top.NodeV6, top.GatewayV4, top.GatewayV6, anyAddr, netip.MustParseAddr("127.8.8.8"), netip.MustParseAddr("::1")} {
		if !holds(a) {
			t.Errorf("%s is not among %v", a, local)
		}
	}
	for _, a := range []netip.Addr{top.OutsideV4, top.OutsideV6, top.PodV4, top.PodV6, netip.MustParseAddr("192.0.2.255"), netip.MustParseAddr("198.51.100.1")} {
		if holds(a) {
			t.Errorf("%s is among %v", a, local)
		}
	}
}
