package observe

import (
	"context"
	"errors"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/kernel"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/nfnetlink"
)

// Together they would take too much memory.
func TestOtherProgramsRulesAreReadByOneTaskAtATime(t *testing.T) {
	refuses := nfnetlink.New(func() (*netlink.Conn, error) { return nil, unix.ENXIO })
	h := NewNode(kernel.New(refuses, nil), nil)
	ctx, cancel := context.WithCancel(t.Context())
	err := h.alone(ctx, func() error {
		// The loop does not wait for them.
		if _, err := h.Apply(t.Context(), nft.Ruleset{}, layout.TakeOver); !errors.Is(err, unix.ENXIO) {
			t.Errorf("Apply returns %v", err)
		}
		cancel()
		for name, task := range map[string]func() error{
			"survey": func() error { _, err := h.Others(ctx, nft.Ruleset{}); return err },
			"count":  func() error { return h.apart(ctx, nft.Ruleset{}, nil) },
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
