package agent

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"nft-masq-agent/cmd/nft-masq-agent/internal/running"
	"nft-masq-agent/config"
	"nft-masq-agent/nft/kernel"
)

// ErrStuck reports that the loop makes no progress.
var ErrStuck = errors.New("the loop is stuck")

// stuckAfter is longer than any step takes. The longest one reads tens of
// thousands of rules in mode iptables-nft, for which the kernel takes quadratic
// time.
const stuckAfter = 3 * time.Minute

// Alive returns an error if the loop is stuck.
func (a *Agent) Alive() error {
	switch since := a.busySince.Load(); {
	case since < 0:
		return fmt.Errorf("%w: it has stopped", ErrStuck)
	case since > 0 && time.Since(time.Unix(0, since)) > stuckAfter:
		return fmt.Errorf("%w: one step takes longer than %s", ErrStuck, stuckAfter)
	}
	return nil
}

// Started returns an error until a policy is in the kernel, even if it replaces a
// rejected file. Pods that start earlier may use wrong source addresses.
func (a *Agent) Started() error {
	if v := a.now(); v.installed == nil && v.policy.from != FromForeign && v.policy.left == nil {
		return errors.New("no rules are installed yet")
	}
	return nil
}

// Ready returns an error unless the config was accepted and is in the kernel.
func (a *Agent) Ready() error { return a.now().ready() }

// Report returns the state of the loop, and what commands need to answer like it.
func (a *Agent) Report() running.Report {
	text := func(err error) string {
		if err == nil {
			return ""
		}
		return err.Error()
	}
	v := a.now()
	r := running.Report{
		PID: os.Getpid(), Args: a.settings.Args, ConfigPath: a.settings.ConfigPath,
		Alive: text(a.Alive()), Ready: text(v.ready()), Failure: text(v.problem()), Vanished: text(v.vanished()),
		Delayed: kernel.Delayed(v.failure),
		Source:  string(v.policy.from), Compiled: v.policy.want != nil, Addresses: v.addresses,
		HasLock: a.second.hasLock.Load(), SecondAgent: int(a.second.other.Load()), Problems: a.told(),
	}
	if path, err := filepath.Abs(r.ConfigPath); err == nil {
		r.ConfigPath = path
	}
	if v.installed != nil {
		r.Policy = &v.told
	}
	r.Files, r.Rejected, r.Warnings = v.policy.content.files, config.ProblemsOf(v.content.err), v.content.remarks
	return r
}
