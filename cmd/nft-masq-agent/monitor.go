package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/nft-masq-agent/internal/options"
	"nft-masq-agent/cmd/nft-masq-agent/internal/reply"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/notify"
	"nft-masq-agent/nft/xtables"
)

type monitorFlags struct {
	*nodeFlags
	ends time.Duration
}

func monitorCommand() command {
	return command{
		name:  "monitor",
		about: "print each change of nftables on this node, and which program made it",
		details: "Until it is interrupted, or --for has passed, it prints the time of each transaction, the program, its " +
			"tables, how many objects changed, and whether they include this agent's rules. While it listens, programs that " +
			"fill large sets take up to twice the time and ten times the memory.",
		examples: []string{program + " monitor", program + " monitor --for 1h -o json"},
		flags: func(fs *flag.FlagSet) action {
			f := monitorFlags{nodeFlags: addNodeFlags(fs)}
			options.AddFlag(fs, &f.ends, "for", "10m", "end after this `DURATION`", positiveDuration)
			return func(ctx context.Context, _ []string, e environment) (int, error) { return f.monitor(ctx, e) }
		},
	}
}

func positiveDuration(s string) (time.Duration, error) {
	if d, _ := time.ParseDuration(s); d > 0 {
		return d, nil
	}
	return 0, errors.New("must be a duration such as 10m")
}

// A rulesetChange is one change as it is printed.
type rulesetChange struct {
	reply.Head
	// Time of the change.
	Time string `json:"time"`
	// Program that made the change.
	Program string `json:"program"`
	// PID of the program, 0 if it has ended already.
	PID int `json:"pid"`
	// Tables that changed, family and name.
	Tables []string `json:"tables"`
	// Messages is how many objects changed.
	Messages int `json:"messages"`
	// Ours means that rules of this agent changed, or objects to which they refer.
	Ours bool `json:"ours"`
	// ByAgent means that this agent made the change, or another instance of it.
	ByAgent bool `json:"byAgent"`
	// Lost means that the kernel had more changes than it could report.
	Lost bool `json:"lost"`
}

func (f *monitorFlags) monitor(ctx context.Context, e environment) (int, error) {
	ctx, cancel := signal.NotifyContext(ctx, unix.SIGINT, unix.SIGTERM)
	defer cancel()
	ctx, cancel = context.WithTimeout(ctx, f.ends)
	defer cancel()
	f.ask(e) // the agent's chain may have another name
	l, err := notify.Listen()
	if err != nil {
		return exitFailed, hinted(err)
	}
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	defer stop()
	_, _ = fmt.Fprintf(e.stderr, "listening for %s: programs that fill large sets are slower until then\n", f.ends)
	for {
		c, err := l.Receive()
		switch {
		case ctx.Err() != nil:
			return exitDone, nil
		case err != nil:
			return exitFailed, err
		}
		change := f.describe(c)
		if f.output == outputJSON {
			change.Head = reply.NewHead(e.command)
			err = reply.JSONLine(e.stdout, change)
		} else {
			err = write(e.stdout, change.String())
		}
		if err != nil {
			return exitFailed, err
		}
	}
}

func (f *monitorFlags) describe(c notify.Change) rulesetChange {
	out := rulesetChange{
		Time: time.Now().UTC().Format("2006-01-02T15:04:05.000Z07:00"), Program: c.Process, PID: processOf(c.Thread),
		Tables: []string{}, Messages: c.Messages, ByAgent: strings.HasPrefix(c.Process, program), Lost: c.Lost,
	}
	own := xtables.WithSubchains(f.Chain)
	for _, changed := range c.Chains {
		if name := fmt.Sprintf("%s %s", changed.Family, nfnetlink.Printable(changed.Table)); !slices.Contains(out.Tables,
			name) {
			out.Tables = append(out.Tables, name)
		}
		out.Ours = out.Ours || changed.Family == nfnetlink.Inet && changed.Table == nft.TableName ||
			changed.Table == xtables.NATTable && slices.Contains(own, changed.Name)
	}
	return out
}

// processOf returns the PID of the process of a thread, 0 if it has ended or is not seen
// from this PID namespace.
func processOf(thread uint32) int {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", thread))
	if err != nil {
		return 0
	}
	_, rest, _ := strings.Cut(string(status), "\nTgid:")
	line, _, _ := strings.Cut(rest, "\n")
	pid, _ := strconv.Atoi(strings.TrimSpace(line))
	return pid
}

// String returns the change as a line.
func (c rulesetChange) String() string {
	if c.Lost {
		return c.Time + "  more changes than the kernel could report\n"
	}
	who := c.Program
	if c.PID != 0 {
		who += fmt.Sprintf(" (pid %d)", c.PID)
	}
	objects := "objects"
	if c.Messages == 1 {
		objects = "object"
	}
	line := fmt.Sprintf("%s  %s: %d %s in %s", c.Time, who, c.Messages, objects, strings.Join(c.Tables, ", "))
	if c.Ours {
		line += ", this agent's rules among them"
	}
	return line + "\n"
}
