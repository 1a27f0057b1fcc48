package nft_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
)

func TestEachListIsComparedByItsKey(t *testing.T) {
	const few = 2
	policy := func(key, entries string) (nft.Policy, error) {
		text := "masqLinkLocal: true\nmasqLinkLocalIPv6: true\nenableIPv6: true\n" + key + ": [" + entries + "]\n"
		c, problems := config.Parse(config.Defaults{}, config.Source{Name: "config", Data: []byte(text)})
		return nft.NewPolicy(c, nft.Options{Layout: native.Layout{}}), problems.Err()
	}
	tested := 0
	for _, key := range config.Keys() {
		for _, list := range []struct {
			before, after string
			count         int
			first         []string
		}{
			{"192.0.2.0/25, 2001:db8::/33", "2001:db8::/33, 192.0.2.0/24", 1, []string{"192.0.2.0/24"}},
			{
				"192.0.2.0/24", "192.0.2.0/24, 198.51.100.7/32, 2001:db8::/32, 203.0.113.0/24",
				3,
				[]string{"198.51.100.7/32", "203.0.113.0/24"},
			},
			{"eth7", "eth7, wg*", 1, []string{"wg*"}},
			{"eth7", "eth1, eth2, eth3", 3, []string{"eth1", "eth2"}},
		} {
			before, err := policy(key, list.before)
			after, errAfter := policy(key, list.after)
			if err != nil || errAfter != nil {
				continue // not entries of this list
			}
			tested++
			want := nft.Entries{Count: list.count}
			for _, entry := range list.first {
				if key == config.KeySNATAddresses && entry == "198.51.100.7/32" {
					entry = "198.51.100.7"
				}
				want.First = append(want.First, key+": "+entry)
			}
			if diff := cmp.Diff(want, after.Beyond(before, few)); diff != "" {
				t.Errorf("%s: %s is now %s (-want +got):\n%s", key, list.before, list.after, diff)
			}
			if diff := cmp.Diff(nft.Entries{}, after.Beyond(after, few)); diff != "" {
				t.Errorf("unchanged (-want +got):\n%s", diff)
			}
		}
	}
	if tested != 2*(5+3) {
		t.Errorf("%d lists were compared", tested)
	}
}
