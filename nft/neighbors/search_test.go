package neighbors

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/trace"
)

// The rules are another program's; what the policy exempts is 10.0.0.0/8 and fd00::/8.
func TestConflictsFollowThePathOfAPacket(t *testing.T) {
	t.Parallel()
	const nothing = ""
	tests := []struct{ name, rules, want string }{
		{"masquerades all", "masquerade", "found"},
		{"of one family", "meta nfproto ipv4 masquerade", "found"},
		{"of one family, by protocol", "meta protocol ip6 masquerade", "found"},
		{"to a range", "ip daddr 9.0.0.0-10.0.0.0 masquerade", "found"},
		{"to a range next to it", "ip daddr 9.0.0.0-9.255.255.255 masquerade", nothing},
		{"to all but the exempt", "ip daddr != 10.0.0.0/8 masquerade", nothing},
		{"the exempt returned", "ip daddr 10.0.0.0/8 return\nip6 daddr fd00::/8 accept\nmasquerade", nothing},
		{"in a set that is returned", "ip daddr @nets return\nmeta nfproto ipv4 masquerade", nothing},
		{"in a set that changes at run time", "ip daddr @passing return\nmeta nfproto ipv4 masquerade", "found"},
		{"in a chain that a map leads to", "oifname vmap @jumps", "found where oifname vmap @jumps"},
		{"in a chain that a map leads to from others", "ip saddr vmap @sources", nothing},
		{"from a source", `ip saddr 172.17.0.0/16 oifname != "docker0" masquerade`, `found where oifname != "docker0"`},
		{"from all but a source", "ip saddr != 10.0.0.0/8 masquerade", "found"},
		{"from an address to itself", "ip saddr 10.0.0.2 ip daddr 10.0.0.2 masquerade", nothing},
		{"from the loopback addresses", "ip saddr 127.0.0.0/8 masquerade", nothing},
		{"from half of the addresses", "ip saddr 0.0.0.0/1 return\nip saddr 128.0.0.0/1 masquerade", "found"},
		{"from this node", "fib saddr type local meta nfproto ipv4 masquerade", "found where fib saddr type local"},
		{"to this node", "fib daddr type local masquerade", nothing},
		{"to another", "fib daddr type unicast meta nfproto ipv4 masquerade", "found"},
		{"marked by kube-proxy", "mark and 0x4000 == 0x4000 masquerade", nothing},
		{"out of the loopback device", `oifname "lo" masquerade`, nothing},
		{"received on the loopback device", `iifname "lo" masquerade`, `found where iifname "lo"`},
		{"of a new connection", "ct state new meta nfproto ipv4 masquerade", "found"},
		{"after DNAT", "ct status dnat meta nfproto ipv4 masquerade", "found where ct status dnat"},
	}
	ns := nfttest.NewNS(t, "node")
	n := open(t, ns)
	for _, test := range tests {
		nfttest.NFT(t, ns, fmt.Sprintf(`flush ruleset
			table inet t {
				set nets { type ipv4_addr; flags interval; elements = { 10.0.0.0/8 }; }
				set passing { type ipv4_addr; flags timeout; timeout 1h; elements = { 10.0.0.1 }; }
				chain masking { masquerade; }
				chain other-source { ip saddr 10.2.0.0/16 masquerade; }
				map jumps { type ifname : verdict; elements = { "a" : jump masking, "b" : drop }; }
				map sources { type ipv4_addr : verdict; elements = { 10.1.0.1 : jump other-source, 10.2.0.1 : drop }; }
				chain post { type nat hook postrouting priority 100;
					%s
				}
			}`, test.rules), "-f", "-")
		o := others(t, n, exempting("10.0.0.0/8 fd00::/8"))
		var got []string
		for _, c := range o.Conflicts {
			found := "found"
			if len(c.Open) > 0 {
				found += " where " + strings.Join(c.Open, ", ")
			}
			got = append(got, found)
		}
		if got := strings.Join(got, "; "); got != test.want {
			t.Errorf("%s: %s, want %s", test.name, got, test.want)
		}
	}
}

// In random rulesets, every rule that masquerades some packet to an exempt destination is found,
// and no other. The oracle follows each of 72 packets; a mark may be set or not.
func TestRulesThatMasqueradeWhatIsExemptAreFoundAndNoOthers(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNS(t, "node")
	n, r := open(t, ns), rand.New(rand.NewPCG(1, 6))
	rounds := 300
	if testing.Short() {
		rounds = 40
	}
	exempt := []netip.Prefix{netip.MustParsePrefix("10.0.2.0/30"), netip.MustParsePrefix("10.0.2.6/32")}
	for range rounds {
		m := randomModel(r)
		nfttest.NFT(t, ns, "flush ruleset\n"+m.String(), "-f", "-")
		s := survey(t, n, exempting("10.0.2.0/30 10.0.2.6/32"))
		o, err := s.Others()
		must(t, err)
		found, hits := map[string]bool{}, map[string]bool{}
		for _, c := range o.Conflicts {
			found[c.Rule.Chain+" "+strings.TrimPrefix(c.RuleText()[strings.Index(c.RuleText(), "comment"):], "comment ")] = true
		}
		may := s.asker().mayTranslate
		for i := range 9 * 8 * 2 {
			src, dst, marked := modelAddr(1, i%9), modelAddr(2, i/9%8), i/9/8 == 1
			rule, hit, _ := m.bound(0, src, dst, marked)
			if hit && !may(src, dst, false) {
				t.Fatalf("rule %v rewrites %s to %s\n%s", rule, src, dst, m)
			}
			if hit && slices.ContainsFunc(exempt, func(p netip.Prefix) bool { return p.Contains(dst) }) {
				hits[rule] = true
			}
		}
		for rule := range hits {
			if !found[rule] {
				t.Fatalf("rule %s masquerades what is exempt, and was not found: %v\n%s", rule, found, m)
			}
		}
		for rule := range found {
			if !hits[rule] && !m.marks() { // that a mark is both set and not is not ruled out
				t.Fatalf("rule %s masquerades nothing that is exempt, and was found\n%s", rule, m)
			}
		}
	}
}

// A model is a ruleset of chains, the first of which is the base chain. Rules jump only to later
// chains.
type model [][]modelRule

type modelRule struct {
	src, dst *modelTest
	mark     *modelTest // stands for a condition that may be true or false
	verdict  string
	target   int
}

type modelTest struct {
	prefix netip.Prefix
	not    bool
}

func (t *modelTest) passes(a netip.Addr) bool { return t == nil || t.prefix.Contains(a) != t.not }

func (t *modelTest) text(field string) string {
	if t == nil {
		return ""
	}
	return field + map[bool]string{true: " != ", false: " "}[t.not] + t.prefix.String() + " "
}

func (m model) marks() bool {
	return slices.ContainsFunc(slices.Concat(m...), func(r modelRule) bool { return r.mark != nil })
}

// There are 72 packets: from 9 addresses, of which the rules name 8, to 8 addresses.
func modelAddr(third byte, n int) netip.Addr { return netip.AddrFrom4([4]byte{10, 0, third, byte(n)}) }

func randomTest(r *rand.Rand, third byte) *modelTest {
	if r.IntN(2) == 0 {
		return nil
	}
	p := netip.PrefixFrom(modelAddr(third, r.IntN(8)), 29+r.IntN(4)).Masked()
	return &modelTest{p, r.IntN(4) == 0}
}

func randomModel(r *rand.Rand) model {
	m := make(model, 4)
	for i := range m {
		for range 1 + r.IntN(5) {
			rule := modelRule{src: randomTest(r, 1), dst: randomTest(r, 2)}
			if r.IntN(6) == 0 {
				rule.mark = &modelTest{not: r.IntN(2) == 0}
			}
			rule.verdict = []string{"masquerade", "masquerade", "return", "accept", "jump", "goto"}[r.IntN(6)]
			switch {
			case rule.verdict != "jump" && rule.verdict != "goto":
			case i < len(m)-1:
				rule.target = i + 1 + r.IntN(len(m)-1-i)
			default:
				rule.verdict = "return"
			}
			m[i] = append(m[i], rule)
		}
	}
	return m
}

// String returns the ruleset for nft; each rule has its place as a comment.
func (m model) String() string {
	var b strings.Builder
	b.WriteString("table ip t {\n")
	for i := len(m) - 1; i >= 0; i-- {
		fmt.Fprintf(&b, "chain c%d {\n", i)
		if i == 0 {
			b.WriteString("type nat hook postrouting priority 0;\n")
		}
		for n, r := range m[i] {
			mark := ""
			if r.mark != nil {
				mark = "meta mark " + map[bool]string{true: "!= ", false: ""}[r.mark.not] + "0x1000001 "
			}
			to := ""
			if r.target > 0 {
				to = fmt.Sprintf(" c%d", r.target)
			}
			fmt.Fprintf(&b, "%s%s%s%s%s comment \"%d\"\n", r.src.text("ip saddr"), r.dst.text("ip daddr"), mark,
				r.verdict, to, n)
		}
		b.WriteString("}\n")
	}
	return b.String() + "}\n"
}

// bound returns the rule that masquerades a packet. done means that the packet does not return
// from the chain.
func (m model) bound(chain int, src, dst netip.Addr, marked bool) (rule string, hit, done bool) {
	for i, r := range m[chain] {
		if !r.src.passes(src) || !r.dst.passes(dst) || r.mark != nil && marked == r.mark.not {
			continue
		}
		switch r.verdict {
		case "masquerade":
			return fmt.Sprintf("c%d %q", chain, fmt.Sprint(i)), true, true
		case "accept":
			return "", false, true
		case "return":
			return "", false, false
		}
		rule, hit, done = m.bound(r.target, src, dst, marked)
		if done || r.verdict == "goto" {
			return rule, hit, done
		}
	}
	return "", false, false
}

// Paths multiply, and so do groups of addresses: the search ends, and says what it did not ask.
func TestSearchEndsAtItsBounds(t *testing.T) {
	t.Parallel()
	const jumps, depth, rules = 12, 5, 40
	var paths, many strings.Builder
	paths.WriteString("table ip t {\nchain c5 { masquerade; }\n")
	for i := depth - 1; i >= 0; i-- {
		fmt.Fprintf(&paths, "chain c%d {\n", i)
		if i == 0 {
			paths.WriteString("type nat hook postrouting priority 0;\n")
		}
		for n := range rules {
			fmt.Fprintf(&paths, "meta mark %d masquerade\n", n)
		}
		for n := range jumps {
			fmt.Fprintf(&paths, "meta mark %d jump c%d\n", n, i+1)
		}
		paths.WriteString("}\n")
	}
	paths.WriteString("}\n")
	many.WriteString("table ip t {\nchain p {\ntype nat hook postrouting priority 0;\n")
	for i := range maxConflicts + 500 {
		fmt.Fprintf(&many, "ip daddr 10.%d.%d.0/24 masquerade\n", i/200, i%200)
	}
	many.WriteString("}\n}\n")
	for _, tt := range []struct {
		text  string
		found int // at least
	}{{paths.String(), rules}, {many.String(), maxConflicts}} {
		ns := nfttest.NewNS(t, "node")
		nfttest.NFT(t, ns, tt.text, "-f", "-")
		o := others(t, open(t, ns), exempting("10.0.0.0/8"))
		if o.Unasked == 0 || len(o.Conflicts) < tt.found || len(o.Conflicts) > maxConflicts {
			t.Errorf("%d conflicts, at least %d are wanted; %d packets were not asked about", len(o.Conflicts), tt.found,
				o.Unasked)
		}
	}
}

// A source is asked about what the rules for it compare with, not about what all others do. Each of
// these rules is for another source and another destination.
func TestRulesForASourceAndANetworkEachAreAllFound(t *testing.T) {
	t.Parallel()
	const rules = 1500
	var text, pairs strings.Builder
	for i := range rules {
		fmt.Fprintf(&text, "ip saddr 10.244.%d.%d ip daddr 10.%d.%d.0/24 masquerade\n", i>>8, i&0xff, i>>8, i&0xff)
		fmt.Fprintf(&pairs, "10.244.%d.%d . 10.%d.%d.0/24 : jump masq,", i>>8, i&0xff, i>>8, i&0xff)
	}
	ns := nfttest.NewNS(t, "node")
	for _, tt := range []struct {
		rules          string
		found, unasked int
	}{
		{text.String(), rules, 0},
		{text.String() + "ip daddr { 10.250.0.0/24, 10.251.0.7 } masquerade\n", rules + 1, 0},
		{"ip saddr . ip daddr vmap { " + pairs.String() + " }", 1, 0},
	} {
		nfttest.NFT(t, ns, "flush ruleset\ntable ip t {\nchain masq { masquerade; }\nchain p {\n"+
			"type nat hook postrouting priority 0;\n"+tt.rules+"\n}\n}\n", "-f", "-")
		o := others(t, open(t, ns), exempting("10.0.0.0/8"))
		if len(o.Conflicts) != tt.found || o.Unasked != tt.unasked {
			t.Errorf("%.60s: %d conflicts, want %d; %d packets were not asked about", tt.rules, len(o.Conflicts), tt.found,
				o.Unasked)
		}
	}
}

// Of groups beyond the bound those are joined that lie next to each other, and they are counted.
func TestGroupsBeyondTheBoundAreJoinedAndCounted(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNS(t, "node")
	nfttest.NFT(t, ns, `table ip t {
		chain p { type nat hook postrouting priority 0
			ip daddr { 10.1.0.0/16, 10.3.0.0/16, 10.5.0.0/16 } masquerade
			ip daddr 10.0.0.0/8 counter
			ip saddr 10.244.0.9 ip daddr { 10.7.0.0/16, 10.9.0.0/16 } masquerade
		}
	}`, "-f", "-")
	s := survey(t, open(t, ns), exempting("10.0.0.0/8"))
	e := trace.New(s.others).Ends(perSet)
	of := iprange.SetOf([]netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")})
	for _, tt := range []struct {
		src, want string
		most      int
	}{
		{
			"10.244.0.9", "[10.0.0.2 10.1.0.2 10.2.0.2 10.3.0.2 10.4.0.2 10.5.0.2 10.6.0.2 10.7.0.2 10.8.0.2 10.9.0.2 " +
				"10.10.0.2] 0", 50,
		},
		{"10.244.0.8", "[10.0.0.2 10.1.0.2 10.2.0.2 10.3.0.2 10.4.0.2 10.5.0.2 10.6.0.2] 0", 50},
		{"10.244.0.8", "[10.0.0.2 10.2.0.2 10.4.0.2 10.6.0.2] 3", 5},
		{"10.244.0.9", "[10.0.0.2 10.7.0.2] 9", 1},
	} {
		all, joined := destinations(e, of, tt.most)(netip.MustParseAddr(tt.src))
		if got := fmt.Sprint(all, joined); got != tt.want {
			t.Errorf("%s, at most %d: %s, want %s", tt.src, tt.most, got, tt.want)
		}
	}
	running := samples(e.Src, of, []netip.Addr{netip.MustParseAddr("10.244.0.7")}, 1) // stands for its group
	if got, want := fmt.Sprint(running), "[10.244.0.7 10.244.0.9 10.244.0.11]"; got != want {
		t.Errorf("sources are %s, want %s", got, want)
	}
}

func TestConnectionsThatTheRulesTreatAlikeAreAskedAboutOnce(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNS(t, "node")
	nfttest.NFT(t, ns, `table ip t {
		set elsewhere { type ipv4_addr; flags interval; elements = { 198.51.100.0/24, 203.0.113.0/25 }; }
		chain p { type nat hook postrouting priority 0
			ip saddr 10.244.0.0/17 ip daddr @elsewhere masquerade
			ip daddr 192.0.2.1 meta l4proto tcp masquerade
		}
	}`, "-f", "-")
	s := survey(t, open(t, ns), exempting("10.0.0.0/8"))
	a, r := s.asker(), rand.New(rand.NewPCG(5, 5))
	for range 20_000 {
		src := netip.AddrFrom4([4]byte{10, 244, byte(r.IntN(256)), byte(r.IntN(256))})
		dst := [][4]byte{
			{198, 51, 100, byte(r.IntN(256))}, {203, 0, 113, byte(r.IntN(256))}, {192, 0, 2, byte(r.IntN(4))},
		}[r.IntN(3)]
		near := src.As4()[2] < 128
		want := near && (dst[0] == 198 || dst[0] == 203 && dst[3] < 128) || dst == [4]byte{192, 0, 2, 1}
		if got := a.mayTranslate(src, netip.AddrFrom4(dst), false); got != want {
			t.Fatalf("%s to %v: %t", src, dst, got)
		}
	}
	if n := len(a.known); n > 14 {
		t.Errorf("asked %d times", n)
	}
	nfttest.NFT(t, ns, `flush ruleset; table ip t { chain p { type nat hook postrouting priority 0
		ip daddr & 0.0.0.3 == 0.0.0.1 masquerade
	}; }`, "-f", "-")
	s = survey(t, open(t, ns), exempting("10.0.0.0/8"))
	a = s.asker()
	for i := range byte(16) { // only equal addresses are alike
		src, dst := netip.AddrFrom4([4]byte{10, 244}), netip.AddrFrom4([4]byte{192, 0, 2, i})
		if got := a.mayTranslate(src, dst, false); got != (i%4 == 1) {
			t.Errorf("192.0.2.%d: %t", i, got)
		}
	}
	nfttest.NFT(t, ns, `flush ruleset; table ip t { chain p { type nat hook postrouting priority 0
		ip daddr 10.244.0.0/24 counter
		ct status dnat masquerade
	}; }`, "-f", "-")
	a = survey(t, open(t, ns), exempting("10.0.0.0/8")).asker()
	for pair, want := range map[[2]string]bool{ // what comes back to its source was translated
		{"10.244.0.5", "10.244.0.5"}: true, {"10.244.0.5", "192.0.2.1"}: false, {"192.0.2.1", "192.0.2.2"}: false,
	} {
		if got := a.mayTranslate(netip.MustParseAddr(pair[0]), netip.MustParseAddr(pair[1]), false); got != want {
			t.Errorf("%q: %t", pair, got)
		}
	}
	s.passed = func() (*trace.Rules, error) { return nil, errors.ErrUnsupported }
	if !s.asker().mayTranslate(netip.MustParseAddr("10.244.0.1"), netip.MustParseAddr("192.0.2.2"), false) {
		t.Error("rules that cannot be read do nothing")
	}
}
