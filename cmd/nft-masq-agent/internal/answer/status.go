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
	"nft-masq-agent/nft/older"
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
	// Untranslated packets of pods, dropped because of dropInvalid.
	Untranslated []Untranslated `json:"untranslated,omitempty"`
	// Stale connections were opened under an earlier policy; absent if unknown.
	Stale *Stale `json:"staleConnections,omitempty"`
	// Legacy are chains of iptables-based agents.
	Legacy []Legacy `json:"olderAgents"`
	// Evidence of open connections, by the entry of the policy that decides them.
	Evidence []EntryEvidence `json:"evidence"`
	// Unanswered are destinations of exempt connections from which no replies come.
	Unanswered []Unanswered `json:"unanswered,omitempty"`
	// SNAT lists which of snatAddresses this node has.
	SNAT []SNATReport `json:"snatAddresses,omitempty"`
	// Areas are the health of this node on one screen.
	Areas []Area `json:"areas"`

	verbose bool
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

// A Counter counts new connections.
type Counter struct {
	// Family of the connections.
	Family string `json:"family"`
	// Verdict about the connections.
	Verdict nft.Verdict `json:"verdict"`
	// Count of connections.
	Count uint64 `json:"count"`
}

// An Untranslated counts packets of pods that belong to no connection.
type Untranslated struct {
	// Family of the packets.
	Family string `json:"family"`
	// Packets that were dropped.
	Packets uint64 `json:"packets"`
}

// A Stale counts connections whose translation contradicts the kernel's rules, and that began before them.
type Stale struct {
	// Count of connections.
	Count int `json:"count"`
}

// A Legacy is a chain of an iptables-based agent.
type Legacy struct {
	// Table is family and name.
	Table string `json:"table"`
	// Chain of the agent.
	Chain string `json:"chain"`
	// Rules in the chain and in the agent's chains below it.
	Rules int `json:"ruleCount"`
	// Jumps to the chain.
	Jumps int `json:"jumpCount"`
}

// An EntryEvidence counts open connections that an entry of the policy decides.
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

// An Unanswered is a destination from which no replies come.
type Unanswered struct {
	// Destination that does not answer.
	Destination string `json:"destination"`
	// Entry that exempts it.
	Entry string `json:"entry"`
	// Silent connections, older than ten seconds.
	Silent int `json:"silentCount"`
	// Answered connections.
	Answered int `json:"answered"`
}

// StatusFacts are what status has gathered.
type StatusFacts struct {
	Head   cli.Head
	Config Config
	// Rejected is why the config is rejected, nil if it is not.
	Rejected error
	// Files are remarks about the files.
	Files config.Problems
	// Lenient is the hash of the older agents' reading of a rejected config, Default that of the built-in defaults.
	Lenient, Default string
	// Agent that runs here, as far as it is known; nil for none.
	Agent *running.Report
	// Others are flags of this command that the agent does not have.
	Others string
	// Guessed means that the flags of the agent are not known, nor was a config named; SocketNamed that a socket was.
	Guessed, SocketNamed bool
	// Kernel is compared with the config.
	Kernel Kernel
	// Unknown is why no known policy is in force, a sentence without its end.
	Unknown string
	Counts  []nft.Counts
	// Policy in force, or else that of the config.
	Policy  nft.Policy
	InForce bool
	Health  health.Facts
	// Older are chains of iptables-based agents, XTables lines about such agents in legacy ip_tables, and TakeOver
	// whether the agent removes the former.
	Older    []older.Chain
	XTables  []string
	TakeOver bool
	PodCIDRs []netip.Prefix
	// Evidence of open connections; nil without a policy in force.
	Evidence *conntrack.Evidence
	// EvidenceError is why there is no evidence.
	EvidenceError error
	// Full is the destination with the largest share of its source ports in use, nil if all have enough.
	Full *FullPorts
	// PortsError is why the source ports in use are not known.
	PortsError error
	Verbose    bool
}

// FullPorts is a destination to which nearly all source ports are in use.
type FullPorts struct {
	conntrack.PortUse
	Pods []netip.Addr // whose connections use them
	More int          // further destinations
}

// ranks are the problems by weight, with the area of each. The first one stands in the first line. Problems of
// the files have no ID here: they come after config-rejected.
var ranks = []struct{ id, area string }{
	{"agent-stuck", "agent"},
	{"rules-not-written", "agent"},
	{"rules-delayed", "agent"},
	{"config-rejected", "config"},
	{"config-vanished", "config"},
	{"", "config"},
	{"second-agent", "agent"},
	{"out-of-sync", "rules"},
	{"no-agent", "agent"},
	{"older-agent", "other programs"},
	{health.InterfaceList, "config"},
	{health.NoPods, "config"},
	{health.LegacyTables, "other programs"},
	{"connections-overruled", "connections"},
	{"destination-unanswered", "connections"},
	{"uplink-silent", "connections"},
	{health.Forwarding, "forwarding"},
	{health.OtherFile, "config"},
	{health.SingleFile, "config"},
	{health.Conntrack, "connections"},
	{health.InsertFailed, "connections"},
	{"rules-restored", "rules"},
	{"source-ports", "ports"},
	{"snat-missing", "addresses"},
	{"snat-rule-missing", "addresses"},
}

// rank returns the weight of a problem, the smallest first.
func rank(p config.Problem) int {
	files := 0
	for i, r := range ranks {
		if r.id == p.ID {
			return i
		}
		if r.id == "" {
			files = i
		}
	}
	return files
}

// NewStatus finds the problems in the facts. The first line, the areas and the exit code follow from them.
func NewStatus(f StatusFacts) Status {
	s := Status{
		Head: f.Head.Clone(), Config: f.Config, Kernel: f.Kernel, Counters: []Counter{}, Legacy: []Legacy{},
		Evidence: []EntryEvidence{}, SNAT: NodeSNAT(f.Policy), verbose: f.Verbose,
	}
	if s.Kernel.Differences == nil {
		s.Kernel.Differences = []string{}
	}
	for _, c := range f.Counts {
		if c.Verdict == nft.Invalid {
			s.Untranslated = append(s.Untranslated, Untranslated{familyKey(c.IPv6), c.Packets})
			continue
		}
		s.Counters = append(s.Counters, Counter{familyKey(c.IPv6), c.Verdict, c.Packets})
	}
	for _, chain := range f.Older {
		s.Legacy = append(s.Legacy, Legacy{
			chain.Family.String() + " " + config.Printable(chain.Table), config.Printable(chain.Name), chain.Rules,
			chain.Jumps(),
		})
	}
	if f.Agent != nil {
		s.Agent = &Agent{f.Agent.PID, append([]string{}, f.Agent.Args...), f.Agent.Policy}
	}
	s.setEvidence(f)
	s.Take(f.Files)
	s.Take(f.problems())
	slices.SortStableFunc(s.Errors, func(a, b config.Problem) int { return cmp.Compare(rank(a), rank(b)) })
	s.Areas = areas(f, s.Errors)
	return s
}

func (s *Status) setEvidence(f StatusFacts) {
	if f.Evidence == nil {
		return
	}
	stale := 0
	for _, c := range f.Evidence.Counts {
		stale += c.Stale
		e := EntryEvidence{
			Entry: c.Entry.String(), Family: familyKey(c.Entry.IPv6), Verdict: c.Entry.Verdict, Open: c.Open(),
			Stale: c.Stale, Overruled: c.Overruled, Undated: c.Undated,
		}
		for _, x := range c.Contradicting {
			e.Examples = append(e.Examples, exampleConnection(x))
		}
		s.Evidence = append(s.Evidence, e)
	}
	s.Stale = &Stale{stale}
	for _, u := range f.Evidence.Unanswered {
		s.Unanswered = append(s.Unanswered, Unanswered{u.To.String(), u.Entry.String(), u.Silent, u.Answered})
	}
}

// exampleConnection returns an example of the evidence as other commands show connections.
func exampleConnection(x conntrack.Example) Connection {
	return Connection{
		Protocol: x.Protocol, Source: End(x.Source), Destination: End(x.Destination), SeenAs: End(x.SeenAs),
		Stale: x.Age == conntrack.AgeStale,
	}
}

// problems are everything that is wrong, and what is to be known.
func (f *StatusFacts) problems() (found config.Problems) {
	found = append(found, f.ofAgent()...)
	found = append(found, f.ofRules()...)
	found = append(found, f.ofOtherAgents()...)
	found = append(found, health.Interfaces(health.AbsentInterfaces(f.Policy, f.Health.Links))...)
	found = append(found, f.Health.Problems(f.Policy)...)
	found = append(found, f.ofConnections()...)
	found = append(found, f.ofPorts()...)
	found = append(found, f.ofAddresses()...)
	return append(found, UncoveredPods(f.Policy, f.PodCIDRs)...)
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
	if f.Agent.Alive != "" {
		found = append(found, statusProblem("agent-stuck", lost+
			"the kubelet restarts it when its liveness probe fails; see its log", "the agent is stuck (%s): %s",
			running.Process(f.Agent.PID), f.Agent.Alive))
	}
	switch {
	case f.Agent.Delayed:
		found = append(found, statusProblem("rules-delayed", "", "%s", f.Agent.Failure))
	case f.Agent.Failure != "":
		found = append(found, statusProblem("rules-not-written", f.Agent.Failure,
			"the agent cannot write its rules"))
	}
	if f.Agent.Vanished != "" {
		found = append(found, statusProblem("config-vanished", "write it again at "+f.Config.Path+"\n"+
			"if it was removed on purpose, restart the agent", "%s", f.Agent.Vanished))
	}
	if f.Agent.SecondAgent != 0 {
		found = append(found, statusProblem("second-agent", "",
			"2 agents run here (%s, %s) and overwrite each other: stop all but one", running.Process(f.Agent.PID),
			running.Process(f.Agent.SecondAgent)))
	}
	return append(found, f.Agent.Problems...)
}

// ofRules finds what is wrong with the config and our rules in the kernel.
func (f *StatusFacts) ofRules() (found config.Problems) {
	switch {
	case f.Rejected != nil:
		faults := config.ProblemsOf(f.Rejected)
		found = append(found, statusProblem("config-rejected", "fix "+placeOf(f.Rejected, f.Config.Path),
			"config rejected; %s", f.enforced()))
		found = append(found, faults...)
	case !f.Kernel.InSync:
		found = append(found, statusProblem("out-of-sync", fmt.Sprintf("expected: %s, mode %s, from %s\n%s",
			f.Config.Hash, f.Config.Mode, f.source(), f.outOfSync()), "out of sync: %s", f.installed()))
	}
	if f.Unknown != "" && !f.InForce {
		found = append(found, cli.Problem(config.Note, "stale-unknown", "%s: which connections are stale is unknown.",
			f.Unknown))
	}
	return found
}

// outOfSync says what to do about rules that are not those of the config.
func (f *StatusFacts) outOfSync() string {
	switch {
	case f.Agent == nil:
		return "start it, or check that it runs with these flags"
	case f.Others != "":
		return "this command has another " + f.Others + " than the agent"
	case f.Guessed:
		return fmt.Sprintf("cannot read the flags of the agent (%s): give --config", running.Process(f.Agent.PID)) +
			either(f.SocketNamed, "", " or --probe-socket")
	}
	return "see its log; nft monitor shows which program changes them"
}

// enforced names what is enforced instead of a rejected config, judging by the installed rules.
func (f *StatusFacts) enforced() string {
	hash := f.Kernel.Hash
	switch hash {
	case "":
		return either(len(f.Older) > 0, "the rules of an iptables-based agent are active, ", "") +
			"none of our rules are installed"
	case f.Lenient:
		return fmt.Sprintf("the older agents' reading of it (%s) is installed, mode %s", hash, f.Kernel.Mode)
	case f.Default:
		return fmt.Sprintf("the built-in defaults (%s) are installed, mode %s", hash, f.Kernel.Mode)
	}
	return fmt.Sprintf("an earlier config (%s) is installed, mode %s", hash, f.Kernel.Mode)
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
func (f *StatusFacts) ofOtherAgents() (found config.Problems) {
	if len(f.Older) > 0 {
		found = append(found, statusProblem("older-agent", strings.Join(texts(f.Older),
			"\n")+"\nstop that agent"+
			either(f.TakeOver, ": this one then removes its rules (--takeover), once the config is accepted",
				", and run this one with --takeover, or nft-masq-agent cleanup --legacy-only"),
			"rules of an iptables-based agent are also active"))
	}
	for _, line := range f.XTables {
		found = append(found, cli.Problem(config.Error, "older-agent", "%s", line))
	}
	return found
}

// ofConnections finds connections that contradict the policy, and destinations that do not answer.
func (f *StatusFacts) ofConnections() (found config.Problems) {
	if f.EvidenceError != nil {
		return config.Problems{cli.Problem(config.Warning, health.Unchecked, "cannot read connections: %v",
			f.EvidenceError)}
	}
	if f.Evidence == nil {
		return nil
	}
	stale, undated, overruled := 0, 0, 0
	var worst *conntrack.Count
	for i, c := range f.Evidence.Counts {
		stale += c.Stale
		undated += c.Undated
		overruled += c.Overruled
		if c.Overruled > 0 && worst == nil {
			worst = &f.Evidence.Counts[i]
		}
	}
	if worst != nil {
		details := ""
		for _, x := range worst.Contradicting {
			if x.Age == conntrack.AgeOverruled {
				details = fmt.Sprintf("such as %s %s to %s, which is seen as %s: %s says otherwise\n"+
					"nft-masq-agent explain %s --from %s --trace names the rule", x.Protocol, x.Source, x.Destination, x.SeenAs,
					worst.Entry, x.Destination.Addr(), x.Source.Addr())
				break
			}
		}
		found = append(found, statusProblem("connections-overruled", details,
			"%s under this policy contradict it: another program decides", Plural(overruled, "connection")+" that began"))
	}
	for _, u := range f.Evidence.Unanswered {
		found = append(found, statusProblem("destination-unanswered", fmt.Sprintf(
			"force %s (%s), or check the way back to the pods; a dead host looks the same\n%s exempts it",
			netip.PrefixFrom(u.To, u.To.BitLen()), config.KeyForceMasqueradeCIDRs, u.Entry),
			"%s answered %d of %d connections that show the pod's IP", u.To, u.Answered, u.Answered+u.Silent))
	}
	for _, u := range f.Evidence.SilentUplinks {
		found = append(found, statusProblem("uplink-silent",
			"check the node's next hop, its address, and firewalls: masqueraded connections leave with the node's address",
			"%d of %d masqueraded %s connections have no reply", u.Silent, u.Answered+u.Silent, familyName(u.Entry.IPv6)))
	}
	if stale > 0 {
		found = append(found, cli.Problem(config.Note, "stale-connections",
			"%s an earlier policy: nft-masq-agent connections --stale lists them.",
			Plural(stale, "connection")+either(stale == 1, " still uses", " still use")))
	}
	if undated > 0 {
		found = append(found, cli.Problem(config.Note, "undated-connections",
			"%s the policy: they began before this agent's start, or another program decides; nft-masq-agent connections "+
				"--stale lists them.", Plural(undated, "connection")+either(undated == 1, " contradicts", " contradict")))
	}
	if f.Evidence.Partial {
		found = append(found, cli.Problem(config.Note, "sampled", "Counted among %d of %d connections.",
			f.Evidence.Examined,
			f.Evidence.Tracked))
	}
	return found
}

// ofPorts finds the destination with the largest share of source ports in use, if new connections to it fail or
// soon will.
func (f *StatusFacts) ofPorts() config.Problems {
	if f.PortsError != nil {
		return config.Problems{cli.Problem(config.Warning, health.Unchecked, "cannot read the source ports in use: %v",
			f.PortsError)}
	}
	u := f.Full
	if u == nil {
		return nil
	}
	whose, remedy := "", fmt.Sprintf("nft-masq-agent connections %s names the pods\n"+
		"have them reuse connections, exempt the destination, add addresses to %s, or widen %s", u.To.Addr(),
		config.KeySNATAddresses, config.KeyToPorts)
	if u.Among.Block >= 0 { // others are not affected
		whose = " of " + addressList(u.Pods)
		remedy = "have it reuse connections, exempt the destination, or raise " + config.KeyPortsPerPod +
			"\nor somebody else sends with its address: then the CNI has to stop that"
	}
	more := ""
	if u.More > 0 {
		more = fmt.Sprintf(" (likewise for %d more destinations)", u.More)
	}
	return config.Problems{statusProblem("source-ports", fmt.Sprintf(
		"%d of %d source ports of %s are in use there%s\n%s", u.Used, u.Among.Ports, u.From, more, remedy),
		"new %s connections%s to %s fail, or will", conntrack.ProtocolName(u.Protocol), whose, u.To)}
}

// FullestPorts returns the destination with the largest share of source ports in use, nil if all have enough.
func FullestPorts(used conntrack.Tally) *FullPorts {
	const most = 0.9
	full := slices.DeleteFunc(used.Fullest(len(used)), func(u conntrack.PortUse) bool { return u.Share() < most })
	if len(full) == 0 {
		return nil
	}
	return &FullPorts{PortUse: full[0], More: len(full) - 1}
}

// ofAddresses finds snatAddresses of which the node has none, and entries of snatRules that match a pod of the node,
// but have no address here.
func (f *StatusFacts) ofAddresses() (found config.Problems) {
	for _, s := range NodeSNAT(f.Policy) {
		if len(s.Present) == 0 && len(s.Absent) > 0 {
			found = append(found, statusProblem("snat-missing", s.String(), "this node has none of %s",
				config.KeySNATAddresses))
		}
	}
	for _, family := range f.Policy.Families {
		for _, entry := range family.SNATRules {
			for _, pod := range f.Health.Pods {
				if pod.Address.Is6() != family.IPv6 || !judge.MissesAddress(entry, family.SNATRules, pod.Address) {
					continue
				}
				found = append(found, statusProblem("snat-rule-missing", fmt.Sprintf(
					"%s: it is for pods such as %s, whose connections leave from another address\nassign one of %s to this node",
					entry.At, pod.Address, addressList(entry.Prefixes())),
					"this node has no address of entry %d of %s", entry.Place, config.KeySNATRules))
				break
			}
		}
	}
	return found
}

// String returns the report as text, starting with the problems.
func (s *Status) String() string {
	var b strings.Builder
	write(&b, s.Errors)
	if len(s.Errors) == 0 {
		first(&b, fmt.Sprintf("in sync: %s is installed, mode %s", s.Kernel.Hash, s.Config.Mode))
	}
	writeAreas(&b, s.Areas)
	if s.Agent != nil && s.Agent.Policy != nil {
		lines(&b, "  ", fmt.Sprintf("pid %d %s", s.Agent.PID, s.Agent.Policy))
	}
	s.writeCounters(&b)
	s.writeEvidence(&b)
	list(&b, "Source addresses:", texts(s.SNAT))
	list(&b, "Differences:", s.Kernel.Differences)
	list(&b, "Warnings:", texts(s.Warnings))
	list(&b, "Notes:", texts(s.Notes))
	return b.String()
}

func (s *Status) writeEvidence(b *strings.Builder) {
	if len(s.Evidence) == 0 {
		return
	}
	b.WriteString("\nOpen connections by the entry that decides them:\n")
	b.WriteString(table("  FAMILY\tENTRY\tVERDICT\tOPEN\tSTALE\tOVERRULED\tUNDATED", s.Evidence,
		func(e EntryEvidence) string {
			return fmt.Sprintf("  %s\t%s\t%s\t%d\t%d\t%d\t%d", e.Family, e.Entry, e.Verdict, e.Open, e.Stale, e.Overruled,
				e.Undated)
		}))
}

func (s *Status) writeCounters(b *strings.Builder) {
	if len(s.Counters) == 0 || s.Kernel.Hash == "" {
		return
	}
	counted := slices.ContainsFunc(s.Counters, func(c Counter) bool { return c.Count > 0 })
	if !counted {
		b.WriteString("\nNo connection has been counted yet. If pods do connect, a data plane such as eBPF bypasses " +
			"netfilter.\n")
		if !s.verbose {
			return
		}
	}
	b.WriteString("\nConnections since the counters were created:\n")
	for _, c := range s.Counters {
		if c.Count > 0 || s.verbose {
			fmt.Fprintf(b, "  %-5s %-12s %12d\n", c.Family, c.Verdict, c.Count)
		}
	}
	for _, u := range s.Untranslated {
		if u.Packets > 0 || s.verbose {
			fmt.Fprintf(b, "  %-5s %-12s %12d packets of pods without a connection, dropped (%s)\n", u.Family, nft.Invalid,
				u.Packets, config.KeyDropInvalid)
		}
	}
}
