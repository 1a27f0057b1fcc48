package nft

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"nft-masq-agent/config"
)

// specified is the whole of the policy.
func specified(c config.Config, src, dst netip.Addr, local bool) Verdict {
	linkLocal := dst.IsLinkLocalUnicast() && (dst.Is4() && !c.MasqLinkLocal || dst.Is6() && !c.MasqLinkLocalIPv6)
	switch {
	case dst.Is6() && !c.EnableIPv6:
		return Exempt
	case local:
		return Local
	case ofFamilyOf(src, c.MasqueradeSrcCIDRs) && !holds(c.MasqueradeSrcCIDRs, src), holds(c.NonMasqueradeSrcCIDRs, src):
		return Exempt
	case holds(c.ForceMasqueradeCIDRs, dst):
		return Masqueraded
	case holds(c.NonMasqueradeCIDRs, dst), linkLocal:
		return Exempt
	}
	return Masqueraded
}

func holds(list []config.CIDR, a netip.Addr) bool {
	return slices.ContainsFunc(list, func(c config.CIDR) bool { return c.Contains(a) })
}

// ofFamilyOf says whether the list has an entry of the address's family.
func ofFamilyOf(a netip.Addr, list []config.CIDR) bool {
	return slices.ContainsFunc(list, func(c config.CIDR) bool { return c.Addr().Is6() == a.Is6() })
}

// A maker makes random configs, and addresses at the edges of their prefixes.
type maker struct{ *rand.Rand }

func newMaker(seed uint64) maker { return maker{rand.New(rand.NewPCG(seed, 0))} }

// addr gives an address that a host can have. They lie near each other, so that
// prefixes meet.
func (m maker) addr(ipv6 bool) netip.Addr {
	if ipv6 {
		heads := []string{"fd00::", "fd00:10:244::", "fdff:ffff::", "2001:db8:1::", "2001:db8:77::", "2001:db8:ffff::"}
		b := netip.MustParseAddr(heads[m.IntN(len(heads))]).As16()
		b[m.IntN(8)+2] ^= byte(m.IntN(4))
		b[15] = byte(m.IntN(255) + 1)
		return netip.AddrFrom16(b)
	}
	heads := []string{"10.0.0.0", "10.9.0.0", "10.64.0.0", "100.64.0.0", "172.16.0.0", "192.168.0.0", "198.18.0.0", "203.0.113.0"}
	b := netip.MustParseAddr(heads[m.IntN(len(heads))]).As4()
	b[m.IntN(2)+1] ^= byte(m.IntN(4))
	b[3] = byte(m.IntN(254) + 1)
	return netip.AddrFrom4(b)
}

func (m maker) cidr() config.CIDR {
	a := m.addr(m.IntN(2) == 0)
	bits := m.IntN(a.BitLen() + 1)
	if m.IntN(4) > 0 { // mostly lengths that leave something to others
		bits = a.BitLen()/4 + m.IntN(a.BitLen()*3/4+1)
	}
	p, _ := a.Prefix(bits)
	return config.CIDR{Prefix: p}
}

func (m maker) list(most int) []config.CIDR {
	if m.IntN(3) == 0 {
		return nil
	}
	list := make([]config.CIDR, m.IntN(most)+1)
	for i := range list {
		list[i] = m.cidr()
	}
	return list
}

func (m maker) config() config.Config {
	return config.Config{
		NonMasqueradeCIDRs: m.list(12), ForceMasqueradeCIDRs: m.list(4),
		NonMasqueradeSrcCIDRs: m.list(4), MasqueradeSrcCIDRs: m.list(6),
		MasqLinkLocal: m.IntN(2) == 0, MasqLinkLocalIPv6: m.IntN(2) == 0, EnableIPv6: m.IntN(4) > 0,
	}
}

func (m maker) options(mode Mode) Options {
	o := Options{Mode: mode, Chain: defaultChain, RandomFully: m.IntN(2) == 0}
	for from := 1024; m.IntN(3) == 0; from += 10000 {
		o.Ports = append(o.Ports, PortRange{uint16(from), uint16(from + m.IntN(5000))})
	}
	return o
}

// near gives an address for a config: often the first or last of one of its
// prefixes, or the next to it.
func (m maker) near(c config.Config, ipv6 bool) netip.Addr {
	all := slices.Concat(c.NonMasqueradeCIDRs, c.ForceMasqueradeCIDRs, c.NonMasqueradeSrcCIDRs, c.MasqueradeSrcCIDRs)
	all = ofFamily(append(all, cidrs("169.254.0.0/16", "fe80::/10")...), ipv6)
	p := all[m.IntN(len(all))].Prefix
	first, last := p.Addr(), lastOf(p)
	if a := []netip.Addr{first, last, first.Prev(), last.Next()}[m.IntN(4)]; a.IsValid() && m.IntN(4) > 0 {
		return a
	}
	return m.addr(ipv6)
}

// lastOf gives the last address of a prefix, found by counting in halves.
func lastOf(p netip.Prefix) netip.Addr {
	a := p.Addr()
	for bits := p.Bits() + 1; bits <= a.BitLen(); bits++ {
		b := a.AsSlice()
		b[(bits-1)/8] |= 0x80 >> ((bits - 1) % 8)
		a, _ = netip.AddrFromSlice(b)
	}
	return a
}

func TestPolicyDecidesAsSpecified(t *testing.T) {
	m := newMaker(1)
	seen := map[Verdict]int{}
	for range 2000 {
		c := m.config()
		r := Compile(c, m.options(modes[m.IntN(2)]))
		for range 20 {
			ipv6 := m.IntN(2) == 0
			src, dst, local := m.near(c, ipv6), m.near(c, ipv6), m.IntN(8) == 0
			want := specified(c, src, dst, local)
			seen[want]++
			if got := r.Policy.Decide(src, dst, local); got != want {
				t.Fatalf("%s to %s, local %t: got %s, want %s\n%+v", src, dst, local, got, want, c)
			}
		}
	}
	for _, v := range []Verdict{Local, Exempt, Masqueraded} {
		if seen[v] < 1000 {
			t.Errorf("%d of 40000 were %s", seen[v], v)
		}
	}
}

func TestExplanationNamesTheEntryThatDecides(t *testing.T) {
	c := config.Config{
		NonMasqueradeCIDRs: []config.CIDR{
			{Prefix: netip.MustParsePrefix("10.0.0.0/8"), Pos: config.Position{File: "a", Line: 2, Col: 5}},
		},
		ForceMasqueradeCIDRs: []config.CIDR{
			{Prefix: netip.MustParsePrefix("10.9.0.0/16"), Pos: config.Position{File: "b", Line: 7, Col: 5}},
		},
		MasqueradeSrcCIDRs: cidrs("10.244.0.0/16"),
	}
	p := NewPolicy(c, Options{})
	type step struct {
		Question, CIDR, At string
		Decides            bool
		Verdict            Verdict
	}
	for _, tt := range []struct {
		src, dst string
		local    bool
		want     []step
	}{
		{"10.244.1.2", "192.0.2.1", true, []step{{"local", "", "", true, Local}}},
		{"10.1.1.1", "198.51.100.8", false, []step{
			{Question: "local", Verdict: Local}, {Question: "masq-src-v4", Decides: true, Verdict: Exempt},
		}},
		{"10.244.1.2", "10.9.1.1", false, []step{
			{Question: "local", Verdict: Local},
			{Question: "masq-src-v4", CIDR: "10.244.0.0/16", Verdict: Exempt},
			{"force-masq-v4", "10.9.0.0/16", "b:7:5", true, Masqueraded},
		}},
		{"10.244.1.2", "10.8.1.1", false, []step{
			{Question: "local", Verdict: Local},
			{Question: "masq-src-v4", CIDR: "10.244.0.0/16", Verdict: Exempt},
			{Question: "force-masq-v4", Verdict: Masqueraded},
			{"non-masq-v4", "10.0.0.0/8", "a:2:5", true, Exempt},
		}},
		{"10.244.1.2", "198.51.100.8", false, []step{
			{Question: "local", Verdict: Local},
			{Question: "masq-src-v4", CIDR: "10.244.0.0/16", Verdict: Exempt},
			{Question: "force-masq-v4", Verdict: Masqueraded},
			{Question: "non-masq-v4", Verdict: Exempt},
			{Question: "default", Decides: true, Verdict: Masqueraded},
		}},
		{"10.244.1.2", "::ffff:10.8.1.1", true, []step{{"local", "", "", true, Local}}},
		{"fd00::1", "2001:db8::1", false, []step{{"family", "", "", true, Exempt}}},
	} {
		var got []step
		for _, s := range p.Explain(netip.MustParseAddr(tt.src), netip.MustParseAddr(tt.dst), tt.local) {
			g := step{Question: s.Question, Decides: s.Decides, Verdict: s.Verdict}
			if s.CIDR.IsValid() {
				g.CIDR = s.CIDR.Prefix.String()
			}
			if s.CIDR.Pos != (config.Position{}) {
				g.At = s.CIDR.Pos.String()
			}
			got = append(got, g)
		}
		if diff := gocmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s to %s (-want +got):\n%s", tt.src, tt.dst, diff)
		}
	}
}

// full is a config that says something of everything, and options alike.
func full() (config.Config, Options) {
	return config.Config{
		NonMasqueradeCIDRs:    cidrs("10.0.0.0/8", "172.16.0.0/12", "fd00::/8"),
		ForceMasqueradeCIDRs:  cidrs("10.9.0.0/16", "fd00:9::/32"),
		NonMasqueradeSrcCIDRs: cidrs("203.0.113.0/24", "2001:db8:77::/48"),
		MasqueradeSrcCIDRs:    cidrs("10.244.0.0/16", "203.0.113.0/25", "fd00:10::/32"),
		MasqLinkLocal:         true, EnableIPv6: true,
	}, Options{
		Mode: ModeNFTables, Chain: defaultChain, RandomFully: true,
		Ports: []PortRange{{1024, 29999}, {32768, 65535}},
	}
}

func TestHashIsOverWhatDecides(t *testing.T) {
	c, o := full()
	hash := Compile(c, o).Hash()
	for name, change := range map[string]func(*config.Config, *Options){
		"order": func(c *config.Config, _ *Options) {
			for _, list := range []*[]config.CIDR{
				&c.NonMasqueradeCIDRs, &c.ForceMasqueradeCIDRs, &c.NonMasqueradeSrcCIDRs, &c.MasqueradeSrcCIDRs,
			} {
				slices.Reverse(*list)
			}
		},
		"place in the file": func(c *config.Config, _ *Options) {
			c.NonMasqueradeCIDRs[0].Pos = config.Position{File: "x", Line: 3, Col: 1}
		},
		"twice": func(c *config.Config, _ *Options) {
			c.NonMasqueradeCIDRs = append(c.NonMasqueradeCIDRs, c.NonMasqueradeCIDRs...)
		},
		"covered": func(c *config.Config, _ *Options) {
			c.NonMasqueradeCIDRs = append(cidrs("10.244.0.0/16"), c.NonMasqueradeCIDRs...)
		},
		"resync interval": func(c *config.Config, _ *Options) { c.ResyncInterval = 7 },
		"mode":            func(_ *config.Config, o *Options) { o.Mode = ModeIPTables },
		"chain":           func(_ *config.Config, o *Options) { o.Chain = "OTHER" },
	} {
		c, o := full()
		change(&c, &o)
		if got := Compile(c, o).Hash(); got != hash {
			t.Errorf("%s: hash %s became %s", name, hash, got)
		}
	}
	hashes := map[string]string{hash: "the original"}
	for name, change := range map[string]func(*config.Config, *Options){
		"one more": func(c *config.Config, _ *Options) {
			c.NonMasqueradeCIDRs = append(c.NonMasqueradeCIDRs, cidrs("100.64.0.0/10")...)
		},
		"one less":     func(c *config.Config, _ *Options) { c.NonMasqueradeCIDRs = c.NonMasqueradeCIDRs[1:] },
		"other length": func(c *config.Config, _ *Options) { c.NonMasqueradeCIDRs[0] = cidrs("10.0.0.0/9")[0] },
		"halves of one": func(c *config.Config, _ *Options) {
			c.NonMasqueradeCIDRs = append(cidrs("10.0.0.0/9", "10.128.0.0/9"), c.NonMasqueradeCIDRs[1:]...)
		},
		"lists exchanged": func(c *config.Config, _ *Options) {
			c.ForceMasqueradeCIDRs, c.NonMasqueradeSrcCIDRs = c.NonMasqueradeSrcCIDRs, c.ForceMasqueradeCIDRs
		},
		"sources exchanged": func(c *config.Config, _ *Options) {
			c.MasqueradeSrcCIDRs, c.NonMasqueradeSrcCIDRs = c.NonMasqueradeSrcCIDRs, c.MasqueradeSrcCIDRs
		},
		"no sources":           func(c *config.Config, _ *Options) { c.MasqueradeSrcCIDRs = nil },
		"link-local":           func(c *config.Config, _ *Options) { c.MasqLinkLocal = false },
		"IPv6 link-local":      func(c *config.Config, _ *Options) { c.MasqLinkLocalIPv6 = true },
		"IPv6 off":             func(c *config.Config, _ *Options) { c.EnableIPv6 = false },
		"no random ports":      func(_ *config.Config, o *Options) { o.RandomFully = false },
		"no port ranges":       func(_ *config.Config, o *Options) { o.Ports = nil },
		"other port range":     func(_ *config.Config, o *Options) { o.Ports[0].Max++ },
		"one port range fewer": func(_ *config.Config, o *Options) { o.Ports = o.Ports[:1] },
	} {
		c, o := full()
		change(&c, &o)
		got := Compile(c, o).Hash()
		if other, ok := hashes[got]; ok {
			t.Errorf("%s: hash %s is that of %s", name, got, other)
		}
		hashes[got] = name
		if len(got) != 8 {
			t.Errorf("hash %q has not eight digits", got)
		}
	}
}

func TestLinkLocalInTheFileIsExplainedByItsPlace(t *testing.T) {
	c := config.Config{NonMasqueradeCIDRs: cidrs("10.0.0.0/8", "169.254.0.0/16")}
	c.NonMasqueradeCIDRs[1].Pos = config.Position{File: "config", Line: 3, Col: 5}
	p := NewPolicy(c, Options{})
	steps := p.Explain(netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("169.254.169.254"), false)
	if got := steps[len(steps)-1].CIDR; got != c.NonMasqueradeCIDRs[1] {
		t.Errorf("decided by %v, want %v", got, c.NonMasqueradeCIDRs[1])
	}
	if covered := p.Families[0].NonMasq.Covered; len(covered) > 0 {
		t.Errorf("covered: %v", covered)
	}
}

func TestLinkLocalInTheFileSaysNothingNew(t *testing.T) {
	plain := Compile(config.Config{NonMasqueradeCIDRs: cidrs("10.0.0.0/8")}, Options{Mode: ModeNFTables})
	both := Compile(config.Config{NonMasqueradeCIDRs: cidrs("10.0.0.0/8", "169.254.0.0/16")}, Options{Mode: ModeNFTables})
	written := Compile(config.Config{NonMasqueradeCIDRs: cidrs("169.254.0.0/16", "10.0.0.0/8"), MasqLinkLocal: true}, Options{Mode: ModeNFTables})
	if plain.Hash() != both.Hash() || plain.Hash() != written.Hash() {
		t.Errorf("hashes %s, %s and %s of the same policy", plain.Hash(), both.Hash(), written.Hash())
	}
}

func FuzzDropCovered(f *testing.F) {
	f.Add([]byte{4, 10, 0, 0, 0, 8, 4, 10, 1, 0, 0, 16, 4, 10, 0, 0, 0, 8})
	f.Add([]byte{4, 0, 0, 0, 0, 0, 4, 255, 255, 255, 255, 32, 4, 128, 0, 0, 0, 1})
	f.Add(binary.BigEndian.AppendUint64([]byte{6, 0xfd}, 7))
	f.Fuzz(func(t *testing.T, b []byte) {
		var list []config.CIDR
		for len(b) >= 6 && len(list) < 200 {
			a := netip.AddrFrom4([4]byte(b[1:5]))
			if b[0]%2 == 1 { // an IPv6 address of which four bytes vary
				a = netip.AddrFrom16([16]byte{0: b[1], 1: b[2], 7: b[3], 15: b[4]})
			}
			p, err := a.Prefix(int(b[5]) % (a.BitLen() + 1))
			if err != nil {
				t.Fatal(err)
			}
			list = append(list, config.CIDR{Prefix: p, Pos: config.Position{Line: len(list) + 1}})
			b = b[6:]
		}
		for _, ipv6 := range []bool{false, true} {
			checkDropCovered(t, ofFamily(list, ipv6))
		}
	})
}

// checkDropCovered holds that what stays is what no other entry covers, that of
// equals the first stays, and that order and places are those of the list.
func checkDropCovered(t *testing.T, list []config.CIDR) {
	t.Helper()
	covers := func(a, b config.CIDR) bool { return a.Bits() <= b.Bits() && a.Contains(b.Addr()) }
	var want []config.CIDR
	for i, c := range list {
		covered := false
		for j, o := range list {
			covered = covered || j != i && covers(o, c) && (o.Prefix != c.Prefix || j < i)
		}
		if !covered {
			want = append(want, c)
		}
	}
	got := dropCovered(slices.Clone(list))
	if !slices.Equal(got.CIDRs, want) {
		t.Errorf("of %v stay %v, want %v", list, got.CIDRs, want)
	}
	if len(got.CIDRs)+len(got.Covered) != len(list) {
		t.Errorf("of %d stay %d and go %d", len(list), len(got.CIDRs), len(got.Covered))
	}
	for _, c := range got.Covered {
		if !covers(c.By, c.CIDR) || !slices.Contains(list, c.By) || !slices.Contains(got.CIDRs, c.By) {
			t.Errorf("%v is said to be covered by %v", c.CIDR, c.By)
		}
	}
	sorted := got.Prefixes()
	if !slices.IsSortedFunc(sorted, func(a, b netip.Prefix) int { return cmp.Or(a.Addr().Compare(b.Addr()), a.Bits()-b.Bits()) }) {
		t.Errorf("not sorted: %v", sorted)
	}
}

func TestManyCoveredEntriesTakeNoTime(t *testing.T) {
	list := make([]config.CIDR, 0, 200_000)
	for i := range cap(list) {
		a := netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})
		list = append(list, config.CIDR{Prefix: netip.PrefixFrom(a, 32)})
	}
	list = append(list, cidrs("10.0.0.0/8")...)
	got := dropCovered(list)
	if len(got.CIDRs) != 1 || len(got.Covered) != len(list)-1 {
		t.Errorf("%d stay, %d go", len(got.CIDRs), len(got.Covered))
	}
}

func TestPortRangesAreParsed(t *testing.T) {
	for _, tt := range []struct {
		in   string
		want string
		err  string
	}{
		{"", "[]", ""},
		{"1024-29999,32768-65535", "[1024-29999 32768-65535]", ""},
		{"8080", "[8080]", ""},
		{"1-65535", "[1-65535]", ""},
		{"5-5", "[5]", ""},
		{"65535", "[65535]", ""},
		{"3000-4000,1000-2000", "[3000-4000 1000-2000]", ""},
		{"1000-1999,2000-2999", "[1000-1999 2000-2999]", ""},
		{"1000-2000,2000-3000", "", `port ranges 1000-2000 and 2000-3000 overlap`},
		{"1000,1000", "", `port ranges 1000 and 1000 overlap`},
		{"1000-4000,2000-3000", "", `port ranges 1000-4000 and 2000-3000 overlap`},
		{"0", "", `port range "0": "0" is not a port from 1 to 65535`},
		{"0-100", "", `port range "0-100": "0" is not a port from 1 to 65535`},
		{"1-65536", "", `port range "1-65536": "65536" is not a port from 1 to 65535`},
		{"70000", "", `port range "70000": "70000" is not a port from 1 to 65535`},
		{"2000-1000", "", `port range "2000-1000": 2000 is greater than 1000`},
		{",", "", `port range "": "" is not a port from 1 to 65535`},
		{"1,", "", `port range "": "" is not a port from 1 to 65535`},
		{"-", "", `port range "-": "" is not a port from 1 to 65535`},
		{"1-", "", `port range "1-": "" is not a port from 1 to 65535`},
		{"-1", "", `port range "-1": "" is not a port from 1 to 65535`},
		{"1-2-3", "", `port range "1-2-3": "2-3" is not a port from 1 to 65535`},
		{"+5", "", `port range "+5": "+5" is not a port from 1 to 65535`},
		{"1 - 2", "", `port range "1 - 2": "1 " is not a port from 1 to 65535`},
		{" 1", "", `port range " 1": " 1" is not a port from 1 to 65535`},
		{"0x10", "", `port range "0x10": "0x10" is not a port from 1 to 65535`},
		{"1_000", "", `port range "1_000": "1_000" is not a port from 1 to 65535`},
		{"http", "", `port range "http": "http" is not a port from 1 to 65535`},
		{"1000:2000", "", `port range "1000:2000": "1000:2000" is not a port from 1 to 65535`},
	} {
		got, err := ParsePorts(tt.in)
		if tt.err != "" {
			if err == nil || err.Error() != tt.err || got != nil {
				t.Errorf("%q: got %v, error %v; want error %s", tt.in, got, err, tt.err)
			}
			continue
		}
		if err != nil || fmt.Sprint(got) != tt.want {
			t.Errorf("%q: got %v, error %v; want %s", tt.in, got, err, tt.want)
		}
	}
}

func TestRangesAreChosenBySize(t *testing.T) {
	ranges := []PortRange{{1000, 1999}, {5000, 5000}, {1, 65535}, {40000, 40001}}
	var size float64
	for _, r := range ranges {
		size += float64(r.Size())
	}
	left := 1.0 // the chance that no range before was taken
	for i, c := range choices(ranges) {
		chance := left * float64(c.Size()) / float64(c.Remaining)
		if want := float64(ranges[i].Size()) / size; chance/want < 0.999999 || chance/want > 1.000001 {
			t.Errorf("range %s is taken with %f, want %f", c, chance, want)
		}
		left -= chance
		if c.last() != (i == len(ranges)-1) {
			t.Errorf("range %s: last is %t", c, c.last())
		}
	}
}
