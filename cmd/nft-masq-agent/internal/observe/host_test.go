package observe

import (
	"context"
	"errors"
	"testing"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/layout"
)

// Together they would take too much memory.
func TestOtherProgramsRulesAreReadByOneTaskAtATime(t *testing.T) {
	h := NewNode(nil, nil)
	ctx, cancel := context.WithCancel(t.Context())
	err := h.alone(ctx, func() error {
		cancel()
		for name, task := range map[string]func() error{
			"survey": func() error { _, err := h.Others(ctx, nft.Ruleset{}); return err },
			"resync": func() error { _, err := h.Apply(ctx, nft.Ruleset{}, layout.Everything); return err },
		} {
			if err := task(); !errors.Is(err, context.Canceled) {
				t.Errorf("%s: %v, want it to wait", name, err)
			}
		}
		return errors.ErrUnsupported
	})
	if !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("the task returned %v", err)
	}
	if err := h.alone(t.Context(), func() error { return nil }); err != nil {
		t.Errorf("afterwards: %v", err)
	}
}
