package trace_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/routes"
	"nft-masq-agent/nft/trace"
)

// words describes a result: each finding with its new addresses, "?" if it may happen only, then
// whether the packet keeps its address.
func words(r trace.Result) string {
	var all []string
	for _, f := range r.Findings {
		w := string(f.Code)
		switch {
		case f.Keeps:
			w += " itself"
		case len(f.To) == 1:
			w += " " + f.To[0].String()
		case len(f.To) > 0:
			w += fmt.Sprint(f.To)
		}
		if !f.Sure {
			w += "?"
		}
		all = append(all, w)
	}
	truths := map[trace.Truth]string{trace.No: "no", trace.Maybe: "maybe", trace.Yes: "yes"}
	return strings.Join(append(all, "keeps "+truths[r.Keeps]), ", ")
}

// What is known of each expression, and to which side it errs.
func TestWhatRulesDoToOnePacket(t *testing.T) {
	t.Parallel()
	ns, c := dialNS(t)
	const (
		masquerades = "foreign-masquerade, keeps no"
		may         = "foreign-masquerade?, keeps maybe"
		nothing     = "keeps yes"
	)
	for _, tt := range []struct{ rules, want string }{
		{"masquerade", masquerades},
		{"ip saddr 10.244.1.0/24 ip daddr != 10.0.0.0/8 masquerade", masquerades},
		{"ip saddr & 0.0.0.3 == 0.0.0.2 masquerade", masquerades},
		{"ip saddr & 0.0.0.3 == 0.0.0.1 masquerade", nothing},
		{"ip saddr < 10.244.1.2 masquerade", nothing},
		{"ip saddr <= 10.244.1.2 masquerade", masquerades},
		{"ip saddr 10.244.1.1-10.244.1.2 masquerade", masquerades},
		{"ip saddr != 10.244.1.1-10.244.1.2 masquerade", nothing},
		{"ip saddr { 10.244.1.1-10.244.1.2, 10.244.1.7 } masquerade", masquerades},
		{"ip saddr { 10.244.0.0-10.244.0.255, 10.245.0.1 } masquerade", nothing}, // and so up to the next network
		{"ip saddr . ip daddr { 10.244.1.2 . 203.0.113.9 } masquerade", masquerades},
		{"ip saddr . ip daddr { 10.244.1.0/24 . 203.0.113.8 } masquerade", nothing},
		{"ip saddr . ip daddr { 10.244.1.0/24 . 203.0.113.0/24 } masquerade", masquerades},
		{"ip saddr . meta l4proto { 10.244.1.2 . tcp } masquerade", may},
		{"ip saddr . meta l4proto { 10.244.1.3 . tcp } masquerade", nothing},
		{"iifname cali0 masquerade", masquerades},
		{`iifname "cali*" masquerade`, masquerades},
		{`iifname { "cali1", "docker0" } masquerade`, nothing},
		{`oifname "eth1" masquerade`, nothing},
		{"iif 5 masquerade", masquerades},
		{"meta l4proto tcp masquerade", may},
		{"tcp sport 80 masquerade", may},
		{"ct state new masquerade", masquerades},
		{"ct state vmap { established : accept, invalid : drop } masquerade", masquerades},
		{"ct state vmap { new : accept } masquerade", "accepted-first, keeps yes"},
		{"ct mark 7 masquerade", may},
		{"fib daddr type local masquerade", nothing},
		// the mark: unset is only a comparison of exactly the bit
		{"meta mark & 0x4000 == 0x4000 masquerade", nothing},
		{"meta mark & 0x2000 == 0x2000 masquerade", nothing},
		{"meta mark 0x2000 masquerade", may},
		{"meta mark 51820 masquerade", may},
		{"meta mark & 0xffff == 0x4000 masquerade", may},
		{"meta mark & 0x6000 == 0x4000 masquerade", may},
		// numbers that nft turns into network order, to compare ranges of them
		{"meta mark set 7; meta mark 5-10 masquerade", may},
		{"meta mark set 7; meta mark { 5-10, 20 } masquerade", may},
		{
			"numgen inc mod 4 vmap { 0-2 : accept, 3 : jump masq }",
			"accepted-first?, foreign-masquerade?, keeps maybe",
		},
		{"meta mark set 0x4000 meta mark & 0x4000 == 0x4000 masquerade", masquerades},
		{"meta l4proto tcp meta mark set 0x4000; meta mark & 0x4000 == 0x4000 masquerade", may},
		// limits, and sets that change
		{"limit rate 5/second masquerade", may},
		{"quota 10 mbytes masquerade", may},
		{"ct count 5 masquerade", may},
		{"quota name q masquerade", may},
		{"counter name seen masquerade", masquerades},
		{"update @learned { ip saddr } accept; masquerade", "accepted-first?, foreign-masquerade?, keeps maybe"},
		{"add @full { ip saddr } masquerade", may},
		{"ip saddr @learned masquerade", may},
		{"ip saddr @limited masquerade", may},
		{"ip saddr @paced masquerade", may},
		{"ip saddr != @paced masquerade", may},
		{"ip daddr @paced masquerade", may},
		{"ip saddr != @limited masquerade", may},
		{"delete @learned { ip saddr } masquerade", may},
		{"update @learned { ip saddr limit rate over 1/second } masquerade", may},
		{"quota name ip saddr map { 10.244.1.2 : \"q\" } masquerade", "unknown?, foreign-masquerade?, keeps maybe"},
		{"ip saddr vmap { 10.244.1.2 : goto sub } masquerade", nothing},
		// addresses
		{"snat to 192.0.2.1", "translated 192.0.2.1, keeps no"},
		{"snat to 192.0.2.1-192.0.2.3", "translated 192.0.2.1-192.0.2.3, keeps no"},
		{"snat to ip saddr", "translated itself, keeps no"},
		{"snat prefix to 192.0.2.0/24", "translated 192.0.2.2, keeps no"},
		{
			"th dport 53 ip saddr set 198.51.100.9; snat prefix to 192.0.2.0/24",
			"rewritten 198.51.100.9?, translated, keeps no",
		},
		{
			"snat ip prefix to ip saddr map { 10.244.1.0/24 : 192.0.2.0/24, 10.244.2.0/24 : 198.51.100.0/24 }",
			"translated 192.0.2.2, keeps no",
		},
		{
			"snat to ip saddr map { 10.244.1.2 : 192.0.2.7, 10.244.1.3 : 192.0.2.8 }",
			"translated 192.0.2.7, keeps no",
		},
		{"snat to ip saddr map { 10.244.1.3 : 192.0.2.8 }", nothing},
		{
			"snat to numgen inc mod 2 map { 0 : 192.0.2.7, 1 : 192.0.2.8 }",
			"translated 192.0.2.7-192.0.2.8, keeps no",
		},
		{
			"snat to numgen random mod 3 map { 0 : 192.0.2.7, 1 : 192.0.2.8 }",
			"translated 192.0.2.7-192.0.2.8?, keeps maybe",
		},
		{
			"snat to jhash ip saddr mod 2 map { 0 : 192.0.2.7, 1 : 192.0.2.8 }",
			"translated 192.0.2.7-192.0.2.8, keeps no",
		},
		{
			"numgen inc mod 2 vmap { 0 : jump masq, 1 : jump masq }",
			"foreign-masquerade?, foreign-masquerade?, keeps no",
		},
		{"numgen inc mod 2 offset 4 vmap { 4 : jump masq, 6 : jump masq }", may},
		// ways
		{"jump sub; masquerade", masquerades},
		{"goto sub; masquerade", nothing},
		{"meta l4proto tcp return; masquerade", "accepted-first?, foreign-masquerade?, keeps maybe"},
		{"jump some; masquerade", masquerades},
		{"jump either", "foreign-masquerade?, foreign-masquerade?, keeps no"},
		{"drop", "dropped, keeps no"},
	} {
		nfttest.NFT(t, ns, `flush ruleset
		table ip t {
			counter seen { }
			quota q { over 10 mbytes }
			set learned { type ipv4_addr; flags dynamic, timeout; timeout 1m; elements = { 10.244.1.2 }; }
			set full { type ipv4_addr; size 1; flags dynamic; }
			set limited { type ipv4_addr; flags dynamic; limit rate 1/second; elements = { 10.244.1.2 }; }
			set paced { type ipv4_addr; flags dynamic; elements = { 10.244.1.2 limit rate 1/second }; }
			chain sub { return; }
			chain masq { masquerade; }
			chain some { meta l4proto tcp return; meta l4proto udp return; }
			chain either { meta l4proto tcp masquerade; masquerade; }
			chain post { type nat hook postrouting priority 100;
`+strings.ReplaceAll(tt.rules, "; ", "\n")+"\n}\n}\n", "-f", "-")
		r := trace.New(read(t, c)).At(packet(), unix.NF_INET_POST_ROUTING)
		for _, f := range r.Findings {
			text := f.RuleText() + strings.Join(f.Open, "")
			if strings.Contains(text, "<dynset>") || strings.Contains(text, "<objref>") {
				t.Errorf("%s: %s", tt.rules, text)
			}
		}
		if got := words(r); got != tt.want {
			t.Errorf("%s\n got %s\nwant %s", tt.rules, got, tt.want)
		}
	}
}

func packet() trace.Packet {
	return trace.Packet{
		Src: netip.MustParseAddr("10.244.1.2"), Dst: netip.MustParseAddr("203.0.113.9"), SrcType: unix.RTN_UNICAST,
		DstType: unix.RTN_UNICAST, In: routes.Interface{Name: "cali0", Index: 5},
		Out: routes.Interface{Name: "eth0", Index: 2},
	}
}

// A rule that rejects ends a connection like one that drops, and what follows is not met.
func TestWhatEndsAConnectionIsAVerdictOfItsOwn(t *testing.T) {
	t.Parallel()
	ns, c := dialNS(t)
	for _, tt := range []struct{ rules, want string }{
		{"reject", "rejected, keeps yes"},
		{"meta l4proto tcp reject with tcp reset", "rejected?, keeps yes"},
		{"meta l4proto tcp reject; drop", "rejected?, dropped?, keeps yes"},
		{"limit rate 5/second accept; drop", "dropped?, keeps yes"},
		{"accept; drop", "keeps yes"},
		{"notrack", "keeps yes"}, // after connection tracking
		{"meta l4proto tcp synproxy mss 1460 wscale 7; drop", "unknown?, dropped?, keeps yes"},
	} {
		nfttest.NFT(t, ns, "flush ruleset\ntable inet t { chain f { type filter hook forward priority 0;\n"+
			strings.ReplaceAll(tt.rules, "; ", "\n")+"\n}\n}\n", "-f", "-")
		if got := words(trace.New(read(t, c)).At(packet(), unix.NF_INET_FORWARD)); got != tt.want {
			t.Errorf("%s\n got %s\nwant %s", tt.rules, got, tt.want)
		}
	}
	for _, tt := range []struct{ rules, want string }{
		{"-j REJECT", "rejected, keeps yes"},
		{"-m conntrack --ctstate INVALID -j DROP", "keeps yes"},
		{"-m conntrack --ctstate NEW,RELATED -j REJECT", "rejected, keeps yes"},
		{"-m conntrack ! --ctstate NEW -j DROP", "keeps yes"},
		{"-m state --state NEW -j DROP", "dropped, keeps yes"},
		{"-m comment --comment words -j DROP", "dropped, keeps yes"},
		{"-m ttl --ttl-eq 3 -j DROP", "dropped?, keeps yes"},
	} {
		nfttest.NFT(t, ns, "flush ruleset", "-f", "-")
		nfttest.Run(t, ns, "*filter\n-A FORWARD "+tt.rules+"\nCOMMIT\n", "iptables-nft-restore")
		if got := words(trace.New(read(t, c)).At(packet(), unix.NF_INET_FORWARD)); got != tt.want {
			t.Errorf("%s\n got %s\nwant %s", tt.rules, got, tt.want)
		}
	}
}

// An answer that is not certain names each condition on which it depends: those of the rule, and
// those by which an earlier rule may have ended the way to it.
func TestEachConditionIsNamed(t *testing.T) {
	t.Parallel()
	ns, c := dialNS(t)
	for _, tt := range []struct {
		rules string // of the base chain
		want  []string
	}{
		{"masquerade", nil},
		{"udp dport 53 accept; masquerade", []string{"udp", "dport 53"}},
		{"tcp dport 80 accept; udp dport 53 accept; masquerade", []string{"tcp", "dport 80", "udp", "dport 53"}},
		{
			"tcp dport 80 accept; iifname lo accept; meta mark 7 accept; ct mark 3 masquerade",
			[]string{"dport 80", "ct mark 0x3"},
		},
		{"udp sport 9 accept; ct mark 3 masquerade", []string{"sport 9", "ct mark 0x3"}},
		{"jump called; masquerade", []string{"dport 8080", "dport 8081"}},
		{"ct mark 5 jump called; masquerade", []string{"ct mark 0x5", "dport 8080", "dport 8081"}},
		{"jump returns; masquerade", nil},
		{"tcp dport 80 accept; jump returns; masquerade", []string{"dport 80"}},
		{"ct mark 4 goto returns; masquerade", []string{"ct mark 0x4"}},
		{"masquerade; tcp dport 80 accept", nil},
	} {
		nfttest.NFT(t, ns, `flush ruleset
			table ip t {
				chain called { tcp dport 8080 accept; tcp dport 8081 accept; ip daddr 192.0.2.1 accept; }
				chain returns { tcp dport 9090 return; tcp dport 9091 return; }
				chain post { type nat hook postrouting priority 100; `+tt.rules+`; }
			}`, "-f", "-")
		r := trace.New(read(t, c)).At(packet(), unix.NF_INET_POST_ROUTING)
		text := strings.Join(r.Unknown, "; ")
		for _, w := range tt.want {
			if !strings.Contains(text, w) {
				t.Errorf("%s: %q is not named in %q", tt.rules, w, text)
			}
		}
		if len(tt.want) == 0 && text != "" || strings.Contains(text, "909") || strings.Contains(text, "192.0.2.1") {
			t.Errorf("%s: named was %q, want %q", tt.rules, text, tt.want)
		}
	}
}

// A set that is too large to read is asked for the address, and for the element that has all others.
func TestLargeSetsAreAsked(t *testing.T) {
	t.Parallel()
	ns, c := dialNS(t)
	var many strings.Builder
	for i := range 10_001 {
		fmt.Fprintf(&many, "10.9.%d.%d, ", i/250, i%250)
	}
	for _, tt := range []struct{ more, want string }{
		{"", "keeps yes"}, {"203.0.113.9", "foreign-masquerade, keeps no"}, {"*", "foreign-masquerade, keeps no"},
	} {
		if tt.more == "*" && nfttest.KernelBefore(t, 5, 13) {
			continue // it has no such element
		}
		nfttest.NFT(t, ns, `flush ruleset
			table ip t {
				set large { type ipv4_addr; elements = { `+many.String()+tt.more+` }; }
				chain post { type nat hook postrouting priority 100; ip daddr @large masquerade; }
			}`, "-f", "-")
		tracer := trace.New(read(t, c))
		tracer.Has = c.HasElement
		if got := words(tracer.At(packet(), unix.NF_INET_POST_ROUTING)); got != tt.want {
			t.Errorf("with %q: got %s, want %s", tt.more, got, tt.want)
		}
	}
}

// Rules that compare addresses by their ends tell them apart there; those that mask bits, anywhere.
func TestMaskedAddressesAreToldApartExactly(t *testing.T) {
	t.Parallel()
	ns, c := dialNS(t)
	for rule, exact := range map[string]bool{
		"ip saddr 10.244.1.0/24 accept": false, "ip daddr 10.9.0.0-10.9.0.8 accept": false, "ip saddr @s accept": false,
		"ip saddr & 0.0.0.255 == 0.0.0.7 accept": true, "ip daddr & 0.0.0.3 @s accept": true,
	} {
		nfttest.NFT(t, ns, `flush ruleset
			table ip t {
				set s { type ipv4_addr; elements = { 0.0.0.1, 10.0.0.1 }; }
				chain post { type nat hook postrouting priority 100; `+rule+`; }
			}`, "-f", "-")
		if e := trace.New(read(t, c)).Ends(10); e.Exact != exact {
			t.Errorf("%s: exact %t, want %t", rule, e.Exact, exact)
		}
	}
}

// Bits with which kube-proxy and tailscale mark are not set, but only where their rules compare them.
func TestMarksOfProgramsAreKnownByTheirChains(t *testing.T) {
	t.Parallel()
	ns, c := dialNS(t)
	nobody := packet()
	nobody.In, nobody.SrcType = routes.Interface{}, unix.RTN_UNSPEC
	received := nobody
	received.In = packet().In
	const not, may = "keeps yes", "foreign-masquerade?, keeps maybe"
	for _, tt := range []struct {
		table, chain, mark string
		packet             trace.Packet
		want               string
	}{
		{"kube-proxy", "post", "0x8000", packet(), not},
		{"other", "post", "0x8000", packet(), may},
		{"other", "KUBE-POSTROUTING", "0x8000", packet(), not},
		{"kube-proxy", "post", "0xc000", packet(), may},
		{"other", "post", "0x4000", packet(), not},
		{"other", "ts-postrouting", "0x40000", packet(), not},
		{"other", "ts-postrouting", "0x40000", received, not},
		{"other", "ts-postrouting", "0x40000", nobody, may},
	} {
		nfttest.NFT(t, ns, fmt.Sprintf("flush ruleset; table ip %s { chain %s { type nat hook postrouting priority 100; "+
			"meta mark & %s == %[3]s masquerade; }; }", tt.table, tt.chain, tt.mark), "-f", "-")
		if got := words(trace.New(read(t, c)).At(tt.packet, unix.NF_INET_POST_ROUTING)); got != tt.want {
			t.Errorf("table %s, chain %s, mark %s: %s, want %s", tt.table, tt.chain, tt.mark, got, tt.want)
		}
	}
}

// The mark that the packet has after prerouting is known as far as rules set it.
func TestTheMarkAfterPreroutingIsKnown(t *testing.T) {
	t.Parallel()
	ns, c := dialNS(t)
	for _, tt := range []struct {
		rules        string // of nft, or of iptables
		value, known uint32
	}{
		{"meta mark set 7", 7, 0xffffffff},
		{"meta mark set meta mark or 0x10", 0x10, 0x10},
		{"ip saddr 10.244.1.2 meta mark set meta mark and 0xff", 0, 0xffffff00},
		{"ip saddr 10.244.1.3 meta mark set 7", 0, 0},
		{"meta l4proto tcp meta mark set 7", 0, 0},
		{"meta mark set ct mark", 0, 0},
		{"-j CONNMARK --restore-mark", 0, 0},
		{"-j CONNMARK --restore-mark --mask 0xff", 0, 0xffffff00},
		{"-j CONNMARK --restore-mark --nfmask 0xff", 0, 0},
		{"-j CONNMARK --restore-mark --nfmask 0xff --ctmask 0xf000", 0, 0xffff0f00},
		{"-j CONNMARK --restore-mark --mask 0xff --left-shift-mark 8", 0, 0},
		{"-j CONNMARK --save-mark", 0, 0xffffffff},
		{"-j CONNMARK --set-mark 5", 0, 0xffffffff},
	} {
		text := "flush ruleset\ntable ip t { chain pre { type filter hook prerouting priority -151;\n%s\n}\n}\n"
		if strings.HasPrefix(tt.rules, "-j") {
			nfttest.NFT(t, ns, fmt.Sprintf(text, "meta mark set 0"), "-f", "-")
			nfttest.Run(t, ns, "", "iptables-nft", strings.Fields("-t mangle -A PREROUTING "+tt.rules)...)
		} else {
			nfttest.NFT(t, ns, fmt.Sprintf(text, tt.rules), "-f", "-")
		}
		d, _ := trace.New(read(t, c)).Trace(packet())
		if d.Mark.Value != tt.value || d.Mark.Known != tt.known {
			t.Errorf("%s: %#x of %#x, want %#x of %#x", tt.rules, d.Mark.Value, d.Mark.Known, tt.value, tt.known)
		}
	}
}

// Expressions that need modules which few kernels have are known by name, and no other is.
func TestWhatAnExpressionDoesIsKnownByItsName(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]struct {
		code trace.Code
		is   trace.Truth
	}{
		"target REJECT": {trace.Rejects, trace.Yes}, "target TARPIT": {trace.Rejects, trace.Yes},
		"target DELUDE": {trace.Rejects, trace.Yes}, "reject": {trace.Rejects, trace.Yes},
		"target LOG": {"", trace.Yes}, "target TRACE": {"", trace.Yes}, "match comment": {"", trace.Yes},
		"counter": {"", trace.Yes}, "match statistic": {"", trace.Maybe}, "match LOG": {"", trace.Maybe},
		"dynset": {"", trace.Maybe}, "connlimit": {"", trace.Maybe}, "quota": {"", trace.Maybe}, "socket": {"", trace.Maybe},
		"tproxy": {trace.Unknown, trace.Maybe}, "synproxy": {trace.Unknown, trace.Maybe},
		"target TPROXY": {trace.Unknown, trace.Maybe}, "target NFQUEUE": {trace.Unknown, trace.Maybe},
		"target SYNPROXY": {trace.Unknown, trace.Maybe}, "target comment": {trace.Unknown, trace.Maybe},
		"target counter": {trace.Unknown, trace.Maybe}, "something new": {trace.Unknown, trace.Maybe},
		"target SNPT": {trace.Rewrites, trace.Yes}, "target DNPT": {trace.Rewrites, trace.Yes},
		"target HMARK": {"marks", trace.Yes}, "target NOTRACK": {trace.Untracks, trace.Yes},
		"target MASQUERADE": {trace.Masquerades, trace.Yes}, "target NETMAP": {trace.Translates, trace.Yes},
	} {
		kind, of, is := strings.Cut(name, " ")
		e := nfnetlink.Expr{Name: kind}
		if attr := map[string]uint16{"target": unix.NFTA_TARGET_NAME, "match": unix.NFTA_MATCH_NAME}[kind]; is {
			e.Attrs.AddBytes(attr, append([]byte(of), 0))
		}
		code, truth := trace.Effect(nfnetlink.Rule{Family: nfnetlink.IPv4, Exprs: []nfnetlink.Expr{e}})
		if code != want.code || truth != want.is {
			t.Errorf("%s: %q, %d, want %q, %d", name, code, truth, want.code, want.is)
		}
	}
}
