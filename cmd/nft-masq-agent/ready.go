package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
	"nft-masq-agent/cmd/nft-masq-agent/internal/running"
	"nft-masq-agent/config"
)

// How often --wait-for asks an agent, and how long it may take to answer.
const (
	readyInterval = 100 * time.Millisecond
	readyTimeout  = 2 * time.Second
)

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

func (r *readyAnswer) String() string {
	if r.Yes {
		return r.Asked + "\n"
	}
	return fmt.Sprintf("not %s: %s\n", r.Asked, r.Errors[0].Msg)
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
	reason, err := running.Probe(f.socket, path)
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
	// "[192.0.2.1]" is a host of ours, as the manifests have it, and none of a URL.
	host, port, err := net.SplitHostPort(f.waitFor)
	if err != nil {
		return exitFailed, err
	}
	waiting := e.stdout
	if f.output == outputJSON { // which is one object, at the end
		waiting = e.stderr
	}
	url := "http://" + net.JoinHostPort(host, port) + "/startupz"
	client := http.Client{Timeout: readyTimeout, Transport: &http.Transport{DisableKeepAlives: true}}
	last := ""
	for {
		reason := started(ctx, client, url)
		if reason == "" {
			if f.output == outputText {
				return exitDone, write(e.stdout, "rules are installed\n")
			}
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

// started returns "", or why the agent has not started, as far as is known.
func started(ctx context.Context, client http.Client, url string) string {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err.Error()
	}
	response, err := client.Do(request)
	if err != nil {
		return err.Error()
	}
	defer response.Body.Close()
	text, err := io.ReadAll(io.LimitReader(response.Body, 1<<10))
	if response.StatusCode == http.StatusOK && err == nil {
		return ""
	}
	return cmp.Or(strings.TrimSpace(string(text)), response.Status)
}
