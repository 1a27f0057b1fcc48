package node

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"nft-masq-agent/nft/nfttest"
)

func texts(addrs []netip.Addr) string { return strings.Trim(fmt.Sprint(addrs), "[]") }

func TestAddressesAreThoseThatRepliesReach(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNS(t, "node")
	for _, s := range [][2]string{
		{"default.use_tempaddr", "2"}, {"default.accept_dad", "0"}, {"all.accept_dad", "0"},
	} {
		if err := ns.Sysctl("net.ipv6.conf."+s[0], s[1]); err != nil {
			t.Fatal(err)
		}
	}
	ip(t, ns, links("eth0", "eth1"), `link set eth1 down
address add 198.51.100.12/24 dev eth0
address add 198.51.100.11/24 dev eth0
address add 10.1.1.1 peer 10.1.1.2/32 dev eth0
address add 198.51.100.13/32 dev lo
address add 198.51.100.11/32 dev lo
address add 169.254.7.7/16 dev eth0
address add 2001:db8::11/64 dev eth0 nodad mngtmpaddr
address add 2001:db8::12/64 dev eth0 nodad preferred_lft 0
address add 203.0.113.1/24 dev eth1`)
	for begun := time.Now(); ; { // until a temporary address is usable, without which the test shows nothing
		text := nfttest.Run(t, ns, "", "ip", "-6", "address", "show", "dev", "eth0", "temporary")
		if strings.Contains(text, "inet6 2001:db8:") && !strings.Contains(text, "tentative") {
			break
		}
		if time.Since(begun) > 30*time.Second {
			t.Fatalf("there is no temporary address:\n%s", text)
		}
	}
	want := "10.1.1.1 198.51.100.11 198.51.100.12 198.51.100.13 2001:db8::11 2001:db8::12"
	if diff := cmp.Diff(want, texts(in(t, ns, Addresses))); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestAddressStaysUntilItIsNowhereOnTheNode(t *testing.T) {
	t.Parallel()
	ns := newNode(t, links("eth0", "eth1"))
	for _, step := range [][2]string{
		{"address add 198.51.100.11/24 dev eth0", "198.51.100.11"},
		{"address add 198.51.100.11/32 dev eth0", "198.51.100.11"},
		{"address add 198.51.100.11 peer 10.1.1.1/32 dev eth0", "198.51.100.11"},
		{"address add 198.51.100.11/24 dev eth1", "198.51.100.11"},
		{"address del 198.51.100.11/24 dev eth0", "198.51.100.11"},
		{"address del 198.51.100.11/32 dev eth0", "198.51.100.11"},
		{"address del 198.51.100.11 peer 10.1.1.1/32 dev eth0", "198.51.100.11"},
		{"address del 198.51.100.11/24 dev eth1", ""},
		{"address add 2001:db8::11/64 dev eth0 nodad", "2001:db8::11"},
		{"address add 2001:db8::11/128 dev eth1 nodad", "2001:db8::11"},
		{"address del 2001:db8::11/64 dev eth0", "2001:db8::11"},
		{"link set eth1 down", ""},
		{"address add 2001:db8::11/128 dev lo nodad", "2001:db8::11"},
	} {
		ip(t, ns, step[0])
		if got := texts(in(t, ns, Addresses)); got != step[1] {
			t.Errorf("%s: the node has %q, want %q", step[0], got, step[1])
		}
	}
}

// The kernel masquerades with an address of another interface where the one that packets leave by
// has none.
func TestInterfaceOfAnAddressIsFoundWhicheverPacketsLeaveBy(t *testing.T) {
	t.Parallel()
	ns := newNode(t, links("eth0", "eth1"), `address add 198.51.100.11/24 dev eth1
address add 198.51.100.11/32 dev lo
address add 10.1.1.1 peer 10.1.1.2/32 dev eth1
address add 2001:db8::11/64 dev eth1 nodad
route add default dev eth0`)
	for addr, want := range map[string]string{
		"198.51.100.11": "lo eth1", "10.1.1.1": "eth1", "10.1.1.2": "", "198.51.100.12": "", "127.0.0.1": "lo",
		"2001:db8::11": "eth1", "2001:db8::12": "",
	} {
		if got := namesOf(in(t, ns, func() ([]Interface, error) { return With(netip.MustParseAddr(addr)) })); got != want {
			t.Errorf("%s is an address of %q, want %q", addr, got, want)
		}
	}
	pod, dst := netip.MustParseAddr("10.244.1.2"), netip.MustParseAddr("203.0.113.9")
	way := in(t, ns, func() (Routes, error) { return Lookup(pod, dst, "") }).Ways[0]
	of := namesOf(in(t, ns, func() ([]Interface, error) { return With(way.Address) }))
	if way.Interface.Name != "eth0" || of != "lo eth1" {
		t.Errorf("by %s, %s is the address of %q", way.Interface.Name, way.Address, of)
	}
}

func namesOf(all []Interface) string {
	var names []string
	for _, i := range all {
		names = append(names, i.Name)
	}
	return strings.Join(names, " ")
}
