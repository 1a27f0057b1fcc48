package main

import (
	"context"
	"errors"
	"flag"
	"time"

	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
	"nft-masq-agent/cmd/nft-masq-agent/internal/running"
	"nft-masq-agent/config"
)

// readyInterval is how often --wait-for asks an agent.
const readyInterval = 100 * time.Millisecond

type readyFlags struct {
	socket  string
	alive   bool
	waitFor string
	output  string
}

// A readyAnswer is the output of ready.
type readyAnswer struct {
	cli.Head
	// Asked is ready, with --alive alive, or with --wait-for started: rules are installed.
	Asked string `json:"asked"`
	// Yes means that the agent is; otherwise the error says why not.
	Yes bool `json:"yes"`
}

// Print writes the answer as text.
func (r *readyAnswer) Print(t cli.Text) {
	switch {
	case !r.Yes:
		t.Line("not %s: %s", r.Asked, r.Errors[0].Msg)
	case r.Asked == "started":
		t.Line("rules are installed")
	default:
		t.Line("%s", r.Asked)
	}
}

func readyCommand() command {
	return command{
		name:  "ready",
		about: "ask this container's agent whether it is ready, and if not, why",
		details: "For exec probes: the kubelet shows their output, and the socket is in a volume of the pod, so no " +
			"other agent answers. Exit code 0 means yes; 1 means no, or no response. As an init container of another pod, " +
			"--wait-for keeps the pod from sending anything before its node has rules.",
		examples: []string{program + " ready", program + " ready --alive", program + " ready --wait-for 192.0.2.1:9717"},
		flags: func(fs *flag.FlagSet) action {
			var f readyFlags
			cli.AddFlag(fs, &f.socket, "probe-socket", cli.DefaultProbeSocket, "`PATH` of the agent's unix socket",
				cli.ParseSocketPath)
			fs.BoolVar(&f.alive, "alive", false, "ask whether its loop is running, as a liveness probe does")
			cli.AddFlag(fs, &f.waitFor, "wait-for", "",
				"wait until the agent at `HOST:PORT`, its --http-address, has installed rules", parseHostPort)
			addOutput(fs, &f.output)
			return func(ctx context.Context, _ []string, e environment) (int, error) {
				switch {
				case f.waitFor != "" && f.alive:
					return exitUsage, usagef("--wait-for asks for rules, and --alive for the loop: omit one")
				case f.waitFor != "":
					return f.wait(ctx, e)
				}
				return f.ready(e)
			}
		},
	}
}

func parseHostPort(s string) (string, error) {
	if s == "" {
		return "", errors.New("is not a HOST:PORT, such as 192.0.2.1:9717")
	}
	return cli.ParseHTTPAddress(s)
}

func (f readyFlags) ready(e environment) (int, error) {
	word := "ready"
	path := "/readyz"
	if f.alive {
		word = "alive"
		path = "/healthz"
	}
	reason, err := running.Probe("unix", f.socket, path)
	if err != nil {
		return exitFailed, err
	}
	r := readyAnswer{cli.NewHead(e.command), word, reason == ""}
	if !r.Yes {
		r.Add(config.Error, "not-"+word, "%s", reason)
	}
	return e.reply(f.output, &r)
}

// wait returns when the agent has rules in the kernel. Each new reason to wait is
// printed.
func (f readyFlags) wait(ctx context.Context, e environment) (int, error) {
	waiting := e.stdout
	if f.output == outputJSON { // which is one object, at the end
		waiting = e.stderr
	}
	last := ""
	for {
		reason, err := running.Probe("tcp", f.waitFor, "/startupz")
		if err != nil {
			reason = err.Error()
		}
		if reason == "" {
			return e.reply(f.output, &readyAnswer{cli.NewHead(e.command), "started", true})
		}
		if reason != last {
			last = reason
			if err := write(waiting, "waiting: "+reason+"\n"); err != nil {
				return exitFailed, err
			}
		}
		select {
		case <-ctx.Done():
			return exitFailed, ctx.Err()
		case <-time.After(readyInterval):
		}
	}
}
