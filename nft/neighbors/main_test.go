package neighbors

import (
	"flag"
	"os"
	"path/filepath"
	"testing"

	"github.com/mdlayher/netlink"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/kernel"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/rule"
)

func TestMain(m *testing.M) {
	flag.Parse()
	os.Exit(nfttest.Main(m))
}

// open returns the node of the namespace as in a new process, without its interfaces.
func open(tb testing.TB, ns *nfttest.NS) *Node {
	tb.Helper()
	n := New(kernel.New(nfnetlink.New(func() (*netlink.Conn, error) { return nfttest.DialNetfilter(ns) }), rule.String))
	tb.Cleanup(func() {
		if err := n.Close(); err != nil {
			tb.Error(err)
		}
	})
	return n
}

// survey reads our rules and those of others.
func survey(tb testing.TB, n *Node, want nft.Ruleset) *State {
	tb.Helper()
	s, err := n.Survey(tb.Context(), want)
	must(tb, err)
	return s
}

// others reads other programs' rules.
func others(tb testing.TB, n *Node, want nft.Ruleset) Others {
	tb.Helper()
	o, err := survey(tb, n, want).Others()
	must(tb, err)
	return o
}

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// sample returns another program's rules for nft from testdata/foreign.
func sample(t *testing.T, name string) string {
	t.Helper()
	rules, err := os.ReadFile(filepath.Join("../../testdata/foreign", name, "rules.nft"))
	must(t, err)
	return string(rules)
}
