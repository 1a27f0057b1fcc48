package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"slices"

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
	"nft-masq-agent/cmd/nft-masq-agent/internal/running"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/kernel"
)

// nodeFlags are the flags of the commands that answer for this node.
type nodeFlags struct {
	*cli.Options
	output string
}

func addNodeFlags(fs *flag.FlagSet) *nodeFlags {
	f := &nodeFlags{Options: cli.AddNodeFlags(fs)}
	addOutput(fs, &f.output)
	return f
}

// A session is what a command knows: which agent runs here, and the config.
type session struct {
	environment
	*nodeFlags
	answer.Loaded
	rejected error // why the config is rejected, or cannot be read

	agent        *running.Report // nil if none answers
	agentOptions *cli.Options    // of the agent; nil if they are not known
	stuck        string          // why the agent that listens does not answer; "" if none listens, or it does
	whose        string          // whose flags are used, as text; "" for those of the command line
}

// open asks the agent for its flags, and reads the config.
func (f *nodeFlags) open(e environment) (*session, error) {
	s := f.ask(e)
	return s, s.load()
}

// ask asks the agent that runs here for its flags, which apply unless the command line has others.
func (f *nodeFlags) ask(e environment) *session {
	f.ForCommand(e.stdin)
	if f.ProbeSocket != "" {
		e.socket = f.ProbeSocket
	}
	s := &session{environment: e, nodeFlags: f}
	report, err := running.Ask(e.socket)
	if err == nil {
		s.agent = &report
		s.follow()
	} else if !errors.Is(err, fs.ErrNotExist) {
		s.whose = fmt.Sprintf("without the flags of a running agent: %v", err)
	}
	if errors.Is(err, running.ErrNoAnswer) {
		s.stuck = err.Error()
	}
	return s
}

// follow uses the flags of the agent.
func (s *session) follow() {
	options, err := s.Follow(s.agent.Args, s.agent.ConfigPath)
	if err != nil {
		s.whose = fmt.Sprintf("without the flags of %s: %v", s.agent, err)
		return
	}
	s.agentOptions = &options
	if s.Verbosity > 0 {
		s.whose = fmt.Sprintf("with the flags of %s, unless others are given", s.agent)
	}
}

// load reads the config, and completes the ruleset by the addresses of this node, if it has snatAddresses.
func (s *session) load() error {
	s.Loaded, s.rejected = answer.Load(*s.Options)
	if len(s.Files) == 0 && s.isAwaited() {
		s.Loaded = answer.Build(*s.Options, s.agent.Files)
	}
	if s.Ruleset == nil || !s.Ruleset.Policy.HasSNAT() {
		return nil
	}
	addresses, err := s.addresses()
	if err != nil {
		return err
	}
	completed := s.Ruleset.WithAddresses(addresses)
	s.Ruleset = &completed
	return nil
}

// isAwaited reports whether the agent has a config of the path that is missing: for three seconds that means nothing,
// because somebody may be writing it.
func (s *session) isAwaited() bool {
	return s.agent != nil && s.agent.Vanished == "" && config.Count(s.agent.Files) > 0 && !s.Given("config")
}

// enforced returns the ruleset that the agent has compiled, or without an agent that of the usual config, which one
// would have read. It is nil if that is not known.
func (s *session) enforced() *nft.Ruleset {
	if s.agent == nil {
		usual := *s.Options
		usual.ConfigPath = cli.DefaultConfig
		usual.MustExist = false
		l, _ := answer.Load(usual)
		return l.Ruleset
	}
	if s.agentOptions == nil || !s.agent.Compiled {
		return nil
	}
	built := nft.Build(s.agentOptions.Defaults, s.agentOptions.NFT(), s.agent.Files...)
	if built.Ruleset == nil {
		return nil
	}
	completed := built.Ruleset.WithAddresses(s.agent.Addresses)
	return &completed
}

// An inForce is what the kernel has of our rules.
type inForce struct {
	nft.Installed
	state   *kernel.State // compared with the config
	found   bool          // there are rules of ours
	known   *kernel.State // compared with the ruleset that they are exactly; nil if that is not known
	unknown string        // why not, a sentence without its end; "" if there are none
}

// inForce compares our rules in the kernel with the ruleset of the config, or else with the one that the agent
// enforces: the hash that the kernel's rules have decides which one they can be.
func (s *session) inForce(ctx context.Context) (f inForce, err error) {
	want := nft.Ruleset{Layout: s.NFT().Layout}
	if s.rejected == nil {
		want = *s.Ruleset
	}
	f.state, err = s.kernel.Read(ctx, want, nft.WithLeftovers)
	if err != nil {
		return f, hinted(err)
	}
	f.Installed, f.found = f.state.Installed()
	if !f.found {
		return f, nil
	}
	candidate := s.Ruleset
	if candidate == nil || candidate.Hash() != f.Hash {
		candidate = s.enforced()
	}
	if f.Hash == "" {
		f.unknown = "The kernel has rules of this agent without the hash of their policy"
		return f, nil
	}
	if candidate == nil || candidate.Hash() != f.Hash {
		f.unknown = fmt.Sprintf("The kernel enforces %s, which is not the policy of the config (%s)", f.Hash, s.ConfigPath)
		return f, nil
	}
	state := f.state
	if !candidate.Same(want) {
		state, err = s.kernel.Read(ctx, *candidate, nft.WithLeftovers)
	}
	if err != nil {
		return f, hinted(err)
	}
	if slices.ContainsFunc(state.Differences(), func(d nft.Difference) bool { return d.Kind != nft.Leftover }) {
		f.unknown = "Another program changed this agent's rules"
		return f, nil
	}
	f.Layout = candidate.Layout
	f.known = state
	return f, nil
}

func (s *session) head() cli.Head {
	h := cli.NewHead(s.command)
	if s.whose != "" {
		h.Add(config.Note, "flags", "%s", s.whose)
	}
	return h
}

// files is all that is to be said about the files.
func (s *session) files() config.Problems {
	if s.rejected != nil {
		return config.ProblemsOf(s.rejected)
	}
	return s.Problems
}

// config describes the files, and what the kernel has instead.
func (s *session) config(current inForce) answer.Config {
	c := answer.NewConfig(*s.Options, s.Loaded, s.rejected)
	if current.Hash != c.Hash {
		c.Enforced = current.Hash
	}
	return c
}
