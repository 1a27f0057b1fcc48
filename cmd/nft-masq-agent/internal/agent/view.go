package agent

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"nft-masq-agent/cmd/nft-masq-agent/internal/running"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/kernel"
)

// A view has the decisions of the loop and its knowledge. It is a value: each event
// leads to another one, and the log is the difference of two.
type view struct {
	read       bool // content was read
	configured bool // some content had a file
	content    content
	policy     policy

	addresses  []netip.Addr // of the node, if a policy has needed them
	listed     time.Time    // when these were listed: an older list may arrive later
	unfollowed error        // why changes of these are not known

	installed         *nft.Ruleset   // what the kernel accepted last, nil for nothing yet
	replaced          *nft.Ruleset   // what it accepted before the last change of our rules, nil for nothing
	installedAccepted bool           // installed comes from an accepted config
	history           running.Policy // about installed
	failure           error          // why it is not known to be in the kernel; nil if it is
	tries             int            // number of failed ones since the policy was decided

	generation uint32    // of the ruleset, at which everything was right; 0: unknown
	resynced   time.Time // when a start, a resync or a SIGHUP last succeeded, whatever depth that had
	hangups    int
	changes    int // of our rules, by this agent
	repairs    int // of rules that another program had changed
	attempt    attempt
}

// An attempt is what an event led to.
type attempt struct {
	reason  string
	depth   nft.Depth       // of what was compared
	read    bool            // a new content of the config
	took    time.Duration   // including everything that was read
	cost    time.Duration   // processor time, as by [schedule.cost]
	applied *kernel.Applied // nil if nothing was compared, or that failed
	err     error           // why it failed
	differs bool            // with an error: differences were found, and are still there
	slowed  bool            // repairs are slowed down from now on
	cause   cause

	added, removed nft.Entries // of the policy, if another one was replaced
}

// A cause is why the rules in the kernel were not the wanted ones.
type cause int

const (
	noCause          cause = iota
	policyChanged          // there was another policy, or none
	addressesChanged       // the same policy has other addresses of the node
	changedByOthers        // another program has changed them
	onlyOlderAgents        // only rules of an older agent were there, which are gone now
)

// A content is a content of the config, and what it means.
type content struct {
	files  []config.Source
	readAt time.Time
	err    error // why it is rejected
	// missing is why there is no config, so that the built-in defaults apply; nil if there is one.
	missing error
	// want is nil if there is an error. With mistakes alone it is what the older agents
	// make of the files.
	want    *nft.Ruleset
	remarks config.Problems
	resync  time.Duration
	stale   config.Stale
}

// vanished returns an error if there was a config in this run and there is none any more. A node that never had one is
// fine with the defaults.
func (v view) vanished() error {
	if !v.configured || v.content.missing == nil {
		return nil
	}
	return fmt.Errorf("the config vanished (%w); the built-in defaults (%s) apply until it is back", v.content.missing,
		v.policy.hash())
}

// hash returns the hash of our rules in the kernel, "" if there are none.
func (v view) hash() string {
	if v.installed == nil {
		return ""
	}
	return v.installed.Hash()
}

// inForce reports whether the kernel has what is wanted, as far as is known.
func (v view) inForce() bool {
	return v.failure == nil && v.policy.want != nil && v.installed != nil && v.policy.want.Same(*v.installed)
}

// pending reports whether another policy was decided, and is about to be written.
func (v view) pending() bool {
	return v.policy.want != nil && !v.inForce() && v.attempt.applied == nil && v.attempt.err == nil
}

// ready returns an error unless the config was accepted and is in the kernel.
func (v view) ready() error {
	switch {
	case !v.read:
		return errors.New("the config has not been read yet")
	case v.content.err != nil:
		return fmt.Errorf("config rejected: %w\n%s", v.content.err, v.describeEnforced())
	case v.failure != nil:
		return v.problem()
	case !v.inForce():
		return errors.New("the config is not yet in the kernel")
	}
	return v.vanished()
}

// problem returns the failure in words, nil for none.
func (v view) problem() error {
	if v.failure == nil {
		return nil
	}
	text := "cannot read nftables: %w"
	switch {
	case kernel.Rejected(v.failure):
		text = "the kernel rejected the rules: %w"
	case kernel.Delayed(v.failure):
		text = "the rules are not yet written, because other programs change nftables all the time: %w"
	}
	if hint := kernel.Hint(v.failure); hint != "" {
		text += "; " + hint
	}
	return fmt.Errorf(text, v.failure)
}

// describeEnforced describes what is enforced while the config is rejected.
func (v view) describeEnforced() string {
	var subject, verb string
	switch v.policy.source {
	case "":
		return "nothing is enforced yet because the kernel's rules cannot be read"
	case FromOlder:
		return "the rules of an iptables-based agent stay active, and nothing is written"
	case FromFile:
		subject = "config"
		verb = "is"
	case FromPrevious:
		subject = "config of a previous run"
		verb = "stays"
		if v.policy.accepted {
			subject = "last good config"
		}
	case FromLenient:
		subject = "the older agents' reading of it"
		verb = "is"
	case FromDefaults:
		subject = "built-in defaults"
		verb = "are"
	}
	hash := v.policy.hash()
	installed := v.hash()
	subject += " (" + hash + ")"
	switch {
	case v.policy.inherited != nil, installed == hash:
		return subject + " " + verb + " enforced"
	case installed == "":
		return subject + " is not in the kernel yet"
	}
	return fmt.Sprintf("%s is not in the kernel yet, which still has %s", subject, installed)
}

// causeOf returns why the kernel did not have the wanted ruleset. While the kernel has rejected a policy, what differs
// is that policy.
func (v view) causeOf(want nft.Ruleset, a kernel.Applied) cause {
	if len(a.Differences) == 0 {
		return noCause
	}
	if v.installed == nil || !want.SamePolicy(*v.installed) {
		return policyChanged
	}
	if !want.Same(*v.installed) {
		return addressesChanged
	}
	rejected := v.failure != nil && !kernel.Delayed(v.failure)
	onlyOlder := len(a.Differences) == len(a.TookOver)
	switch {
	case rejected, onlyOlder && !v.installedAccepted:
		return policyChanged
	case onlyOlder:
		return onlyOlderAgents
	}
	return changedByOthers
}

// withApplied returns the view when the kernel has the wanted ruleset.
func (v view) withApplied(a kernel.Applied, moment time.Time) view {
	previous := v
	want := v.policy.want
	v.attempt.applied = &a
	v.attempt.cause = previous.causeOf(*want, a)
	v.installed = want
	v.installedAccepted = v.policy.accepted
	v.failure = nil
	v.tries = 0
	v.generation = a.Generation
	if v.attempt.cause == changedByOthers {
		v.repairs++
	}
	n := len(a.Differences)
	samePolicy := previous.hash() == want.Hash()
	if n == 0 && samePolicy {
		return v
	}
	v.changes++
	v.replaced = previous.installed
	v.history = running.Policy{Hash: want.Hash(), Since: moment, Changed: moment, Reason: v.attempt.reason}
	if samePolicy {
		v.history.Since = previous.history.Since
	}
	switch {
	case v.attempt.cause == changedByOthers:
		v.history.Change = fmt.Sprintf("rules restored, differences: %d", n)
		v.history.Reason = "changed by another program"
	case v.attempt.cause == addressesChanged:
		v.history.Change = "source addresses replaced by those that this node has"
	case samePolicy:
		v.history.Change = fmt.Sprintf("differences removed: %d", n)
	case previous.installed != nil:
		v.attempt.added = want.Policy.Additions(previous.installed.Policy, few)
		v.attempt.removed = previous.installed.Policy.Additions(want.Policy, few)
		v.history.Change = fmt.Sprintf("policy %s replaced, entries added: %d, removed: %d", previous.hash(),
			v.attempt.added.Count, v.attempt.removed.Count)
	case n == 0:
		v.history.Change = "the rules were already in place"
	default:
		v.history.Change = "rules installed"
	}
	return v
}
