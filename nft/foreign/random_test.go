package foreign_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/foreign"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/routes"
)

// randomRules returns a ruleset of conditions and verdicts that the interpreter knows.
func randomRules(r *rand.Rand) string {
	pick := func(of ...string) string { return of[r.IntN(len(of))] }
	last := []string{"a", "b", "c"}
	rule := func(chain int) string {
		var words []string
		for range r.IntN(3) {
			words = append(words, pick(
				"ip saddr 10.0.1.%d", "ip saddr 10.0.1.%d/30", "ip saddr != 10.0.1.%d/31", "ip saddr @sources",
				"ip saddr < 10.0.1.%d", "ip daddr 10.0.2.%d", "ip daddr 10.0.2.%d/30", "ip daddr != 10.0.2.%d",
				"ip daddr @dests", "ip daddr != @dests", "ip daddr & 0.0.0.5 == 0.0.0.%d", "meta mark %d",
				"meta mark & 1 == 1", "meta mark & 0x4000 == 0", "meta mark & 0x4000 == 0x4000", "meta mark != %d",
				"meta mark > %d", `iifname "cali0"`, `iifname != "cali*"`, `iifname { "cali0", "docker0" }`,
				`oifname "eth0"`, `oifname != "eth%d"`, `oifname "lo"`, `oif != "lo"`, "ct state new",
				"ct state established", "ct status dnat", "ct status != dnat", "fib daddr type local",
				"fib daddr type != local", "fib saddr type local", "fib saddr type unicast",
				"meta nfproto ipv4", "meta l4proto tcp"))
			if strings.Contains(words[len(words)-1], "%d") {
				words[len(words)-1] = fmt.Sprintf(words[len(words)-1], r.IntN(8))
			}
		}
		if r.IntN(8) == 0 {
			words = append(words, fmt.Sprintf("meta mark set %s",
				pick("1", "3", "meta mark or 0x4000", "meta mark and 0xffffbfff", "meta mark xor 0x1")))
		}
		verdicts := []string{
			"masquerade", "snat ip to 192.0.2.1", "accept", "return", "drop", "snat ip to ip saddr",
			"ip saddr vmap @bysource", "ip daddr . iifname vmap @bydest", "ip saddr vmap @intervals",
			"snat ip to ip saddr map @addresses",
		}
		for _, to := range last[chain:] {
			verdicts = append(verdicts, "jump "+to, "jump "+to, "goto "+to)
		}
		return strings.Join(append(words, pick(verdicts...)), " ")
	}
	var b strings.Builder
	b.WriteString(`table inet t {
		set sources { type ipv4_addr; elements = { 10.0.1.1, 10.0.1.2, 10.0.1.6 }; }
		set dests { type ipv4_addr; flags interval; elements = { 10.0.2.2-10.0.2.4, 10.0.2.7 }; }
		map addresses { type ipv4_addr : ipv4_addr
			elements = { 10.0.1.1 : 192.0.2.11, 10.0.1.4 : 192.0.2.12 }
		}
		map bysource { type ipv4_addr : verdict
			elements = { 10.0.1.1 : jump c, 10.0.1.5 : accept, 10.0.1.6 : goto c, * : jump c }
		}
		map bydest { type ipv4_addr . ifname : verdict
			elements = { 10.0.2.1 . "cali0" : jump c, 10.0.2.2 . "docker0" : accept, 10.0.2.3 . "cali0" : return }
		}
		map intervals { type ipv4_addr : verdict; flags interval
			elements = { 10.0.1.0-10.0.1.3 : jump c, 10.0.1.5-10.0.1.6 : drop }
		}
	`)
	for i := 2; i >= -1; i-- {
		head := "chain post { type nat hook postrouting priority 100;\n"
		if i >= 0 {
			head = "chain " + last[i] + " {\n"
		}
		b.WriteString(head)
		for range 1 + r.IntN(4) {
			text := rule(i + 1)
			if i == 2 { // the maps lead to this chain
				text = strings.NewReplacer("ip saddr vmap @bysource", "accept", "ip daddr . iifname vmap @bydest", "return",
					"ip saddr vmap @intervals", "masquerade").Replace(text)
			}
			b.WriteString(text + "\n")
		}
		b.WriteString("}\n")
	}
	return b.String() + "}\n"
}

// What may happen to a packet from one address to another is found for packets from any
// address to it, and among all packets.
func TestWhatMayHappenToOnePacketIsFoundForAll(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft")
	ns, c := dialNS(t)
	r := rand.New(rand.NewPCG(7, 9))
	exempt := prefixes(t, "10.0.2.0/30 10.0.2.6/32")
	rounds, translated := 300, 0
	if testing.Short() {
		rounds = 100
	}
	for range rounds {
		rules := randomRules(r)
		if nfttest.KernelBefore(t, 5, 13) { // maps have no *
			rules = strings.ReplaceAll(rules, ", * : jump c", "")
		}
		nfttest.NFT(t, ns, "flush ruleset\n"+rules, "-f", "-")
		tracer, err := foreign.NewTracer(t.Context(), c, notOwn)
		if err != nil {
			t.Fatal(err)
		}
		s := read(t, c)
		conflicts := map[uint64]bool{}
		for _, c := range conflictsOf(s, exempt) {
			conflicts[c.Rule.Handle] = true
		}
		rewrites := foreign.FindRewrites(s)
		p := foreign.Packet{
			SrcType: unix.RTN_UNICAST, DstType: unix.RTN_UNICAST,
			In:  routes.Interface{Name: []string{"cali0", "docker0"}[r.IntN(2)], Index: 5},
			Out: routes.Interface{Name: "eth0", Index: 2},
		}
		for i := range 8 * 8 {
			p.Src, p.Dst = netip.Addr{}, modelAddr(2, i/8)
			all := tracer.TraceAt(p, unix.NF_INET_POST_ROUTING)
			handles := map[uint64]bool{}
			for _, w := range all.Ways {
				handles[w.Rule.Handle] = true
			}
			p.Src = modelAddr(1, i%8)
			one := tracer.TraceAt(p, unix.NF_INET_POST_ROUTING)
			for _, w := range one.Ways {
				isExempt := exempt[0].Contains(p.Dst) || exempt[1].Contains(p.Dst)
				switch at := w.Rule.Handle; {
				case !handles[at]:
					t.Fatalf("%s to %s: not found for any source: %s\n%s", p.Src, p.Dst, w.RuleText(), rules)
				case !w.Drops && isExempt && !conflicts[at]:
					t.Fatalf("%s to %s: not a conflict: %s\n%s", p.Src, p.Dst, w.RuleText(), rules)
				case !w.Drops && !rewrites.Meet(p.Src, p.Dst, i%2 == 0):
					t.Fatalf("%s to %s: not among the rewrites: %s\n%s", p.Src, p.Dst, w.RuleText(), rules)
				}
				translated++
			}
			if one.Through && !all.Through {
				t.Fatalf("%s to %s passes, but no source does\n%s", p.Src, p.Dst, rules)
			}
		}
	}
	if translated < 10*rounds {
		t.Errorf("%d translations", translated)
	}
}
