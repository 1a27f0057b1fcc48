package answer

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/judge"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/others"
	"nft-masq-agent/nft/routes"
	"nft-masq-agent/nft/xtables"
)

// testPolicy is that of a file, on a node with some addresses.
func testPolicy(t *testing.T, text string, addresses ...string) nft.Policy {
	t.Helper()
	b := nft.Build(config.Defaults{}, nft.Options{Layout: native.Layout{}},
		config.Source{Name: "config", Data: []byte(text)})
	if b.Ruleset == nil {
		t.Fatal(b.Problems)
	}
	return b.Ruleset.Policy.WithAddresses(cases.Addrs(addresses...))
}

// testFacts are those of a packet of a pod to another host, of which nothing else is known.
func testFacts(t *testing.T, text string, dst string) *ExplainFacts {
	t.Helper()
	p := testPolicy(t, text, "198.51.100.7")
	return &ExplainFacts{
		Head: cli.NewHead("explain"), Config: Config{Path: "/etc/config/ip-masq-agent", Accepted: true}, Policy: &p,
		Packet: Packet{Src: netip.MustParseAddr("10.244.1.7"), Dst: netip.MustParseAddrPort(dst)},
		Route: routes.Route{
			Type: unix.RTN_UNICAST, Egress: routes.Interface{Name: "eth0"}, Address: netip.MustParseAddr("192.0.2.1"),
			SourceType: unix.RTN_UNICAST, Ingress: routes.Interface{Name: "veth1"},
		},
	}
}

// exampleOf is an example of a connection that contradicts the policy.
func exampleOf(address string, age conntrack.Age) conntrack.Example {
	src := netip.MustParseAddrPort("10.244.1.7:40000")
	dst := netip.MustParseAddrPort("203.0.113.9:443")
	return conntrack.Example{Entry: conntrack.Entry{Key: conntrack.Key{
		Original: conntrack.Tuple{Src: src, Dst: dst, Protocol: unix.IPPROTO_TCP},
		Reply:    conntrack.Tuple{Src: dst, Dst: netip.MustParseAddrPort(address + ":40000"), Protocol: unix.IPPROTO_TCP},
	}, Timeout: 77}, Verdict: nft.Masqueraded, Age: age}
}

// evidenceOf sets what connections to the address and to the entry of the policy show.
func (f *ExplainFacts) evidenceOf(address, entry conntrack.Count) {
	f.evidenceFrom(address, conntrack.Count{}, entry)
}

// evidenceFrom also sets what connections from other sources to the address show.
func (f *ExplainFacts) evidenceFrom(address, elsewhere, entry conntrack.Count) {
	dst := f.Packet.Dst.Addr()
	family, _ := f.Policy.Family(dst.Is6())
	entry.Entry = judge.Rule(&family, f.connection()).Entry
	f.SetEvidence(conntrack.Evidence{Answers: []conntrack.Count{address, elsewhere}, Counts: []conntrack.Count{entry}})
}

// optional returns the address of a text, the zero address of none.
func optional(text string) (a netip.Addr) {
	if text != "" {
		a = netip.MustParseAddr(text)
	}
	return a
}

// Each headline is chosen by the first fact of its rank, and the text follows from it.
func TestEachHeadlineFollowsFromTheFacts(t *testing.T) {
	const file = "nonMasqueradeCIDRs: [10.0.0.0/8]\n"
	shown := []netip.Addr{netip.MustParseAddr("192.0.2.1")}
	agree := conntrack.Count{Agrees: 4, Answered: 3, Seen: shown}
	overruled := conntrack.Count{
		Agrees: 1, Answered: 1, Overruled: 2,
		Examples: []conntrack.Example{exampleOf("192.0.2.77", conntrack.AgeOverruled)},
	}
	answered := exampleOf("192.0.2.77", conntrack.AgeOverruled)
	answered.Status = conntrack.SeenReply
	for _, tt := range []struct {
		name, config, to string
		facts            func(f *ExplainFacts)
		code             Code
		headline         string
		sees, should     string
		details          string // a part of them
		errors           int
	}{
		{
			name: "nothing is known but the policy", code: Should, should: "192.0.2.1",
			headline: "203.0.113.9:443 should see 192.0.2.1, the address of eth0: masqueraded by this agent; no open " +
				"connection shows it.",
			details: "nft-masq-agent explain 203.0.113.9:443 --from 10.244.1.7 --trace names each rule",
		},
		{
			name: "exempt", to: "10.9.0.9:443", code: Should, should: "10.244.1.7",
			headline: "10.9.0.9:443 should see 10.244.1.7, the source's own address: this agent does not masquerade it; no " +
				"open connection shows it.",
		},
		{
			name: "exempt and enforced", config: file + "masqueradeSrcCIDRs: [10.244.0.0/16]\nenforceNonMasquerade: true\n",
			to: "10.9.0.9:443", code: Should, should: "10.244.1.7",
			headline: "10.9.0.9:443 should see 10.244.1.7, the source's own address: this agent enforces that " +
				"(enforceNonMasquerade); no open connection shows it.",
		},
		{
			name: "snatAddresses", config: file + "snatAddresses: [198.51.100.7]\n", code: Should, should: "198.51.100.7",
			headline: "203.0.113.9:443 should see 198.51.100.7, one of snatAddresses: masqueraded by this agent; no open " +
				"connection shows it.",
		},
		{
			name: "none of snatAddresses", config: file + "snatAddresses: [198.51.100.8]\n", code: Should, should: "192.0.2.1",
			headline: "203.0.113.9:443 should see 192.0.2.1, the address of eth0: masqueraded by this agent; " +
				"no open connection shows it.",
		},
		{
			name: "the address of the interface is not known", code: Should,
			facts:    func(f *ExplainFacts) { f.Route.Address = netip.Addr{} },
			headline: "203.0.113.9:443 should see this node's address: masqueraded by this agent;",
		},
		{
			name: "snatRules", code: Should, should: "198.51.100.7",
			config: file + "snatRules: [{from: [10.244.0.0/16], addresses: [198.51.100.9]}, " +
				"{from: [10.244.1.0/24], addresses: [198.51.100.7]}]\n",
			headline: "203.0.113.9:443 should see 198.51.100.7, by entry 2 of snatRules: masqueraded by this agent; no open " +
				"connection shows it.",
		},
		{
			name: "portsPerPod names the block", config: file + "masqueradeSrcCIDRs: [10.244.0.0/16]\nportsPerPod: 250\n",
			code: Should, should: "192.0.2.1",
			headline: "203.0.113.9:443 should see 192.0.2.1, the address of eth0: masqueraded by this agent; the source " +
				"port, or the identifier of an ICMP echo, is one of 2774-3023, the block of 10.244.1.7 (portsPerPod); no open " +
				"connection shows it.",
		},
		{
			name: "other rules and legacy tables are named", code: Should, should: "192.0.2.1",
			facts: func(f *ExplainFacts) {
				f.Others = []others.Rule{
					{Table: "ip nat", Chain: "x", Handle: 7, Command: "nft -a list"},
					{Table: "ip t;touch", Chain: "post", Command: "nft -a list 't;touch'"},
				}
				f.Legacy = []xtables.LegacyTable{{Family: nfnetlink.IPv4, Table: "filter"}}
			},
			headline: "203.0.113.9:443 should see",
			details: "rule ip nat x handle 7 of another program names one of the addresses: nft -a list\n" +
				"chain ip t;touch post of another program may translate sources: nft -a list 't;touch'\n" +
				"legacy ip_tables (ip filter) may decide, too: iptables-legacy -t filter -S shows it\nnft-masq-agent explain",
		},
		{
			name: "connections to it agree", code: Shown, sees: "192.0.2.1", should: "192.0.2.1",
			facts: func(f *ExplainFacts) { f.evidenceOf(agree, agree) },
			headline: "203.0.113.9:443 sees 192.0.2.1, the address of eth0: masqueraded by this agent; 4 open connections to " +
				"it agree.",
		},
		{
			name: "connections of other pods agree", code: Shown, sees: "192.0.2.1", should: "192.0.2.1",
			facts: func(f *ExplainFacts) {
				f.Packet.Chosen = true
				f.evidenceFrom(conntrack.Count{}, agree, agree)
			},
			headline: "203.0.113.9:443 sees 192.0.2.1",
		},
		{
			name: "connections of pods show nothing about the node's", code: ShownByEntry, should: "192.0.2.1",
			facts: func(f *ExplainFacts) {
				f.Packet.Chosen = true
				f.Packet.Src = netip.MustParseAddr("192.0.2.1")
				f.Route.SourceType = unix.RTN_LOCAL
				f.evidenceFrom(conntrack.Count{}, conntrack.Count{
					Agrees: 2, Answered: 2, Seen: []netip.Addr{netip.MustParseAddr("198.51.100.7")},
				}, agree)
			},
			headline: "203.0.113.9:443 should see 192.0.2.1, the address of eth0",
		},
		{
			name: "they agree, but none was answered", code: Should, should: "192.0.2.1",
			facts: func(f *ExplainFacts) { f.evidenceOf(conntrack.Count{Agrees: 4}, agree) },
			headline: "203.0.113.9:443 should see 192.0.2.1, the address of eth0: masqueraded by this agent; 4 open " +
				"connections to it agree, but none was answered.",
		},
		{
			name: "connections of the same entry agree", code: ShownByEntry, should: "192.0.2.1",
			facts: func(f *ExplainFacts) { f.evidenceOf(conntrack.Count{}, agree) },
			headline: "203.0.113.9:443 should see 192.0.2.1, the address of eth0: masqueraded by this agent; no open " +
				"connection shows it, but 4 open connections that the same entry decides agree.",
		},
		{
			name: "stale ones are open to it, and others of the same entry agree", code: ShownByEntry, should: "192.0.2.1",
			facts: func(f *ExplainFacts) { f.evidenceOf(conntrack.Count{Stale: 2}, agree) },
			headline: "203.0.113.9:443 should see 192.0.2.1, the address of eth0: masqueraded by this agent; no open " +
				"connection shows it, but 4 open connections that the same entry decides agree.",
		},
		{
			name: "connections contradict", code: Contradicted, should: "192.0.2.1",
			facts: func(f *ExplainFacts) { f.evidenceOf(overruled, agree) },
			headline: "2 connections to 203.0.113.9:443 show 192.0.2.77, not 192.0.2.1, the address of eth0: another " +
				"program decides.",
			details: "tcp 10.244.1.7:40000 to 203.0.113.9:443 is seen as 192.0.2.77:40000\n1 connection to it agrees with",
		},
		{
			name: "answered ones contradict", code: Contradicted, sees: "192.0.2.77", should: "192.0.2.1",
			facts: func(f *ExplainFacts) {
				f.evidenceOf(conntrack.Count{Overruled: 1, Examples: []conntrack.Example{answered}}, agree)
			},
			headline: "1 connection to 203.0.113.9:443 shows 192.0.2.77, not 192.0.2.1, the address of eth0: another " +
				"program decides.",
		},
		{
			name: "answered ones contradict, and others agree", code: Contradicted, should: "192.0.2.1",
			facts: func(f *ExplainFacts) {
				f.evidenceOf(conntrack.Count{
					Agrees: 1, Overruled: 2, Examples: []conntrack.Example{answered, answered},
				}, agree)
			},
			headline: "2 connections to 203.0.113.9:443 show 192.0.2.77, not 192.0.2.1", details: "--trace names each rule",
		},
		{
			name: "an answered one contradicts, and another one shows another address", code: Contradicted,
			should: "192.0.2.1", facts: func(f *ExplainFacts) {
				other := exampleOf("192.0.2.78", conntrack.AgeOverruled)
				f.evidenceOf(conntrack.Count{Overruled: 2, Examples: []conntrack.Example{answered, other}}, agree)
			},
			headline: "2 connections to 203.0.113.9:443 show 192.0.2.77, 192.0.2.78, not 192.0.2.1",
		},
		{
			name: "they contradict, and it is not known when they began", code: Contradicted,
			should: "192.0.2.1",
			facts: func(f *ExplainFacts) {
				f.evidenceOf(conntrack.Count{
					Undated: 1, Examples: []conntrack.Example{exampleOf("10.244.1.7", conntrack.AgeUndated)},
				}, agree)
			},
			headline: "1 connection to 203.0.113.9:443 shows 10.244.1.7, not 192.0.2.1, the address of eth0: they began " +
				"before the policy, or another program decides.",
		},
		{
			name: "stale ones contradict nothing", code: Shown, sees: "192.0.2.1", should: "192.0.2.1",
			facts: func(f *ExplainFacts) {
				f.evidenceOf(conntrack.Count{
					Agrees: 1, Answered: 1, Stale: 1, Seen: shown,
					Examples: []conntrack.Example{exampleOf("10.244.1.7", conntrack.AgeStale)},
				}, agree)
			},
			headline: "203.0.113.9:443 sees 192.0.2.1",
		},
		{
			name: "they show another address than it should be", code: Shown, sees: "198.51.100.50", should: "192.0.2.1",
			facts: func(f *ExplainFacts) {
				f.evidenceOf(conntrack.Count{
					Agrees: 2, Answered: 1, Seen: []netip.Addr{netip.MustParseAddr("198.51.100.50")},
				}, agree)
			},
			headline: "203.0.113.9:443 sees 198.51.100.50, as 2 open connections to it show; it should see 192.0.2.1, the " +
				"address of eth0.",
			details: "--trace names each rule",
		},
		{
			name: "they lead to endpoints", code: Shown, should: "192.0.2.1",
			facts: func(f *ExplainFacts) {
				f.evidenceOf(conntrack.Count{
					Agrees: 2, Answered: 2, Seen: shown,
					Endpoints: []netip.AddrPort{netip.MustParseAddrPort("10.9.0.9:80")},
				}, agree)
			},
			headline: "2 open connections to 203.0.113.9:443 lead to 10.9.0.9:80, show 192.0.2.1, and agree with the policy: " +
				"another endpoint may see another address.",
			details: "--trace names each rule",
		},
		{
			name: "endpoints are overruled", code: Contradicted, should: "192.0.2.1",
			facts: func(f *ExplainFacts) {
				f.evidenceOf(conntrack.Count{
					Overruled: 1, Endpoints: []netip.AddrPort{netip.MustParseAddrPort("10.9.0.9:80")},
					Examples: []conntrack.Example{exampleOf("192.0.2.77", conntrack.AgeOverruled)},
				}, agree)
			},
			headline: "1 connection to 203.0.113.9:443 shows 192.0.2.77, not what the policy says of 10.9.0.9:80: " +
				"another program decides.",
		},
		{
			name: "no route", code: NoRoute, should: "192.0.2.1",
			facts:    func(f *ExplainFacts) { f.Route.Type = unix.RTN_UNSPEC },
			headline: "This node has no route to 203.0.113.9:443 for a packet from 10.244.1.7.",
		},
		{
			name: "no source", code: NoRoute, headline: "This node has no route to 203.0.113.9:443.",
			facts: func(f *ExplainFacts) { f.Packet.Src = netip.Addr{} },
		},
		{
			name: "no forwarding", code: NotForwarded, should: "192.0.2.1",
			facts: func(f *ExplainFacts) {
				f.Kept = "packets"
				f.Remedy = "sysctl -w net.ipv4.ip_forward=1"
				f.Route.Type = unix.RTN_UNSPEC
			},
			headline: "203.0.113.9:443 sees nothing: this node forwards no packets.", details: "sysctl -w net.ipv4.ip_forward=1",
		},
		{
			name: "the node itself needs no forwarding", code: Should, should: "192.0.2.1",
			facts: func(f *ExplainFacts) {
				f.Kept = "packets"
				f.Route.SourceType = unix.RTN_LOCAL
			},
			headline: "203.0.113.9:443 should see 192.0.2.1",
		},
		{
			name: "an address of this node", to: "192.0.2.1:80", code: LocalAddress, should: "10.244.1.7",
			facts: func(f *ExplainFacts) { f.Route.Type = unix.RTN_LOCAL },
			headline: "192.0.2.1:80 is an address of this node: this agent does not masquerade a connection from " +
				"10.244.1.7.",
		},
		{
			name: "the config is rejected", code: ConfigRejected, should: "192.0.2.1", errors: 1,
			facts: func(f *ExplainFacts) {
				f.Config.Accepted = false
				f.Files = config.Problems{{Pos: config.Position{File: "/its/config", Line: 3, Col: 5}}}
				f.Why = "the kernel enforces 12345678"
				f.evidenceOf(overruled, agree)
			},
			headline: "the config is rejected; the kernel enforces 12345678",
			details: "by the policy in force, 203.0.113.9:443 should see 192.0.2.1, the address of eth0: masqueraded by " +
				"this agent\nfix /its/config:3:5",
		},
		{
			name: "no rules of ours", code: NotInstalled, should: "192.0.2.1", errors: 1,
			facts:    func(f *ExplainFacts) { f.Kernel = Absent },
			headline: "None of this agent's rules are installed on this node.",
			details:  "with the config, 203.0.113.9:443 would see 192.0.2.1",
		},
		{
			name: "another policy", code: OutOfSync, errors: 1,
			facts: func(f *ExplainFacts) {
				f.Kernel = Differs
				f.Policy = nil
				f.Why = "The kernel enforces 12345678, not 87654321 of the config"
			},
			headline: "The kernel enforces 12345678, not 87654321 of the config.",
		},
		{
			name: "the kernel is not read", code: Should, should: "192.0.2.1",
			facts: func(f *ExplainFacts) {
				f.Kernel = Unread
				f.Why = "no permission"
			},
			headline: "203.0.113.9:443 should see 192.0.2.1",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.config == "" {
				tt.config = file
			}
			if tt.to == "" {
				tt.to = "203.0.113.9:443"
			}
			f := testFacts(t, tt.config, tt.to)
			if tt.facts != nil {
				tt.facts(f)
			}
			x := Explain(*f)
			if x.Why.Code != tt.code || x.Sees != optional(tt.sees) || x.ShouldSee != optional(tt.should) ||
				len(x.Errors) != tt.errors {
				t.Errorf("code %s, sees %q, should see %q, errors %v; want %+v", x.Why.Code, x.Sees, x.ShouldSee, x.Errors, tt)
			}
			if !strings.HasPrefix(x.Headline, tt.headline) || !strings.Contains(strings.Join(x.Details, "\n"), tt.details) {
				t.Errorf("headline and details:\n%s\n%s\nwant\n%s\n%s", x.Headline, x.Details, tt.headline, tt.details)
			}
			if slices.ContainsFunc(x.Details, func(line string) bool { return strings.HasPrefix(line, "0 ") }) {
				t.Errorf("nothing is a detail: %q", x.Details)
			}
			shown := text(t, &x)
			if !strings.HasPrefix(shown, x.Headline+"\n") {
				t.Errorf("the first line is not the headline:\n%s", shown)
			}
		})
	}
}

func TestTextOfAnExplanation(t *testing.T) {
	f := testFacts(t, "masqueradeSrcCIDRs: [10.244.0.0/16]\nnonMasqueradeCIDRs: [10.0.0.0/8]\n", "10.9.0.9:443")
	f.Kernel = Unread
	f.Why = "no permission"
	f.ToAddress.Stale = 2
	f.Packet.Protocol = unix.IPPROTO_TCP
	f.Packet.Chosen = true
	for i := range 9 {
		f.Others = append(f.Others, others.Rule{Table: "ip x", Chain: "y", Handle: uint64(i), Command: "nft -a"})
	}
	const want = "\n  and more: nft -a list ruleset\n  nft-masq-agent explain 10.9.0.9:443 --from 10.244.1.7 " +
		"--protocol tcp --trace names each rule that the next connection meets" + `
no permission; the answer is from the config only

The policy, for a connection from 10.244.1.7:

  1  to an address of this node         no
  2  source in masqueradeSrcCIDRs       yes, 10.244.0.0/16
     config:1:22
  3  destination in nonMasqueradeCIDRs  yes, 10.0.0.0/8: not masqueraded
     config:2:22

2 connections to it date from an earlier policy.
`
	x := Explain(*f)
	f.Packet.Src = netip.MustParseAddr("172.17.0.2")
	other := Explain(*f)
	if end := "yes, 10.0.0.0/8"; strings.Contains(text(t, &other), end) || !strings.Contains(text(t, &other),
		"  2  source in masqueradeSrcCIDRs  no: not masqueraded\n     config:1:22\n") {
		t.Errorf("of a source that is not listed:\n%s", text(t, &other))
	}
	_, shown, _ := strings.Cut(text(t, &x), "handle 7 of another program names one of the addresses: nft -a")
	nfttest.Same(t, "explanation (-want +got)", want, shown)
}

// Each connection is listed with what the policy says about it.
func TestTextOfConnections(t *testing.T) {
	policy := conntrack.NewComparison(testPolicy(t, "nonMasqueradeCIDRs: [10.0.0.0/8]"), &conntrack.Node{})
	contradicts := exampleOf("10.244.1.7", "").Entry
	service := exampleOf("192.0.2.1", "").Entry
	service.Original.Dst = netip.MustParseAddrPort("10.96.0.10:443")
	service.State = "ESTABLISHED"
	zone := exampleOf("192.0.2.1", "").Entry
	zone.Zone = 7
	all := []conntrack.Entry{contradicts, contradicts, service, zone}
	known := conntrack.History{Earlier: map[uint32]bool{}}
	c := Connections{Head: cli.NewHead("connections"), Total: len(all)}
	c.Behind(netip.MustParseAddrPort("192.0.2.1:40000"), all)
	c.Connections = []Connection{
		JudgedConnection(&contradicts, policy, conntrack.History{}), JudgedConnection(&contradicts, policy, known),
		JudgedConnection(&service, policy, known), JudgedConnection(&zone, policy, known),
	}
	c.Add(config.Note, "note", "a note")
	want := []string{
		"behind 192.0.2.1:40000: 10.244.1.7",
		"PROTO SOURCE DESTINATION SEEN AS STATE TIMEOUT NOW",
		"tcp 10.244.1.7:40000 203.0.113.9:443 10.244.1.7:40000 - 77s masqueraded (stale)",
		"tcp 10.244.1.7:40000 203.0.113.9:443 10.244.1.7:40000 - 77s masqueraded (overruled)",
		"tcp 10.244.1.7:40000 10.96.0.10:443 → 203.0.113.9:443 192.0.2.1:40000 ESTABLISHED 77s masqueraded",
		"tcp 10.244.1.7:40000 203.0.113.9:443 192.0.2.1:40000 - 77s",
		"a note",
	}
	var shown []string
	for line := range strings.Lines(text(t, &c)) {
		shown = append(shown, strings.Join(strings.Fields(line), " "))
	}
	nfttest.Same(t, "connections (-want +got)", want, shown)
	none := Connections{Head: cli.NewHead("connections")}
	nfttest.Same(t, "no connections (-want +got)", "no connections\n", text(t, &none))
}
