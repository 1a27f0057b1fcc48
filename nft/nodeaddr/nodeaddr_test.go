package nodeaddr

import (
	"fmt"
	"net/netip"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/mdlayher/netlink"

	"nft-masq-agent/nft/nfttest"
)

func TestMain(m *testing.M) { os.Exit(nfttest.Main(m)) }

// ip runs ip commands in a namespace, one per line.
func ip(t *testing.T, ns *nfttest.NS, commands string) {
	t.Helper()
	nfttest.Run(t, ns, commands, "ip", "-batch", "-")
}

// dialIn opens sockets in a namespace.
func dialIn(ns *nfttest.NS) Dial {
	return func(groups uint32) (nl *netlink.Conn, err error) {
		err = ns.Do(func() error {
			nl, err = dial(groups)
			return err
		})
		return nl, err
	}
}

func texts(addrs []netip.Addr) string { return strings.Trim(fmt.Sprint(addrs), "[]") }

func TestListHasUsableAddresses(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNS(t, "node")
	ip(t, ns, `link add eth0 type veth peer name peer0
link set peer0 up
link add eth1 type veth peer name peer1
link set peer1 up
link set eth0 up
address add 198.51.100.12/24 dev eth0
address add 198.51.100.11/24 dev eth0
address add 10.1.1.1 peer 10.1.1.2/32 dev eth0
address add 198.51.100.13/32 dev lo
address add 198.51.100.11/32 dev lo
address add 2001:db8::11/64 dev eth0 nodad
address add 2001:db8::12/64 dev eth0 nodad preferred_lft 0
address add 203.0.113.1/24 dev eth1
`)
	var got []netip.Addr
	err := ns.Do(func() (err error) {
		got, err = List()
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	// Without that of an interface that is down, and without loopback and link-local ones.
	if diff := cmp.Diff("10.1.1.1 198.51.100.11 198.51.100.12 198.51.100.13 2001:db8::11 2001:db8::12", texts(got)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// awaits returns a function that waits until the addresses are as wanted.
func awaits(t *testing.T, changes <-chan Change) func(want string) {
	t.Helper()
	return func(want string) {
		t.Helper()
		got := "nothing"
		for timeout := time.After(30 * time.Second); got != want; {
			select {
			case c := <-changes:
				if got = texts(c.Addresses); c.Err != nil {
					t.Fatal(c.Err)
				}
			case <-timeout:
				t.Fatalf("addresses are %s, want %s", got, want)
			}
		}
	}
}

func TestAddressesAreFollowed(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNS(t, "node")
	ip(t, ns, "link add eth0 type veth peer name peer0\nlink set peer0 up\nlink set eth0 up\naddress add 198.51.100.11/24 dev eth0\n")
	await := awaits(t, FollowBy(t.Context(), dialIn(ns)))
	await("198.51.100.11")
	for _, step := range [][2]string{
		{"address add 198.51.100.12/24 dev eth0", "198.51.100.11 198.51.100.12"},
		{"address add 198.51.100.12/32 dev lo\naddress add 198.51.100.13/32 dev lo", "198.51.100.11 198.51.100.12 198.51.100.13"},
		{"address del 198.51.100.12/24 dev eth0\naddress del 198.51.100.13/32 dev lo", "198.51.100.11 198.51.100.12"},
		{"address add 2001:db8::11/64 dev eth0 nodad", "198.51.100.11 198.51.100.12 2001:db8::11"},
		{"link set eth0 down", "198.51.100.12"},
		{"link set eth0 up", "198.51.100.11 198.51.100.12"}, // IPv6 addresses were deleted with the link
		{"link add eth1 type veth peer name peer1\nlink set peer1 up\naddress add 203.0.113.1/24 dev eth1", ""},
		{"link set eth1 up", "198.51.100.11 198.51.100.12 203.0.113.1"},
		{"link del eth1", "198.51.100.11 198.51.100.12"},
		{"address flush dev eth0\naddress flush dev lo", ""},
		{"address add 198.51.100.11/24 dev eth0", "198.51.100.11"},
	} {
		ip(t, ns, step[0]+"\n")
		if step[1] != "" || strings.Contains(step[0], "flush") {
			await(step[1])
		}
	}
}

// While duplicate address detection is running, the address cannot be used.
func TestTentativeAddressDoesNotCount(t *testing.T) {
	nfttest.SkipIfShort(t)
	t.Parallel()
	ns := nfttest.NewNS(t, "node")
	ip(t, ns, "link add eth0 type veth peer name peer0\nlink set peer0 up\nlink set eth0 up\n")
	if err := ns.Sysctl("net.ipv6.conf.eth0.dad_transmits", "2"); err != nil {
		t.Fatal(err)
	}
	changes := FollowBy(t.Context(), dialIn(ns))
	await := awaits(t, changes)
	await("")
	// The second one is reported; if the first one were reported too early, it
	// would be by then.
	ip(t, ns, "address add 2001:db8::11/64 dev eth0\naddress add 2001:db8::12/64 dev eth0 nodad\n")
	await("2001:db8::12")
	await("2001:db8::11 2001:db8::12")
}

// After lost notifications the addresses are listed again.
func TestOverrunListsAgain(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNS(t, "node")
	ip(t, ns, "link add eth0 type veth peer name peer0\nlink set peer0 up\nlink set eth0 up\naddress add 198.51.100.11/24 dev eth0\n")
	var joined atomic.Int32
	await := awaits(t, FollowBy(t.Context(), func(groups uint32) (*netlink.Conn, error) {
		nl, err := dialIn(ns)(groups)
		if err == nil && groups != 0 {
			joined.Add(1)
			err = nl.SetReadBuffer(1) // the smallest possible
		}
		return nl, err
	}))
	await("198.51.100.11")
	var many strings.Builder
	for i := range 2000 {
		fmt.Fprintf(&many, "address add 10.9.%d.%d/32 dev eth0\n", i/250, i%250+1)
	}
	ip(t, ns, many.String()+"address flush dev eth0\naddress add 198.51.100.12/24 dev eth0\n")
	await("198.51.100.12")
	if joined.Load() == 1 {
		t.Error("the buffer never overran: the test shows nothing")
	}
}
