package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"strings"

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
	"nft-masq-agent/config"
)

type checkFlags struct {
	*cli.Options
	podCIDRs []netip.Prefix
	strict   bool
	output   string
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
			program + " check ./ip-masq-agent --pod-cidr 10.244.0.0/16 --strict",
		},
		flags: func(fs *flag.FlagSet) action {
			f := &checkFlags{Options: cli.AddPolicyFlags(fs)}
			fs.BoolVar(&f.strict, "strict", false, "treat warnings as errors: exit code 1")
			fs.Func("pod-cidr",
				"warn if pods of this `CIDR` would see a node's address instead of a pod's; can be repeated, or "+
					"a comma-separated list", f.addPodCIDRs)
			f.AddManifest(fs)
			addOutput(fs, &f.output)
			return f.check
		},
	}
}

func (f *checkFlags) addPodCIDRs(list string) error {
	for text := range strings.SplitSeq(list, ",") {
		p, err := netip.ParsePrefix(text)
		if err != nil || p != p.Masked() {
			return fmt.Errorf("%q is not a CIDR, such as 10.244.0.0/16", text)
		}
		f.podCIDRs = append(f.podCIDRs, p)
	}
	return nil
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
	if err != nil && f.output != outputJSON {
		return failed, l.Explain(err)
	}
	r := answer.NewCheck(cli.NewHead(e.command), *f.Options, l, err, f.podCIDRs)
	if n := len(r.Warnings); f.strict && n > 0 {
		err = fmt.Errorf("%s (treated as an error because of --strict)", answer.Plural(n, "warning"))
		r.Add(config.Error, "strict", "%v", err)
	}
	if f.output == outputJSON {
		code, err := e.reply(f.output, &r)
		if code == exitFailed {
			code = failed
		}
		return code, err
	}
	return exitDone, errors.Join(e.print(r.Print), err)
}
