package main

import (
	"context"
	"flag"
	"fmt"

	"nft-masq-agent/cmd/nft-masq-agent/internal/options"
	"nft-masq-agent/cmd/nft-masq-agent/internal/running"
)

type readyFlags struct {
	socket string
	alive  bool
}

func readyCommand() command {
	return command{
		name:  "ready",
		about: "ask the agent of this container whether it is ready, and if not, why",
		details: "For exec probes: the kubelet shows what they print, and a socket in a volume of the pod reaches no other " +
			"pod's agent. Exit code 0 means yes, 1 no or no answer.",
		examples: []string{program + " ready", program + " ready --alive"},
		flags: func(fs *flag.FlagSet) action {
			var f readyFlags
			options.AddFlag(fs, &f.socket, "probe-socket", options.DefaultProbeSocket, "`PATH` of the unix socket on which the agent answers", options.ParseSocketPath)
			fs.BoolVar(&f.alive, "alive", false, "ask whether its loop is running, as a liveness probe does")
			return func(_ context.Context, _ []string, e environment) (int, error) { return f.ready(e) }
		},
	}
}

func (f readyFlags) ready(e environment) (int, error) {
	report, err := running.Ask(f.socket)
	if err != nil {
		return exitFailed, err
	}
	word, reason := "ready", report.Ready
	if f.alive {
		word, reason = "alive", report.Alive
	}
	if reason == "" {
		return exitDone, write(e.stdout, word+"\n")
	}
	return exitFailed, write(e.stdout, fmt.Sprintf("not %s: %s\n", word, reason))
}
