// Package modes writes the rules of one mode into a network namespace, for the tests of the
// mode's own package: as package kernel does it, but without its second reads and retries.
package modes

import (
	"errors"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/mdlayher/netlink"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
)

// A Reader reads the state of a mode.
type Reader func(
	c *nfnetlink.Conn, want, has nft.Ruleset, depth nft.Depth, staged nft.KernelState,
) (nft.KernelState, error)

// A Node is a network namespace with rules of a mode.
type Node struct {
	*nfttest.NS
	Conn *nfnetlink.Conn
	read Reader
}

// New returns a node without rules, until the test ends.
func New(t testing.TB, read Reader) *Node {
	t.Helper()
	ns := nfttest.NewNS(t, "node")
	conn := nfnetlink.New(func() (*netlink.Conn, error) { return nfttest.DialNetfilter(ns) })
	t.Cleanup(func() { _ = conn.Close() })
	return &Node{ns, conn, read}
}

// Load runs a transaction of nft.
func (n *Node) Load(t testing.TB, text string) {
	t.Helper()
	nfttest.NFT(t, n.NS, text, "-f", "-")
}

// Read reads the state.
func (n *Node) Read(t testing.TB, want nft.Ruleset, depth nft.Depth) nft.KernelState {
	t.Helper()
	s, err := n.read(n.Conn, want, nft.Ruleset{}, depth, nil)
	nfttest.NoError(t, err)
	return s
}

// kinds are the kinds of differences, as [Texts] begins with them.
var kinds = map[nft.DifferenceKind]string{
	nft.Drift: "", nft.Unexpected: "odd: ", nft.Leftover: "leftover: ", nft.Overwritten: "replaced: ",
	nft.Prevented: "prevented: ",
}

// Texts returns the differences of a state: the kind, unless rules are written again, and
// the text.
func Texts(s nft.KernelState) (all []string) {
	for _, d := range s.Differences() {
		all = append(all, kinds[d.Kind]+d.Text)
	}
	return all
}

// Apply writes what is wanted, and returns the differences that there were. Afterwards there
// must be none.
func (n *Node) Apply(t testing.TB, want nft.Ruleset, depth nft.Depth) (found []string) {
	t.Helper()
	s := n.Read(t, want, depth)
	found = Texts(s)
	n.Write(t, s)
	if left := Texts(n.Read(t, want, depth)); len(left) > 0 {
		t.Errorf("after the differences %q were removed, there are %q", found, left)
	}
	return found
}

// Write carries out a state.
func (n *Node) Write(t testing.TB, s nft.KernelState) {
	t.Helper()
	nfttest.NoError(t, s.Stage(t.Context(), n.Conn.Commit))
	switching, after := &nfnetlink.Batch{}, &nfnetlink.Batch{}
	s.Switch(switching, after)
	nfttest.NoError(t, errors.Join(n.Conn.Commit(switching), n.Conn.Commit(after)))
}

// Match compares texts. "…" in the wanted ones stands for any others, and at the end of
// one for any rest.
func Match(found, want []string) bool {
	joined := func(texts []string) string {
		return strings.Join(slices.Concat([]string{""}, texts, []string{""}), "\x00")
	}
	pattern := regexp.QuoteMeta(joined(want))
	pattern = strings.ReplaceAll(pattern, "\x00…\x00", "\x00(.*\x00)*")
	pattern = strings.ReplaceAll(pattern, "…\x00", "[^\x00]*\x00")
	return regexp.MustCompile("(?s)^" + pattern + "$").MatchString(joined(found))
}
