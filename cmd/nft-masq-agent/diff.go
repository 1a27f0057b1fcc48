package main

import (
	"cmp"
	"context"
	"flag"
	"fmt"

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
	"nft-masq-agent/cmd/nft-masq-agent/internal/options"
	"nft-masq-agent/cmd/nft-masq-agent/internal/reply"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/neighbors"
)

func diffCommand(l look) command {
	return command{
		name:     "diff",
		operands: "[OLD] [NEW]",
		about:    "show what would change if a config took effect",
		details: "It compares the policy in force with NEW, or with --config, and lists the destinations, and where " +
			"needed the sources, whose verdict changes, with the number of open connections there. Open connections keep " +
			"their address; a change affects only new ones. Flags that are not given are those of the running agent. With " +
			"OLD and NEW, it compares these files and reads nothing else. Exit code 0: no change, 1: changes, 2: wrong " +
			"usage or an error. Nothing is written.",
		examples: []string{
			program + " diff ./ip-masq-agent",
			program + " diff ./old ./new --enable-ipv6",
		},
		flags: func(fs *flag.FlagSet) action {
			return lookFlags{addNodeFlags(fs), l}.diff
		},
	}
}

func (f lookFlags) diff(ctx context.Context, operands []string, e environment) (int, error) {
	var d answer.Diff
	var found config.Problems
	var err error
	if len(operands) == 2 && operands[0] == "-" && operands[1] == "-" {
		return exitUsage, usagef("standard input can be one of the files, not both")
	}
	if err := f.UseFile(operands[max(0, len(operands)-1):]); err != nil {
		return exitUsage, usageError{err}
	}
	if len(operands) < 2 {
		d, found, err = f.online(ctx, e)
	} else {
		f.ForCommand(e.stdin)
		d, found, err = f.offline(operands[0], operands[1], e)
	}
	if err == nil {
		_, err = e.reply(f.output, &d, found...)
	}
	switch {
	case err != nil:
		return exitUsage, err // 1 means that there are changes, as with kubectl diff
	case d.Changed():
		return exitFailed, nil
	}
	return exitDone, nil
}

// offline compares two files.
func (f lookFlags) offline(before, after string, e environment) (d answer.Diff, found config.Problems, err error) {
	var policies [2]nft.Policy
	var configs [2]answer.Config
	for i, path := range []string{before, after} {
		o := *f.Options
		o.ConfigPath, o.MustExist = path, true
		l, err := answer.Load(o)
		if err != nil {
			return d, nil, l.Why(err)
		}
		policies[i], configs[i], found = l.Ruleset.Policy, answer.NewConfig(o, l, nil), l.Problems
	}
	d = answer.NewDiff(policies[0], policies[1])
	d.Head, d.Before, d.After = reply.NewHead(e.command), configs[0], configs[1]
	return d, found, nil
}

func (f lookFlags) online(ctx context.Context, e environment) (d answer.Diff, found config.Problems, err error) {
	s, err := f.open(e)
	defer func() { _ = s.kernel.Close() }()
	if err != nil || s.rejected != nil {
		return d, nil, s.why(cmp.Or(err, s.rejected))
	}
	if s.agent == nil { // what an agent would have read
		usual := *f.Options
		usual.ConfigPath, usual.MustExist = options.DefaultConfig, false
		l, _ := answer.Load(usual)
		s.enforced = func() *nft.Ruleset { return l.Ruleset }
	}
	err = s.consistently(func() error {
		now, err := s.inForce(ctx)
		if err != nil {
			return err
		}
		var before nft.Policy
		switch {
		case now.known != nil:
			before = now.known.Want.Policy
		case now.found:
			whose := ""
			if s.whose != "" {
				whose = " (" + s.whose + ")"
			}
			return fmt.Errorf("%s%s: name two files, OLD and NEW", now.unknown, whose)
		}
		after := s.Ruleset.Policy
		d = answer.NewDiff(before, after)
		d.Head, d.After, d.Before.Accepted = s.head(), s.config(inForce{}), true
		for _, line := range answer.NodeSNAT(after) {
			d.Add(config.Note, "snat-addresses", "%s", line)
		}
		if !now.found {
			d.Other, d.Before.Hash = []string{}, ""
			d.Add(config.Note, "not-installed", "The kernel has no rules of this agent: what it masquerades now is not counted.")
		}
		if len(s.Files) == 0 {
			d.Add(config.Note, "no-file", "There is no config at %s: the built-in defaults apply.", f.ConfigPath)
		}
		if !d.Changed() {
			return nil
		}
		return countOpen(&d, now.state, before, after)
	})
	return d, s.files(), err
}

// countOpen counts the open connections of pods in each change, and those that both
// policies masquerade but that keep a source address that the second does not allow.
func countOpen(d *answer.Diff, state *neighbors.State, before, after nft.Policy) error {
	evidence, err := state.Evidence()
	if err != nil {
		return err
	}
	now, then := conntrack.NewJudge(before, evidence), conntrack.NewJudge(after, evidence)
	var kept answer.Open
	sample, err := conntrack.Open().Sample(func() func(*conntrack.Entry) {
		kept = answer.Open{}
		count := d.CountOpen()
		return func(e *conntrack.Entry) {
			if !now.Forwarded(e) {
				return
			}
			count(e.Original.Src.Addr(), e.Destination().Addr())
			if now.Now(e) == nft.Masqueraded && then.Now(e) == nft.Masqueraded && !now.Stale(e) && then.Stale(e) {
				kept.Add(e.Original.Src.Addr())
			}
		}
	})
	if kept.Connections > 0 {
		d.Kept = &kept
	}
	if sample.Partial {
		d.Add(config.Note, "sampled", "Counted among %d of %d connections.", sample.Examined, sample.Entries)
	}
	return err
}
