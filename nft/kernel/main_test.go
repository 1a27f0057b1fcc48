package kernel

import (
	"context"
	"os"
	"testing"

	"github.com/mdlayher/netlink"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
)

func TestMain(m *testing.M) {
	os.Exit(nfttest.Main(m))
}

// dialIn returns a function that opens sockets in the namespace, including
// replacements of failed ones.
func dialIn(ns *nfttest.NS) func() (*netlink.Conn, error) {
	return func() (*netlink.Conn, error) { return nfttest.DialNetfilter(ns) }
}

// connect returns a connection to nf_tables in the namespace.
func connect(t testing.TB, ns *nfttest.NS) *nfnetlink.Conn {
	t.Helper()
	c := nfnetlink.New(dialIn(ns))
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

// open returns the kernel of the namespace as in a new process, without state.
func open(t testing.TB, ns *nfttest.NS) *Kernel {
	t.Helper()
	k := New(connect(t, ns))
	t.Cleanup(func() {
		if err := k.scraping.Close(); err != nil {
			t.Error(err)
		}
	})
	return k
}

// apply applies and returns the differences that it found.
func apply(t testing.TB, k *Kernel, want nft.Ruleset, depth nft.Depth) []string {
	t.Helper()
	a, err := k.Apply(t.Context(), want, depth)
	nfttest.NoError(t, err)
	return a.Differences
}

const everything = nft.WithLeftovers

// inSync fails the test unless the kernel has exactly what is wanted: a new
// process finds no differences and writes nothing.
func inSync(t testing.TB, ns *nfttest.NS, want nft.Ruleset) {
	t.Helper()
	k := open(t, ns)
	diffs, err := k.Diff(t.Context(), want, everything)
	nfttest.NoError(t, err)
	if len(diffs) > 0 {
		t.Errorf("%d differences, the first is %s", len(diffs), diffs[0])
	}
	before := generation(t, ns)
	for _, look := range []nft.Depth{everything, nft.Contents} {
		if diffs := apply(t, k, want, look); len(diffs) > 0 {
			t.Errorf("a further Apply undid %q", diffs)
		}
	}
	if after := generation(t, ns); after != before {
		t.Errorf("a further Apply wrote: generation %d, was %d", after, before)
	}
}

func generation(t testing.TB, ns *nfttest.NS) uint32 {
	t.Helper()
	g, err := connect(t, ns).Generation()
	nfttest.NoError(t, err)
	return g
}

// Diff describes how the kernel differs from the wanted ruleset.
func (k *Kernel) Diff(ctx context.Context, want nft.Ruleset, depth nft.Depth) ([]string, error) {
	s, err := k.Read(ctx, want, depth)
	if err != nil {
		return nil, err
	}
	return texts(s.Differences()), nil
}
