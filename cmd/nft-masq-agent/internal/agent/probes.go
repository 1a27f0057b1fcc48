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
	busySince := a.busySince.Load()
	switch {
	case busySince < 0:
		return fmt.Errorf("%w: it has stopped", ErrStuck)
	case busySince > 0 && time.Since(time.Unix(0, busySince)) > stuckAfter:
		return fmt.Errorf("%w: one step takes longer than %s", ErrStuck, stuckAfter)
	}
	return nil
}

// Started returns an error until a policy is in the kernel, even if it replaces a
// rejected file. Pods that start earlier may use wrong source addresses.
func (a *Agent) Started() error {
	if v := a.current(); v.installed == nil && v.policy.source != FromOlder && v.policy.inherited == nil {
		return errors.New("no rules are installed yet")
	}
	return nil
}

// Ready returns an error unless the config was accepted and is in the kernel.
func (a *Agent) Ready() error { return a.current().ready() }

// Report returns the state of the loop, and what commands need to answer like it.
func (a *Agent) Report() running.Report {
	text := func(err error) string {
		if err == nil {
			return ""
		}
		return err.Error()
	}
	v := a.current()
	r := running.Report{
		PID: os.Getpid(), Args: a.settings.Args, ConfigPath: a.settings.ConfigPath,
		Alive: text(a.Alive()), Ready: text(v.ready()), Failure: text(v.problem()), Vanished: text(v.vanished()),
		Delayed: kernel.Delayed(v.failure),
		Source:  string(v.policy.source), Compiled: v.policy.want != nil, Addresses: v.addresses,
		HasLock: a.second.hasLock.Load(), SecondAgent: int(a.second.other.Load()), Problems: a.currentProblems(),
	}
	if path, err := filepath.Abs(r.ConfigPath); err == nil {
		r.ConfigPath = path
	}
	if v.installed != nil {
		r.Policy = &v.history
	}
	r.Files = v.policy.content.files
	r.Rejected = config.ProblemsOf(v.content.err)
	r.Warnings = v.content.remarks
	return r
}
