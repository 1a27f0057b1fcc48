package main

import (
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"strings"

	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
	"nft-masq-agent/cmd/nft-masq-agent/internal/running"
	"nft-masq-agent/nft"
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

// asked is what a command knows of the agent that runs here.
type asked struct {
	environment
	*nodeFlags
	agent *running.Report // nil if none answers
	path  string          // of the socket on which it was asked
	stuck string          // why the agent that listens does not answer; "" if none listens, or it does
	whose string          // whose flags are used, as text; "" for those of the command line
	// others are flags of the command line that differ from those of the agent.
	others string
	// enforced is the ruleset that the agent has compiled, if it is not that of the config.
	enforced func() *nft.Ruleset
}

// ask asks the agent that runs here for its flags, which apply unless the command line has
// others.
func (f *nodeFlags) ask(e environment) *asked {
	f.ForCommand(e.stdin)
	s := &asked{environment: e, nodeFlags: f, enforced: func() *nft.Ruleset { return nil }}
	socket := e.socket
	if f.ProbeSocket != "" {
		socket = f.ProbeSocket
	}
	s.path = socket
	switch answer, err := running.Ask(socket); {
	case err == nil:
		s.agent = &answer
		s.follow()
	case !errors.Is(err, fs.ErrNotExist):
		s.whose = fmt.Sprintf("without the flags of a running agent: %v", err)
		if errors.Is(err, running.ErrNoAnswer) {
			s.stuck = err.Error()
		}
	}
	return s
}

// runningAgent returns what is known of the agent that runs here, whether or not it has a
// socket or answers there.
func (s *asked) runningAgent() (r running.Report, found bool) {
	if s.agent != nil {
		return *s.agent, true
	}
	r = running.Report{PID: running.Hidden, Alive: s.stuck}
	holder, first := running.Holder()
	latecomer, second := running.Latecomer()
	switch {
	case first && second:
		r.PID = holder
		r.SecondAgent = latecomer
	case first:
		r.PID = holder
	case second: // a process of another user has the lock
		r.PID = latecomer
	default:
		return r, s.stuck != ""
	}
	return r, true
}

// follow uses the flags of the agent.
func (s *asked) follow() {
	agent := fmt.Sprintf("the running agent (pid %d)", s.agent.PID)
	if s.Verbosity > 0 {
		agent = s.agent.String()
	}
	agentOptions, others, err := s.Follow(s.agent.Args, s.agent.ConfigPath)
	if err != nil {
		s.whose = fmt.Sprintf("without the flags of %s: %v", agent, err)
		return
	}
	s.others = strings.Join(others, ", ")
	if s.others != "" {
		s.whose = "with the flags of " + agent + ", except " + s.others
	} else if s.Verbosity > 0 {
		s.whose = "with the flags of " + agent
	}
	if !s.agent.Compiled {
		return
	}
	s.enforced = func() *nft.Ruleset {
		r := nft.Build(agentOptions.Defaults, agentOptions.NFT(), s.agent.Files...).Ruleset
		if r != nil {
			completed := r.WithAddresses(s.agent.Addresses)
			r = &completed
		}
		return r
	}
}
