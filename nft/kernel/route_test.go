package kernel

import (
	"net/netip"
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
			got, err := RouteType(a)
			if got != typ {
				t.Errorf("%s is of type %d, want %d", a, got, typ)
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
			got, err := RouteType(netip.MustParseAddr(a))
			if got != unix.RTN_UNSPEC {
				t.Errorf("%s is of type %d", a, got)
			}
			return err
		})
		if err != nil {
			t.Error(err)
		}
	}
}
