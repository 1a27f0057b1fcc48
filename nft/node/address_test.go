package node

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mdlayher/netlink"
	"github.com/mdlayher/netlink/nltest"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfttest"
)

// awaits returns a function that waits until the addresses are as wanted.
func awaits(t *testing.T, changes <-chan Change) func(want string) {
	t.Helper()
	return func(want string) {
		t.Helper()
		got := "nothing"
		for timeout := time.After(nfttest.Patient(30 * time.Second)); got != want; {
			select {
			case c := <-changes:
				if got = texts(c.Addresses); c.Err != nil || c.At.IsZero() {
					t.Fatalf("%+v", c)
				}
			case <-timeout:
				t.Fatalf("addresses are %s, want %s", got, want)
			}
		}
	}
}

func TestAddressesAreFollowed(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNode(t, nfttest.Links("eth0"), "address add 198.51.100.11/24 dev eth0")
	await := awaits(t, follow(t.Context(), dialIn(ns), shortest/10))
	await("198.51.100.11")
	for _, step := range [][2]string{
		{"address add 198.51.100.12/24 dev eth0", "198.51.100.11 198.51.100.12"},
		{
			"address add 198.51.100.12/32 dev lo\naddress add 198.51.100.13/32 dev lo",
			"198.51.100.11 198.51.100.12 198.51.100.13",
		},
		{"address del 198.51.100.12/24 dev eth0\naddress del 198.51.100.13/32 dev lo", "198.51.100.11 198.51.100.12"},
		{"address add 2001:db8::11/64 dev eth0 nodad", "198.51.100.11 198.51.100.12 2001:db8::11"},
		{"link set eth0 down", "198.51.100.12"},
		{"link set eth0 up", "198.51.100.11 198.51.100.12"}, // IPv6 addresses were deleted with the link
		{nfttest.Links("eth1") + "address add 203.0.113.1/24 dev eth1", "198.51.100.11 198.51.100.12 203.0.113.1"},
		{"link del eth1", "198.51.100.11 198.51.100.12"},
		{"address flush dev eth0\naddress flush dev lo", ""},
		{"address add 198.51.100.11/24 dev eth0", "198.51.100.11"},
	} {
		nfttest.IP(t, ns, step[0])
		await(step[1])
	}
}

// While duplicate address detection is running, the address cannot be used.
func TestTentativeAddressDoesNotCount(t *testing.T) {
	nfttest.SkipIfShort(t)
	t.Parallel()
	ns := nfttest.NewNode(t, nfttest.Links("eth0"))
	nfttest.NoError(t, ns.Sysctl("net.ipv6.conf.eth0.dad_transmits", "2"))
	await := awaits(t, follow(t.Context(), dialIn(ns), shortest/10))
	await("")
	// The second one is reported; if the first one were reported too early, it
	// would be by then.
	nfttest.IP(t, ns, "address add 2001:db8::11/64 dev eth0\naddress add 2001:db8::12/64 dev eth0 nodad")
	await("2001:db8::12")
	await("2001:db8::11 2001:db8::12")
}

// Most events are lost, because no socket waits for them after a list, and a socket that has
// one is closed. Still the last list is right, and there are few lists.
func TestManyEventsLeadToFewListsOfWhichTheLastIsRight(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNode(t, nfttest.Links("eth0"), "address add 198.51.100.11/24 dev eth0")
	var sockets, lists atomic.Int64
	await := awaits(t, follow(t.Context(), func(groups uint32) (*netlink.Conn, error) {
		nl, err := dialIn(ns)(groups)
		if sockets.Add(1); groups == 0 {
			lists.Add(1)
		} else if err == nil {
			err = nl.SetReadBuffer(1) // the smallest possible
		}
		return nl, err
	}, shortest))
	await("198.51.100.11")
	var many strings.Builder
	for i := range 2000 {
		fmt.Fprintf(&many, "address add 10.9.%d.%d/32 dev eth0\n", i/250, i%250+1)
	}
	begun := time.Now()
	for range 3 {
		nfttest.IP(t, ns, many.String()+"address flush dev eth0\naddress add 198.51.100.12/24 dev eth0")
	}
	await("198.51.100.12")
	took, most := time.Since(begun), 3+int64(time.Since(begun)/shortest)
	if lists.Load() > most || sockets.Load() > 2*most {
		t.Errorf("%d lists and %d sockets within %s, want at most %d and %d", lists.Load(), sockets.Load(), took, most,
			2*most)
	}
}

// The kernel drops events of which there are too many, and reports that. A list follows each report, and no other one.
func TestEachListIsFollowedByAWait(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNode(t, nfttest.Links("eth0"), "address add 198.51.100.11/24 dev eth0")
	waits := make(chan struct{})
	changes := follow(t.Context(), func(groups uint32) (*netlink.Conn, error) {
		if groups == 0 {
			return dialIn(ns)(0)
		}
		return nltest.Dial(func([]netlink.Message) ([]netlink.Message, error) {
			select {
			case waits <- struct{}{}:
			case <-t.Context().Done():
			}
			return nil, unix.ENOBUFS
		}), nil
	}, shortest/10)
	for range 3 {
		<-waits
		c := <-changes
		if c.Err != nil || texts(c.Addresses) != "198.51.100.11" {
			t.Errorf("%+v", c)
		}
	}
}

// A socket that fails is reported, and opened again.
func TestFollowingContinuesAfterAnError(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNode(t, nfttest.Links("eth0"), "address add 198.51.100.11/24 dev eth0")
	var opened atomic.Int32
	changes := follow(t.Context(), func(groups uint32) (*netlink.Conn, error) {
		switch n := opened.Add(1); n {
		case 1:
			return nil, unix.EMFILE
		case 3: // the second listener's list
			return nil, unix.ENFILE
		}
		return dialIn(ns)(groups)
	}, shortest/10)
	for _, want := range []error{unix.EMFILE, unix.ENFILE} {
		if c := <-changes; !errors.Is(c.Err, want) {
			t.Errorf("%+v, want %v", c, want)
		}
	}
	awaits(t, changes)("198.51.100.11")
}

// When its context ends, no socket is left open, and that is no error.
func TestFollowingEndsWithItsContext(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNode(t, "address add 198.51.100.11/32 dev lo")
	ctx, cancel := context.WithCancel(t.Context())
	sockets := make(chan *netlink.Conn, 2) // of the listener and its list
	changes := follow(ctx, func(groups uint32) (*netlink.Conn, error) {
		nl, err := dialIn(ns)(groups)
		sockets <- nl
		return nl, err
	}, shortest)
	awaits(t, changes)("198.51.100.11")
	cancel()
	end := time.Now().Add(nfttest.Patient(time.Second))
	for range cap(sockets) {
		for nl := <-sockets; nl.SetWriteDeadline(time.Time{}) == nil; runtime.Gosched() { // until it is closed
			if time.Now().After(end) {
				t.Fatal("a socket is open")
			}
		}
	}
	if len(changes) > 0 {
		t.Errorf("delivered %+v", <-changes)
	}
}

func TestMain(m *testing.M) { os.Exit(nfttest.Main(m)) }

// dialIn opens sockets in a namespace.
func dialIn(ns *nfttest.NS) Dialer {
	return func(groups uint32) (nl *netlink.Conn, err error) {
		err = ns.Do(func() error {
			nl, err = Dial(groups)
			return err
		})
		return nl, err
	}
}

func texts(addrs []netip.Addr) string { return strings.Trim(fmt.Sprint(addrs), "[]") }

func TestAddressesAreThoseThatRepliesReach(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNS(t, "node")
	for _, s := range [][2]string{
		{"default.use_tempaddr", "2"}, {"default.accept_dad", "0"}, {"all.accept_dad", "0"},
	} {
		nfttest.NoError(t, ns.Sysctl("net.ipv6.conf."+s[0], s[1]))
	}
	nfttest.IP(t, ns, nfttest.Links("eth0", "eth1"), `link set eth1 down
address add 198.51.100.12/24 dev eth0
address add 198.51.100.11/24 dev eth0
address add 10.1.1.1 peer 10.1.1.2/32 dev eth0
address add 198.51.100.13/32 dev lo
address add 198.51.100.11/32 dev lo
address add 169.254.7.7/16 dev eth0
address add 2001:db8::11/64 dev eth0 nodad mngtmpaddr
address add 2001:db8::12/64 dev eth0 nodad preferred_lft 0
address add 203.0.113.1/24 dev eth1`)
	nfttest.Until(t, "a temporary address, without which the test shows nothing", func() bool {
		text := nfttest.Run(t, ns, "", "ip", "-6", "address", "show", "dev", "eth0", "temporary")
		return strings.Contains(text, "inet6 2001:db8:") && !strings.Contains(text, "tentative")
	})
	want := "10.1.1.1 198.51.100.11 198.51.100.12 198.51.100.13 2001:db8::11 2001:db8::12"
	nfttest.Same(t, "(-want +got)", want, texts(nfttest.In(t, ns, Addresses)))
	six, err := Read(dialIn(ns), "addresses", func(r *Reader) []Address { return r.Addresses(unix.AF_INET6) })
	nfttest.NoError(t, err)
	if slices.ContainsFunc(six, func(a Address) bool { return a.Local.Is4() }) || len(six) < 2 {
		t.Errorf("of IPv6: %v", six)
	}
}

func TestNumbersOfAttributes(t *testing.T) {
	b, err := netlink.MarshalAttributes([]netlink.Attribute{Numbered(7, 5), {Type: 8, Data: []byte{1}}})
	nfttest.NoError(t, err)
	for typ, want := range map[uint16]uint32{6: 0, 7: 5, 8: 0} {
		if got := (Message{Attrs: b}).Number(typ); got != want {
			t.Errorf("attribute %d: %d, want %d", typ, got, want)
		}
	}
}
