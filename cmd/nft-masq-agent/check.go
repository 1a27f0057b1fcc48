package main

import (
	"context"
	"errors"
	"flag"

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
	"nft-masq-agent/config"
)

type checkFlags struct {
	*cli.Options
	strict bool
	output string
}

func checkCommand() command {
	return command{
		name: "check", operands: "[FILE]",
		about: "validate the config and print what it means",
		details: "It lists each CIDR with its place, except those that another one covers, and likely mistakes in the " +
			"config. Each error is a line on stderr that begins with FILE:LINE:COL. FILE is a file or a " +
			"directory, as in --config. It reads nothing but the files, so the answer is the same on a node, in a pod and " +
			"in CI. Give it the flags of the running agent.",
		examples: []string{
			program + " check ./ip-masq-agent",
			program + " check ./ip-masq-agent --strict",
		},
		flags: func(fs *flag.FlagSet) action {
			f := &checkFlags{Options: cli.AddPolicyFlags(fs)}
			fs.BoolVar(&f.strict, "strict", false, "treat warnings as errors: exit code 1")
			f.AddManifest(fs)
			addOutput(fs, &f.output)
			return f.check
		},
	}
}

func (f *checkFlags) check(_ context.Context, operands []string, e environment) (int, error) {
	if err := f.UseFile(operands); err != nil {
		return exitUsage, usageError{err}
	}
	f.ForCommand(e.stdin)
	l, err := answer.Load(*f.Options)
	failed := exitFailed
	if errors.Is(err, config.ErrMissing) {
		failed = exitUsage
	}
	if err != nil && f.output == outputText {
		return failed, err
	}
	r := answer.NewCheck(cli.NewHead(e.command), *f.Options, l, err)
	if n := len(r.Warnings); f.strict && n > 0 {
		r.Add(config.Error, "strict", "%s (treated as an error because of --strict)", answer.Plural(n, "warning"))
	}
	code, err := e.reply(f.output, &r)
	if code == exitFailed {
		code = failed
	}
	return code, err
}
