package trace_test

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/routes"
	"nft-masq-agent/nft/trace"
)

func TestMain(m *testing.M) {
	flag.Parse()
	os.Exit(nfttest.Main(m))
}

func dialNS(t *testing.T) (*nfttest.NS, *nfnetlink.Conn) {
	t.Helper()
	ns := nfttest.NewNS(t, "node")
	return ns, connect(t, ns)
}

func connect(t *testing.T, ns *nfttest.NS) *nfnetlink.Conn {
	t.Helper()
	c := nfnetlink.New(func() (*netlink.Conn, error) { return nfttest.DialNetfilter(ns) })
	t.Cleanup(func() { c.Close() })
	return c
}

var everything = trace.Scope{
	Own:   func(nfnetlink.Chain) bool { return false },
	Reads: func(nfnetlink.Chain) bool { return true },
}

func read(t *testing.T, c *nfnetlink.Conn) *trace.Rules {
	t.Helper()
	return readAs(t, c, everything)
}

func readAs(t *testing.T, c *nfnetlink.Conn, of trace.Scope) *trace.Rules {
	t.Helper()
	r, err := trace.Read(c, of)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// randomRules returns a ruleset with chains at all hooks.
func randomRules(r *rand.Rand) string {
	pick := func(of ...string) string { return of[r.IntN(len(of))] }
	subs := []string{"a", "b", "c"}
	rule := func(after int, verdicts ...string) string {
		var words []string
		for range r.IntN(3) {
			words = append(words, pick(
				"ip saddr 10.244.1.%d", "ip saddr 10.244.1.%d/30", "ip saddr != 10.244.1.%d/31", "ip saddr @sources",
				"ip daddr 10.244.2.%d", "ip daddr 10.244.2.%d/30", "ip daddr != 10.244.2.%d",
				"ip daddr @dests", "ip daddr != @dests", "meta mark %d",
				"ip daddr 10.244.2.1-10.244.2.%d", "ip saddr != 10.244.1.1-10.244.1.%d",
				"meta mark & 1 == 1", "meta mark & 0x4000 == 0", "meta mark & 0x4000 == 0x4000", "meta mark != %d",
				"meta mark > %d", `iifname "cni0"`, `iifname != "cni*"`,
				`oifname "eth0"`, `oifname != "eth%d"`, `oifname "lo"`, `oif != "lo"`, "ct state new",
				"ct state established", "ct status dnat", "ct status != dnat", "fib daddr type local",
				"fib daddr type != local", "fib saddr type local", "fib saddr type unicast",
				"meta nfproto ipv4", "meta l4proto tcp"))
			if strings.Contains(words[len(words)-1], "%d") {
				words[len(words)-1] = fmt.Sprintf(words[len(words)-1], 1+r.IntN(8))
			}
		}
		if r.IntN(8) == 0 {
			words = append(
				words,
				"meta mark set "+pick("1", "3", "meta mark or 0x4000", "meta mark and 0xffffbfff", "meta mark xor 0x1"),
			)
		}
		verdicts = append(verdicts, "accept", "return", "drop", "ip saddr vmap @bysource", "ip daddr . iifname vmap @bydest",
			"ip saddr vmap @intervals")
		for _, to := range subs[after:] {
			verdicts = append(verdicts, "jump "+to, "goto "+to)
		}
		text := strings.Join(append(words, pick(verdicts...)), " ")
		if after == len(subs) { // the maps lead to this chain
			text = strings.NewReplacer("ip saddr vmap @bysource", "accept", "ip daddr . iifname vmap @bydest", "return",
				"ip saddr vmap @intervals", "drop").Replace(text)
		}
		return text
	}
	var b strings.Builder
	b.WriteString(`table inet t {
		set sources { type ipv4_addr; elements = { 10.244.1.1, 10.244.1.2, 10.244.1.6 }; }
		set dests { type ipv4_addr; flags interval; elements = { 10.244.2.2-10.244.2.4, 10.244.2.7 }; }
		map addresses { type ipv4_addr : ipv4_addr; elements = { 10.244.1.1 : 192.0.2.11, 10.244.1.4 : 192.0.2.12 }; }
		map bysource { type ipv4_addr : verdict
			elements = { 10.244.1.1 : jump c, 10.244.1.5 : accept, 10.244.1.6 : goto c, * : jump c }
		}
		map bydest { type ipv4_addr . ifname : verdict
			elements = { 10.244.2.1 . "cni0" : jump c, 10.244.2.2 . "docker0" : accept, 10.244.2.3 . "cni0" : return }
		}
		map intervals { type ipv4_addr : verdict; flags interval
			elements = { 10.244.1.0-10.244.1.3 : jump c, 10.244.1.5-10.244.1.6 : drop }
		}
	`)
	for i := len(subs) - 1; i >= 0; i-- {
		fmt.Fprintf(&b, "chain %s {\n%s\n%s\n}\n", subs[i], rule(i+1), rule(i+1))
	}
	snat := []string{"masquerade", "snat ip to 192.0.2.1", "snat ip to ip saddr", "snat ip to ip saddr map @addresses"}
	for _, c := range []struct {
		name, head string
		verdicts   []string
	}{
		{"raw", "filter hook prerouting priority -300", []string{"notrack"}},
		{"mangle", "filter hook prerouting priority -150", nil},
		{"pre", "nat hook prerouting priority -100", []string{"dnat ip to 10.244.2.3"}},
		{"out", "nat hook output priority -100", []string{"dnat ip to 10.244.2.3"}},
		{"in", "nat hook input priority 100", snat[1:]},
		{"forward", "filter hook forward priority 0; policy drop", nil},
		{"post", "nat hook postrouting priority 100", snat},
		{"late", "nat hook postrouting priority 110", snat},
		{"filter", "filter hook postrouting priority 120", nil},
	} {
		fmt.Fprintf(&b, "chain %s { type %s;\n", c.name, c.head)
		for range 1 + r.IntN(3) {
			b.WriteString(rule(0, c.verdicts...) + "\n")
		}
		b.WriteString("}\n")
	}
	return b.String() + "}\n"
}

// What becomes known of a packet narrows what may happen to it: nothing that happens to the
// packet with its interfaces and types is ruled out for the one without.
func TestWhatIsKnownOnlyNarrowsTheAnswer(t *testing.T) {
	t.Parallel()
	ns, c := dialNS(t)
	r := rand.New(rand.NewPCG(17, 19))
	rounds := 100
	if testing.Short() {
		rounds = 30
	}
	for range rounds {
		rules := randomRules(r)
		nfttest.NFT(t, ns, "flush ruleset\n"+rules, "-f", "-")
		tracer := trace.New(read(t, c))
		for i := range 64 {
			less := trace.Packet{
				Src: netip.AddrFrom4([4]byte{10, 244, 1, byte(i % 8)}), Dst: netip.AddrFrom4([4]byte{10, 244, 2, byte(i / 8)}),
			}
			more := less
			more.In = routes.Interface{Index: 3, Name: []string{"cni0", "docker0"}[r.IntN(2)]}
			more.Out = routes.Interface{Index: 2, Name: "eth0"}
			more.SrcType, more.DstType, more.Protocol = unix.RTN_UNICAST, unix.RTN_UNICAST, 6
			_, unsure := tracer.Trace(less)
			_, sure := tracer.Trace(more)
			for _, f := range sure.Findings {
				found := slices.ContainsFunc(unsure.Findings, func(g trace.Finding) bool {
					return g.Code == f.Code && g.Rule.Handle == f.Rule.Handle && g.Rule.Chain == f.Rule.Chain && (f.Sure || !g.Sure)
				})
				if !found {
					t.Fatalf("%s to %s: %s by %s, which is not found, or certain, for all\n%s", less.Src, less.Dst, f.Code,
						f.RuleText(), rules)
				}
			}
			apart := func(a, b trace.Truth) bool { return a != trace.Maybe && a != b }
			if apart(unsure.Keeps, sure.Keeps) || apart(unsure.Untracked, sure.Untracked) {
				t.Fatalf("%s to %s: %+v, but for all %+v\n%s", less.Src, less.Dst, sure, unsure, rules)
			}
			if known := unsure.Mark.Known; known&^sure.Mark.Known != 0 || (unsure.Mark.Value^sure.Mark.Value)&known != 0 {
				t.Fatalf("%s to %s: mark %+v, but for all %+v\n%s", less.Src, less.Dst, sure.Mark, unsure.Mark, rules)
			}
		}
	}
}
