package nft_test

import (
	"slices"
	"testing"

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
