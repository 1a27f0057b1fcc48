package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfttest"
)

// An agent is a running process of the binary.
type agent struct {
	process *nfttest.Process

	mu       sync.Mutex
	partial  []byte
	last     []string      // log lines, for errors
	held     string        // hash of the policy that it last said is in the kernel
	restored int           // times that it said it restored the rules
	said     chan struct{} // closed with each line
}

// startAgent starts the binary in the node's namespace.
func (b *bench) startAgent(mode nft.Mode, args ...string) (*agent, error) {
	a := &agent{said: make(chan struct{})}
	cmd := nfttest.Command(b.binary, append([]string{"run", "--config", b.config, "--mode", string(mode)}, args...)...)
	cmd.Stdout, cmd.Stderr = a, a
	var err error
	if a.process, err = b.top.Node.Start(cmd); err != nil {
		return nil, err
	}
	b.agents = append(b.agents, a)
	return a, nil
}

// Write takes what the process logs.
func (a *agent) Write(p []byte) (int, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.partial = append(a.partial, p...)
	for {
		line, rest, whole := bytes.Cut(a.partial, []byte("\n"))
		if !whole {
			return len(p), nil
		}
		a.hear(line)
		a.partial = rest
	}
}

// hear takes one line of the log.
func (a *agent) hear(line []byte) {
	const kept = 20
	a.last = append(a.last, string(line))
	a.last = a.last[max(0, len(a.last)-kept):]
	var l struct{ Event, Hash string }
	if json.Unmarshal(line, &l) != nil {
		return
	}
	switch l.Event {
	case "config_applied", "rules_in_place", "config_accepted":
		a.held = l.Hash
	case "rules_restored":
		a.restored++
	}
	close(a.said)
	a.said = make(chan struct{})
}

// wait waits until the log says what is waited for. The condition is called
// with the lock held.
func (a *agent) wait(ctx context.Context, what string, condition func() bool) error {
	for {
		a.mu.Lock()
		met, said, last := condition(), a.said, strings.Join(a.last, "\n")
		a.mu.Unlock()
		if met {
			return nil
		}
		select {
		case <-said:
		case <-a.process.Done():
			return fmt.Errorf("wait for %s: the agent ended: %w\n%s", what, a.process.Wait(), last)
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: %w; the agent said last:\n%s", what, ctx.Err(), last)
		}
	}
}

// holds waits until the agent says that the policy is in the kernel.
func (a *agent) holds(ctx context.Context, r nft.Ruleset) error {
	return a.wait(ctx, "policy "+r.Hash(), func() bool { return a.held == r.Hash() })
}

// restores is how often the agent has said that it restored the rules.
func (a *agent) restores() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.restored
}

// stop ends the process with a signal and waits for it.
func (a *agent) stop(signal unix.Signal) error {
	if err := a.process.Signal(signal); err != nil {
		return fmt.Errorf("stop the agent: %w", err)
	}
	if err := a.process.Wait(); err != nil && signal != unix.SIGKILL {
		return fmt.Errorf("stop the agent: %w\n%s", err, strings.Join(a.last, "\n"))
	}
	return nil
}
