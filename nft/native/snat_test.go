package native_test

import (
	"net/netip"
	"testing"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfttest/cases"
)

// An unfinished update leaves a second set of snatAddresses. Rules refer to
// neither of the two.
func TestListOfAnUnfinishedUpdateIsNotUsed(t *testing.T) {
	compile := func(addresses ...string) nft.Ruleset {
		c := config.Default(config.Defaults{})
		c.SNATAddresses = cases.CIDRs(addresses...)
		return nft.Compile(c, nft.Options{Layout: native.Layout{}, RandomFully: true}).On([]netip.Addr{
			netip.MustParseAddr("198.51.100.11"), netip.MustParseAddr("198.51.100.12"),
		})
	}
	now := compile("198.51.100.11/32", "198.51.100.12/32")
	for _, staged := range []nft.Ruleset{compile("198.51.100.11/32"), compile("198.51.100.0/24"), compile("198.51.100.11/32", "198.51.100.12/32")} {
		for _, side := range []string{nft.SideA, nft.SideB} {
			found := native.OwnWithSecond(now.Tables[0], staged.Tables[0], "snat-v4", side).ReadBack()
			if !found.Ours || found.Hash() != now.Hash() || !found.Same(now) {
				t.Errorf("%s is staged at %s, and %s read back instead of %s", staged.Hash(), side, found.Hash(), now.Hash())
			}
		}
	}
}
