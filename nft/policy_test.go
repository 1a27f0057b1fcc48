package nft_test

import (
	"fmt"
	"net/netip"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/xtables"
)

// full returns a config and options that set everything.
func full() (config.Config, nft.Options) {
	c := config.Config{
		NonMasqueradeCIDRs:    cases.CIDRs("10.0.0.0/8", "172.16.0.0/12", "fd00::/8"),
		ForceMasqueradeCIDRs:  cases.CIDRs("10.9.0.0/16", "fd00:9::/32"),
		NonMasqueradeSrcCIDRs: cases.CIDRs("203.0.113.0/24", "2001:db8:77::/48"),
		MasqueradeSrcCIDRs:    cases.CIDRs("10.244.0.0/16", "203.0.113.0/25", "fd00:10::/32"),
		EnableIPv6:            true,
	}
	o := nft.Options{
		Layout: native.Layout{}, RandomFully: true,
		Ports: []nft.PortRange{{Min: 1024, Max: 29999}, {Min: 32768, Max: 65535}},
	}
	return c, o
}

func TestHashCoversThePolicy(t *testing.T) {
	c, o := full()
	hash := nft.Compile(c, o).Hash()
	for name, change := range map[string]func(*config.Config, *nft.Options){
		"order": func(c *config.Config, _ *nft.Options) {
			for _, list := range []*[]config.CIDR{
				&c.NonMasqueradeCIDRs, &c.ForceMasqueradeCIDRs, &c.NonMasqueradeSrcCIDRs, &c.MasqueradeSrcCIDRs,
			} {
				slices.Reverse(*list)
			}
		},
		"place in the file": func(c *config.Config, _ *nft.Options) {
			c.NonMasqueradeCIDRs[0].Pos = config.Position{File: "x", Line: 3, Col: 1}
		},
		"twice": func(c *config.Config, _ *nft.Options) {
			c.NonMasqueradeCIDRs = append(c.NonMasqueradeCIDRs, c.NonMasqueradeCIDRs...)
		},
		"covered": func(c *config.Config, _ *nft.Options) {
			c.NonMasqueradeCIDRs = append(cases.CIDRs("10.244.0.0/16"), c.NonMasqueradeCIDRs...)
		},
		"link-local": func(c *config.Config, _ *nft.Options) {
			c.NonMasqueradeCIDRs = append(c.NonMasqueradeCIDRs, cases.CIDRs("169.254.0.0/16")...)
		},
		"link-local in the file alone": func(c *config.Config, _ *nft.Options) {
			c.NonMasqueradeCIDRs, c.MasqLinkLocal = append(c.NonMasqueradeCIDRs, cases.CIDRs("169.254.0.0/16")...), true
		},
		"resync interval": func(c *config.Config, _ *nft.Options) { c.ResyncInterval = 7 },
	} {
		c, o := full()
		change(&c, &o)
		if got := nft.Compile(c, o).Hash(); got != hash {
			t.Errorf("%s: hash %s became %s", name, hash, got)
		}
	}
	original := hash
	older := config.Config{NonMasqueradeCIDRs: c.NonMasqueradeCIDRs, EnableIPv6: true}
	hash = nft.Compile(older, o).Hash()
	for _, chain := range []string{cases.DefaultChain, "OTHER"} {
		o.Layout = xtables.Layout{ChainName: chain}
		if got := nft.Compile(older, o).Hash(); got != hash {
			t.Errorf("mode iptables-nft, chain %s: hash %s became %s", chain, hash, got)
		}
	}
	hashes := map[string]string{original: "the original"}
	for name, change := range map[string]func(*config.Config, *nft.Options){
		"halves of one": func(c *config.Config, _ *nft.Options) {
			c.NonMasqueradeCIDRs = append(cases.CIDRs("10.0.0.0/9", "10.128.0.0/9"), c.NonMasqueradeCIDRs[1:]...)
		},
		"lists exchanged": func(c *config.Config, _ *nft.Options) {
			c.ForceMasqueradeCIDRs, c.NonMasqueradeSrcCIDRs = c.NonMasqueradeSrcCIDRs, c.ForceMasqueradeCIDRs
		},
		"sources exchanged": func(c *config.Config, _ *nft.Options) {
			c.MasqueradeSrcCIDRs, c.NonMasqueradeSrcCIDRs = c.NonMasqueradeSrcCIDRs, c.MasqueradeSrcCIDRs
		},
		"received on": func(c *config.Config, _ *nft.Options) {
			c.MasqueradeSrcInterfaces = []config.Interface{{Name: "cni0"}}
		},
		"received on a prefix": func(c *config.Config, _ *nft.Options) {
			c.MasqueradeSrcInterfaces = []config.Interface{{Name: "cni0*"}}
		},
		"enforced": func(c *config.Config, _ *nft.Options) { c.Enforce = true },
		"enforced, marked": func(c *config.Config, o *nft.Options) {
			c.Enforce, o.Marks = true, []nft.Mark{{Value: 1, Mask: 1}}
		},
		"other port range":     func(_ *config.Config, o *nft.Options) { o.Ports[0].Max++ },
		"one port range fewer": func(_ *config.Config, o *nft.Options) { o.Ports = o.Ports[:1] },
	} {
		c, o := full()
		change(&c, &o)
		got := nft.Compile(c, o).Hash()
		if other, ok := hashes[got]; ok {
			t.Errorf("%s: hash %s is that of %s", name, got, other)
		}
		hashes[got] = name
		if len(got) != 8 {
			t.Errorf("hash %q does not have eight digits", got)
		}
	}
}

// Two nodes with the same config agree, and a node agrees with its earlier state.
func TestHashIsIndependentOfNodeAndAddressOrder(t *testing.T) {
	c := config.Default(config.Defaults{})
	c.SNATAddresses = cases.CIDRs("198.51.100.11/32", "198.51.100.64/29", "198.51.100.65/32")
	r := nft.Compile(c, nft.Options{Layout: native.Layout{}})
	c.SNATAddresses = cases.CIDRs("198.51.100.64/29", "198.51.100.11/32")
	other := nft.Compile(c, nft.Options{Layout: native.Layout{}})
	if !r.Same(other) || r.Hash() != other.Hash() {
		t.Error("the result depends on the order")
	}
	here, there := r.WithAddresses(cases.Addrs("198.51.100.11")), r.WithAddresses(cases.Addrs("198.51.100.66"))
	if here.Hash() != r.Hash() || there.Hash() != r.Hash() {
		t.Errorf("hashes %s, %s and %s", r.Hash(), here.Hash(), there.Hash())
	}
	if here.Same(there) || here.Same(r) || !here.WithAddresses(nil).Same(r) {
		t.Error("the rules are not those of the node")
	}
}

func TestEachListIsComparedByItsKey(t *testing.T) {
	const few = 2
	policy := func(key, entries string) (nft.Policy, error) {
		text := "masqLinkLocal: true\nmasqLinkLocalIPv6: true\nenableIPv6: true\n" + key + ": [" + entries + "]\n"
		c, problems := config.Parse(config.Defaults{}, config.Source{Name: "config", Data: []byte(text)})
		return nft.NewPolicy(c, nft.Options{Layout: native.Layout{}}), problems.Err()
	}
	tested := 0
	for _, key := range config.Keys() {
		for _, list := range []struct {
			before, after string
			count         int
			first         []string
		}{
			{"192.0.2.0/25, 2001:db8::/33", "2001:db8::/33, 192.0.2.0/24", 1, []string{"192.0.2.0/24"}},
			{
				"192.0.2.0/24", "192.0.2.0/24, 198.51.100.7/32, 2001:db8::/32, 203.0.113.0/24",
				3,
				[]string{"198.51.100.7/32", "203.0.113.0/24"},
			},
			{"eth7", "eth7, wg*", 1, []string{"wg*"}},
			{"eth7", "eth1, eth2, eth3", 3, []string{"eth1", "eth2"}},
		} {
			before, err := policy(key, list.before)
			after, errAfter := policy(key, list.after)
			if err != nil || errAfter != nil {
				continue // not entries of this list
			}
			tested++
			want := nft.Entries{Count: list.count}
			for _, entry := range list.first {
				if key == config.KeySNATAddresses && entry == "198.51.100.7/32" {
					entry = "198.51.100.7"
				}
				want.First = append(want.First, key+": "+entry)
			}
			if diff := cmp.Diff(want, after.Additions(before, few)); diff != "" {
				t.Errorf("%s: %s is now %s (-want +got):\n%s", key, list.before, list.after, diff)
			}
			nfttest.Same(t, "unchanged (-want +got)", nft.Entries{}, after.Additions(after, few))
		}
	}
	if tested != 2*(5+3) {
		t.Errorf("%d lists were compared, want %d: a new one needs a change here", tested, 2*(5+3))
	}
}

// However long their lists are, entries of snatRules are compared as a whole, and named by their places.
func TestChangedEntriesOfSNATRulesAreNamedByTheirPlaces(t *testing.T) {
	t.Parallel()
	policy := func(entries ...string) nft.Policy {
		text := "enableIPv6: true\nsnatRules:\n- " + strings.Join(entries, "\n- ") + "\n"
		c, problems := config.Parse(config.Defaults{}, config.Source{Name: "config", Data: []byte(text)})
		nfttest.Check(problems.Err())
		return nft.NewPolicy(c, nft.Options{Layout: native.Layout{}})
	}
	const (
		first  = "{to: [203.0.113.0/24, '2001:db8::/32'], addresses: [198.51.100.1, '2001:db8:5::1']}"
		longer = "{to: [203.0.113.0/24, 192.0.2.0/24, '2001:db8::/32', '2001:db8:1::/48'], addresses: [198.51.100.1, " +
			"'2001:db8:5::1']}"
		second = "{from: [10.0.0.0/8], addresses: [198.51.100.2]}"
		bound  = "{from: [10.0.0.0/8], out: [eth1], addresses: [198.51.100.2]}"
		moved  = "{from: [10.0.0.0/8], addresses: [198.51.100.3]}"
	)
	for _, tt := range []struct {
		before, after nft.Policy
		added         []string
		removed       []string
	}{
		{policy(first, second), policy(second, first), nil, nil},
		{policy(first, second), policy(longer, second), []string{"entry 1"}, []string{"entry 1"}},
		{policy(first, second), policy(first, bound), []string{"entry 2"}, []string{"entry 2"}},
		{policy(first, second), policy(first, moved), []string{"entry 2"}, []string{"entry 2"}},
		{policy(second), policy(first, second), []string{"entry 1"}, nil},
	} {
		want := func(places []string) (e nft.Entries) {
			for _, place := range places {
				e.Count++
				e.First = append(e.First, "snatRules: "+place)
			}
			return e
		}
		nfttest.Same(t, "added (-want +got)", want(tt.added), tt.after.Additions(tt.before, 5))
		nfttest.Same(t, "removed (-want +got)", want(tt.removed), tt.before.Additions(tt.after, 5))
	}
}

// What has changed is found at about the cost of a policy, however long the lists are: until then the loop of the agent
// does nothing else. To look for each entry in the whole list costs a hundred times as much, and a collection of
// garbage at most as much again.
func TestAdditionsCostNoMoreThanAFewPolicies(t *testing.T) {
	t.Parallel()
	const entries, long = 64, 1850
	with := func(changed byte) config.Config {
		c := config.Config{}
		for i := range entries {
			r := config.SNATRule{Addresses: cases.CIDRs("198.51.100.1/32")}
			for j := range long {
				a := netip.AddrFrom4([4]byte{byte(100 + i), byte(j >> 7), byte(j << 1), 0})
				r.To = append(r.To, config.CIDR{Prefix: netip.PrefixFrom(a, 24)})
			}
			c.NonMasqueradeCIDRs = append(c.NonMasqueradeCIDRs, r.To...)
			c.SNATRules = append(c.SNATRules, r)
		}
		one := config.CIDR{Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{99, changed, 0, 0}), 24)}
		c.NonMasqueradeCIDRs = append(c.NonMasqueradeCIDRs, one)
		c.SNATRules[entries-1].To = append(c.SNATRules[entries-1].To, one)
		return c
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	before := nft.NewPolicy(with(1), nft.Options{Layout: native.Layout{}})
	begun := nfttest.ThreadTime()
	after := nft.NewPolicy(with(2), nft.Options{Layout: native.Layout{}})
	compiled := nfttest.ThreadTime()
	found := after.Additions(before, 5)
	compared := nfttest.ThreadTime()
	want := nft.Entries{First: []string{"nonMasqueradeCIDRs: 99.2.0.0/24", "snatRules: entry 64"}, Count: 2}
	nfttest.Same(t, "added (-want +got)", want, found)
	if compared-compiled > 5*(compiled-begun) {
		t.Errorf("the comparison cost %s, and the policy %s", compared-compiled, compiled-begun)
	}
}

// Two values of a key that has a meaning for connections have two hashes, and two rulesets.
func TestEachKeyOfThePolicyChangesHashAndRuleset(t *testing.T) {
	cases.EachKey(t, func(t *testing.T, k cases.Key) {
		var rulesets []nft.Ruleset
		files := k.Files()
		for _, text := range files {
			b := nft.Build(config.Defaults{}, nft.Options{Layout: native.Layout{}},
				config.Source{Name: "f", Data: []byte(text)})
			if b.Ruleset == nil || b.Problems.Err() != nil {
				t.Fatalf("%s%v", text, b.Problems)
			}
			rulesets = append(rulesets, *b.Ruleset)
		}
		a, b := rulesets[0], rulesets[1]
		if equal := a.Hash() == b.Hash(); equal != k.NoPolicy {
			t.Errorf("equal hashes %t, want %t: Policy.digest has not %s, or newFamilyPolicy not its entries:\n%s\n%s", equal,
				k.NoPolicy, k.Name, files[0], files[1])
		}
		if same := a.Same(b) || b.Same(a); same != k.NoPolicy {
			t.Errorf("Ruleset.Same is %t, want %t:\n%s\n%s", same, k.NoPolicy, files[0], files[1])
		}
	})
}

// Its rules are golden, and its packets are sent.
func TestEachKeyOfThePolicyHasACase(t *testing.T) {
	given := map[string]bool{}
	cases.Each(t, func(_ *testing.T, c cases.Case) {
		for _, key := range config.Keys() {
			given[key] = given[key] || c.Config.Given(key) != (config.Position{})
		}
	})
	cases.EachKey(t, func(t *testing.T, k cases.Key) {
		if !k.NoPolicy && !given[k.Name] {
			t.Errorf("%s is in no config of testdata/cases: add a directory with config.yaml, packets.txt and flags", k.Name)
		}
	})
}

// neverSet returns the fields that no value of a random type has, also those of the entries of
// its lists.
func neverSet(random func() any) []string {
	set, all := map[string]bool{}, []string{}
	var look func(prefix string, v reflect.Value)
	look = func(prefix string, v reflect.Value) {
		for i := range v.NumField() {
			f, name := v.Type().Field(i), prefix+v.Type().Field(i).Name
			if !f.IsExported() || f.Type == reflect.TypeFor[config.Position]() {
				continue
			}
			if _, seen := set[name]; !seen {
				set[name], all = false, append(all, name)
			}
			set[name] = set[name] || !v.Field(i).IsZero()
			if f.Type == reflect.TypeFor[[]config.SNATRule]() {
				for j := range v.Field(i).Len() {
					look(name+".", v.Field(i).Index(j))
				}
			}
		}
	}
	for range 2000 {
		look("", reflect.ValueOf(random()))
	}
	var never []string
	for _, name := range all {
		if !set[name] {
			never = append(never, name)
		}
	}
	return never
}

// What the maker of random configs and connections does not set is in no test with random ones.
func TestRandomConfigsAndConnectionsHaveEachField(t *testing.T) {
	m := cases.NewMaker(1)
	if never := neverSet(func() any { return m.Config() }); len(never) > 0 {
		t.Errorf("random configs never have %q: cases.Maker.Config", never)
	}
	random := func() any { return m.Connection(m.Near(m.Config(), false), m.Near(m.Config(), true)) }
	if never := neverSet(random); len(never) > 0 {
		t.Errorf("random connections never have %q: cases.Maker.Connection", never)
	}
}

// Numbers that people decode logs with: they must be the same in all versions, for ever.
func TestBlocksOfPods(t *testing.T) {
	for _, tt := range []struct {
		size  int
		ports string
		count int
		// by the last byte of the pod
		blocks map[int]string
		node   string
	}{
		{0, "", 0, nil, ""},
		{250, "", 256, map[int]string{0: "1024-1273", 7: "2774-3023", 255: "64774-65023"}, "[65024-65535]"},
		{251, "", 256, map[int]string{0: "1024-1274", 255: "65029-65279"}, "[65280-65535]"},
		{252, "", 128, map[int]string{0: "1024-1275", 127: "33028-33279", 128: "1024-1275"}, "[33280-65535]"},
		{500, "", 128, map[int]string{7: "4524-5023", 135: "4524-5023"}, "[65024-65535]"},
		{1000, "", 32, map[int]string{31: "32024-33023", 255: "32024-33023"}, "[33024-65535]"},
		{2000, "", 16, map[int]string{16: "1024-3023", 15: "31024-33023"}, "[33024-65535]"},
		{16, "", 256, map[int]string{1: "1040-1055", 255: "5104-5119"}, "[5120-65535]"},
		{16, "1000-1047", 2, map[int]string{0: "1000-1015", 1: "1016-1031", 2: "1000-1015"}, "[1032-1047]"},
		{16, "1000-1046", 0, nil, ""},
		// A gap is left out by whole blocks, counted from the first port. Ranges may overlap.
		{10, "100-124,131-169", 4, map[int]string{0: "100-109", 1: "110-119", 2: "140-149", 3: "150-159"}, "[160-169]"},
		{10, "150-169,100-119,105-124", 2, map[int]string{1: "110-119"}, "[120-124 150-169]"},
		{10, "100-119,120-129", 2, map[int]string{0: "100-109"}, "[120-129]"},
		{2000, "59536-65535", 2, map[int]string{1: "61536-63535"}, "[63536-65535]"},
	} {
		ranges, err := config.ParsePorts(tt.ports)
		nfttest.NoError(t, err)
		b := nft.NewPortBlocks(tt.size, ranges)
		if b.Count() != tt.count {
			t.Errorf("%d of %q: %d blocks, want %d", tt.size, tt.ports, b.Count(), tt.count)
			continue
		}
		for last, want := range tt.blocks {
			for _, pod := range []netip.Addr{
				netip.AddrFrom4([4]byte{10, 244, 3, byte(last)}), netip.AddrFrom16([16]byte{0: 0xfd, 14: 9, 15: byte(last)}),
			} {
				if got := b.Block(b.BlockOfPod(pod)).String(); got != want {
					t.Errorf("%d of %q: %s has %s, want %s", tt.size, tt.ports, pod, got, want)
				}
			}
		}
		if got := fmt.Sprint(b.NodePorts); tt.count > 0 && got != tt.node {
			t.Errorf("%d of %q: the node has %s, want %s", tt.size, tt.ports, got, tt.node)
		}
	}
}

// Each port of toPorts is in one block, or the node's, or in the rest of a gap; decoding a port
// finds the pod that encoding gave it to.
func TestEachPortOfABlockNamesItsPods(t *testing.T) {
	m := cases.NewMaker(49)
	for range 300 {
		ranges := make([]nft.PortRange, 1+m.IntN(3))
		for i := range ranges {
			low := 1 + m.IntN(60_000)
			ranges[i] = nft.PortRange{Min: uint16(low), Max: uint16(min(65535, low+m.IntN(20_000)))}
		}
		b := nft.NewPortBlocks(16+m.IntN(1985), ranges)
		in := func(port uint16, list []nft.PortRange) bool {
			return slices.ContainsFunc(list, func(r nft.PortRange) bool { return r.Min <= port && port <= r.Max })
		}
		node := 0
		for number := range b.Count() {
			for _, port := range []uint16{b.Block(number).Min, b.Block(number).Max} {
				owner, ok := b.BlockOf(port)
				if !ok || owner != number || in(port, b.NodePorts) || !in(port, ranges) {
					t.Fatalf("%v: port %d of block %d is of %d, %t", ranges, port, number, owner, ok)
				}
			}
			for _, last := range b.LastBytes(number) {
				if got := b.BlockOfPod(netip.AddrFrom4([4]byte{10, 0, 0, byte(last)})); got != number {
					t.Fatalf("a pod that ends in %d has block %d, not %d", last, got, number)
				}
			}
		}
		for _, r := range b.NodePorts {
			node += int(r.Size())
			if _, ok := b.BlockOf(r.Min); ok || !in(r.Min, ranges) || !in(r.Max, ranges) {
				t.Fatalf("%v: %v is the node's", ranges, r)
			}
		}
		if n := b.Count(); n != 0 && (node < b.Size || n&(n-1) != 0 || n < 2 || n > 256) {
			t.Fatalf("%v: %d blocks of %d, %d ports for the node", ranges, n, b.Size, node)
		}
	}
}

func TestBlocksNeedRoom(t *testing.T) {
	const noRoom = "f:2:14: portsPerPod: toPorts has no room for two blocks and the node's own ports"
	const pods = "masqueradeSrcCIDRs: [10.244.0.0/16]\n"
	for _, tt := range []struct{ file, flag, want string }{
		{pods + "portsPerPod: 250", "", ""},
		{pods + "portsPerPod: 250", "20000-20748", noRoom},
		{pods + "portsPerPod: 250", "20000-20749", ""},
		{pods + "portsPerPod: 250\ntoPorts: 20000-20748", "", noRoom},
		{pods + "portsPerPod: 250\ntoPorts: ''", "20000-20748", ""},
		{
			pods + "portsPerPod: 250\nsnatRules: [{from: [10.244.1.0/24], addresses: [198.51.100.1]}]", "",
			"f:2:14: portsPerPod cannot be combined with snatRules, whose first entry is at f:3:13: remove one of them, " +
				"or list the addresses for all pods in snatAddresses",
		},
		{pods + "portsPerPod: 250\nsnatRules: []", "", ""},
		{pods + "portsPerPod: 0\nsnatRules: [{from: [10.244.1.0/24], addresses: [198.51.100.1]}]", "", ""},
	} {
		ports, err := config.ParsePorts(tt.flag)
		nfttest.NoError(t, err)
		b := nft.Build(config.Defaults{}, nft.Options{Layout: native.Layout{}, Ports: ports},
			config.Source{Name: "f", Data: []byte(tt.file)})
		got := ""
		if err := b.Problems.Err(); err != nil {
			got = err.Error()
		}
		if got != tt.want || (b.Ruleset == nil) != (tt.want != "") {
			t.Errorf("%q: %q, want %q", tt.file, got, tt.want)
		}
	}
}

// The older agents have four keys, non-masquerade-daemon a fifth one, and two flags that are keys here. Mode
// iptables-nft is the view of these alone, whatever the value is.
func TestModeIPTablesHasTheKeysOfOlderAgents(t *testing.T) {
	t.Parallel()
	older := []string{
		config.KeyNonMasqueradeCIDRs, "masqLinkLocal", "masqLinkLocalIPv6", "resyncInterval", "cidrLimit", "linkLocal",
		config.KeyToPorts, "randomFully",
	}
	cases.EachKey(t, func(t *testing.T, k cases.Key) {
		for _, value := range k.Values {
			text := k.Name + ": " + value + "\n"
			b := nft.Build(config.Defaults{Chain: "NON-MASQUERADE-DAEMON"}, nft.Options{Layout: xtables.Layout{ChainName: "X"}},
				config.Source{Name: "f", Data: []byte(text)})
			rejected := slices.ContainsFunc(b.Problems, func(p config.Problem) bool {
				return p.Level == config.Error && p.Pos.Line == 1 && p.Msg == k.Name+" needs mode nftables"
			})
			accepted := b.Ruleset != nil && b.Problems.Err() == nil
			if slices.Contains(older, k.Name) {
				if !accepted {
					t.Errorf("%s: %v", text, b.Problems)
				}
			} else if accepted || !rejected && !strings.Contains(b.Problems.Error(), " needs masqueradeSrc") {
				t.Errorf("%s: %v", text, b.Problems)
			}
		}
	})
}

// portsPerPod needs a chain for each block, and two if both families have addresses of their own.
func TestPortsPerPodNeedsAtMost600Chains(t *testing.T) {
	t.Parallel()
	const file = "enableIPv6: true\nmasqueradeSrcCIDRs: [10.244.0.0/16, 'fd00:10:244::/48']\nportsPerPod: %d\n" +
		"snatAddresses: [198.51.100.0/24, '2001:db8:5::/64']\nenforceNonMasquerade: true\ndropInvalid: true\n"
	for _, size := range []int{16, 250, 2000} {
		for _, present := range [][]netip.Addr{
			nil, cases.Addrs("198.51.100.1"), cases.Addrs("198.51.100.1", "198.51.100.2", "2001:db8:5::1", "2001:db8:5::2"),
		} {
			source := config.Source{Name: "f", Data: fmt.Appendf(nil, file, size)}
			b := nft.Build(config.Defaults{}, nft.Options{Layout: native.Layout{}, Marks: cases.Marks()}, source)
			nfttest.NoError(t, b.Problems.Err())
			r := b.Ruleset.WithAddresses(present)
			if n := len(r.Tables[0].Chains); n > 600 {
				t.Errorf("portsPerPod %d, %v: %d chains", size, present, n)
			}
		}
	}
}
