package agent

import (
	"errors"
	"slices"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/kernel"
)

// A logLine is a line of the log.
type logLine struct {
	level  zapcore.Level
	text   string
	fields []any // names and values in turn
}

// logLines are the lines of an attempt.
type logLines []logLine

func (l *logLines) add(level zapcore.Level, event, text string, fields ...any) {
	*l = append(*l, logLine{level, text, append(fields, "event", event)})
}

// report returns the lines about an attempt: the difference of two views.
func (a *Agent) report(previous, v view) (l logLines) {
	if v.attempt.read {
		a.reportContent(&l, previous, v)
	}
	if v.unfollowed != nil && previous.unfollowed == nil {
		l.add(zap.WarnLevel, "addresses_unreadable",
			"cannot follow the addresses of this node; retrying, with the last known addresses until then", "error",
			v.unfollowed)
	}
	if previous.failure != nil && v.failure == nil {
		text := "kernel accepted the rules again"
		switch {
		case v.attempt.applied == nil:
			text = "nftables can be read again; nothing is written"
		case kernel.Delayed(previous.failure):
			text = "the rules are checked and in place in spite of other programs' changes"
		}
		l.add(zap.InfoLevel, "rules_accepted", text)
	}
	if v.attempt.applied != nil {
		a.reportApplied(&l, previous, v, *v.attempt.applied)
	}
	if err := v.failure; err != nil && !sameFailure(previous.failure, err) {
		reportFailure(&l, err, v.hash() != "")
	}
	source := previous.policy.source
	switch {
	case v.attempt.read && v.content.err != nil:
		l.add(zap.ErrorLevel, "config_rejected", "config rejected; "+v.describeEnforced(),
			"source", string(v.policy.source), "error", v.content.err)
	case !v.attempt.read && source != v.policy.source && source != "":
		l.add(zap.WarnLevel, "config_source_changed", "config still rejected; from now on "+v.describeEnforced(),
			"source", string(v.policy.source), "previous_source", string(source))
	}
	return l
}

// reportContent reports a new content of the config, the first one with the start.
func (a *Agent) reportContent(l *logLines, previous, v view) {
	path := a.settings.ConfigPath
	if !previous.read {
		message := "starting"
		layout := a.settings.NFT.Layout
		if v.content.missing != nil {
			message = "starting without a config file: the built-in defaults apply"
		}
		fields := []any{"version", a.settings.Version, "path", path, "mode", string(layout.Mode())}
		if chain := layout.Chain(); chain != "" {
			fields = append(fields, "chain", chain)
		} else {
			fields = append(fields, "table", "inet "+nft.TableName)
		}
		l.add(zap.InfoLevel, "starting", message, fields...)
	}
	switch {
	case !previous.read:
	case previous.content.missing != nil && v.content.missing == nil:
		l.add(zap.InfoLevel, "config_file_appeared", "the config file appeared", "path", path)
	case previous.content.missing == nil && v.vanished() != nil:
		l.add(zap.WarnLevel, "config_file_vanished", "the config file vanished: the built-in defaults now apply",
			"path", path, "hash", v.policy.hash(), "error", v.content.missing)
	}
	if previous.content.err != nil && v.content.err == nil && previous.hash() == v.policy.hash() {
		l.add(zap.InfoLevel, "config_accepted", "config accepted again: its policy is already in the kernel",
			"source", string(v.policy.source), "hash", v.policy.hash())
	}
	for _, w := range v.content.remarks {
		if slices.ContainsFunc(previous.content.remarks, func(b config.Problem) bool { return b.Error() == w.Error() }) {
			continue
		}
		level := zap.WarnLevel
		if w.Level == config.Note {
			level = zap.InfoLevel
		}
		l.add(level, "config_warning", "config warning", "warning", w.Error())
	}
}

// reportApplied reports that the kernel has the wanted rules: one line for a change, and
// at level debug if nothing changed.
func (a *Agent) reportApplied(l *logLines, previous, v view, applied kernel.Applied) {
	if len(applied.Overwritten) > 0 {
		l.add(zap.WarnLevel, "legacy_rules_replaced",
			"rules of another agent or version in our chain were replaced: stop any iptables-based agent",
			"found", applied.Overwritten)
	}
	if len(applied.TookOver) > 0 && previous.installedAccepted {
		l.add(zap.WarnLevel, "legacy_rules_removed",
			"rules of an iptables-based agent came back and were removed: stop that agent",
			"taken_over", applied.TookOver)
	}
	if applied.Recreated {
		l.add(zap.WarnLevel, "table_recreated", "our table had something that is not ours and was replaced; "+
			"connections that began at that moment may show a wrong source")
	}
	fields := a.appliedFields(previous, v, applied)
	switch {
	case v.attempt.cause == changedByOthers:
		l.add(zap.WarnLevel, "rules_restored", "rules were changed by another program; restored", "differences",
			len(applied.Differences),
			"what", firstFew(applied.Differences), "duration_ms", milliseconds(applied.Took))
	case v.attempt.cause == addressesChanged:
		reportMoved(l, v.installed.Policy, v.hash())
	case v.attempt.cause == policyChanged:
		l.add(zap.InfoLevel, "config_applied", "applied", fields...)
	case v.attempt.cause == onlyOlderAgents:
	case previous.installed == nil:
		l.add(zap.InfoLevel, "rules_in_place", "rules are already in place", fields...)
	default:
		l.add(zap.DebugLevel, "rules_checked", "checked; rules are in place", fields...)
	}
	if v.attempt.slowed {
		l.add(zap.WarnLevel, "repairs_slowed",
			"another program keeps changing the rules; they are restored at most once a second. "+
				"nft monitor shows which program it is")
	}
	reportMissing(l, previous, v)
}

// appliedFields returns the fields of a line about rules in the kernel.
func (a *Agent) appliedFields(previous, v view, applied kernel.Applied) []any {
	v4, v6 := v.installed.CIDRs()
	fields := []any{
		"reason", v.attempt.reason, "source", string(v.policy.source), "hash", v.hash(),
		"cidrs", v4 + v6, "duration_ms", milliseconds(applied.Took),
	}
	if previous.installed != nil && previous.hash() != v.hash() {
		fields = append(fields, "from", previous.hash(),
			"added", v.attempt.added.First, "added_count", v.attempt.added.Count,
			"removed", v.attempt.removed.First, "removed_count", v.attempt.removed.Count)
	}
	if len(applied.TookOver) > 0 {
		fields = append(fields, "taken_over", applied.TookOver)
	}
	if len(applied.Removed) > 0 {
		fields = append(fields, "removed_rules", applied.Removed)
	}
	return fields
}

// sameFailure reports whether an error was reported before. Whatever other programs keep us from is the same.
func sameFailure(previous, err error) bool {
	if previous == nil {
		return false
	}
	return previous.Error() == err.Error() || kernel.Delayed(previous) && kernel.Delayed(err)
}

// reportFailure reports that the kernel cannot be read, or rejects the rules, or that other
// programs keep us from both.
func reportFailure(l *logLines, err error, installed bool) {
	level := zap.ErrorLevel
	event := "rules_unreadable"
	text := "cannot read nftables; retrying"
	switch {
	case kernel.Delayed(err):
		level = zap.WarnLevel
		event = "rules_delayed"
		text = "other programs change nftables all the time; the rules are not yet written, retrying"
	case errors.Is(err, nft.ErrPostroutingHook):
		event = "rules_rejected"
		text = "the rules cannot be written; retrying"
	case kernel.Rejected(err) && installed:
		event = "rules_rejected"
		text = "kernel rejected the rules; previous rules stay, retrying"
	case kernel.Rejected(err):
		event = "rules_rejected"
		text = "kernel rejected the rules, retrying"
	case errors.Is(err, unix.EPERM):
		text = "cannot read nftables: CAP_NET_ADMIN is missing; retrying"
	}
	fields := []any{"error", err}
	if hint := kernel.Hint(err); hint != "" {
		fields = append(fields, "hint", hint)
	}
	l.add(level, event, text, fields...)
}

// reportMoved reports which source addresses connections have after a change of the
// node's addresses.
func reportMoved(l *logLines, policy nft.Policy, hash string) {
	var present []string
	for _, f := range policy.Families {
		for _, address := range f.PresentAddresses() {
			present = append(present, address.String())
		}
	}
	l.add(zap.InfoLevel, "snat_addresses_changed",
		"the addresses of this node changed; connections leave from those that it has",
		"addresses", firstFew(present), "address_count", len(present), "hash", hash)
}

// reportMissing reports for which families the node has none of snatAddresses.
func reportMissing(l *logLines, previous, v view) {
	for _, f := range v.installed.Policy.Families {
		lacks := func(r nft.SNATRule) bool { return len(r.Addresses.CIDRs) > 0 && len(r.Present) == 0 }
		lacked := false
		if previous.installed != nil {
			old, _ := previous.installed.Policy.Family(f.IPv6)
			lacked = lacks(old.SNATAddresses())
		}
		addresses := f.SNATAddresses()
		family := nft.FamilyKey(f.IPv6)
		switch {
		case lacks(addresses) && !lacked:
			l.add(zap.WarnLevel, "snat_addresses_missing",
				"this node has none of snatAddresses: connections are masqueraded with the address of the interface", "family",
				family)
		case lacked && len(addresses.Present) > 0:
			l.add(zap.InfoLevel, "snat_addresses_found", "this node has one of snatAddresses again", "family", family)
		}
	}
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// few is how many entries of a list a log line contains.
const few = 5

func firstFew(list []string) []string { return list[:min(few, len(list))] }
