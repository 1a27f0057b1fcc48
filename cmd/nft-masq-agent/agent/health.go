package agent

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"nft-masq-agent/nft"
)

// health is what the loop tells others of itself.
type health struct {
	mu       sync.Mutex
	stopped  bool
	since    time.Time // when the step under way began; zero: none is
	rejected error     // of the config
	refusal  error     // of the kernel
	synced   bool      // the accepted config is in the kernel
	ready    bool      // it once was
	warnings int
	repairs  int
}

// ErrStuck says that the loop does not turn.
var ErrStuck = errors.New("the loop is stuck")

// stuckAfter is longer than any step takes: 1,000,000 CIDRs take seconds.
const stuckAfter = time.Minute

func (h *health) do(fn func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	fn()
}

func (h *health) idle() { h.do(func() { h.since = time.Time{} }) }
func (h *health) busy() { h.do(func() { h.since = time.Now() }) }
func (h *health) stop() { h.do(func() { h.stopped = true }) }

func (h *health) config(err error, warnings int) {
	h.do(func() {
		h.rejected = err
		h.warnings = warnings
		h.synced = false
	})
}

func (h *health) applied(string, bool, error, time.Duration) {}

func (h *health) refused(err error) { h.do(func() { h.refusal = err }) }
func (h *health) repaired()         { h.do(func() { h.repairs++ }) }

func (h *health) inStep(nft.Ruleset) {
	h.do(func() {
		h.refusal = nil
		h.synced = h.rejected == nil
		h.ready = h.ready || h.synced
	})
}

func (h *health) everReady() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.ready
}

// Alive says whether the loop turns.
func (a *Agent) Alive() error {
	h := &a.health
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.stopped {
		return fmt.Errorf("%w: it has ended", ErrStuck)
	}
	if !h.since.IsZero() && time.Since(h.since) > stuckAfter {
		return fmt.Errorf("%w: one step takes longer than %s", ErrStuck, stuckAfter)
	}
	return nil
}

// Ready says whether the files were accepted and are in the kernel, and if not
// why.
func (a *Agent) Ready() error {
	h := &a.health
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case h.rejected != nil:
		return fmt.Errorf("config rejected: %w", h.rejected)
	case h.refusal != nil:
		return fmt.Errorf("the kernel refuses the rules: %w", h.refusal)
	case !h.synced:
		return errors.New("the config is not yet in the kernel")
	}
	return nil
}
