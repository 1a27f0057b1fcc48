package foreign_test

import (
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/foreign"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/older"
	"nft-masq-agent/nft/rule"
)

var update = flag.Bool("update", false, "rewrite the expect.txt files")

func TestMain(m *testing.M) {
	flag.Parse()
	os.Exit(nfttest.Main(m))
}

const testdata = "../../testdata/foreign"

// defaultExempt is what most configurations exempt.
const defaultExempt = "10.0.0.0/8 172.16.0.0/12 192.168.0.0/16 169.254.0.0/16 fd00::/8 fe80::/10"

func prefixes(t testing.TB, words string) []netip.Prefix {
	t.Helper()
	var out []netip.Prefix
	for _, word := range strings.Fields(words) {
		p, err := netip.ParsePrefix(word)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, p)
	}
	return out
}

// dialNS connects to a new namespace.
func dialNS(t *testing.T) (*nfttest.NS, *nfnetlink.Conn) {
	t.Helper()
	ns := nfttest.NewNS(t, "node")
	return ns, connect(t, ns)
}

func connect(tb testing.TB, ns *nfttest.NS) *nfnetlink.Conn {
	tb.Helper()
	c := nfnetlink.New(func() (*netlink.Conn, error) {
		defer runtime.KeepAlive(ns)
		return netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{NetNS: ns.Fd(), MessageBufferSize: 32 << 10})
	})
	tb.Cleanup(func() { c.Close() })
	return c
}

func notOwn(nfnetlink.Chain) bool { return false }

func read(t *testing.T, c *nfnetlink.Conn) foreign.Snapshot {
	t.Helper()
	s, err := foreign.Read(t.Context(), c, notOwn)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// install loads the rules of a case into the namespace.
func install(t *testing.T, ns *nfttest.NS, name string) {
	t.Helper()
	nfttest.LoadForeign(t, ns, filepath.Join(testdata, name), nil)
}

// text returns a file of a case, empty if there is none.
func text(t *testing.T, name, file string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(testdata, name, file))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	return string(b)
}

func cases(t *testing.T) []string {
	t.Helper()
	dirs, err := os.ReadDir(testdata)
	if err != nil || len(dirs) == 0 {
		t.Fatalf("no cases: %v", err)
	}
	var names []string
	for _, d := range dirs {
		names = append(names, d.Name())
	}
	return names
}

// describe formats what was found, as in expect.txt.
func describe(s foreign.Snapshot, found []older.Chain, exempt []netip.Prefix) string {
	var b strings.Builder
	for _, l := range found {
		fmt.Fprintf(&b, "legacy %s %s %s: rules %d, random-fully %t\n", l.Family, l.Table, l.Name, l.Rules,
			l.RandomFully)
		if l.Base != nil {
			fmt.Fprintf(&b, "\tfrom %s (priority %d)\n", l.Base.Name, l.Base.Hook.Priority)
		}
		for _, sub := range l.SubChains {
			fmt.Fprintf(&b, "\twith %s\n", sub.Name)
		}
		for _, j := range l.Jumps {
			for _, c := range s.Chains {
				for _, r := range c.Rules {
					if c.Family == j.Family && c.Table == j.Table && c.Name == j.Chain && r.Handle == j.Handle {
						fmt.Fprintf(&b, "\tjump in %s: %s\n", j.Chain, rule.String(r))
					}
				}
			}
		}
	}
	for _, c := range conflictsOf(s, exempt) {
		fmt.Fprintf(&b, "conflict %s %s (%s, priority %d)\n", c.Table(), c.Rule.Chain, c.Base, c.Priority)
		for _, v := range c.ViaText() {
			fmt.Fprintf(&b, "\tvia %s\n", v)
		}
		fmt.Fprintf(&b, "\trule %s\n\t%s\n", c.RuleText(), c.Why())
	}
	if b.Len() == 0 {
		return "nothing\n"
	}
	return b.String()
}

func TestRulesOfRealProgramsAreRecognized(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft", "iptables-nft-restore", "ip6tables-nft-restore")
	for _, name := range cases(t) {
		t.Run(name, func(t *testing.T) {
			if text(t, name, "source.txt") == "" {
				t.Error("no source")
			}
			ns, c := dialNS(t)
			install(t, ns, name)
			exempt := defaultExempt
			if words := text(t, name, "exempt.txt"); words != "" {
				exempt = words
			}
			found, err := older.Find(c, c.EachRule, notOwn, rule.String)
			if err != nil {
				t.Fatal(err)
			}
			got := describe(read(t, c), found, prefixes(t, exempt))
			if *update {
				if err := os.WriteFile(filepath.Join(testdata, name, "expect.txt"), []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if diff := cmp.Diff(text(t, name, "expect.txt"), got); diff != "" {
				t.Errorf("found (-want +got):\n%s", diff)
			}
		})
	}
}

func TestOurChainsAreNoConflicts(t *testing.T) {
	nfttest.Require(t, "iptables-nft-restore")
	ns, c := dialNS(t)
	install(t, ns, "ip-masq-agent-two-jumps")
	s, err := foreign.Read(t.Context(), c, func(c nfnetlink.Chain) bool { return c.Name == "IP-MASQ-AGENT" })
	if err != nil {
		t.Fatal(err)
	}
	if found := conflictsOf(s, prefixes(t, "8.0.0.0/8")); len(found) > 0 {
		t.Errorf("conflicts %v", found)
	}
}

// conflictsOf returns the conflicts in a snapshot, which has few enough.
func conflictsOf(s foreign.Snapshot, exempt []netip.Prefix) []foreign.Conflict {
	found, _ := foreign.Conflicts(s, foreign.Share{Exempt: exempt})
	return found
}
