package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"strings"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/kernel"
)

type statusFlags struct {
	*options
	set    *flag.FlagSet
	output string
}

func statusCommand() command {
	return command{
		name:  "status",
		about: "holds the kernel against the config and says what differs",
		details: "It also counts connections, and names other rules on this node that masquerade. Without flags about the " +
			"policy it takes those of an agent that runs here. Exit code 0 says that the kernel is in step with a valid " +
			"config. Nothing is written.",
		examples: []string{
			program + " status",
			"kubectl exec -n kube-system nft-masq-agent-abcde -- /nft-masq-agent status",
		},
		flags: func(fs *flag.FlagSet) action {
			f := statusFlags{options: addPolicyFlags(fs), set: fs}
			addFlag(fs, &f.output, "o", outputText, "text or json `FORMAT` of the answer", oneOf(outputText, outputJSON))
			return func(_ context.Context, _ []string, e environment) (int, error) { return f.status(e) }
		},
	}
}

// A statusReport is the answer of status. As JSON, fields are only ever added.
type statusReport struct {
	Agent  string        `json:"agent,omitempty"` // whose flags were taken, in words
	Agents []agentReport `json:"agents"`          // that run in this network namespace
	Config configReport  `json:"config"`
	Kernel kernelReport  `json:"kernel"`
	// Connections since the counters were made.
	Connections []connectionReport `json:"connections"`
	Legacy      []string           `json:"legacy"`    // rules of iptables-based agents
	Conflicts   []conflictReport   `json:"conflicts"` // other rules that masquerade what the config exempts
	Notes       []string           `json:"notes"`
}

type agentReport struct {
	PID  int      `json:"pid"`
	Args []string `json:"args"`
}

type configReport struct {
	Path     string   `json:"path"`
	Files    []string `json:"files"` // none: the defaults hold
	Accepted bool     `json:"accepted"`
	Errors   []string `json:"errors"`
	Warnings []string `json:"warnings"`
	Hash     string   `json:"hash,omitempty"`
	Mode     string   `json:"mode"`
	Chain    string   `json:"chain,omitempty"` // of mode iptables-nft
}

type kernelReport struct {
	InStep      bool     `json:"inStep"`
	Mode        string   `json:"mode,omitempty"` // of the rules found; none: not as this version writes them
	Hash        string   `json:"hash,omitempty"`
	Differences []string `json:"differences"`
}

type connectionReport struct {
	Family  string `json:"family"`  // ipv4 or ipv6
	Verdict string `json:"verdict"` // masqueraded, exempt or local
	Count   uint64 `json:"count"`
}

type conflictReport struct {
	Table    string   `json:"table"`
	Chain    string   `json:"chain"`
	Priority int32    `json:"priority"` // of the base chain from which it is reached
	Rule     string   `json:"rule"`
	Via      []string `json:"via"`
	Why      string   `json:"why"`
}

func (f *statusFlags) status(e environment) (int, error) {
	agents := runningAgents(e.proc)
	r := statusReport{Agent: f.followAgent(f.set, agents), Agents: []agentReport{}, Notes: []string{}}
	for _, a := range agents {
		r.Agents = append(r.Agents, agentReport{a.pid, a.args})
	}
	if len(agents) > 1 {
		r.Notes = append(r.Notes, fmt.Sprintf("%d agents run here: they write the same rules; end all but one", len(agents)))
	}
	r.Notes = append(r.Notes, legacyIPTables(e.proc)...)
	l, err := f.load()
	r.config(f.options, l, err)
	k := kernel.Open()
	defer func() { _ = k.Close() }()
	if err := r.kernel(k, *f.options, l.ruleset); err != nil {
		return exitFailed, hinted(err)
	}
	text := r.String()
	if f.output == outputJSON {
		if text, err = encodeJSON(r); err != nil {
			return exitFailed, err
		}
	}
	if err := write(e.stdout, text); err != nil {
		return exitFailed, err
	}
	if !r.Config.Accepted || !r.Kernel.InStep {
		return exitFailed, nil
	}
	return exitDone, nil
}

// config reports on the files.
func (r *statusReport) config(o *options, l loaded, err error) {
	r.Config = configReport{
		Path: o.configPath, Files: append([]string{}, l.files...), Accepted: err == nil,
		Errors: []string{}, Warnings: []string{}, Mode: string(o.mode),
	}
	if o.mode == nft.ModeIPTables {
		r.Config.Chain = o.chain
	}
	for _, w := range l.warnings {
		r.Config.Warnings = append(r.Config.Warnings, w.Error())
	}
	var problems config.Problems
	switch {
	case errors.As(err, &problems):
		for _, p := range problems {
			r.Config.Errors = append(r.Config.Errors, p.Error())
		}
	case err != nil:
		r.Config.Errors = append(r.Config.Errors, err.Error())
	default:
		r.Config.Hash = l.ruleset.Hash()
	}
}

// kernel reports on the kernel. What a bad config wants is not known: then the
// kernel is held against what it holds itself, as a running agent does.
func (r *statusReport) kernel(k *kernel.Kernel, o options, want nft.Ruleset) error {
	held, found, err := k.ReadBack()
	if err != nil {
		return err
	}
	if found {
		r.Kernel.Mode, r.Kernel.Hash = string(held.Mode), held.Hash()
	}
	r.Kernel.Differences, r.Connections = []string{}, []connectionReport{}
	if o.mode == nft.ModeIPTables {
		err := k.CheckChain(o.chain)
		if errors.Is(err, kernel.ErrForeignChain) {
			// Neither its rules nor what they counted are ours.
			r.Kernel.Differences = append(r.Kernel.Differences, err.Error())
			r.others(kernel.Others{})
			return nil
		}
		if err != nil {
			return err
		}
	}
	if r.Config.Accepted {
		diffs, err := k.Diff(want, kernel.Look{Full: true, Others: true})
		if err != nil {
			return err
		}
		r.Kernel.Differences = append(r.Kernel.Differences, diffs...)
		r.Kernel.InStep = len(diffs) == 0
	} else {
		want = held
	}
	counts, err := k.Counters(o.nftOptions())
	if err != nil {
		return err
	}
	for _, c := range counts {
		r.Connections = append(r.Connections, connectionReport{strings.ToLower(familyName(c.IPv6)), string(c.Verdict), c.Packets})
	}
	others, err := k.Others(want)
	if err != nil {
		return err
	}
	r.others(others)
	return nil
}

func (r *statusReport) others(others kernel.Others) {
	r.Legacy, r.Conflicts = []string{}, []conflictReport{}
	for _, l := range others.Legacy {
		r.Legacy = append(r.Legacy, l.String())
	}
	for _, c := range others.Conflicts {
		r.Conflicts = append(r.Conflicts, conflictReport{
			Table: c.Family.String() + " " + c.Table, Chain: c.Chain, Priority: c.Priority, Rule: c.Rule,
			Via: append([]string{}, c.Via...), Why: c.Why(),
		})
	}
}

// String is the report for people, in lines of 80 columns where words allow.
func (r statusReport) String() string {
	var b strings.Builder
	b.WriteString(wrap(r.verdict(), ""))
	if r.Agent != "" {
		b.WriteString(wrap(r.Agent, "  "))
	}
	r.writeConnections(&b)
	writeList(&b, "Config rejected; the agent keeps its last good rules:", r.Config.Errors)
	writeList(&b, "Differences:", r.Kernel.Differences)
	writeList(&b, "Warnings of the config:", r.Config.Warnings)
	writeList(&b, "Rules of iptables-based agents (run with --takeover, or cleanup --legacy):", r.Legacy)
	var conflicts []string
	for _, c := range r.Conflicts {
		conflicts = append(conflicts, fmt.Sprintf("%s %s, priority %d: %s (%s)", c.Table, c.Chain, c.Priority, c.Rule, c.Why))
	}
	writeList(&b, "Other rules that masquerade what the config exempts:", conflicts)
	writeList(&b, "Notes:", r.Notes)
	return b.String()
}

// verdict says in one line how config and kernel stand to each other.
func (r statusReport) verdict() string {
	running := "no agent runs here"
	if n := len(r.Agents); n > 0 {
		running = fmt.Sprintf("agent runs, pid %d", r.Agents[0].PID)
	}
	source := strings.Join(r.Config.Files, ", ")
	if source == "" {
		source = "the defaults (no file at " + r.Config.Path + ")"
	}
	switch {
	case !r.Config.Accepted && r.Kernel.Hash == "":
		return fmt.Sprintf("config rejected, and the kernel has no rules of ours; %s", running)
	case !r.Config.Accepted:
		return fmt.Sprintf("config rejected; the kernel holds %s, mode %s; %s", r.Kernel.Hash, r.Kernel.Mode, running)
	case r.Kernel.InStep:
		return fmt.Sprintf("in step: the kernel holds %s, mode %s, from %s; %s", r.Kernel.Hash, r.Config.Mode, source, running)
	case r.Kernel.Hash == "":
		return fmt.Sprintf("differs: the config %s wants %s, mode %s; the kernel holds nothing that this version wrote; %s",
			source, r.Config.Hash, r.Config.Mode, running)
	}
	return fmt.Sprintf("differs: the config %s wants %s, mode %s; the kernel holds %s, mode %s; %s",
		source, r.Config.Hash, r.Config.Mode, r.Kernel.Hash, r.Kernel.Mode, running)
}

func (r statusReport) writeConnections(b *strings.Builder) {
	if len(r.Connections) == 0 {
		return
	}
	b.WriteString("\nConnections since the rules were first installed:\n")
	for _, c := range r.Connections {
		fmt.Fprintf(b, "  %-5s %-12s %12d\n", c.Family, c.Verdict, c.Count)
	}
}

func writeList(b *strings.Builder, title string, lines []string) {
	if len(lines) == 0 {
		return
	}
	fmt.Fprintf(b, "\n%s\n", title)
	for _, l := range lines {
		b.WriteString(wrap(l, "  "))
	}
}
