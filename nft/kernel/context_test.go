package kernel

import (
	"context"
	"errors"
	"testing"

	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
)

func TestCanceledApplyKeepsTheOldRules(t *testing.T) {
	for _, m := range cases.Modes() {
		ns := nfttest.NewNS(t, "node")
		k := open(t, ns)
		before := cases.Load(t, "default").Compile(m)
		apply(t, k, before, Look{})
		after := cases.Load(t, "all-policies").Compile(m)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := k.Apply(ctx, after, Look{}); !errors.Is(err, context.Canceled) {
			t.Errorf("mode %s: Apply: %v", m, err)
		}
		inSync(t, ns, before)
		apply(t, k, after, Look{})
		inSync(t, ns, after)
	}
}

func TestReadersStopWithTheirContext(t *testing.T) {
	k := open(t, nfttest.NewNS(t, "node"))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := k.ReadBack(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("ReadBack: %v", err)
	}
	if _, err := k.Diff(ctx, cases.Load(t, "default").Compile(cases.Modes()[0]), Look{}); !errors.Is(err, context.Canceled) {
		t.Errorf("Diff: %v", err)
	}
}
