package main

import (
	"cmp"
	"context"
	"errors"
	"flag"

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
)

func diffCommand() command {
	return command{
		name:     "diff",
		operands: "[OLD] [NEW]",
		about:    "show what would change if a config took effect",
		details: "It compares the policy in force with NEW, or with --config, and lists the entries that were added, " +
			"removed or moved, by key, and the open connections that would get another translation. Open connections keep " +
			"their address; a change affects only new ones. Flags that are not given are those of the running agent. With " +
			"OLD and NEW, it compares these files and reads nothing else. Exit code 0: no change, 1: changes, 2: wrong " +
			"usage or an error. Nothing is written.",
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
	case d.HasChanges():
		return exitFailed, nil
	}
	return exitDone, nil
}

// offline compares two files.
func (f *nodeFlags) offline(old, current string, e environment) (d answer.Diff, found config.Problems, err error) {
	var policies [2]nft.Policy
	var configs [2]answer.Config
	for i, path := range []string{old, current} {
		o := *f.Options
		o.ConfigPath = path
		o.MustExist = true
		l, err := answer.Load(o)
		if err != nil {
			return d, nil, err
		}
		policies[i] = l.Ruleset.Policy
		configs[i] = answer.NewConfig(o, l, nil)
		found = l.Problems
	}
	d = answer.NewDiff(policies[0], policies[1])
	d.Head = cli.NewHead(e.command)
	d.Before = configs[0]
	d.After = configs[1]
	return d, found, nil
}

func (f *nodeFlags) online(ctx context.Context, e environment) (d answer.Diff, found config.Problems, err error) {
	s, err := f.open(e)
	if err != nil || s.rejected != nil {
		return d, nil, cmp.Or(s.rejected, err)
	}
	current, err := s.inForce(ctx)
	if err != nil {
		return d, nil, err
	}
	var old nft.Policy
	switch {
	case current.known != nil:
		old = current.known.Want.Policy
	case current.found:
		return d, nil, errors.New(current.unknown + ": name two files, OLD and NEW")
	}
	wanted := s.Ruleset.Policy
	d = answer.NewDiff(old, wanted)
	d.Head = s.head()
	d.After = s.config(inForce{})
	d.Before.Accepted = true
	if len(s.Files) == 0 {
		d.Add(config.Note, "no-file", "There is no config at %s: the built-in defaults apply.", f.ConfigPath)
	}
	if !current.found {
		d.Before.Hash = ""
		d.Add(config.Note, "not-installed", "The kernel has no rules of this agent: what it masquerades now is not counted.")
		return d, s.files(), nil
	}
	if d.HasChanges() {
		err = countOpen(ctx, &d, old, wanted)
	}
	return d, s.files(), err
}

// countOpen counts the open connections that two policies translate differently.
func countOpen(ctx context.Context, d *answer.Diff, older, newer nft.Policy) error {
	node, err := conntrack.ReadNode()
	if err != nil {
		return err
	}
	old := conntrack.NewComparison(older, node)
	current := conntrack.NewComparison(newer, node)
	var count *answer.Retranslations
	begin := func() { count = answer.NewRetranslations(old, current) }
	err = conntrack.New().Dump(ctx, begin, func(e *conntrack.Entry) error {
		count.Add(e)
		return nil
	})
	if err != nil {
		return err
	}
	d.Open = count.List()
	d.Unjudged = count.Unjudged
	return nil
}
