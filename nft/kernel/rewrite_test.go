package kernel

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
)

// withBlocks returns a config with port blocks, and with addresses of which the node has some.
func withBlocks(addresses string, size int, node ...string) nft.Ruleset {
	c := config.Config{
		NonMasqueradeCIDRs: cases.CIDRs("10.0.0.0/8"), MasqueradeSrcCIDRs: cases.CIDRs("10.244.0.0/16"),
		PortsPerPod: config.PodPorts(size),
	}
	if addresses != "" {
		c.SNATAddresses = cases.CIDRs(addresses)
	}
	return nft.Compile(c, nft.Options{Layout: native.Layout{}}).WithAddresses(cases.Addrs(node...))
}

// Next to a program that commits before each of our transactions, no transaction that is guarded by the generation
// comes through. Chains do not need one.
func TestChainsAreWrittenAgainAtAnyGeneration(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft")
	ns := nfttest.NewNS(t, "node")
	want := withBlocks("", 1000)
	commit, disturbed, guarded := commits(t, ns), false, 0
	k := nextTo(t, ns, func(tr transaction) {
		if tr.guarded() {
			guarded++
		}
		if disturbed {
			commit()
		}
	})
	apply(t, k, want, nft.Contents)
	for _, does := range []string{
		"flush chain TABLE postrouting", "flush chain TABLE pod-ports", "flush chain TABLE node-ports",
		"flush chain TABLE ports-7", "add rule TABLE ports-9 accept", "insert rule TABLE postrouting accept",
		"add chain TABLE postrouting { policy drop; }",
	} {
		attack(t, ns, does)
		disturbed, guarded = true, 0
		a, err := k.Apply(t.Context(), want, nft.Frame)
		disturbed = false
		if err != nil || len(a.Differences) == 0 || guarded > 0 {
			t.Errorf("%s: %q, %v, %d guarded transactions", does, a.Differences, err, guarded)
		}
		inSync(t, ns, want)
	}
}

// Next to a program that commits every 5 ms, a table is replaced, too, in which the kernel counts more than it lists.
func TestTableIsReplacedNextToAProgramThatCommitsAllTheTime(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft")
	for _, does := range []string{
		"add set TABLE theirs { type ipv4_addr; timeout 1h; }", "add quota TABLE theirs { 10 mbytes }",
		"add flowtable TABLE theirs { hook ingress priority 0; }",
		"add chain TABLE theirs { type filter hook output priority 0; jump pod-ports; }",
	} {
		t.Run(does, func(t *testing.T) {
			t.Parallel()
			ns := nfttest.NewNS(t, "node")
			k, want := open(t, ns), withBlocks("", 1000)
			apply(t, k, want, nft.Contents)
			if _, err := ns.Output(strings.ReplaceAll(does, "TABLE", "inet "+nft.TableName), "nft", "-f", "-"); err != nil {
				t.Skipf("this kernel does not have it: %v", err)
			}
			disturb(t, ns, 5*time.Millisecond)
			if a, err := k.Apply(t.Context(), want, nft.Frame); err != nil || len(a.Differences) == 0 {
				t.Errorf("%q, %v", a.Differences, err)
			}
			if left, err := k.Diff(t.Context(), want, nft.Frame); err != nil || len(left) > 0 {
				t.Errorf("then there are %q, %v", left, err)
			}
		})
	}
}

// A check next to a program that commits reads few rules, however many blocks there are: their number is in the list of
// chains.
func TestCheckReadsNoRulesOfBlocks(t *testing.T) {
	t.Parallel()
	var listed []string
	k := (&faults{dial: dialIn(nfttest.NewNS(t, "node")), before: func(_ call, msgs []netlink.Message) {
		m := msgs[0]
		if isRequest(m, unix.NFT_MSG_GETRULE) {
			listed = append(listed, nfnetlink.Attrs(m.Data[4:]).Str(unix.NFTA_RULE_CHAIN))
		}
	}}).open()
	t.Cleanup(func() { _ = k.Close() })
	want := withBlocks("", 250)
	apply(t, k, want, nft.Contents)
	for depth, chains := range map[nft.Depth][]string{
		nft.Frame: {"node-ports", "pod-ports", "postrouting"}, nft.Contents: {""}, // all chains in one list
	} {
		listed = nil
		if diffs := apply(t, k, want, depth); len(diffs) > 0 || !slices.Equal(listed, chains) {
			t.Errorf("depth %d: differences %q, and the rules of %q are listed, want %q", depth, diffs, listed, chains)
		}
	}
}

// An address that comes or goes changes rules and maps. The other sets stay, and their elements are not read.
func TestAddressesChangeInAFrame(t *testing.T) {
	t.Parallel()
	for name, compile := range map[string]func(node ...string) nft.Ruleset{
		"both families": fixed,
		"blocks":        func(node ...string) nft.Ruleset { return withBlocks("198.51.100.208/29", 1000, node...) },
	} {
		ns := nfttest.NewNS(t, "node")
		reads := 0
		k := (&faults{dial: dialIn(ns), before: func(_ call, msgs []netlink.Message) {
			if isRequest(msgs[0], unix.NFT_MSG_GETSETELEM) {
				reads++
			}
		}}).open()
		t.Cleanup(func() { _ = k.Close() })
		apply(t, k, compile(), everything)
		before := otherSets(t, ns)
		reads = 0
		for _, node := range []string{
			"198.51.100.211", "198.51.100.211 198.51.100.212", "198.51.100.213 198.51.100.212", "",
			"2001:db8:5::2 2001:db8:5::3 198.51.100.213", "2001:db8:5::3 198.51.100.211",
		} {
			want := compile(strings.Fields(node)...)
			if diffs := apply(t, k, want, nft.Frame); len(diffs) == 0 || reads > 0 {
				t.Errorf("%s, %q: %d differences, elements were read %d times", name, node, len(diffs), reads)
			}
			inSync(t, ns, want)
			if diffs := apply(t, k, want, nft.Frame); len(diffs) > 0 {
				t.Errorf("%s, %q: then there are %q", name, node, diffs)
			}
			if diff := cmp.Diff(before, otherSets(t, ns)); diff != "" {
				t.Errorf("%s, %q: sets (-before +after):\n%s", name, node, diff)
			}
			if got, found, err := k.Installed(t.Context()); err != nil || !found || got.Hash != want.Hash() {
				t.Errorf("%s, %q: installed are %+v, %t, %v", name, node, got, found, err)
			}
		}
	}
}

// otherSets returns the handles of sets that do not follow the addresses of the node.
func otherSets(t *testing.T, ns *nfttest.NS) map[string]uint64 {
	t.Helper()
	sets, err := connect(t, ns).Sets(nfnetlink.Inet, nft.TableName)
	nfttest.NoError(t, err)
	all := map[string]uint64{}
	for _, s := range sets {
		if !strings.Contains(s.Name, "by-pod") {
			all[s.Name] = s.Handle
		}
	}
	return all
}
