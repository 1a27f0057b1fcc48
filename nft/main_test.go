package nft_test

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
)

func TestMain(m *testing.M) {
	os.Exit(nfttest.Main(m))
}

// counterName words a rule that counts.
func counterName(r nfnetlink.Rule) string {
	for _, e := range r.Exprs {
		if e.Name == "objref" {
			return "counter name " + e.Str(unix.NFTA_OBJREF_IMM_NAME)
		}
	}
	return ""
}
