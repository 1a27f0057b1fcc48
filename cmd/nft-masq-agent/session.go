package main

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/kernel"
	"nft-masq-agent/nft/routes"
)

// lookFlags are the flags of a command that looks at this node.
type lookFlags struct {
	*nodeFlags
	look
}

// A look is how commands read what there is on this node beside our rules.
type look struct {
	route func(routes.Query) (routes.Route, error) // [routes.Lookup]
	pods  func(ipv6 bool) ([]routes.Pod, error)    // [routes.Pods]
	links func() ([]routes.Interface, error)       // [routes.Interfaces]
}

func theLook() look { return look{route: routes.Lookup, pods: routes.Pods, links: routes.Interfaces} }

// commands returns the commands that look, in the order of the help.
func (l look) commands() []command {
	return []command{
		checkCommand(), diffCommand(l), renderCommand(), statusCommand(l), explainCommand(l), connectionsCommand(l),
	}
}

// A session is what a command knows: which agent runs here, the config, and the kernel.
type session struct {
	*asked
	look
	answer.Loaded
	rejected error // why the config is rejected, or cannot be read
	kernel   *kernel.Kernel
}

// open asks the agent, and reads the config. The caller has to close the kernel.
func (f lookFlags) open(e environment) (*session, error) {
	s := &session{asked: f.ask(e), look: f.look, kernel: e.kernel()}
	s.Loaded, s.rejected = answer.Load(*f.Options)
	if s.Missing && s.bridges() {
		s.Loaded = answer.Build(*f.Options, s.agent.Files)
	}
	if s.Ruleset == nil {
		return s, nil
	}
	if s.agent != nil && s.agent.Policy != nil && s.agent.Policy.Hash == s.Ruleset.Hash() {
		s.agent.Files = nil // the same, and perhaps long
	}
	var err error
	s.Ruleset, err = e.onThisNode(s.Ruleset)
	return s, err
}

// bridges reports whether the agent has the config of this path although that is missing: for
// some seconds this means nothing, because somebody may be writing it.
func (s *session) bridges() bool {
	return s.agent != nil && s.agent.Vanished == "" && config.Count(s.agent.Files) > 0 && !s.Given("config")
}

// onThisNode completes a ruleset by the addresses of this node, if it has snatAddresses.
func (e environment) onThisNode(r *nft.Ruleset) (*nft.Ruleset, error) {
	if !r.Policy.HasSNAT() {
		return r, nil
	}
	addresses, err := e.addresses()
	if err != nil {
		return r, err
	}
	completed := r.WithAddresses(addresses)
	return &completed, nil
}

// An inForce is what the kernel has of our rules.
type inForce struct {
	nft.Installed
	state   *kernel.State // compared with the config
	found   bool          // there are rules of ours
	known   *kernel.State // compared with the candidate that they are exactly; nil if they are none
	unknown string        // why not, a sentence without its end; "" if there are none
}

// inForce compares our rules in the kernel with the candidates. The hash that the kernel's
// rules have decides which one they can be.
func (s *session) inForce(ctx context.Context) (f inForce, err error) {
	want := nft.Ruleset{Layout: s.NFT().Layout}
	if s.rejected == nil && s.Ruleset != nil {
		want = *s.Ruleset
	}
	f.state, err = s.kernel.Read(ctx, want, nft.Everything)
	if err != nil {
		return f, hinted(err)
	}
	f.Installed, f.found = f.state.Installed()
	if !f.found {
		return f, nil
	}
	f.unknown = fmt.Sprintf("The kernel enforces %s, which is not the policy of the config (%s)", f.Hash, s.ConfigPath)
	if s.agent == nil && !s.Given("config") {
		f.unknown += "; a running agent may have other flags: give its --probe-socket, or its --config"
	}
	if f.Hash == "" {
		f.unknown = "The kernel has rules of this agent without the hash of their policy"
	}
	for _, candidate := range []func() *nft.Ruleset{func() *nft.Ruleset { return s.Ruleset }, s.enforced} {
		r := candidate()
		if r == nil || r.Hash() != f.Hash {
			continue
		}
		state := f.state
		if !r.Same(want) {
			state, err = s.kernel.Read(ctx, *r, nft.Everything)
		}
		if err != nil {
			return f, hinted(err)
		}
		if !slices.ContainsFunc(state.Differences(), func(d nft.Difference) bool { return d.Kind != nft.Leftover }) {
			f.Layout = r.Layout
			f.known = state
			return f, nil
		}
		f.unknown = "Another program changed this agent's rules"
	}
	return f, nil
}

func (s *session) head() cli.Head {
	h := cli.NewHead(s.command)
	if s.whose != "" {
		h.Add(config.Note, "flags", "%s", s.whose)
	}
	return h
}

func (s *session) files() config.Problems {
	return append(s.Problems.Remarks(), config.ProblemsOf(s.rejected)...)
}

// explained adds to an error about the files whose flags are used, and their warnings.
func (s *session) explained(err error) error {
	if errors.As(err, new(config.Problems)) {
		return append(s.head().Notes, s.files()...)
	}
	return err
}

// config describes the files, and what the kernel has instead.
func (s *session) config(current inForce) answer.Config {
	c := answer.NewConfig(*s.Options, s.Loaded, s.rejected)
	if current.Hash != c.Hash {
		c.Enforced = current.Hash
	}
	return c
}
