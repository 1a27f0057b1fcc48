package answer

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
	"nft-masq-agent/cmd/nft-masq-agent/internal/health"
	"nft-masq-agent/cmd/nft-masq-agent/internal/running"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/judge"
	"nft-masq-agent/nft/routes"
	"nft-masq-agent/nft/xtables"
)

// A Status is the output of status.
type Status struct {
	cli.Head
	// Config of the files.
	Config Config `json:"config"`
	// Agent that runs in this network namespace.
	Agent *Agent `json:"agent,omitempty"`
	// Kernel is what the kernel has of this agent's rules.
	Kernel Kernel `json:"kernel"`
	// Counters of connections since they were created.
	Counters []Counter `json:"counters"`
	// Evidence of connections, by the entry of the policy that decides them.
	Evidence []EntryEvidence `json:"evidence"`

	summary [][2]string // what was looked at, and what is there
	verbose bool
}

// An Agent is a running agent.
type Agent struct {
	// PID is the agent's process, as the command sees it.
	PID int `json:"pid"`
	// Flags of the agent.
	Flags []string `json:"flags"`
	// Policy that the agent enforces; absent if it does not answer.
	Policy *running.Policy `json:"policy,omitempty"`
}

// A Kernel is what the kernel has of this agent's rules.
type Kernel struct {
	// InSync means that the kernel has the rules of the config.
	InSync bool `json:"inSync"`
	// Mode of the installed rules; absent if there are none.
	Mode string `json:"mode,omitempty"`
	// Hash of the installed policy.
	Hash string `json:"hash,omitempty"`
	// Differences between the rules and those of the config.
	Differences []string `json:"differences"`
}

// A Counter counts new connections by verdict; with dropInvalid also packets of pods that belong to no connection.
type Counter struct {
	// Family of the connections.
	Family string `json:"family"`
	// Verdict about the connections; invalid for packets without one.
	Verdict nft.Verdict `json:"verdict"`
	// Count of connections.
	Count uint64 `json:"count"`
}

// An EntryEvidence counts connections that an entry of the policy decides: open ones, and closed ones that another
// program decided.
type EntryEvidence struct {
	// Entry is the key of the config and the CIDR.
	Entry string `json:"entry"`
	// Family of the connections.
	Family string `json:"family"`
	// Verdict of the entry.
	Verdict nft.Verdict `json:"verdict"`
	// Open is how many are open.
	Open int `json:"openCount"`
	// Stale contradict the policy and began before it.
	Stale int `json:"staleCount"`
	// Overruled contradict the policy and began under it.
	Overruled int `json:"overruledCount"`
	// Undated contradict the policy, and it is not known when they began.
	Undated int `json:"undatedCount"`
	// Examples are some that contradict.
	Examples []Connection `json:"contradicting,omitempty"`
}

// StatusFacts are what status has gathered.
type StatusFacts struct {
	Head   cli.Head
	Config Config
	// Files is what is to be said about the files.
	Files config.Problems
	// Agent that runs here, as far as it is known; nil for none.
	Agent *running.Report
	// Kernel is compared with the config.
	Kernel Kernel
	// Unknown is why no known policy is in force, a sentence without its end; "" if one is, or none at all.
	Unknown string
	Counts  []nft.Counts
	// Policy in force, or else that of the config.
	Policy  nft.Policy
	InForce bool
	Health  health.Facts
	// Older are chains of iptables-based agents, and TakeOver whether the agent removes them.
	Older    []xtables.OlderChain
	TakeOver bool
	// Evidence of connections; nil without a policy in force.
	Evidence *conntrack.Evidence
	// Recent are the last counts of entries that were overruled within the last ten minutes.
	Recent  []conntrack.Count
	Verbose bool
}

// weights are the problems, the most serious one first: it stands in the first line. The empty one is for those that
// are not listed, such as problems of the files.
var weights = []string{
	"agent-stuck", "rules-not-written", "rules-delayed", "config-rejected", "config-vanished", "", "second-agent",
	"out-of-sync", "no-agent", "older-agent", health.InterfaceList, health.NoPods, health.LegacyTables,
	"connections-overruled", "destination-unanswered", "uplink-silent", health.Forwarding,
	health.SingleFile, health.Conntrack, "rules-restored", "source-ports", "snat-missing",
	"snat-rule-missing",
}

// rank returns the weight of a problem, the smallest first.
func rank(p config.Problem) int {
	if place := slices.Index(weights, p.ID); place >= 0 {
		return place
	}
	return slices.Index(weights, "")
}

// NewStatus finds the problems in the facts. The first line and the exit code follow from them.
func NewStatus(f StatusFacts) Status {
	s := Status{
		Head: f.Head, Config: f.Config, Kernel: f.Kernel, Counters: []Counter{}, Evidence: []EntryEvidence{},
		verbose: f.Verbose,
	}
	if s.Kernel.Differences == nil {
		s.Kernel.Differences = []string{}
	}
	for _, c := range f.Counts {
		s.Counters = append(s.Counters, Counter{nft.FamilyKey(c.IPv6), c.Verdict, c.Packets})
	}
	if f.Agent != nil {
		s.Agent = &Agent{f.Agent.PID, append([]string{}, f.Agent.Args...), f.Agent.Policy}
	}
	s.setEvidence(f)
	s.Take(f.problems())
	slices.SortStableFunc(s.Errors, func(a, b config.Problem) int { return cmp.Compare(rank(a), rank(b)) })
	s.summary = f.summary()
	return s
}

// summary says what was looked at besides the problems.
func (f *StatusFacts) summary() [][2]string {
	agent := "none"
	if f.Agent != nil {
		agent = running.Process(f.Agent.PID)
		if f.Agent.Policy != nil {
			agent += " " + f.Agent.Policy.String()
		}
	}
	connections := "not compared with the policy"
	if f.Evidence != nil {
		open := 0
		agreeing := 0
		for _, c := range f.Evidence.Counts {
			open += c.Open()
			agreeing += c.Agrees
		}
		connections = fmt.Sprintf("%d tracked; %d of %d that the policy concerns agree with it", f.Evidence.Tracked,
			agreeing, open)
	}
	var addresses []netip.Addr
	for _, family := range f.Policy.Families {
		addresses = append(addresses, family.PresentAddresses()...)
	}
	return [][2]string{
		{"agent", agent},
		{"config", cmp.Or(f.Config.Hash, "rejected") + ", from " + f.source()},
		{"connections", connections},
		{"addresses", cmp.Or(listed(cli.Texts(addresses)), "those of the interfaces")},
		{"pods", fmt.Sprintf("%d addresses on this node", len(f.Health.Pods))},
	}
}

func (s *Status) setEvidence(f StatusFacts) {
	if f.Evidence == nil {
		return
	}
	for _, c := range f.Evidence.Counts {
		e := EntryEvidence{
			Entry: c.Entry.String(), Family: nft.FamilyKey(c.Entry.IPv6), Verdict: c.Entry.Verdict, Open: c.Open(),
			Stale: c.Stale, Overruled: c.Overruled, Undated: c.Undated,
		}
		for _, x := range c.Examples {
			e.Examples = append(e.Examples, exampleConnection(x))
		}
		s.Evidence = append(s.Evidence, e)
	}
}

// problems are everything that is wrong, and what is to be known.
func (f *StatusFacts) problems() (found config.Problems) {
	found = append(found, f.Files...)
	found = append(found, f.ofAgent()...)
	found = append(found, f.ofRules()...)
	found = append(found, f.ofOtherAgents()...)
	found = append(found, f.Health.Problems(f.Policy)...)
	found = append(found, f.ofConnections()...)
	found = append(found, f.ofPorts()...)
	return append(found, f.ofAddresses()...)
}

func statusProblem(id, details, format string, args ...any) config.Problem {
	p := cli.Problem(config.Error, id, format, args...)
	p.Details = details
	return p
}

// ofAgent finds what is wrong with the agent.
func (f *StatusFacts) ofAgent() (found config.Problems) {
	const lost = "changes of the config do not arrive, and nothing restores the rules\n"
	if f.Agent == nil {
		return config.Problems{statusProblem("no-agent", lost+
			"kubectl -n kube-system get pods -o wide -l app.kubernetes.io/name=nft-masq-agent", "no agent runs on this node")}
	}
	process := running.Process(f.Agent.PID)
	if f.Agent.Alive != "" {
		found = append(found, statusProblem("agent-stuck", lost+
			"the kubelet restarts it when its liveness probe fails; see its log", "the agent is stuck (%s): %s", process,
			f.Agent.Alive))
	}
	if f.Agent.Delayed {
		found = append(found, statusProblem("rules-delayed", "", "%s", f.Agent.Failure))
	} else if f.Agent.Failure != "" {
		found = append(found, statusProblem("rules-not-written", f.Agent.Failure, "the agent cannot write its rules"))
	}
	if f.Agent.Vanished != "" {
		found = append(found, statusProblem("config-vanished", "write it again at "+f.Config.Path+"\n"+
			"if it was removed on purpose, restart the agent", "%s", f.Agent.Vanished))
	}
	if f.Agent.SecondAgent != 0 {
		found = append(found, statusProblem("second-agent", "",
			"2 agents run here (%s, %s) and overwrite each other: stop all but one", process,
			running.Process(f.Agent.SecondAgent)))
	}
	return append(found, f.Agent.Problems...)
}

// ofRules finds what is wrong with the config and our rules in the kernel.
func (f *StatusFacts) ofRules() (found config.Problems) {
	if !f.Config.Accepted {
		found = append(found, statusProblem("config-rejected", "fix "+placeOf(f.Files, f.Config.Path),
			"config rejected; %s", f.enforced()))
	} else if !f.Kernel.InSync {
		remedy := "see its log; nft monitor shows which program changes them"
		if f.InForce && (f.Kernel.Hash != f.Config.Hash || f.Kernel.Mode != f.Config.Mode) {
			remedy = "the agent enforces that: this command has another config, or other flags"
		}
		if f.Agent == nil {
			remedy = "start it, or check that it runs with these flags"
		}
		found = append(found, statusProblem("out-of-sync", fmt.Sprintf("expected: %s, mode %s, from %s\n%s", f.Config.Hash,
			f.Config.Mode, f.source(), remedy), "out of sync: %s", f.installed()))
	}
	if f.Unknown != "" {
		found = append(found, cli.Problem(config.Note, "stale-unknown", "%s: which connections are stale is unknown.",
			f.Unknown))
	}
	return found
}

// enforced names what is enforced instead of a rejected config.
func (f *StatusFacts) enforced() string {
	if f.Kernel.Hash == "" {
		return choose(len(f.Older) > 0, "the rules of an iptables-based agent are active, ", "") +
			"none of our rules are installed"
	}
	text := "an earlier config (%s) is installed, mode %s"
	if f.Agent != nil && f.Agent.Source == "lenient" {
		text = "the older agents' reading of it (%s) is installed, mode %s"
	}
	if f.Agent != nil && f.Agent.Source == "defaults" {
		text = "the built-in defaults (%s) are installed, mode %s"
	}
	return fmt.Sprintf(text, f.Kernel.Hash, f.Kernel.Mode)
}

// installed says which rules of ours the kernel has.
func (f *StatusFacts) installed() string {
	switch {
	case f.Kernel.Hash == "":
		return "none of our rules are installed"
	case f.Kernel.Hash == f.Config.Hash && f.Kernel.Mode == f.Config.Mode:
		return fmt.Sprintf("%s is installed, but its rules were changed", f.Kernel.Hash)
	}
	return fmt.Sprintf("installed: %s, mode %s", f.Kernel.Hash, f.Kernel.Mode)
}

func (f *StatusFacts) source() string {
	if len(f.Config.Files) == 0 {
		return "built-in defaults (no config at " + f.Config.Path + ")"
	}
	return strings.Join(f.Config.Files, ", ")
}

// ofOtherAgents finds rules of iptables-based agents.
func (f *StatusFacts) ofOtherAgents() config.Problems {
	if len(f.Older) == 0 {
		return nil
	}
	remedy := "stop that agent, and run this one with --takeover, or nft-masq-agent cleanup --legacy-only"
	if f.TakeOver {
		remedy = "stop that agent: this one then removes its rules (--takeover), once the config is accepted"
	}
	return config.Problems{statusProblem("older-agent", strings.Join(append(cli.Texts(f.Older), remedy), "\n"),
		"rules of an iptables-based agent are also active")}
}

// ofConnections finds connections that contradict the policy, and destinations that do not answer.
func (f *StatusFacts) ofConnections() (found config.Problems) {
	if f.Evidence == nil {
		return found
	}
	stale := 0
	undated := 0
	for _, c := range f.Evidence.Counts {
		stale += c.Stale
		undated += c.Undated
	}
	problem, overruled := overruledProblem(f.Evidence.Counts)
	if !overruled {
		problem, overruled = overruledProblem(f.Recent)
		problem.Msg += ", or did: none is left, and this is said for ten minutes"
	}
	if overruled {
		found = append(found, problem)
	}
	for _, u := range f.Evidence.Unanswered {
		id := "uplink-silent"
		exempts := ""
		if u.To.IsValid() {
			id = "destination-unanswered"
			exempts = "\n" + u.Entry.String() + " exempts it"
		}
		found = append(found, statusProblem(id, u.Remedy()+exempts, "%s", u))
	}
	if stale > 0 {
		found = append(found, cli.Problem(config.Note, "stale-connections",
			"%s that began before this policy %s it: nft-masq-agent connections --stale lists them.",
			Plural(stale, "connection"), verb(stale, "contradict")))
	}
	if undated > 0 {
		found = append(found, cli.Problem(config.Note, "undated-connections",
			"%s %s the policy: they began before this agent's start, or another program decides; nft-masq-agent connections "+
				"--stale lists them.", Plural(undated, "connection"), verb(undated, "contradict")))
	}
	if f.Evidence.Partial {
		found = append(found, cli.Problem(config.Note, "sampled", "Counted among %d of %d connections.",
			f.Evidence.Examined, f.Evidence.Tracked))
	}
	if f.Evidence.Incomplete {
		found = append(found, cli.Problem(config.Note, "evidence-full", "There are more connections or destinations than "+
			"are kept: when some began is not known, and some destinations that do not answer may be missing."))
	}
	return found
}

// overruledProblem is about connections that began under the policy and contradict it, if there are any, with an
// example.
func overruledProblem(counts []conntrack.Count) (p config.Problem, found bool) {
	n := 0
	details := ""
	for _, c := range counts {
		n += c.Overruled
		for _, x := range c.Examples {
			if details == "" && x.Age == conntrack.AgeOverruled {
				details = fmt.Sprintf("such as %s %s to %s, which is seen as %s: %s says otherwise\n"+
					"nft-masq-agent explain %s --from %s --trace names the rule of that program: turn off its masquerading, or set "+
					"enforceNonMasquerade", conntrack.ProtocolName(x.Original.Protocol), conntrack.HostPort(x.Original.Src),
					conntrack.HostPort(x.Destination()), conntrack.HostPort(x.SeenAs()), c.Entry, x.Destination().Addr(),
					x.Original.Src.Addr())
			}
		}
	}
	return statusProblem("connections-overruled", details,
		"%s that began under this policy %s it: another program decides", Plural(n, "connection"),
		verb(n, "contradict")), n > 0
}

// ofPorts finds the destination with the largest share of source ports in use, if new connections to it fail or
// soon will.
func (f *StatusFacts) ofPorts() config.Problems {
	const limit = 0.9
	if f.Evidence == nil || f.Evidence.Fullest.Share() < limit {
		return nil
	}
	u := f.Evidence.Fullest
	whose := ""
	source := u.From.String()
	remedy := fmt.Sprintf("nft-masq-agent connections %s names the pods\n"+
		"have them reuse connections, exempt the destination, add addresses to %s, or widen %s", u.To.Addr(),
		config.KeySNATAddresses, config.KeyToPorts)
	if u.Among.Block >= 0 { // others are not affected
		blocks := f.Policy.PortBlocks(u.From.Is6())
		whose = " of a pod"
		source += fmt.Sprintf(" for pods whose IP ends in one of %v", blocks.LastBytes(u.Among.Block))
		remedy = "have it reuse connections, exempt the destination, or raise " + config.KeyPortsPerPod +
			"\nor somebody else sends with its address: then the CNI has to stop that"
	}
	return config.Problems{statusProblem("source-ports", fmt.Sprintf(
		"%d of %d source ports of %s are in use there\n%s", u.Used, u.Among.Ports, source, remedy),
		"new %s connections%s to %s fail, or will", conntrack.ProtocolName(u.Protocol), whose, u.To)}
}

// ofAddresses finds snatAddresses of which the node has none, and entries of snatRules that match a pod of the node,
// but have no address here.
func (f *StatusFacts) ofAddresses() (found config.Problems) {
	for _, family := range f.Policy.Families {
		for _, entry := range family.SNAT {
			if entry.Number == 0 && len(entry.Present) == 0 {
				found = append(found, missingAddress("snat-missing", "this node has none of ", family, entry))
			}
			misses := func(pod routes.Pod) bool {
				return pod.Address.Is6() == family.IPv6 && judge.MissesAddress(f.Policy, entry, pod.Address)
			}
			if entry.Number > 0 && slices.ContainsFunc(f.Health.Pods, misses) {
				found = append(found, missingAddress("snat-rule-missing", "this node has no address of ", family, entry))
			}
		}
	}
	return found
}

func missingAddress(id, text string, family nft.FamilyPolicy, entry nft.SNATRule) config.Problem {
	return statusProblem(id, fmt.Sprintf("assign one of %s to this node: until then, %s connections of its pods leave "+
		"from another address", listed(config.Texts(entry.Addresses.CIDRs)), nft.FamilyName(family.IPv6)),
		"%s", text+entryName(entry))
}

// Print writes the report as text, starting with the problems.
func (s *Status) Print(t cli.Text) {
	t.Problems(s.Errors)
	if len(s.Errors) == 0 {
		t.Line("in sync: %s is installed, mode %s", s.Kernel.Hash, s.Config.Mode)
	}
	t.Line("")
	for _, part := range s.summary {
		t.Line("%-12s %s", part[0], part[1])
	}
	s.printCounters(t)
	if len(s.Evidence) > 0 {
		t.Line("\nConnections by the entry that decides them:")
		cli.Table(t, "  FAMILY\tENTRY\tVERDICT\tOPEN\tSTALE\tOVERRULED\tUNDATED", s.Evidence)
	}
	s.printDifferences(t)
	t.List("Warnings:", s.Warnings)
	t.List("Notes:", s.Notes)
}

// printDifferences prints the first ones: another config can differ in hundreds of chains.
func (s *Status) printDifferences(t cli.Text) {
	const limit = 20
	all := s.Kernel.Differences
	if len(all) == 0 {
		return
	}
	t.Line("\nDifferences:")
	for _, line := range all[:min(len(all), limit)] {
		t.Line("  %s", line)
	}
	if len(all) > limit {
		t.Line("  and %d more: -o json lists all", len(all)-limit)
	}
}

// String returns the columns of a table.
func (e EntryEvidence) String() string {
	return fmt.Sprintf("  %s\t%s\t%s\t%d\t%d\t%d\t%d", e.Family, e.Entry, e.Verdict, e.Open, e.Stale, e.Overruled,
		e.Undated)
}

func (s *Status) printCounters(t cli.Text) {
	shown := slices.DeleteFunc(slices.Clone(s.Counters), func(c Counter) bool { return c.Count == 0 && !s.verbose })
	if len(shown) == 0 || s.Kernel.Hash == "" {
		return
	}
	t.Line("\nConnections since the counters were created:")
	for _, c := range shown {
		text := ""
		if c.Verdict == nft.Invalid {
			text = " packets of pods without a connection, dropped (" + config.KeyDropInvalid + ")"
		}
		t.Line("  %-5s %-12s %12d%s", c.Family, c.Verdict, c.Count, text)
	}
}
