package foreign

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/rule"
)

var exempting = Share{Exempt: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}}

func searched(s Snapshot) *finder {
	w := newFinder(s, nil)
	w.search(Masquerades, exempting)
	return w
}

// Paths multiply: base chains, jumps from each, and chains that are reached again.
func TestSearchVisitsABoundedNumberOfRules(t *testing.T) {
	const bases, jumps, depth, rules = 20, 16, 4, 500
	handle := uint64(0)
	rule := func(chain string, exprs ...expr.Any) nfnetlink.Rule {
		handle++
		return nfnetlink.Rule{
			Family: nfnetlink.IPv4, Table: "t", Chain: chain, Handle: handle,
			Exprs: nfnetlink.Marshal(nfnetlink.IPv4, exprs...),
		}
	}
	marked := func(mark byte) []expr.Any {
		return []expr.Any{
			&expr.Meta{Key: expr.MetaKeyMARK, Register: 1},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{mark, 0, 0, 0}},
		}
	}
	jumpsTo := func(chain, to string) (all []nfnetlink.Rule) {
		for i := range jumps {
			all = append(all, rule(chain, append(marked(byte(i)), &expr.Verdict{Kind: expr.VerdictJump, Chain: to})...))
		}
		return all
	}
	names := []string{"c0", "c1", "c2", "c3", "c4"}
	var s Snapshot
	for i := range depth {
		c := Chain{Chain: nfnetlink.Chain{Family: nfnetlink.IPv4, Table: "t", Name: names[i]}}
		for range rules {
			c.Rules = append(c.Rules, rule(names[i], append(marked(1), &expr.Masq{})...))
		}
		c.Rules = append(c.Rules, jumpsTo(names[i], names[i+1])...)
		s.Chains = append(s.Chains, c)
	}
	last := nfnetlink.Chain{Family: nfnetlink.IPv4, Table: "t", Name: names[depth]}
	s.Chains = append(s.Chains, Chain{Chain: last, Rules: []nfnetlink.Rule{rule(last.Name, &expr.Masq{})}})
	total := 0
	for i := range bases {
		hook := &nfnetlink.Hook{Type: "nat", Number: unix.NF_INET_POST_ROUTING, Priority: int32(i)}
		c := nfnetlink.Chain{Family: nfnetlink.IPv4, Table: "t", Name: "base" + string(rune('a'+i)), Hook: hook}
		s.Chains = append(s.Chains, Chain{Chain: c, Rules: jumpsTo(c.Name, names[0])})
	}
	for _, c := range s.Chains {
		total += len(c.Rules)
	}
	w := searched(s)
	if most := maxWork + 2*total*ruleWork; w.work > most {
		t.Errorf("%d ranges compared, more than %d", w.work, most)
	}
	if want := depth*rules + 1; len(w.conflicts) != want {
		t.Errorf("%d conflicts found, want %d", len(w.conflicts), want)
	}
}

// Each rule that accepts leaves one more range of destinations to the next.
func TestSearchComparesABoundedNumberOfRanges(t *testing.T) {
	const pairs = 4_000
	hook := &nfnetlink.Hook{Type: "nat", Number: unix.NF_INET_POST_ROUTING}
	c := Chain{Chain: nfnetlink.Chain{Family: nfnetlink.IPv4, Table: "t", Name: "base", Hook: hook}}
	add := func(exprs ...expr.Any) {
		handle := uint64(len(c.Rules))
		c.Rules = append(c.Rules, nfnetlink.Rule{
			Family: nfnetlink.IPv4, Table: "t", Chain: "base", Handle: handle,
			Exprs: nfnetlink.Marshal(nfnetlink.IPv4, exprs...),
		})
	}
	for i := range pairs {
		to := []byte{10, byte(i >> 8), byte(i), 0}
		add(&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: 16, Len: 4},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: to}, &expr.Verdict{Kind: expr.VerdictAccept})
		add(&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: 12, Len: 1},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{11}}, &expr.Masq{})
	}
	w := searched(Snapshot{Chains: []Chain{c}})
	if most := maxWork + 5*maxNamed*len(c.Rules); w.work > most {
		t.Errorf("%d ranges compared, more than %d", w.work, most)
	}
	if len(w.conflicts) != pairs {
		t.Errorf("%d conflicts found, want %d", len(w.conflicts), pairs)
	}
}

// A rule that refers to a large set takes as long as many others.
func TestSearchReadsABoundedNumberOfSetElements(t *testing.T) {
	const rules, elements = 2_000, maxSetSize
	var set []iprange.Range
	for i := range elements {
		a := netip.AddrFrom4([4]byte{10, byte(i >> 15), byte(i >> 7), byte(i << 1)})
		set = append(set, iprange.Range{From: a, To: a})
	}
	hook := &nfnetlink.Hook{Type: "nat", Number: unix.NF_INET_POST_ROUTING}
	c := Chain{Chain: nfnetlink.Chain{Family: nfnetlink.IPv4, Table: "t", Name: "base", Hook: hook}}
	for i := range rules {
		c.Rules = append(c.Rules, nfnetlink.Rule{
			Family: nfnetlink.IPv4, Table: "t", Chain: "base", Handle: uint64(i), Exprs: nfnetlink.Marshal(nfnetlink.IPv4,
				&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: 12, Len: 4},
				&expr.Lookup{SourceRegister: 1, SetName: "sources"}, &expr.Masq{}),
		})
	}
	s := Snapshot{Chains: []Chain{c}, sets: map[id][]iprange.Range{{nfnetlink.IPv4, "t", "sources"}: set}}
	w := searched(s)
	if most := maxWork + (elements+5*maxNamed)*rules; w.work > most || len(w.conflicts) != rules {
		t.Errorf("%d ranges compared, want at most %d; %d conflicts", w.work, most, len(w.conflicts))
	}
	some, other := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	if r := FindRewrites(s); !r.Everything() || !r.Meet(some, other, false) {
		t.Errorf("%d areas of rewrites, want everything", len(r.plain))
	}
}

func TestSearchEndsAfterManyConflictsAndCountsTheRest(t *testing.T) {
	const rules = 3 * maxFound
	hook := &nfnetlink.Hook{Type: "nat", Number: unix.NF_INET_POST_ROUTING}
	c := Chain{Chain: nfnetlink.Chain{Family: nfnetlink.IPv4, Table: "t", Name: "base", Hook: hook}}
	for i := range rules {
		c.Rules = append(c.Rules, nfnetlink.Rule{
			Family: nfnetlink.IPv4, Table: "t", Chain: "base", Handle: uint64(i), Exprs: nfnetlink.Marshal(nfnetlink.IPv4,
				&expr.Meta{Key: expr.MetaKeyOIF, Register: 1},
				&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{byte(i), byte(i >> 8), 1, 0}}, &expr.Masq{}),
		})
	}
	s := Snapshot{Chains: []Chain{c}}
	if found, rest := Conflicts(s, exempting); len(found) != maxFound || rest != rules-maxFound {
		t.Errorf("%d conflicts, %d rules not examined", len(found), rest)
	}
}

// Jumps of many conditions lead to a chain on many paths.
func TestTextOfAConflictIsBounded(t *testing.T) {
	handle := uint64(0)
	rule := func(chain string, conditions int, last expr.Any) nfnetlink.Rule {
		handle++
		var exprs []expr.Any
		for i := range conditions {
			exprs = append(exprs, &expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: 12, Len: 4},
				&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: []byte{192, 0, byte(handle), byte(i)}},
				&expr.Meta{Key: expr.MetaKeyOIF, Register: 1},
				&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: []byte{byte(i), byte(handle), 0, 0}})
		}
		return nfnetlink.Rule{
			Family: nfnetlink.IPv4, Table: "t", Chain: chain, Handle: handle,
			Exprs: nfnetlink.Marshal(nfnetlink.IPv4, append(exprs, last)...),
		}
	}
	names := []string{"base", "c1", "c2", "c3", "c4", "c5"}
	perChain := nfttest.Rounds(4, 8, 8)
	var s Snapshot
	for i, name := range names {
		c := Chain{Chain: nfnetlink.Chain{Family: nfnetlink.IPv4, Table: "t", Name: name}}
		if i == 0 {
			c.Hook = &nfnetlink.Hook{Type: "nat", Number: unix.NF_INET_POST_ROUTING}
		}
		for range perChain {
			if i+1 < len(names) {
				c.Rules = append(c.Rules, rule(name, 30, &expr.Verdict{Kind: expr.VerdictJump, Chain: names[i+1]}))
			} else {
				c.Rules = append(c.Rules, rule(name, 30, &expr.Masq{}))
			}
		}
		s.Chains = append(s.Chains, c)
	}
	found, _ := Conflicts(s, exempting)
	if len(found) != perChain {
		t.Errorf("%d conflicts", len(found))
	}
	for _, c := range found {
		if why := c.Why(); len(why) > 8<<10 {
			t.Errorf("%d bytes: %s", len(why), why)
		}
	}
}

// Programs may have a rule for each pod, and connections are compared with all of them at
// once: with one range of sources, and the destinations of all rules for it.
func TestRewritesOfManyRulesAreSearchedNotCompared(t *testing.T) {
	const rules = 4_500
	addr := func(i int) iprange.Range {
		a := netip.AddrFrom4([4]byte{10, 244, byte(i >> 7), byte(i << 1)})
		return iprange.Range{From: a, To: a}
	}
	pods := []iprange.Range{iprange.Of(netip.MustParsePrefix("10.244.0.0/16"))}
	other := iprange.Subtract(anywhere(nfnetlink.IPv4), pods)
	var each, hairpins, nested packets
	for i := range rules {
		self := []iprange.Range{addr(i)}
		each = append(each, box{self, other})
		hairpins = append(hairpins, box{self, self})
		nested = append(nested, box{[]iprange.Range{{From: addr(0).From, To: addr(i).To}}, self})
	}
	size := func(all []area) (n int) {
		for _, a := range all {
			n += 1 + len(a.dst)
		}
		return n
	}
	for _, tt := range []struct {
		name  string
		boxes packets
		most  int // areas and ranges
	}{
		{"none", nil, 0},
		{"each pod", each, 2 * rules * 3},
		{"hairpins", hairpins, 2*rules*2 + 1},
		{"both", slices.Concat(each, hairpins), 2 * rules * 4},
		{"each pod, all sources", append(slices.Clone(each), allPackets(nfnetlink.Inet)...), 4},
		{"nested", nested, maxWork},
	} {
		all := areas(tt.boxes)
		if n := size(all); n > tt.most {
			t.Errorf("%s: %d areas with %d ranges, want at most %d", tt.name, len(all), n-len(all), tt.most)
		}
		checkAreas(t, all, tt.boxes, tt.name == "nested")
	}
}

// checkAreas compares areas with the packets that they are of. more means that there may be
// more.
func checkAreas(t *testing.T, all []area, of packets, more bool) {
	t.Helper()
	var edges []netip.Addr
	for i, b := range of {
		if i > 2 && i < len(of)-3 {
			continue
		}
		for _, r := range slices.Concat(b.src, b.dst) {
			edges = append(edges, r.From, r.To, r.From.Prev(), r.To.Next())
		}
	}
	slices.SortFunc(edges, netip.Addr.Compare)
	edges = slices.Compact(edges)
	for _, src := range edges {
		for _, dst := range edges {
			want := slices.ContainsFunc(of, func(b box) bool {
				return iprange.Contains(b.src, src) && iprange.Contains(b.dst, dst)
			})
			if got := (Rewrites{plain: all}).Meet(src, dst, false); got != want && !(more && got) && src.Is4() == dst.Is4() {
				t.Fatalf("%s to %s: %t, want %t in %v of %v", src, dst, got, want, all, of)
			}
		}
	}
}

func TestAreasHaveTheConnectionsOfTheirBoxes(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 3))
	random := func(ipv6 bool) []iprange.Range {
		all := iprange.All(ipv6)
		universe := []netip.Addr{all.From, all.From.Next(), all.From.Next().Next(), all.To.Prev(), all.To}
		var set []iprange.Range
		for range 1 + r.IntN(3) {
			from := r.IntN(len(universe))
			set = append(set, iprange.Range{From: universe[from], To: universe[from+r.IntN(len(universe)-from)]})
		}
		return iprange.Normal(set)
	}
	for range 500 {
		var boxes packets
		for range r.IntN(6) {
			ipv6 := r.IntN(2) == 0
			boxes = append(boxes, box{random(ipv6), random(ipv6)})
		}
		checkAreas(t, areas(boxes), boxes, false)
	}
}

func TestUnreadRulesMayRewriteAnything(t *testing.T) {
	a, b := netip.MustParseAddr("2001:db8::1"), netip.MustParseAddr("2001:db8::2")
	if FindRewrites(Snapshot{}).Meet(a, b, true) || !FindRewrites(Snapshot{Unread: 1}).Meet(a, b, false) {
		t.Error("without rules a connection is met, or with unread ones it is not")
	}
}

// Beyond the bound a chain is visited once more, for all other paths: also for those on which
// packets have another mark or source.
func TestLastVisitOfAChainIsForAllPaths(t *testing.T) {
	at := func(chain string, handle uint64, exprs ...expr.Any) nfnetlink.Rule {
		return nfnetlink.Rule{
			Family: nfnetlink.IPv4, Table: "t", Chain: chain, Handle: handle,
			Exprs: nfnetlink.Marshal(nfnetlink.IPv4, exprs...),
		}
	}
	from := func(last byte) []expr.Any { // 10.0.0.last
		return []expr.Any{
			&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: 12, Len: 4},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{10, 0, 0, last}},
		}
	}
	set := func(handle uint64, mark byte) nfnetlink.Rule {
		return at("base", handle, &expr.Immediate{Register: 1, Data: []byte{mark, 0, 0, 0}},
			&expr.Meta{Key: expr.MetaKeyMARK, Register: 1, SourceRegister: true})
	}
	jump := func(handle uint64, source byte) nfnetlink.Rule {
		return at("base", handle, append(from(source), &expr.Verdict{Kind: expr.VerdictJump, Chain: "masking"})...)
	}
	many := at("base", 1, &expr.Counter{})
	masking := at("masking", 2, append(from(1), &expr.Meta{Key: expr.MetaKeyMARK, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{1, 0, 0, 0}}, &expr.Masq{})...)
	for _, tt := range []struct {
		rules        int
		first, later byte // sources of the two jumps
		last         byte
		conflict     bool
	}{
		{1, 1, 1, 1, true},
		{1, 1, 1, 3, false},
		{1, 2, 1, 1, true},
		{1, 1, 2, 1, false},
		{maxWork / ruleWork, 1, 1, 1, true},
		{maxWork / ruleWork, 2, 1, 1, true},
	} {
		base := Chain{Chain: nfnetlink.Chain{
			Family: nfnetlink.IPv4, Table: "t", Name: "base",
			Hook: &nfnetlink.Hook{Type: "nat", Number: unix.NF_INET_POST_ROUTING},
		}}
		base.Rules = append(slices.Repeat([]nfnetlink.Rule{many}, tt.rules), set(3, 2), jump(4, tt.first),
			set(5, tt.last), jump(6, tt.later))
		s := Snapshot{Chains: []Chain{base, {
			Chain: nfnetlink.Chain{Family: nfnetlink.IPv4, Table: "t", Name: "masking"}, Rules: []nfnetlink.Rule{masking},
		}}}
		found, _ := Conflicts(s, exempting)
		if len(found) > 0 != tt.conflict {
			t.Errorf("%+v: %v", tt, found)
		}
		if got := FindRewrites(s).Everything(); got != (tt.rules > 1) {
			t.Errorf("behind %d rules: they may translate any connection: %t", tt.rules, got)
		}
	}
}

func TestTextsAreBounded(t *testing.T) {
	for length, kept := range map[int]bool{maxSource: true, maxSource + 1: false} {
		c := Conflict{Source: "a"}
		c.merge(Conflict{Source: strings.Repeat("b", length-len("a or "))})
		if (len(c.Source) == length) != kept || !kept && c.Source != "" {
			t.Errorf("%d bytes: %d are kept", length, len(c.Source))
		}
	}
	base := nfnetlink.Chain{Hook: &nfnetlink.Hook{Type: "filter", Number: unix.NF_INET_FORWARD}}
	tracer := Tracer{walker: &walker{base: base}}
	for i := range 2 * maxUnknown {
		tracer.unknown(strconv.Itoa(i), strconv.Itoa(i))
		tracer.drop(Way{}, false)
	}
	if u, d := tracer.out.Unknown, tracer.out.Drops; len(u) != maxUnknown || u[1] != "1" || len(d) != maxDrops {
		t.Errorf("%d unknown conditions: %q; %d drops", len(u), u, len(d))
	}
}

// What compares other than four bytes as a whole is unknown.
func TestComparisonsOfNumbersAreOfFourBytes(t *testing.T) {
	four, two := []byte{0, 0, 0, 1}, []byte{0, 1}
	for _, tt := range []struct {
		rule.Statement
		ok bool
	}{
		{rule.Statement{Op: "==", Value: four}, true},
		{rule.Statement{Op: "!=", Value: four, Mask: four}, true},
		{rule.Statement{Op: "<", Value: four}, false},
		{rule.Statement{Op: "==", Value: two}, false},
		{rule.Statement{Op: "==", Value: two, Mask: two}, false},
		{rule.Statement{Op: "==", Value: four, Mask: two}, false},
		{rule.Statement{Op: "==", Value: four, Set: "s"}, false},
	} {
		if _, ok := bitsOf(tt.Statement); ok != tt.ok {
			t.Errorf("%+v: %t", tt.Statement, ok)
		}
	}
}
