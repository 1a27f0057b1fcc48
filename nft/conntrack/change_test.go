package conntrack

import (
	"context"
	"encoding/binary"
	"errors"
	"net/netip"
	"slices"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
)

func TestOutdatedConnectionsAgreeWithThePolicyBefore(t *testing.T) {
	const pod, node, elsewhere = "10.244.1.2:4000", "192.0.2.1:20000", "198.51.100.8:20000"
	const pod6 = "[fd00::2]:4000"
	exempt := func(cidrs ...string) func(*config.Config) {
		return func(c *config.Config) { c.NonMasqueradeCIDRs = cases.CIDRs(cidrs...) }
	}
	snat := func(c *config.Config) { c.SNATAddresses = cases.CIDRs("198.51.100.8/32") }
	six := func(on bool) func(*config.Config) { return func(c *config.Config) { c.EnableIPv6 = on } }
	by := func(name string) func(*config.Config) {
		return func(c *config.Config) {
			c.NonMasqueradeCIDRs = nil
			c.MasqueradeSrcInterfaces = []config.Interface{{Name: name}}
		}
	}
	leaving := func(cidrs ...string) func(*config.Config) {
		return func(c *config.Config) {
			c.NonMasqueradeCIDRs = cases.CIDRs(cidrs...)
			c.MasqueradeOutInterfaces = []config.Interface{{Name: "eth0"}}
		}
	}
	without := func(c *config.Config) { c.NonMasqueradeSrcCIDRs = cases.CIDRs("10.244.0.0/16") }
	udp := func(src, requested, dst, seenAs string) Entry {
		return entryOf(unix.IPPROTO_UDP, src, requested, dst, seenAs)
	}
	closed := udp(pod, "", "203.0.113.9:53", node)
	closed.State = "TIME_WAIT"
	zone := udp(pod, "", "203.0.113.9:53", node)
	zone.Zone = 7
	for _, tt := range []struct {
		name           string
		before, policy func(*config.Config)
		entry          Entry
		want           bool
	}{
		{"now exempt", exempt(), exempt("203.0.113.0/24"), udp(pod, "", "203.0.113.9:53", node), true},
		{"now masqueraded", exempt("203.0.113.0/24"), exempt(), udp(pod, "", "203.0.113.9:53", pod), true},
		{"right", exempt(), exempt("203.0.113.0/24"), udp(pod, "", "203.0.113.9:53", pod), false},
		{
			"contradicted both", exempt("203.0.113.0/25"), exempt("203.0.113.0/24"),
			udp(pod, "", "203.0.113.9:53", node), false,
		},
		{
			"the same policy", exempt("203.0.113.0/24"), exempt("203.0.113.0/24"),
			udp(pod, "", "203.0.113.9:53", node), false,
		},
		{"not this destination", exempt(), exempt("203.0.113.0/24"), udp(pod, "", "203.0.114.9:53", node), false},
		{"now without a source", exempt(), without, udp(pod, "", "203.0.113.9:53", node), true},
		{"IPv6 is on now", six(false), six(true), udp(pod6, "", "[2001:db8:9::1]:53", pod6), true},
		{"IPv6 is off now", six(true), six(false), udp(pod6, "", "[2001:db8:9::1]:53", "[2001:db8::1]:9"), true},
		{"other addresses", snat, exempt(), udp(pod, "", "203.0.113.9:53", elsewhere), false},
		{
			"exempt, on which interface before is not known", leaving(), leaving("203.0.113.0/24"),
			udp(pod, "", "203.0.113.9:53", node), true,
		},
		{"masqueraded on some interfaces", exempt("0.0.0.0/0"), leaving(), udp(pod, "", "203.0.113.9:53", pod), false},
		{"another interface", by("pod0"), by("next0"), udp(pod, "", "203.0.113.9:53", node), false},
		{
			"received on the interface", by("eth9"), by("cni0"),
			udp("10.244.2.2:9", "", "203.0.113.9:53", "10.244.2.2:9"), true,
		},
		{"Service", exempt(), exempt("203.0.113.0/24"), udp(pod, "10.96.0.10:53", "203.0.113.9:53", node), false},
		{"hairpin", exempt(), exempt("0.0.0.0/0"), udp(pod, "10.96.0.10:53", "10.244.1.2:53", node), false},
		{"from the node", exempt("0.0.0.0/0"), exempt(), udp("192.0.2.1:9", "", "203.0.113.9:53", "192.0.2.1:9"), false},
		{"to the node", exempt(), exempt("0.0.0.0/0"), udp(pod, "", "192.0.2.1:53", pod), false},
		{"multicast", exempt("0.0.0.0/0"), exempt(), udp(pod, "", "224.0.0.1:53", pod), false},
		{"bridge", exempt("0.0.0.0/0"), exempt(), udp("10.244.0.2:9", "", "10.244.0.3:9", "10.244.0.2:9"), false},
		{"closed", exempt(), exempt("203.0.113.0/24"), closed, false},
		{"zone", exempt(), exempt("203.0.113.0/24"), zone, false},
	} {
		c := Change{Before: comparisonOf(tt.before), InForce: comparisonOf(tt.policy)}
		if got := c.Outdated(&tt.entry); got != tt.want {
			t.Errorf("%s: %t, want %t", tt.name, got, tt.want)
		}
	}
}

func toward(dst string) func(*Entry) bool {
	return func(e *Entry) bool { return e.Destination().Addr() == netip.MustParseAddr(dst) }
}

// Each connection is asked about again right before it is deleted.
func TestDeletionOfWhatIsStillDoomed(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNS(t, "node")
	table := newTable(dialIn(ns))
	insert(t, ns, untranslated(20, "203.0.113.1")...)
	insert(t, ns, untranslated(20, "203.0.113.2")...)
	asked := map[Key]int{}
	deleted, err := table.Delete(t.Context(), func(e *Entry) bool {
		asked[e.Key]++
		return asked[e.Key] == 1 || e.Destination().Addr() == netip.MustParseAddr("203.0.113.1")
	})
	if err != nil || deleted != 20 {
		t.Errorf("deleted %d: %v", deleted, err)
	}
	if got := left(t, table); !slices.Equal(got, []string{"203.0.113.2"}) {
		t.Errorf("connections to %q are left", got)
	}
}

// The kernel rejects to delete entries in a flowtable before Linux 6.4. The others are deleted.
func TestEntriesThatTheKernelKeepsDoNotEndADeletion(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNS(t, "node")
	const all = 20
	insert(t, ns, untranslated(all, "203.0.113.9")...)
	rejected := 0
	table := newTable(nfttest.Through(dialIn(ns), func(m *netlink.Message) error {
		if m.Header.Type&0xff == msgDelete && rejected < 3 {
			rejected++
			return unix.EBUSY
		}
		return nil
	}, nil))
	if deleted, err := table.Delete(t.Context(), toward("203.0.113.9")); err != nil || deleted != all-3 {
		t.Errorf("deleted %d: %v", deleted, err)
	}
	if n := len(entries(t, newTable(dialIn(ns)))); n != 3 {
		t.Errorf("%d are left", n)
	}
	forbidden := newTable(nfttest.Through(dialIn(ns), func(m *netlink.Message) error {
		if m.Header.Type&0xff == msgDelete {
			return unix.EPERM
		}
		return nil
	}, nil))
	if deleted, err := forbidden.Delete(t.Context(), toward("203.0.113.9")); !errors.Is(err, unix.EPERM) || deleted != 0 {
		t.Errorf("without the right to do it: deleted %d: %v", deleted, err)
	}
}

func TestDeletionEndsWithItsContextAndContinuesAfterAFailure(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNS(t, "node")
	const all, few = 300, 20
	insert(t, ns, untranslated(all, "203.0.113.9")...)
	broken := errors.New("broken")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	failing := true
	through := newTable(throughSocket(dialIn(ns), func(n int) error {
		if n != few || ctx.Err() != nil {
			return nil //nolint:nilerr // an ended pass does not fail
		}
		if failing {
			return broken
		}
		cancel()
		return nil
	}))
	doomed := toward("203.0.113.9")
	first, err := through.Delete(ctx, doomed)
	if !errors.Is(err, broken) || first == 0 || first > few {
		t.Errorf("deleted %d: %v", first, err)
	}
	failing = false
	second, err := through.Delete(ctx, doomed)
	if !errors.Is(err, context.Canceled) || first+second == all {
		t.Errorf("deleted %d: %v", second, err)
	}
	if third, err := through.Delete(t.Context(), doomed); err != nil || first+second+third != all {
		t.Errorf("deleted %d: %v", third, err)
	}
	if got := left(t, newTable(dialIn(ns))); len(got) > 0 {
		t.Errorf("connections to %q are left", got)
	}
}

func TestNewerEntryWithTheSameAddressesAndPortsIsNotDeleted(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNS(t, "node")
	table := newTable(dialIn(ns))
	insert(t, ns, untranslated(1, "203.0.113.9")...)
	current := entries(t, table)[0]
	other := netip.MustParseAddrPort("203.0.113.8:53")
	for name, change := range map[string]func(*Entry){
		"another ID":                                 func(e *Entry) { e.ID++ },
		"the same ID, but another translation":       func(e *Entry) { e.Reply.Dst = other },
		"the same ID, but another port":              func(e *Entry) { e.Reply.Dst = withPort(e.Reply.Dst, 1) },
		"the same ID, but another destination":       func(e *Entry) { e.Reply.Src = other },
		"the same ID, but another address asked for": func(e *Entry) { e.Original.Dst = other },
	} {
		before := current.clone()
		change(&before)
		if remove(t, table, before) || len(entries(t, table)) != 1 {
			t.Errorf("%s: it was deleted, want it to stay", name)
		}
	}
	if removeIf(t, table, current, func(*Entry) bool { return false }) {
		t.Error("it was deleted although it is not doomed")
	}
	// Another one took its place after it was asked about.
	replaced := newTable(changing(dialIn(ns), nil, func(m *netlink.Message) {
		_ = nfnetlink.Each(m.Data[headerLen:], func(typ uint16, data []byte) error {
			if typ == ctaID {
				binary.BigEndian.PutUint32(data, current.ID+1)
			}
			return nil
		})
	}))
	before := current.clone()
	before.ID++
	if remove(t, replaced, before) {
		t.Error("it was deleted in place of another one")
	}
	if !remove(t, table, current) || remove(t, table, current) {
		t.Error("it was not deleted, or twice")
	}
}

// left returns the destinations of the connections that are left.
func left(t *testing.T, table *Tracker) (dsts []string) {
	t.Helper()
	for _, e := range entries(t, table) {
		dsts = append(dsts, e.Destination().Addr().String())
	}
	slices.Sort(dsts)
	return slices.Compact(dsts)
}

func withPort(a netip.AddrPort, port uint16) netip.AddrPort {
	return netip.AddrPortFrom(a.Addr(), port)
}
