package agent

import (
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"nft-masq-agent/cmd/nft-masq-agent/internal/running"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/foreign"
	"nft-masq-agent/nft/kernel"
)

// health is the loop's state for others. Its mutex is never held during a wait,
// so that probes and scrapes are answered at any time.
type health struct {
	mu sync.Mutex
	state
}

// A state is the last reported state of the loop.
type state struct {
	stopped bool
	since   time.Time // when the current step began; zero: idle

	rejection error // of the config, nil if it was accepted
	policy    policy
	addresses []netip.Addr // those of the node, if the policy has needed them
	words     string       // what is enforced instead of a rejected config
	refusal   error        // of the kernel
	synced    bool         // the accepted config is in the kernel
	wasSynced bool         // it was at some time

	read     bool      // a config was accepted or rejected
	accepted time.Time // when a config was last accepted; zero: never
	warnings []config.Problem
	second   int // the process of another agent, 0 for none

	listening bool // to changes of the ruleset

	kernel   *installed      // nil until something is in the kernel
	enforces *running.Policy // nil while the agent enforces nothing
	others   *others         // nil until the first check
	// Restricting lists without any interface of the node; nil: unknown.
	unmatched *int

	stale    *int      // connections that contradict the rules; nil: unknown
	pressure *pressure // nil: unknown
}

// installed is what the loop last wrote to the kernel.
type installed struct {
	hash       string
	mode       nft.Mode
	ipv4, ipv6 int // CIDRs
	// Addresses of snatAddresses that the node has, and entries of which it has none.
	present, absent int
}

// others are rules on the node that are not ours.
type others struct{ foreign, legacy, exempting, translating int }

// ErrStuck reports that the loop makes no progress.
var ErrStuck = errors.New("the loop is stuck")

// stuckAfter is longer than any step takes. The longest one reads tens of
// thousands of rules in mode iptables-nft, for which the kernel takes quadratic
// time.
const stuckAfter = 3 * time.Minute

func (h *health) set(fn func(s *state)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	fn(&h.state)
}

func (h *health) now() state {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.state
}

func (h *health) idle() { h.set(func(s *state) { s.since = time.Time{} }) }
func (h *health) busy() { h.set(func(s *state) { s.since = time.Now() }) }

// config records the result for a new content of the config.
func (h *health) config(err error, warnings []config.Problem) {
	h.set(func(s *state) {
		s.read, s.rejection, s.warnings, s.synced = true, err, warnings, false
		if err == nil {
			s.accepted = time.Now()
		}
	})
}

func (h *health) refused(err error) {
	text := "cannot read nftables: %w"
	if kernel.Refused(err) {
		text = "the kernel rejected the rules: %w"
	}
	if hint := kernel.Hint(err); hint != "" {
		text += "; " + hint
	}
	err = fmt.Errorf(text, err)
	h.set(func(s *state) { s.refusal = err })
}

// inSync records that the kernel has the wanted rules.
func (h *health) inSync(r nft.Ruleset) {
	k := installed{hash: r.Hash(), mode: r.Mode()}
	k.ipv4, k.ipv6 = r.CIDRs()
	for _, f := range r.Policy.Families {
		k.present, k.absent = k.present+len(f.SNAT.Present), k.absent+f.SNAT.Absent()
	}
	h.set(func(s *state) {
		s.refusal, s.kernel = nil, &k
		s.synced = s.rejection == nil
		s.wasSynced = s.wasSynced || s.synced
	})
}

// found records how many rules on the node are not ours, by their effect.
func (h *health) found(o kernel.Others) {
	n := others{
		foreign: len(o.Conflicts), legacy: len(o.Legacy) + len(o.XTables),
		exempting: len(o.Of(foreign.Exempts)), translating: len(o.Of(foreign.Translates)),
	}
	h.set(func(s *state) { s.others = &n })
}

// Alive returns an error if the loop is stuck.
func (a *Agent) Alive() error {
	switch s := a.health.now(); {
	case s.stopped:
		return fmt.Errorf("%w: it has stopped", ErrStuck)
	case !s.since.IsZero() && time.Since(s.since) > stuckAfter:
		return fmt.Errorf("%w: one step takes longer than %s", ErrStuck, stuckAfter)
	}
	return nil
}

// Started returns an error until a policy is in the kernel, even if it replaces a
// rejected file. Pods that start earlier may use wrong source addresses.
func (a *Agent) Started() error {
	if s := a.health.now(); s.enforces == nil && s.policy.from != FromForeign {
		return errors.New("no rules are installed yet")
	}
	return nil
}

// Ready returns an error unless the config was accepted and is in the kernel.
func (a *Agent) Ready() error { return a.health.now().ready() }

func (s state) ready() error {
	switch {
	case s.rejection != nil:
		return fmt.Errorf("config rejected: %w\n%s", s.rejection, s.words)
	case s.refusal != nil:
		return s.refusal
	case !s.read:
		return errors.New("the config has not been read yet")
	case !s.synced:
		return errors.New("the config is not yet in the kernel")
	}
	return nil
}
