package nft_test

import (
	"reflect"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
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
			c.NonMasqueradeCIDRs[0].Pos = config.At("x", 3, 1)
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
		"mode":            func(_ *config.Config, o *nft.Options) { o.Layout = xtables.Layout{Name: cases.DefaultChain} },
		"chain":           func(_ *config.Config, o *nft.Options) { o.Layout = xtables.Layout{Name: "OTHER"} },
	} {
		c, o := full()
		change(&c, &o)
		if got := nft.Compile(c, o).Hash(); got != hash {
			t.Errorf("%s: hash %s became %s", name, hash, got)
		}
	}
	hashes := map[string]string{hash: "the original"}
	for name, change := range map[string]func(*config.Config, *nft.Options){
		"halves of one": func(c *config.Config, _ *nft.Options) {
			c.NonMasqueradeCIDRs = append(cases.CIDRs("10.0.0.0/9", "10.128.0.0/9"), c.NonMasqueradeCIDRs[1:]...)
		},
		"one removed": func(c *config.Config, _ *nft.Options) { c.NonMasqueradeCIDRs = c.NonMasqueradeCIDRs[1:] },
		"lists exchanged": func(c *config.Config, _ *nft.Options) {
			c.ForceMasqueradeCIDRs, c.NonMasqueradeSrcCIDRs = c.NonMasqueradeSrcCIDRs, c.ForceMasqueradeCIDRs
		},
		"sources exchanged": func(c *config.Config, _ *nft.Options) {
			c.MasqueradeSrcCIDRs, c.NonMasqueradeSrcCIDRs = c.NonMasqueradeSrcCIDRs, c.MasqueradeSrcCIDRs
		},
		"received on":          func(c *config.Config, _ *nft.Options) { c.MasqueradeSrcInterfaces = ifaces("cni0") },
		"received on a prefix": func(c *config.Config, _ *nft.Options) { c.MasqueradeSrcInterfaces = ifaces("cni0*") },
		"enforced":             func(c *config.Config, _ *nft.Options) { c.Enforce = &config.Position{} },
		"enforced, marked": func(c *config.Config, o *nft.Options) {
			c.Enforce, o.Marks = &config.Position{}, []nft.Mark{{Value: 1, Mask: 1}}
		},
		"no random ports":      func(_ *config.Config, o *nft.Options) { o.RandomFully = false },
		"no port ranges":       func(_ *config.Config, o *nft.Options) { o.Ports = nil },
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
	here, there := r.On(cases.Addrs("198.51.100.11")), r.On(cases.Addrs("198.51.100.66"))
	if here.Hash() != r.Hash() || there.Hash() != r.Hash() {
		t.Errorf("hashes %s, %s and %s", r.Hash(), here.Hash(), there.Hash())
	}
	if here.Same(there) || here.Same(r) || !here.On(nil).Same(r) {
		t.Error("the rules are not those of the node")
	}
}

func ifaces(names ...string) (list []config.Interface) {
	for _, n := range names {
		list = append(list, config.Interface{Name: n})
	}
	return list
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
			if diff := cmp.Diff(want, after.Beyond(before, few)); diff != "" {
				t.Errorf("%s: %s is now %s (-want +got):\n%s", key, list.before, list.after, diff)
			}
			if diff := cmp.Diff(nft.Entries{}, after.Beyond(after, few)); diff != "" {
				t.Errorf("unchanged (-want +got):\n%s", diff)
			}
		}
	}
	if tested != 2*(5+3) {
		t.Errorf("%d lists were compared", tested)
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
