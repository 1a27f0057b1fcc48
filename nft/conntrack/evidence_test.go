package conntrack

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/judge"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/routes"
)

// exampleNode has two addresses, and pods behind a bridge.
func exampleNode() *Node {
	p := netip.MustParsePrefix
	networks := []routes.Network{
		{Prefix: p("192.0.2.1/32"), Type: unix.RTN_LOCAL},
		{Prefix: p("127.0.0.0/8"), Type: unix.RTN_LOCAL},
		{Prefix: p("2001:db8::1/128"), Type: unix.RTN_LOCAL},
		{Prefix: p("192.0.2.255/32"), Type: unix.RTN_BROADCAST},
		{Prefix: p("10.244.1.2/32"), Type: unix.RTN_UNICAST, Interface: "cni0"}, // not of the main table
	}
	for network, name := range map[string]string{"0.0.0.0/0": "eth0", "10.244.0.0/24": "cni0", "10.244.0.5/32": "veth5"} {
		networks = append(networks, routes.Network{Prefix: p(network), Type: unix.RTN_UNICAST, Main: true, Interface: name})
	}
	toward := func(src, dst netip.Addr) (string, error) {
		back := map[string]string{"10.244.2.2": "cni0", "10.244.2.3": "eth1"}
		if src.IsValid() {
			back = map[string]string{"198.51.100.8": "eth0", "198.51.100.9": "wg0"}
		}
		return back[dst.String()], nil
	}
	return newNode(networks, toward, []Timeout{
		{Protocol: unix.IPPROTO_TCP, Seconds: 120},
		{Protocol: unix.IPPROTO_UDP, Seconds: 30},
		{Protocol: unix.IPPROTO_ICMP, Seconds: 30},
	})
}

func comparisonOf(change func(*config.Config)) *Comparison {
	c := config.Default(config.Defaults{EnableIPv6: true})
	change(&c)
	return NewComparison(nft.NewPolicy(c, nft.Options{Layout: native.Layout{}}), exampleNode())
}

func TestFindings(t *testing.T) {
	const pod, node = "10.244.1.2:4000", "192.0.2.1:20000"
	const exempt, other = "10.9.0.9:53", "203.0.113.9:53"
	with := func(e Entry, change func(*Entry)) Entry {
		change(&e)
		return e
	}
	udp := func(src, requested, dst, seenAs string) Entry {
		return entryOf(unix.IPPROTO_UDP, src, requested, dst, seenAs)
	}
	defaults := func(*config.Config) {}
	pods := func(c *config.Config) { c.MasqueradeSrcCIDRs = cases.CIDRs("10.244.0.0/16") }
	left := func(c *config.Config) { c.NonMasqueradeSrcCIDRs = cases.CIDRs("10.244.1.0/24") }
	received := func(c *config.Config) { c.MasqueradeSrcInterfaces = []config.Interface{{Name: "cni0"}} }
	leaving := func(c *config.Config) { c.MasqueradeOutInterfaces = []config.Interface{{Name: "eth0"}} }
	snat := func(c *config.Config) { c.SNATAddresses = cases.CIDRs("198.51.100.8/32") }
	four := func(c *config.Config) { c.EnableIPv6 = false }
	for _, tt := range []struct {
		name   string
		change func(*config.Config)
		entry  Entry
		want   Finding
		by     string // the entry of the policy
	}{
		{"exempt", defaults, udp(pod, "", exempt, pod), Agrees, "nonMasqueradeCIDRs 10.0.0.0/8"},
		{"exempt, but translated", defaults, udp(pod, "", exempt, node), Contradicts, "nonMasqueradeCIDRs 10.0.0.0/8"},
		{"masqueraded", defaults, udp(pod, "", other, node), Agrees, "anything else"},
		{"not masqueraded", defaults, udp(pod, "", other, pod), Contradicts, "anything else"},
		{"another address", snat, udp(pod, "", other, node), Agrees, "anything else"},
		{"address that went", snat, udp(pod, "", other, "198.51.100.8:9"), Contradicts, "anything else"},
		{"exempt Service", defaults, udp(pod, "10.96.0.10:53", exempt, pod), Agrees, "nonMasqueradeCIDRs 10.0.0.0/8"},
		{
			"exempt Service, translated", defaults, udp(pod, "10.96.0.10:53", exempt, node), ToService,
			"nonMasqueradeCIDRs 10.0.0.0/8",
		},
		{"Service, not masqueraded", defaults, udp(pod, "10.96.0.10:53", other, pod), Contradicts, "anything else"},
		{"zone", defaults, with(udp(pod, "", other, pod), func(e *Entry) { e.Zone = 7 }), InZone, ""},
		{"helper", defaults, with(udp(pod, "", other, pod), func(e *Entry) { e.Status = Expected }), Helped, ""},
		{
			"closed", defaults, with(udp(pod, "", other, node), func(e *Entry) { e.State = "TIME_WAIT" }), Closed,
			"anything else",
		},
		{
			"closed, and not masqueraded", defaults,
			with(udp(pod, "", other, pod), func(e *Entry) { e.State = "TIME_WAIT" }), Contradicts, "anything else",
		},
		{"from the node", defaults, udp("192.0.2.1:9", "", other, "192.0.2.1:9"), OfNode, ""},
		{"to the node", defaults, udp(pod, "", "192.0.2.1:9", pod), OfNode, ""},
		{"hairpin", defaults, udp(pod, "10.96.0.10:53", "10.244.1.2:53", node), Hairpin, ""},
		{"multicast", defaults, udp(pod, "", "224.0.0.1:9", pod), OfNode, ""},
		{"broadcast", defaults, udp(pod, "", "192.0.2.255:9", pod), OfNode, ""},
		{"limited broadcast", defaults, udp(pod, "", "255.255.255.255:9", pod), OfNode, ""},
		{"bridge", defaults, udp("10.244.0.2:9", "", "10.244.0.3:9", "10.244.0.2:9"), Bridged, ""},
		{
			"a bridge in another table", defaults, udp(pod, "", "10.244.0.3:9", node), Contradicts,
			"nonMasqueradeCIDRs 10.0.0.0/8",
		},
		{"no bridge", defaults, udp("10.244.0.2:9", "", "10.244.0.5:9", node), Contradicts, "nonMasqueradeCIDRs 10.0.0.0/8"},
		{"IPv6 is off", four, udp("[fd00::2]:9", "", "[2001:db8:9::1]:9", "[fd00::2]:9"), FamilyOff, "enableIPv6"},
		{"IPv6", defaults, udp("[fd00::2]:9", "", "[2001:db8:9::1]:9", "[fd00::2]:9"), Contradicts, "anything else"},
		{"no pod", pods, udp("172.17.0.2:9", "", exempt, node), OfSource, "masqueradeSrcCIDRs"},
		{"a pod", pods, udp(pod, "", exempt, node), Contradicts, "nonMasqueradeCIDRs 10.0.0.0/8"},
		{"left out", left, udp(pod, "", other, node), OfSource, "nonMasqueradeSrcCIDRs 10.244.1.0/24"},
		{"perhaps no pod", received, udp(pod, "", exempt, node), OnInterface, "nonMasqueradeCIDRs 10.0.0.0/8"},
		{
			"received on the interface", received, udp("10.244.2.2:9", "", exempt, node), Contradicts,
			"nonMasqueradeCIDRs 10.0.0.0/8",
		},
		{"masqueraded by the interface", received, udp("10.244.2.2:9", "", other, node), Agrees, "anything else"},
		{"received on another", received, udp("10.244.2.3:9", "", exempt, node), OfSource, "masqueradeSrcInterfaces"},
		{"on an interface", leaving, udp(pod, "", other, pod), OnInterface, "anything else"},
		{"leaving by the interface", leaving, udp(pod, "", "198.51.100.8:53", pod), Contradicts, "anything else"},
		{"leaving by another", leaving, udp(pod, "", "198.51.100.9:53", pod), Agrees, "masqueradeOutInterfaces"},
		{"exempt on any interface", leaving, udp(pod, "", exempt, node), Contradicts, "nonMasqueradeCIDRs 10.0.0.0/8"},
	} {
		ruling, found := comparisonOf(tt.change).Compare(&tt.entry)
		by := ""
		if ruling.Verdict != "" {
			by = ruling.String()
		}
		if found != tt.want || by != tt.by {
			t.Errorf("%s: %s by %q, want %s by %q", tt.name, found, by, tt.want, tt.by)
		}
	}
}

// The kernel is asked once for each source, and only if the policy depends on it.
func TestRoutesAreReadOnceAndAreBounded(t *testing.T) {
	node := exampleNode()
	asked := 0
	node.toward = func(_, _ netip.Addr) (string, error) {
		asked++
		return "cni0", nil
	}
	c := config.Default(config.Defaults{})
	compare := func(src netip.Addr) Finding {
		from := netip.AddrPortFrom(src, 9).String()
		e := entryOf(unix.IPPROTO_UDP, from, "", "203.0.113.9:53", from)
		_, found := NewComparison(nft.NewPolicy(c, nft.Options{Layout: native.Layout{}}), node).Compare(&e)
		return found
	}
	if found := compare(netip.MustParseAddr("10.244.2.2")); found != Contradicts || asked != 0 {
		t.Errorf("without interfaces: %s, asked %d times", found, asked)
	}
	c.MasqueradeSrcInterfaces = []config.Interface{{Name: "cni0"}}
	comparison := NewComparison(nft.NewPolicy(c, nft.Options{Layout: native.Layout{}}), node)
	known := 0
	for i := range 4 * maxLookups {
		src := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 244, byte(i / 2 >> 8), byte(i / 2)}), 9).String()
		e := entryOf(unix.IPPROTO_UDP, src, "", "203.0.113.9:53", src)
		if _, found := comparison.Compare(&e); found == Contradicts {
			known++
		}
	}
	if asked != maxLookups || known != 2*maxLookups {
		t.Errorf("asked %d times, judged %d connections", asked, known)
	}
}

// gather returns the evidence of entries.
// gather asks about 10.9.0.9.
func gather(change func(*config.Config), h History, all ...Entry) Evidence {
	g := newGathering(comparisonOf(change), h, []Query{{To: netip.MustParseAddrPort("10.9.0.9:0")}})
	for i := range all {
		g.add(&all[i])
	}
	return g.evidence()
}

func TestStaleIsOlderThanThePolicyAndOverruledIsYounger(t *testing.T) {
	old := entryOf(unix.IPPROTO_UDP, "10.244.1.2:1", "", "10.9.0.9:53", "192.0.2.1:1")
	young := entryOf(unix.IPPROTO_UDP, "10.244.1.2:2", "", "10.9.0.9:53", "192.0.2.1:2")
	old.ID = 7
	young.ID = 8
	noted := map[uint32]bool{old.ID: true}
	both := map[uint32]bool{old.ID: true, young.ID: true}
	since := time.Now()
	dated := func(e Entry, d time.Duration) Entry {
		e.Started = since.Add(d)
		return e
	}
	for name, tt := range map[string]struct {
		history    History
		old, young Entry
		want       Count
	}{
		"nothing is known": {History{}, old, young, Count{Undated: 2}},
		"noted":            {History{Since: since, Earlier: noted}, old, young, Count{Stale: 1, Overruled: 1}},
		"both":             {History{Since: since, Earlier: both}, old, young, Count{Stale: 2}},
		"full": {
			History{Since: since, Earlier: noted, Incomplete: true}, old, young, Count{Stale: 1, Undated: 1},
		},
		"at the start":          {History{AtStart: true, Earlier: noted}, old, young, Count{Undated: 1, Overruled: 1}},
		"times, and no history": {History{Since: since}, dated(old, -1), dated(young, 1), Count{Stale: 1, Overruled: 1}},
		"times, and full": {
			History{Since: since, Earlier: noted, Incomplete: true},
			dated(old, -1), dated(young, 1),
			Count{Stale: 1, Overruled: 1},
		},
		"times":              {History{Since: since, Earlier: noted}, dated(old, -1), dated(young, -1), Count{Stale: 2}},
		"times at the start": {History{Since: since, AtStart: true}, dated(old, -1), dated(young, -1), Count{Undated: 2}},
		"times alone":        {History{}, dated(old, -1), dated(young, 1), Count{Undated: 2}},
	} {
		found := gather(func(*config.Config) {}, tt.history, tt.old, tt.young)
		if len(found.Counts) != 1 {
			t.Fatalf("%s: %+v", name, found)
		}
		got := found.Counts[0]
		if got.Stale != tt.want.Stale || got.Overruled != tt.want.Overruled || got.Undated != tt.want.Undated ||
			got.Open() != 2 || len(got.Examples) != 2 || found.Incomplete != tt.history.Incomplete {
			t.Errorf("%s: %+v, want %+v", name, got, tt.want)
		}
	}
}

// On a node with short connections, closed ones are all that there is to see.
func TestOfClosedConnectionsOnlyOverruledOnesAreEvidence(t *testing.T) {
	closed := func(id uint32, seenAs string) Entry {
		e := entryOf(unix.IPPROTO_TCP, "10.244.1.2:1", "", "10.9.0.9:80", seenAs)
		e.ID = id
		e.State = "TIME_WAIT"
		e.Status = SeenReply
		return e
	}
	noted, overruled, agrees := closed(1, "192.0.2.1:1"), closed(2, "192.0.2.1:1"), closed(3, "10.244.1.2:1")
	for name, tt := range map[string]struct {
		history History
		want    Count
	}{
		"not noted":        {History{Earlier: map[uint32]bool{noted.ID: true}}, Count{Overruled: 1}},
		"nothing is known": {History{}, Count{}},
		"noted":            {History{Earlier: map[uint32]bool{noted.ID: true, overruled.ID: true}}, Count{}},
	} {
		found := gather(func(*config.Config) {}, tt.history, noted, overruled, agrees)
		var got Count
		if len(found.Counts) > 0 {
			got = found.Counts[0]
		}
		if got.Open() != tt.want.Open() || got.Overruled != tt.want.Overruled || len(got.Examples) != got.Overruled ||
			found.NotJudged["closed"] != 3-got.Overruled || len(found.NotJudged) != 1 || found.Answers[0].Closed != 1 {
			t.Errorf("%s: %+v, not judged %v, %+v", name, got, found.NotJudged, found.Answers)
		}
	}
}

func TestExamplesOfAnotherProgramComeFirst(t *testing.T) {
	e := entryOf(unix.IPPROTO_UDP, "10.244.1.2:1", "", "10.9.0.9:53", "192.0.2.1:9")
	for _, tt := range []struct{ ages, want []Age }{
		{[]Age{AgeStale, AgeOverruled}, []Age{AgeOverruled, AgeStale}},
		{[]Age{AgeStale, AgeStale, AgeStale, AgeUndated}, []Age{AgeUndated, AgeStale, AgeStale}},
		{[]Age{AgeUndated, AgeStale, AgeOverruled, AgeUndated}, []Age{AgeOverruled, AgeUndated, AgeUndated}},
	} {
		var c Count
		for _, age := range tt.ages {
			c.add(&e, nft.Exempt, age)
		}
		var got []Age
		for _, x := range c.Examples {
			got = append(got, x.Age)
		}
		if !slices.Equal(got, tt.want) {
			t.Errorf("%v: %v, want %v", tt.ages, got, tt.want)
		}
	}
}

func TestQueriesSelectConnections(t *testing.T) {
	e := entryOf(unix.IPPROTO_UDP, "10.244.1.2:4000", "10.96.0.10:53", "10.9.0.9:5353", "192.0.2.1:9")
	for _, tt := range []struct {
		from, to string
		protocol uint8
		want     bool
	}{
		{"", "10.9.0.9:0", 0, true},
		{"", "10.9.0.9:5353", 0, true},
		{"", "10.96.0.10:53", 0, true},
		{"10.244.1.2", "10.9.0.9:5353", unix.IPPROTO_UDP, true},
		{"", "10.9.0.9:53", 0, false},
		{"", "10.9.0.8:5353", 0, false},
		{"10.244.1.3", "10.9.0.9:0", 0, false},
		{"", "10.9.0.9:0", unix.IPPROTO_TCP, false},
	} {
		from, _ := netip.ParseAddr(tt.from)
		if got := (Query{from, netip.MustParseAddrPort(tt.to), tt.protocol}).matches(&e); got != tt.want {
			t.Errorf("%+v: %t", tt, got)
		}
	}
}

// Of open connections, an answer has the addresses that answering destinations see, and where a Service leads.
func TestAnswersShowAddressesAndEndpointsOnce(t *testing.T) {
	const service = "10.96.0.10:53"
	var all []Entry
	add := func(status Status, requested, dst, seenAs string) {
		e := entryOf(unix.IPPROTO_UDP, "10.244.1.2:1", requested, dst, seenAs)
		e.Status = status
		all = append(all, e)
	}
	add(0, "", "203.0.113.9:53", "192.0.2.9:1") // nobody answered
	for _, seenAs := range []string{"192.0.2.5:1", "192.0.2.5:2", "192.0.2.6:1", "192.0.2.7:1", "192.0.2.8:1"} {
		add(SeenReply, "", "203.0.113.9:53", seenAs)
	}
	add(SeenReply, "", "203.0.113.9:53", "10.244.1.2:1") // contradicts
	for _, dst := range []string{"1:53", "1:53", "1:54", "2:53", "3:53"} {
		add(SeenReply, service, "203.0.113."+dst, "192.0.2.5:1")
	}
	g := newGathering(comparisonOf(func(*config.Config) {}), History{}, []Query{
		{To: netip.MustParseAddrPort("203.0.113.9:53")}, {To: netip.MustParseAddrPort(service)},
	})
	for i := range all {
		g.add(&all[i])
	}
	answers := g.evidence().Answers
	direct := fmt.Sprint(answers[0].Agrees, answers[0].Answered, answers[0].Seen, answers[0].Endpoints)
	led := fmt.Sprint(answers[1].Agrees, answers[1].Answered, answers[1].Seen, answers[1].Endpoints)
	if want := "6 5 [192.0.2.5 192.0.2.6 192.0.2.7] []"; direct != want {
		t.Errorf("%s, want %s", direct, want)
	}
	if want := "5 5 [192.0.2.5] [203.0.113.1:53 203.0.113.1:54 203.0.113.2:53]"; led != want {
		t.Errorf("%s, want %s", led, want)
	}
}

func TestCountsWithContradictionsComeFirst(t *testing.T) {
	lists := func(c *config.Config) {
		c.NonMasqueradeCIDRs = cases.CIDRs("10.1.0.0/16", "10.2.0.0/16", "10.3.0.0/16", "10.4.0.0/16", "10.5.0.0/16")
	}
	var all []Entry
	for dst, shown := range map[string][]string{ // "overruled" and "stale" are translated
		"10.1.0.9:53": {"agrees"}, "10.2.0.9:53": {"agrees", "agrees", "agrees"}, "10.3.0.9:53": {"stale", "stale"},
		"10.4.0.9:53": {"overruled", "agrees"}, "10.5.0.9:53": {"agrees"},
	} {
		for _, what := range shown {
			e := entryOf(unix.IPPROTO_UDP, "10.244.1.2:1", "", dst, "192.0.2.1:1")
			switch what {
			case "agrees":
				e.Reply.Dst = e.Original.Src
			case "stale":
				e.ID = 7
			}
			all = append(all, e)
		}
	}
	found := gather(lists, History{Earlier: map[uint32]bool{7: true}}, all...)
	got := ""
	for _, c := range found.Counts {
		got += fmt.Sprintln(c.Entry, c.Open())
		if same := found.Entry(c.Entry); same.Open() != c.Open() || same.Entry != c.Entry {
			t.Errorf("%s: %+v", c.Entry, same)
		}
	}
	const key = "nonMasqueradeCIDRs "
	nfttest.Same(t, "counts (-want +got)", key+"10.4.0.0/16 2\n"+key+"10.3.0.0/16 2\n"+key+"10.2.0.0/16 3\n"+
		key+"10.1.0.0/16 1\n"+key+"10.5.0.0/16 1\n", got)
}

func TestWhatIsKeptIsBounded(t *testing.T) {
	many := func(c *config.Config) {
		c.NonMasqueradeCIDRs = nil
		for i := range 2 * maxCounts {
			a := netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 0})
			c.NonMasqueradeCIDRs = append(c.NonMasqueradeCIDRs, config.CIDR{Prefix: netip.PrefixFrom(a, 24)})
		}
	}
	g := newGathering(comparisonOf(many), History{}, nil)
	const all = 3 * maxDestinations
	for i := range all {
		dst := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8 & 7), byte(i), byte(i >> 11)}), 53)
		e := entryOf(unix.IPPROTO_UDP, "10.244.1.2:1", "", dst.String(), "10.244.1.2:1")
		g.add(&e)
	}
	found := g.evidence()
	sum := 0
	for _, c := range found.Counts {
		sum += c.Agrees
	}
	rest := found.Entry(judge.Entry{Key: "nonMasqueradeCIDRs", Verdict: nft.Exempt})
	if len(found.Counts) > maxCounts+1 || sum != all || rest.Agrees == 0 || !found.Incomplete ||
		len(g.replies.destinations) != maxDestinations {
		t.Errorf("%d counts of %d, %d of the key, %d destinations", len(found.Counts), sum, rest.Agrees,
			len(g.replies.destinations))
	}
}

// opened returns n connections to a destination, of which some have a reply.
func opened(protocol uint8, dst, seenAs string, answered, silent int) (all []Entry) {
	for i := range answered + silent {
		src := netip.AddrPortFrom(netip.MustParseAddr("10.244.1.2"), uint16(i+1))
		seen := src
		if seenAs != "" {
			seen = netip.AddrPortFrom(netip.MustParseAddr(seenAs), src.Port())
		}
		e := entryOf(protocol, src.String(), "", dst, seen.String())
		switch {
		case i < answered && protocol == unix.IPPROTO_TCP:
			e.State, e.Status, e.Timeout = "TIME_WAIT", SeenReply, 100
		case i < answered:
			e.Status, e.Timeout = SeenReply, 100
		case protocol == unix.IPPROTO_TCP:
			e.State, e.Timeout = "SYN_SENT", 105
		default:
			e.Timeout = 15
		}
		all = append(all, e)
	}
	return all
}

func TestDestinationsThatDoNotAnswer(t *testing.T) {
	const tcp, udp, icmp = unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_ICMP
	young := opened(tcp, "10.9.0.9:80", "", 0, 20)
	for i := range young {
		young[i].Timeout = 115
	}
	dated := opened(tcp, "10.9.0.9:80", "", 0, 20)
	for i := range dated {
		dated[i].Timeout = 119
		dated[i].Started = time.Now().Add(-20 * time.Second)
	}
	filtered := opened(tcp, "10.9.0.9:80", "", 20, 0)
	for i := range filtered {
		filtered[i].State = "SYN_RECV"
		filtered[i].Timeout = 45
	}
	// changed returns silent connections with another state, and time left.
	changed := func(protocol uint8, state string, timeout uint32) []Entry {
		all := opened(protocol, "10.9.0.9:80", "", 0, 20)
		for i := range all {
			all[i].State = state
			all[i].Timeout = timeout
		}
		return all
	}
	internet6 := slices.Concat(opened(tcp, "[2001:db8:1::1]:80", "2001:db8::1", 0, 3),
		opened(tcp, "[2001:db8:2::1]:80", "2001:db8::1", 0, 3), opened(tcp, "[2001:db8:3::1]:80", "2001:db8::1", 0, 3))
	var internet []Entry
	for _, dst := range []string{"203.0.113.1:80", "203.0.113.2:80", "203.0.113.3:80"} {
		internet = append(internet, opened(tcp, dst, "192.0.2.1", 0, 3)...)
	}
	silent := opened(tcp, "10.9.0.9:80", "", 0, 20)
	for _, tt := range []struct {
		name    string
		entries []Entry
		want    string
	}{
		{"silent", silent, "10.9.0.9 answered 0 of 20"},
		{"one of ten answers", opened(tcp, "10.9.0.9:80", "", 2, 18), "10.9.0.9 answered 2 of 20"},
		{"more than one of ten", opened(tcp, "10.9.0.9:80", "", 3, 18), ""},
		{"too few", opened(tcp, "10.9.0.9:80", "", 0, 4), ""},
		{"too young", young, ""},
		{"ten seconds and no more", changed(tcp, "SYN_SENT", 110), ""},
		{"SYN+ACK of ten seconds ago", changed(tcp, "SYN_RECV", 50), ""},
		{"established without a reply", changed(tcp, "ESTABLISHED", 1), ""},
		{"of a protocol without a timeout", changed(unix.IPPROTO_SCTP, "", 1), ""},
		{"by their time", dated, "10.9.0.9 answered 0 of 20"},
		{"pings", opened(icmp, "10.9.0.9:7", "", 0, 5), "10.9.0.9 answered 0 of 5"},
		{"DNS", opened(udp, "10.9.0.9:53", "", 0, 20), "10.9.0.9 answered 0 of 20"},
		{"syslog", opened(udp, "10.9.0.9:514", "", 0, 20), ""},
		{
			"a port that answers elsewhere",
			slices.Concat(opened(udp, "10.9.0.9:4500", "", 0, 20), opened(udp, "10.9.0.8:4500", "", 1, 0)),
			"10.9.0.9 answered 0 of 20",
		},
		{
			"a port that answered elsewhere before",
			slices.Concat(opened(udp, "10.9.0.8:4500", "", 1, 0), opened(udp, "10.9.0.9:4500", "", 0, 20)),
			"10.9.0.9 answered 0 of 20",
		},
		{
			"syslog to a host that answers otherwise",
			slices.Concat(opened(udp, "10.9.0.9:514", "", 0, 50), opened(tcp, "10.9.0.9:80", "", 5, 0)), "",
		},
		{"SYN+ACK is dropped later", filtered, "10.9.0.9 answered 0 of 20"},
		{"masqueraded", opened(tcp, "203.0.113.1:80", "192.0.2.1", 0, 20), ""},
		{"translated by another program", opened(tcp, "10.9.0.9:80", "192.0.2.1", 0, 20), ""},
		{"uplink", slices.Concat(silent, internet), "0 of 9 masqueraded IPv4"},
		{
			"uplink of the other family", slices.Concat(silent, internet6),
			"0 of 9 masqueraded IPv6 connections10.9.0.9 answered 0 of 20",
		},
		{
			"two destinations and the uplink", slices.Concat(internet[:6], opened(tcp, "203.0.113.3:80", "192.0.2.1", 1, 0)), "",
		},
		{
			"the one with the most is first", slices.Concat(opened(tcp, "10.9.0.8:80", "", 0, 5), silent),
			"10.9.0.9 answered 0 of 20 connections10.9.0.8 answered 0 of 5",
		},
		{
			"several ports of UDP",
			slices.Concat(opened(udp, "10.9.0.9:53", "", 0, 3), opened(udp, "10.9.0.9:123", "", 0, 3)),
			"10.9.0.9 answered 0 of 6",
		},
		{
			"uplink that answers", slices.Concat(silent, internet, opened(tcp, "203.0.113.4:80", "192.0.2.1", 2, 0)),
			"10.9.0.9 answered 0 of 20",
		},
	} {
		found := gather(func(*config.Config) {}, History{}, tt.entries...)
		got := ""
		for _, u := range found.Unanswered {
			got += u.String()
		}
		got = strings.NewReplacer(" that show the pod's IP", "", " were answered", "").Replace(got)
		got = strings.TrimSuffix(got, " connections")
		if got != tt.want {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
	}
}

func TestRemediesNameWhatToDo(t *testing.T) {
	for _, tt := range []struct{ to, want string }{
		{"10.9.0.9", "force 10.9.0.9/32 (forceMasqueradeCIDRs)"},
		{"", "check the uplink of this node"},
	} {
		to, _ := netip.ParseAddr(tt.to)
		if got := (Unanswered{To: to}).Remedy(); !strings.HasPrefix(got, tt.want) {
			t.Errorf("%q: %s", tt.to, got)
		}
	}
}

func TestTimeoutsThatHideSilence(t *testing.T) {
	t.Parallel()
	proc := t.TempDir()
	dir := filepath.Join(proc, "sys/net/netfilter")
	nfttest.NoError(t, os.MkdirAll(dir, 0o700))
	nfttest.NoError(t, os.WriteFile(filepath.Join(dir, "nf_conntrack_udp_timeout"), []byte("10\n"), 0o600))
	nfttest.NoError(t, os.WriteFile(filepath.Join(dir, "nf_conntrack_icmp_timeout"), []byte("11\n"), 0o600))
	for _, timeout := range ReadTimeouts(proc) {
		seconds := map[uint8]uint32{unix.IPPROTO_UDP: 10, unix.IPPROTO_ICMP: 11}[timeout.Protocol] // 0: not known
		if timeout.Seconds != seconds || timeout.HidesSilence() != (timeout.Protocol == unix.IPPROTO_UDP) {
			t.Errorf("%+v hides silence: %t", timeout, timeout.HidesSilence())
		}
	}
}

// Evidence is that of real packets, and questions are answered from the same pass.
func TestEvidenceOfPackets(t *testing.T) {
	t.Parallel()
	top := nfttest.NewTopology(t)
	nfttest.NFT(t, top.Node, natRules, "-f", "-")
	send := func(dst string) nfttest.Sighting {
		return nfttest.MustSend(t, top, nfttest.Flow{
			Proto: nfttest.UDP, From: top.Pod, To: top.Outside, Dst: netip.MustParseAddrPort(dst),
		})
	}
	send("203.0.113.9:53")
	send("198.51.100.9:53")
	send("10.9.0.9:53")
	c := config.Default(config.Defaults{})
	c.NonMasqueradeCIDRs = cases.CIDRs("203.0.113.0/24", "10.0.0.0/8")
	node := nfttest.In(t, top.Node, ReadNode)
	comparison := NewComparison(nft.NewPolicy(c, nft.Options{Layout: native.Layout{}}), node)
	table := newTable(dialIn(top.Node))
	noted, full, err := table.Note(t.Context(), comparison)
	if err != nil || len(noted) != 2 || full {
		t.Fatalf("%v, full %t: %v", noted, full, err)
	}
	table.noteLimit = 1
	if one, full, err := table.Note(t.Context(), comparison); err != nil || len(one) != 1 || !full {
		t.Errorf("bounded: %v, full %t: %v", one, full, err)
	}
	table.noteLimit = maxNoted
	table.sampleLimit = 2
	if some, full, err := table.Note(t.Context(), comparison); err != nil || len(some) == 0 || !full {
		t.Errorf("of a sample: %v, full %t: %v", some, full, err)
	}
	late := send("203.0.113.8:54")
	table.sampleLimit = 4 // all there are
	to := Query{To: netip.MustParseAddrPort("203.0.113.8:0")}
	elsewhere := Query{To: to.To, From: netip.MustParseAddr("10.244.1.99")}
	found, err := table.Gather(t.Context(), comparison, History{Earlier: noted}, to, elsewhere)
	nfttest.NoError(t, err)
	if found.Examined != 4 || found.Tracked != 4 || found.Partial || found.Incomplete {
		t.Errorf("%+v", found)
	}
	counts := map[string][3]int{}
	for _, c := range found.Counts {
		counts[c.Entry.String()] = [3]int{c.Agrees, c.Stale, c.Overruled}
	}
	want := map[string][3]int{
		"nonMasqueradeCIDRs 203.0.113.0/24": {0, 1, 1}, "nonMasqueradeCIDRs 10.0.0.0/8": {1, 0, 0},
		"anything else": {0, 1, 0},
	}
	nfttest.Same(t, "counts (-want +got)", want, counts)
	if a := found.Answers[0]; a.Overruled != 1 || a.Open() != 1 || a.Examples[0].SeenAs() != late.Seen ||
		a.Examples[0].Original.Src != late.Sent || found.Answers[1].Open() != 0 {
		t.Errorf("%+v", found.Answers)
	}
	for _, timeout := range node.timeouts {
		if timeout.Seconds != timeout.Default {
			t.Errorf("in a new namespace: %+v", timeout)
		}
	}
}
