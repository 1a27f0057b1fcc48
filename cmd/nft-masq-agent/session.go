package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
	"nft-masq-agent/cmd/nft-masq-agent/internal/options"
	"nft-masq-agent/cmd/nft-masq-agent/internal/running"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/neighbors"
)

// nodeFlags are the flags of the commands that answer for this node.
type nodeFlags struct {
	*options.Options
	output string
}

func addNodeFlags(fs *flag.FlagSet) *nodeFlags {
	f := &nodeFlags{Options: options.AddNodeFlags(fs)}
	addOutput(fs, &f.output)
	return f
}

// A session is what a command knows: which agent runs here, the config, and the kernel.
type session struct {
	environment
	*nodeFlags
	options.Loaded
	rejected error // why the config is rejected, or cannot be read
	kernel   *neighbors.Node

	agent *running.Report // of the agent that runs here; nil if none answers
	whose string          // whose flags are used, as text; "" for those of the command line
	// others are flags of the command line that differ from those of the agent.
	others string
	// enforced is the ruleset that the agent has compiled, if it is not that of the config.
	enforced func() *nft.Ruleset
}

// ask asks the agent that runs here for its flags, which apply unless the command line has
// others.
func (f *nodeFlags) ask(e environment) *session {
	f.ForCommand(e.stdin)
	s := &session{environment: e, nodeFlags: f, enforced: func() *nft.Ruleset { return nil }}
	socket := e.socket
	if f.ProbeSocket != "" {
		socket = f.ProbeSocket
	}
	switch report, err := running.Ask(socket); {
	case err == nil:
		s.agent = &report
		s.follow()
	case !errors.Is(err, fs.ErrNotExist):
		s.whose = fmt.Sprintf("without the flags of a running agent: %v", err)
	}
	return s
}

// open asks the agent, and reads the config. The caller has to close the kernel.
func (f *nodeFlags) open(e environment) (*session, error) {
	s := f.ask(e)
	s.kernel = e.kernel()
	s.Loaded, s.rejected = f.Load()
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

// follow uses the flags of the agent.
func (s *session) follow() {
	agent, verbose := fmt.Sprintf("the running agent (pid %d)", s.agent.PID), s.Given("v") && s.Verbosity > 0
	if verbose {
		agent = s.agent.String()
	}
	theirs, others, err := s.Follow(s.agent.Args, s.agent.ConfigPath)
	if err != nil {
		s.whose = fmt.Sprintf("without the flags of %s: %v", agent, err)
		return
	}
	s.whose, s.others = "with the flags of "+agent, strings.Join(others, ", ")
	if s.others != "" {
		s.whose += ", except " + s.others
	}
	if !s.agent.Compiled {
		return
	}
	s.enforced = func() *nft.Ruleset {
		r := nft.Build(theirs.Defaults, theirs.NFT(), s.agent.Files...).Ruleset
		if r != nil {
			here := r.On(s.agent.Addresses)
			r = &here
		}
		return r
	}
}

// candidates are the rulesets that can be in force: that of the config or, if it is a bad
// one, the older agents' reading of it, that of the agent, and the built-in defaults.
func (s *session) candidates(yield func(*nft.Ruleset) bool) {
	all := []func() *nft.Ruleset{func() *nft.Ruleset { return s.Ruleset }, s.enforced, func() *nft.Ruleset {
		defaults := nft.Compile(config.Default(s.Defaults), s.NFT())
		return &defaults
	}}
	for _, candidate := range all {
		if r := candidate(); r != nil && !yield(r) {
			return
		}
	}
}

// An inForce is what the kernel has of our rules.
type inForce struct {
	layout.Installed
	state   *neighbors.State // compared with the config
	found   bool             // there are rules of ours
	known   *neighbors.State // compared with the candidate that they are exactly; nil if they are none
	unknown string           // why not, a sentence without its end; "" if there are none
}

// inForce compares our rules in the kernel with the candidates. The hash that the kernel's
// rules have decides which one they can be.
func (s *session) inForce(ctx context.Context) (f inForce, err error) {
	want := nft.Ruleset{Layout: s.NFT().Layout}
	if s.rejected == nil && s.Ruleset != nil {
		want = *s.Ruleset
	}
	if f.state, err = s.kernel.Survey(ctx, want); err != nil {
		return f, hinted(err)
	}
	if f.Installed, f.found = f.state.Installed(); !f.found {
		return f, nil
	}
	for r := range s.candidates {
		if f.Hash != r.Hash() {
			continue
		}
		state := f.state
		if !r.Same(want) {
			if state, err = s.kernel.Survey(ctx, *r); err != nil {
				return f, hinted(err)
			}
		}
		if !slices.ContainsFunc(state.Drift(), func(d layout.Difference) bool { return d.Kind != layout.Leftover }) {
			f.Layout, f.known = r.Layout, state
			return f, nil
		}
		f.unknown = "Another program changed this agent's rules: see status"
	}
	switch {
	case f.Hash == "":
		f.unknown = "The kernel has rules of this agent without the hash of their policy"
	case f.unknown != "":
	case s.Ruleset == nil || s.rejected != nil:
		f.unknown = fmt.Sprintf("The kernel enforces %s, and the config (%s) is rejected", f.Hash, s.ConfigPath)
	default:
		f.unknown = fmt.Sprintf("The kernel enforces %s, not %s of the config (%s)", f.Hash, s.Ruleset.Hash(), s.ConfigPath)
	}
	return f, nil
}

// head returns the beginning of an answer.
func (s *session) head() answer.Head {
	h := answer.NewHead(s.command)
	if s.whose != "" {
		h.Add(config.Note, "flags", "%s", s.whose)
	}
	return h
}

// files returns the problems of the files.
func (s *session) files() config.Problems {
	return append(s.Problems.Remarks(), config.ProblemsOf(s.rejected)...)
}

// why adds to an error about the files whose flags are used, and their warnings.
func (s *session) why(err error) error {
	if errors.As(err, new(config.Problems)) {
		return append(s.head().Notes, s.files()...)
	}
	return err
}

// config describes the files, and what the kernel has instead.
func (s *session) config(now inForce) answer.Config {
	c := answer.NewConfig(*s.Options, s.Loaded, s.rejected)
	if now.Hash != c.Hash {
		c.Enforced = now.Hash
	}
	return c
}

// consistently calls read again if the ruleset has changed meanwhile, up to a limit.
func (s *session) consistently(read func() error) error {
	const attempts = 5
	for i := 0; ; i++ {
		before, _ := s.kernel.Generation()
		err := read()
		if after, _ := s.kernel.Generation(); err != nil || before == after || i == attempts {
			return err
		}
	}
}
