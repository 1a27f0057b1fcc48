package kernel

import (
	"net/netip"
	"runtime"
	"testing"

	"github.com/google/nftables/expr"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/xtables"
)

// flood returns how much another program adds to our tables. Only a small part of
// it is read, which does not exhaust the memory.
func flood() (rules, elements int) {
	return nfttest.FullRounds(8_000, 150_000), nfttest.FullRounds(12_000, 600_000)
}

// fill commits rules of one counter each, or elements, in transactions that fit the
// send buffer.
func fill(t *testing.T, c *nfnetlink.Conn, n int, add func(b *nfnetlink.Batch, from, to int)) {
	t.Helper()
	const most = 25_000
	for from := 0; from < n; from += most {
		b := &nfnetlink.Batch{}
		add(b, from, min(from+most, n))
		if err := c.Commit(b, 0); err != nil {
			t.Fatal(err)
		}
	}
}

func addRules(family nfnetlink.Family, table, chain string) func(*nfnetlink.Batch, int, int) {
	rule := nfnetlink.Rule{Family: family, Table: table, Chain: chain, Exprs: nfnetlink.Marshal(family, &expr.Counter{})}
	return func(b *nfnetlink.Batch, from, to int) {
		for range to - from {
			b.AddRule(rule)
		}
	}
}

func addElements(table, set string) func(*nfnetlink.Batch, int, int) {
	return func(b *nfnetlink.Batch, from, to int) {
		var ps []netip.Prefix
		for i := from; i < to; i++ {
			a := netip.AddrFrom4([4]byte{100, byte(i >> 15), byte(i >> 7), byte(i << 1)})
			ps = append(ps, netip.PrefixFrom(a, 32))
		}
		b.AddElements(nfnetlink.Inet, table, set, ps)
	}
}

func TestForeignAdditionsAreRemovedWithoutReadingThemCompletely(t *testing.T) {
	nfttest.SkipIfShort(t)
	rules, elements := flood()
	own := nft.Compile(tamperConfig(10), nft.Options{Layout: native.Layout{}})
	shared := xtOf(tamperConfig(10))
	for name, attack := range map[string]struct {
		want nft.Ruleset
		do   func(*testing.T, *nfttest.NS, *nfnetlink.Conn)
	}{
		"elements": {own, func(t *testing.T, ns *nfttest.NS, c *nfnetlink.Conn) {
			fill(t, c, elements, addElements(nft.TableName, (&attacker{t, ns, own}).named("non-masq-v4-?")))
		}},
		"elements of the spare set": {own, func(t *testing.T, ns *nfttest.NS, c *nfnetlink.Conn) {
			nfttest.NFT(t, ns, "add set inet nft-masq-agent non-masq-v4-b { type ipv4_addr; flags interval; comment "+
				"\"destinations that see the pod's own address\"; }", "-f", "-")
			fill(t, c, elements, addElements(nft.TableName, "non-masq-v4-b"))
		}},
		"elements of a foreign set": {own, func(t *testing.T, ns *nfttest.NS, c *nfnetlink.Conn) {
			nfttest.NFT(t, ns, "add set inet nft-masq-agent foreign { type ipv4_addr; flags interval; }", "-f", "-")
			fill(t, c, elements, addElements(nft.TableName, "foreign"))
		}},
		"rules": {own, func(t *testing.T, _ *nfttest.NS, c *nfnetlink.Conn) {
			fill(t, c, rules, addRules(nfnetlink.Inet, nft.TableName, native.BaseChain))
		}},
		"rules of a foreign chain before ours": {own, func(t *testing.T, ns *nfttest.NS, c *nfnetlink.Conn) {
			nfttest.NFT(t, ns, "delete table inet nft-masq-agent; add table inet nft-masq-agent; add chain inet "+
				"nft-masq-agent foreign { type filter hook forward priority 0; }", "-f", "-")
			fill(t, c, rules, addRules(nfnetlink.Inet, nft.TableName, "foreign"))
		}},
		"rules in mode iptables-nft": {shared, func(t *testing.T, _ *nfttest.NS, c *nfnetlink.Conn) {
			fill(t, c, rules, addRules(nfnetlink.IPv4, xtables.NATTable, cases.DefaultChain))
		}},
	} {
		t.Run(name, func(t *testing.T) {
			for _, restarted := range []bool{false, true} {
				ns := nfttest.NewNS(t, "node")
				k := open(t, ns)
				apply(t, k, attack.want, everything)
				attack.do(t, ns, connect(t, ns))
				if restarted {
					k = open(t, ns)
				}
				var before, after runtime.MemStats
				runtime.ReadMemStats(&before)
				_, _, err := k.Installed(t.Context()) // like a start with a bad file
				if err != nil {
					t.Error(err)
				}
				a, err := k.Apply(t.Context(), attack.want, everything)
				runtime.ReadMemStats(&after)
				if err != nil || len(a.Differences) == 0 {
					t.Errorf("restarted %t: Apply found %q, %v", restarted, a.Differences, err)
				}
				const most = 64 << 20
				if used := after.TotalAlloc - before.TotalAlloc; used > most {
					t.Errorf("restarted %t: allocated %d MiB", restarted, used>>20)
				}
				t.Logf("restarted %t: %v, %d MiB allocated, recreated %t, %q", restarted, a.Took,
					(after.TotalAlloc-before.TotalAlloc)>>20, a.Recreated, a.Differences[0])
				inSync(t, ns, attack.want)
			}
		})
	}
}
