package main

import (
	"cmp"
	"context"
	"flag"
	"fmt"

	"nft-masq-agent/cmd/nft-masq-agent/internal/agent"
	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
	"nft-masq-agent/cmd/nft-masq-agent/internal/options"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
)

func diffCommand() command {
	return command{
		name:     "diff",
		operands: "[OLD] [NEW]",
		about:    "show what would change if a config took effect",
		details: "It compares the rules in the kernel with NEW, or with --config, and lists the destinations, and if it depends on " +
			"them the sources, whose verdict changes, with the number of open connections there. Those keep their address; " +
			"a change affects only new ones. Flags that are not given are those of the running agent. With OLD " +
			"and NEW, it compares these and reads nothing else. Exit code 0: no change, 1: changes, 2: wrong usage or an error. " +
			"Nothing is written.",
		examples: []string{
			program + " diff ./ip-masq-agent",
			program + " diff ./old ./new --enable-ipv6",
		},
		flags: func(fs *flag.FlagSet) action {
			return addNodeFlags(fs).diff
		},
	}
}

func (f *nodeFlags) diff(ctx context.Context, operands []string, e environment) (int, error) {
	var d answer.Diff
	var err error
	if err := f.UseFile(operands[max(0, len(operands)-1):]); err != nil {
		return exitUsage, usageError{err}
	}
	if len(operands) < 2 {
		d, err = f.online(ctx, e)
	} else {
		f.ForCommand(e.stdin)
		d, err = f.offline(operands[0], operands[1], e)
	}
	if err == nil {
		err = e.reply(f.output, d, d.String)
	}
	switch {
	case err != nil:
		// 1 means that there are changes, as with kubectl diff.
		if _, err = refuse(e, err); err != nil {
			_, _ = fmt.Fprintf(e.stderr, "%s diff: %v\n", program, err)
		}
		return exitUsage, nil
	case d.Changed():
		return exitFailed, nil
	}
	return exitDone, nil
}

// offline compares two files.
func (f *nodeFlags) offline(before, after string, e environment) (answer.Diff, error) {
	var policies [2]nft.Policy
	for i, path := range []string{before, after} {
		o := *f.Options
		o.ConfigPath, o.MustExist = path, true
		l, err := o.Load()
		if i == 1 {
			warn(e, l)
		}
		if err != nil {
			return answer.Diff{}, err
		}
		policies[i] = l.Ruleset.Policy
	}
	return answer.NewDiff(policies[0], policies[1]), nil
}

// online compares what is in force with the config.
func (f *nodeFlags) online(ctx context.Context, e environment) (d answer.Diff, err error) {
	s, err := f.open(e)
	defer func() { _ = s.kernel.Close() }()
	warn(e, s.Loaded)
	if err != nil || s.rejected != nil {
		return d, cmp.Or(err, s.rejected)
	}
	if s.agent == nil { // what an agent would have read
		usual := *f.Options
		usual.ConfigPath, usual.MustExist = options.DefaultConfig, false
		l, _ := usual.Load()
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
			before = now.known.Policy
		case now.found:
			return fmt.Errorf("%s: name two files, OLD and NEW", now.unknown)
		}
		after := s.Ruleset.Policy
		d = answer.NewDiff(before, after)
		d.Whose = s.whose
		for _, line := range answer.NodeSNAT(after) {
			d.Notes = append(d.Notes, line.String())
		}
		if !now.found {
			d.Other, d.Before = []string{}, "none"
			d.Notes = append(d.Notes, "The kernel has no rules of this agent: what it masquerades now is not counted.")
		}
		if len(s.Files) == 0 {
			d.Notes = append(d.Notes, fmt.Sprintf("There is no file at %s: the built-in defaults apply.", f.ConfigPath))
		}
		if !d.Changed() {
			return nil
		}
		return hinted(s.countOpen(ctx, &d, before, after))
	})
	return d, err
}

// countOpen counts the open connections of pods in each change, and those that both
// policies masquerade but that keep a source address that the second does not allow.
func (s *session) countOpen(ctx context.Context, d *answer.Diff, before, after nft.Policy) error {
	evidence, err := agent.Evidence(ctx, s.kernel, nft.Ruleset{})
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
		d.Notes = append(d.Notes, fmt.Sprintf("Counted among %d of %d connections.", sample.Examined, sample.Entries))
	}
	return err
}
