package kernel

import (
	"context"
	"errors"
	"testing"

	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
)

func TestCanceledApplyKeepsTheOldRules(t *testing.T) {
	for _, m := range cases.Modes() {
		ns := nfttest.NewNS(t, "node")
		k := open(t, ns)
		before := cases.Load(t, "default").Compile(m)
		apply(t, k, before, layout.Ours)
		after := cases.Load(t, "all-policies").Compile(m)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, applied := k.Apply(ctx, after, layout.Ours)
		_, diff := k.Diff(ctx, after, layout.Ours)
		_, _, installed := k.Installed(ctx)
		for _, err := range []error{applied, diff, installed} {
			if !errors.Is(err, context.Canceled) {
				t.Errorf("mode %s: %v", m, err)
			}
		}
		inSync(t, ns, before)
		apply(t, k, after, layout.Ours)
		inSync(t, ns, after)
	}
}
