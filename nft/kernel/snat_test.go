package kernel

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
)

// fixed is a ruleset with fixed source addresses on a node with some of them.
func fixed(node ...string) nft.Ruleset {
	c := config.Default(config.Defaults{EnableIPv6: true})
	c.SNATAddresses = cases.CIDRs("198.51.100.208/29", "2001:db8:5::/64")
	return nft.Compile(c, nft.Options{Layout: native.Layout{}, RandomFully: true}).On(cases.Addrs(node...))
}

// If an address is added or removed, only the map changes, or the rule for a single address.
func TestChangeOfAddressesKeepsTheOtherSets(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNS(t, "node")
	k := open(t, ns)
	handles := func() map[string]uint64 {
		t.Helper()
		sets, err := connect(t, ns).Sets(1, nft.TableName)
		if err != nil {
			t.Fatal(err)
		}
		all := map[string]uint64{}
		for _, s := range sets {
			if !strings.HasPrefix(s.Name, "snat-by-pod") {
				all[s.Name] = s.Handle
			}
		}
		return all
	}
	apply(t, k, fixed(), everything)
	before := handles()
	for _, node := range [][]string{
		{"198.51.100.211"},
		{"198.51.100.211", "198.51.100.212"},
		{"198.51.100.213", "198.51.100.212"},
		{"198.51.100.213"},
		{"2001:db8:5::2", "2001:db8:5::3"},
		{},
	} {
		want := fixed(node...)
		if diffs := apply(t, k, want, layout.Ours); len(diffs) == 0 {
			t.Errorf("%v: nothing was written", node)
		}
		inSync(t, ns, want)
		if diff := cmp.Diff(before, handles()); diff != "" {
			t.Errorf("%v: sets (-before +after):\n%s", node, diff)
		}
		if got, found, err := open(t, ns).Installed(t.Context()); err != nil || !found || got.Hash != want.Hash() {
			t.Errorf("%v: installed are %+v, %t, %v", node, got, found, err)
		}
	}
}

// The most entries with port ranges are more rules than are read of another program's.
func TestMostEntriesAreInSyncOnceApplied(t *testing.T) {
	nfttest.SkipIfShort(t)
	t.Parallel()
	ns := nfttest.NewNS(t, "node")
	c := config.Default(config.Defaults{EnableIPv6: true})
	for i := range 64 {
		r := config.SNATRule{
			From:      cases.CIDRs(fmt.Sprintf("10.%d.0.0/16", i), fmt.Sprintf("fd00:%x::/32", i+1)),
			Addresses: cases.CIDRs("198.51.100.211/32", "2001:db8:5::/64"),
		}
		r.Out = []config.Interface{{Name: "eth1"}, {Name: "wan*"}}
		c.SNATRules = append(c.SNATRules, r)
	}
	o := nft.Options{Layout: native.Layout{}, RandomFully: true}
	for i := range uint16(4) {
		o.Ports = append(o.Ports, nft.PortRange{Min: 10_000 * (i + 1), Max: 10_000*(i+1) + 999})
	}
	k := open(t, ns)
	want := nft.Compile(c, o).On(cases.Addrs("198.51.100.211", "2001:db8:5::2"))
	apply(t, k, want, everything)
	inSync(t, ns, want)
	want = want.On(nil)
	apply(t, k, want, everything)
	inSync(t, ns, want)
}
