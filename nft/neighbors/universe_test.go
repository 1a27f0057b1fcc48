package neighbors

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/older"
	"nft-masq-agent/nft/trace"
)

// randomOthers returns chains of other programs at each hook, one of which may lead to an older agent.
func randomOthers(r *rand.Rand) string {
	pick := func(of ...string) string { return of[r.IntN(len(of))] }
	text := "table ip t { chain dropping { drop; }; }\n" +
		"table ip nat { chain accepting { accept; }; chain IP-MASQ-AGENT { counter; }; }\n"
	for _, c := range []struct{ table, head, rules string }{
		{"t", "raw { type filter hook prerouting priority raw", "notrack/ip saddr set 10.0.1.9/accept"},
		{"t", "mangle { type filter hook prerouting priority mangle", "meta mark set meta mark or 0x4000/meta mark set 7"},
		{"t", "forward { type filter hook forward priority 0; policy drop", "accept/drop/jump dropping"},
		{"t", "leaving { type filter hook postrouting priority mangle", "ip saddr set 192.0.2.7/ip daddr set 10.0.3.9/drop"},
		{"t", "last { type filter hook postrouting priority 200; policy drop", "accept/accept/drop"},
		{"t", "POSTROUTING { type nat hook postrouting priority 99", "snat to 192.0.2.7/masquerade/accept/snat to ip saddr"},
		{
			"nat", "POSTROUTING { type nat hook postrouting priority 100",
			"accept/return/jump accepting/jump IP-MASQ-AGENT/meta mark & 0x4000 == 0x4000 masquerade",
		},
		{"t", "late { type nat hook postrouting priority 115", "snat to 192.0.2.7/masquerade/meta mark 7 masquerade/accept"},
	} {
		text += "table ip " + c.table + " { chain " + c.head + "\n"
		for range r.IntN(3) {
			if source := randomTest(r, 1).text("ip saddr"); !strings.HasPrefix(c.head, "last") {
				text += source // after NAT it may be unknown: then a survey does not ask about what rules for others name
			}
			text += randomTest(r, byte(2+r.IntN(2))).text("ip daddr") +
				pick("", "", `iifname "cali1" `, "meta l4proto tcp ", `oifname "eth0" meta l4proto tcp `) +
				pick(strings.Split(c.rules, "/")...) + "\n"
		}
		text += "}; }\n"
	}
	return text
}

// Next to random rules the survey reports what it would if it asked about every packet: each rule with the fewest
// conditions on which a packet meets it. Exempt is 10.0.2.0/24; no rule tells other packets apart than these.
func TestSurveyReportsWhatAnyPacketMeets(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNS(t, "node")
	n, r := open(t, ns), rand.New(rand.NewPCG(12, 7))
	c := config.Config{NonMasqueradeCIDRs: cases.CIDRs("10.0.2.0/24")}
	policy := nft.Compile(c, nft.Options{Layout: native.Layout{}})
	seen := map[Kind]int{}
	for round := range nfttest.Rounds(40, 300, 3000) {
		rules, installed := randomOthers(r), round%2 == 0
		nfttest.NFT(t, ns, "flush ruleset\n"+rules, "-f", "-")
		if installed {
			apply(t, n, policy)
		}
		s := survey(t, n, policy)
		tracer, like := trace.New(s.others), s.asker()
		exactly := asker{Tracer: like.Tracer, ends: like.ends, known: map[asked]bool{}}
		exactly.ends.Exact = true
		met := encounters{map[string]trace.Finding{}, map[string]int{}}
		for i := range 9 * 9 * 2 {
			p := trace.Packet{Src: modelAddr(1, i%9), Dst: modelAddr(byte(2+i/81), i/9%9), DstType: unix.RTN_UNICAST}
			if like.mayTranslate(p.Src, p.Dst, false) != exactly.mayTranslate(p.Src, p.Dst, false) {
				t.Fatalf("%s to %s: not as the packet that stands for it\n%s", p.Src, p.Dst, rules)
			}
			p.Translated = trace.Maybe
			for _, f := range tracer.At(p, unix.NF_INET_PRE_ROUTING, unix.NF_INET_POST_ROUTING).Findings {
				translates := f.Code == trace.Translates && !f.Keeps
				early := !installed || f.Base.Hook.Priority < 110
				met.add(Masquerades, f, i < 81 && (f.Code == trace.Masquerades || translates))
				met.add(Translates, f, i >= 81 && f.Code == trace.Translates && early)
				met.add(Exempts, f, i >= 81 && f.Code == trace.Accepts && f.Rule.Table == "nat" && !leads(f, -1))
				met.add(Untracks, f, i >= 81 && f.Code == trace.Untracks && whatever(f))
				met.add(Writes, f, i >= 81 && f.Code == trace.Rewrites && !f.OfDestination && whatever(f))
			}
			for _, f := range tracer.At(p, unix.NF_INET_PRE_ROUTING, unix.NF_INET_FORWARD, unix.NF_INET_POST_ROUTING).Findings {
				met.add(Drops, f, i >= 81 && f.Ends() && f.Sure && f.Base.Policy == 0)
			}
		}
		want, got := map[string]int{}, map[string]int{}
		for at, f := range met.first {
			switch always := met.always[at] == 81; {
			case strings.HasPrefix(at, "drops") && !always: // it lets some of them pass
			case strings.HasPrefix(at, "accepts") && always && !leads(f, 1): // no agent came after it
			default:
				want[at] = len(f.Open)
			}
		}
		o, err := s.Others()
		must(t, err)
		for _, c := range append(o.Conflicts, o.Overruled...) {
			got[nameOf(c.Kind, c.Finding)] = len(c.Open)
			seen[c.Kind]++
		}
		if !maps.Equal(got, want) {
			t.Fatalf("installed %t: %v, want %v\n%s", installed, got, want, rules)
		}
	}
	for kind := Masquerades; kind <= Drops; kind++ {
		if seen[kind] < 5 {
			t.Errorf("only %v", seen)
		}
	}
}

// Encounters are of packets with rules, by the kind and the rule.
type encounters struct {
	first  map[string]trace.Finding // of those with the fewest conditions
	always map[string]int           // how many are certain
}

func (e encounters) add(kind Kind, f trace.Finding, is bool) {
	at := nameOf(kind, f)
	if !is || f.Own {
		return
	}
	if known, ok := e.first[at]; !ok || len(f.Open) < len(known.Open) {
		e.first[at] = f
	}
	if f.Sure {
		e.always[at]++
	}
}

func nameOf(kind Kind, f trace.Finding) string {
	if kind == Drops {
		return "drops " + f.Base.Name
	}
	return fmt.Sprint(kind, " ", f.Table(), " ", f.Rule.Handle)
}

// whatever reports whether all packets of some interfaces meet a rule.
func whatever(f trace.Finding) bool {
	return f.Sure || len(f.Open) > 0 && !slices.ContainsFunc(f.Open, func(c string) bool { return c[1:3] != "if" })
}

// leads reports whether the first jump to an older agent is before the rule of a base chain that leads to a finding, or
// after it.
func leads(f trace.Finding, side int) bool {
	top := append(slices.Clone(f.Via), f.Rule)[0]
	for i, r := range f.Base.Rules {
		if older.Leads(r) {
			at := slices.IndexFunc(f.Base.Rules, func(r nfnetlink.Rule) bool { return r.Handle == top.Handle })
			return (i-at)*side > 0
		}
	}
	return false
}
