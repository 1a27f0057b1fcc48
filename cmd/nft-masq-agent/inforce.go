package main

import (
	"context"
	"fmt"

	"nft-masq-agent/cmd/nft-masq-agent/internal/options"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/kernel"
	"nft-masq-agent/nft/layout"
)

// A candidates is what an agent may enforce because of a config: its ruleset or, if it is
// rejected, the built-in defaults, or what the older agents make of it.
type candidates struct {
	path     string
	rejected bool
	rulesets []nft.Ruleset
}

func (e environment) candidates(o *options.Options, l options.Loaded, rejected error) (candidates, error) {
	c := candidates{path: o.ConfigPath, rejected: rejected != nil}
	var all []*nft.Ruleset
	if c.rejected {
		defaults := nft.Compile(config.Default(o.Defaults), o.NFT())
		all = append(all, &defaults)
	}
	if l.Ruleset != nil {
		all = append(all, l.Ruleset)
	}
	for _, r := range all {
		r, err := e.onThisNode(r)
		if err != nil {
			return c, err
		}
		c.rulesets = append(c.rulesets, *r)
	}
	return c, nil
}

// An inForce is what the kernel has of our rules.
type inForce struct {
	layout.Installed
	found   bool         // there are rules of ours
	known   *nft.Ruleset // they are exactly these; nil if no candidate is
	unknown string       // why not, a sentence without its end; "" if there are none
}

// inForce compares our rules in the kernel with candidates. The hash that the kernel's
// rules have decides which one they can be.
func (c candidates) inForce(ctx context.Context, k *kernel.Kernel) (f inForce, err error) {
	if f.Installed, f.found, err = k.Installed(ctx); err != nil {
		return f, err
	}
	for i, r := range c.rulesets {
		if f.found && f.Hash != r.Hash() {
			continue
		}
		diffs, err := k.Diff(ctx, r, layout.Ours)
		if err != nil {
			return f, err
		}
		if len(diffs) == 0 {
			return inForce{layout.Installed{Layout: r.Layout, Hash: r.Hash()}, true, &c.rulesets[i], ""}, nil
		}
		f.unknown = "Another program changed this agent's rules: see status"
	}
	switch {
	case !f.found:
		f.unknown = ""
	case f.Hash == "":
		f.unknown = "The kernel has rules of this agent without the hash of their policy"
	case f.unknown != "":
	case c.rejected:
		f.unknown = fmt.Sprintf("The kernel enforces %s, and the config (%s) is rejected", f.Hash, c.path)
	case len(c.rulesets) > 0:
		f.unknown = fmt.Sprintf("The kernel enforces %s, not %s of the config (%s)", f.Hash, c.rulesets[0].Hash(), c.path)
	}
	return f, nil
}
