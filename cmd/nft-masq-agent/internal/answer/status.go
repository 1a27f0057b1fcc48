package answer

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"nft-masq-agent/cmd/nft-masq-agent/internal/options"
	"nft-masq-agent/cmd/nft-masq-agent/internal/running"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/foreign"
	"nft-masq-agent/nft/kernel"
)

// A Status is the output of status. As JSON, fields are only ever added.
type Status struct {
	// Problems of the config and of this node, the most serious first: something has to be
	// done about errors and mistakes.
	Problems config.Problems `json:"problems"`
	Whose    string          `json:"agent,omitempty"` // whose flags are used, as text
	Agents   []agentReport   `json:"agents"`          // the agent in this network namespace
	Config   configReport    `json:"config"`
	Kernel   kernelReport    `json:"kernel"`
	// Connections since the counters were created.
	Connections []connectionReport `json:"connections"`
	// Untranslated are packets of pods that dropInvalid has dropped; none without the key.
	Untranslated []untranslatedReport `json:"untranslated,omitempty"`
	// Stale counts connections that were opened under an earlier policy; none:
	// unknown.
	Stale  *staleReport `json:"stale,omitempty"`
	Legacy []string     `json:"legacy"` // rules of iptables-based agents
	// Routing has the commands that remove such agents' rules of policy routing.
	Routing []string `json:"routing"`
	// Overridden are rules that enforceNonMasquerade prevents from masquerading
	// what the config exempts.
	Overridden []ruleReport `json:"overridden"`
	Conflicts  []ruleReport `json:"conflicts"` // other rules that masquerade what the config exempts
	Overruled  []ruleReport `json:"overruled"` // other rules that override the config for traffic that it masquerades
	Accepted   []ruleReport `json:"accepted"`  // of both, in chains that --accept-foreign names
	// Podless are rules that masquerade what the config exempts, but from no pod by
	// masqueradeSrcCIDRs or masqueradeSrcInterfaces.
	Podless []ruleReport `json:"podless"`
	// SNAT lists which of snatAddresses this node has; none if the policy has none.
	SNAT []SNATReport `json:"snatAddresses,omitempty"`
}

// An agentReport is a running agent.
type agentReport struct {
	PID  int      `json:"pid"`
	Args []string `json:"args"` // after the names of the program and the command
	// Policy is the one that it enforces; nil if it did not answer.
	Policy *running.Policy `json:"policy,omitempty"`
}

// A configReport is the result of reading the files.
type configReport struct {
	Path     string   `json:"path"`
	Files    []string `json:"files"` // none: the built-in defaults apply
	Accepted bool     `json:"accepted"`
	Hash     string   `json:"hash,omitempty"`
	Enforced string   `json:"enforced,omitempty"` // instead of a rejected config, as text
	Mode     string   `json:"mode"`
	Chain    string   `json:"chain,omitempty"` // of mode iptables-nft
}

// A kernelReport is what the kernel has.
type kernelReport struct {
	InSync      bool     `json:"inStep"`
	Mode        string   `json:"mode,omitempty"` // of our installed rules; none: no rules
	Hash        string   `json:"hash,omitempty"`
	Differences []string `json:"differences"`
}

// A connectionReport counts new connections.
type connectionReport struct {
	Family  string `json:"family"`  // ipv4 or ipv6
	Verdict string `json:"verdict"` // masqueraded, exempt or local
	Count   uint64 `json:"count"`
}

// An untranslatedReport counts packets of pods that belong to no connection.
type untranslatedReport struct {
	Family  string `json:"family"` // ipv4 or ipv6
	Packets uint64 `json:"packets"`
}

// A staleReport counts connections whose translation contradicts the kernel's rules.
type staleReport struct {
	Count   int        `json:"count"`
	Oldest  *time.Time `json:"oldest,omitempty"`
	Sampled int        `json:"sampled,omitempty"` // number of connections that the estimate is based on
}

// A ruleReport is a rule of another program, or in an explanation one of ours.
type ruleReport struct {
	Table    string   `json:"table"`
	Chain    string   `json:"chain"`
	Handle   uint64   `json:"handle"`
	Priority int32    `json:"priority"`          // of the base chain from which it is reached
	Packets  *uint64  `json:"packets,omitempty"` // the rule's counter, if it has one
	Rule     string   `json:"rule"`
	Sees     string   `json:"sees,omitempty"` // what the destination sees if this rule decides
	Via      []string `json:"via,omitzero"`   // of a conflict
	Why      string   `json:"why,omitempty"`  // of a conflict

	own  bool
	kind foreign.Kind // of a conflict
}

// place returns the location as nft delete rule expects it.
func (r ruleReport) place() string {
	if r.Handle == 0 {
		return r.Table + " " + r.Chain
	}
	return fmt.Sprintf("%s %s handle %d", r.Table, r.Chain, r.Handle)
}

func (r ruleReport) String() string {
	if r.own {
		return "this agent"
	}
	text := fmt.Sprintf("%s (priority %d", r.place(), r.Priority)
	if r.Packets != nil {
		text += ", " + Plural(int(*r.Packets), "packet")
	}
	text += "): " + r.Rule
	if r.Why != "" {
		text += " (" + r.Why + ")"
	}
	return text
}

// Add adds a problem of this node.
func (r *Status) Add(level config.Level, id, format string, args ...any) {
	r.Problems = append(r.Problems, problem(level, id, nowhere, format, args...))
}

// NewStatus returns the report on the files, which are rejected if there is an error.
func NewStatus(o options.Options, l options.Loaded, err error) Status {
	r := Status{
		Problems: append(config.ProblemsOf(err),
			l.Problems.Remarks()...), Agents: []agentReport{}, Connections: []connectionReport{},
		Config: configReport{
			Path: o.ConfigPath, Files: append([]string{}, l.Files...), Accepted: err == nil,
			Mode: string(o.Mode), Chain: o.NFT().Layout.Chain(),
		},
		Kernel: kernelReport{Differences: []string{}},
	}
	if err == nil {
		r.Config.Hash = l.Ruleset.Hash()
	}
	return r
}

// SetAgent sets the report on the running agent.
func (r *Status) SetAgent(a running.Report) {
	r.Agents = append(r.Agents, agentReport{a.PID, append([]string{}, a.Args...), a.Policy})
	if a.Refusal != "" {
		r.Add(config.Error, "kernel-refusal", "the agent cannot write its rules: %s", a.Refusal)
	}
	if a.SecondAgent != 0 {
		r.Add(config.Error, "second-agent", "2 agents run here and overwrite each other: stop all but one")
	}
}

// enforced names what is enforced instead of a rejected config, judging by the
// installed rules. lenient is what the older agents make of it, if anything.
func (r *Status) enforced(o options.Options, lenient *nft.Ruleset) string {
	hash := r.Kernel.Hash
	what := "an earlier config"
	switch {
	case hash == "":
		return either(len(r.Legacy) > 0, "the rules of an iptables-based agent are active, ",
			"") + "none of our rules are installed"
	case lenient != nil && hash == lenient.Hash():
		what = "what the older agents make of it"
	case hash == nft.Compile(config.Default(o.Defaults), o.NFT()).Hash():
		what = "the built-in defaults"
	}
	return fmt.Sprintf("%s (%s) %s installed, mode %s", what, hash, either(what == "the built-in defaults", "are", "is"),
		r.Kernel.Mode)
}

// SetConnections sets the report on the counters.
func (r *Status) SetConnections(counts []nft.Counts) {
	for _, c := range counts {
		if c.Verdict == nft.Invalid {
			r.Untranslated = append(r.Untranslated, untranslatedReport{familyKey(c.IPv6), c.Packets})
			continue
		}
		r.Connections = append(r.Connections, connectionReport{familyKey(c.IPv6), string(c.Verdict), c.Packets})
	}
}

// SetStale sets the report on stale connections.
func (r *Status) SetStale(s conntrack.Stale) {
	r.Stale = &staleReport{Count: s.Count}
	text := Plural(s.Count, "connection") + either(s.Count == 1, " still uses", " still use") + " an earlier policy"
	if !s.Oldest.IsZero() {
		r.Stale.Oldest = &s.Oldest
		text += ", the oldest since " + s.Oldest.UTC().Format(time.RFC3339)
	}
	if s.Partial {
		r.Stale.Sampled = s.Examined
		text += fmt.Sprintf(" (estimated from %d)", s.Examined)
	}
	if s.Count > 0 {
		r.Add(config.Warning, "stale-connections", "%s; connections --stale lists them", text)
	}
}

// SetOthers sets the report on other programs' rules.
func (r *Status) SetOthers(others kernel.Others) {
	r.Legacy, r.Routing = texts(others.Legacy), append([]string{}, others.Routing...)
	r.Overridden = ruleReports(others.Overridden)
	r.Accepted, r.Podless = ruleReports(others.Accepted), ruleReports(others.Podless)
	r.Conflicts, r.Overruled = ruleReports(others.Conflicts), ruleReports(others.Overruled)
	if others.Unread > 0 {
		r.Add(config.Warning, "rules-unread", "%d rules of other programs were too many to examine; their effect is unknown",
			others.Unread)
	}
}

func ruleReports(conflicts []foreign.Conflict) []ruleReport {
	reports := make([]ruleReport, len(conflicts))
	for i, c := range conflicts {
		reports[i] = ruleReport{
			Table: c.Table(), Chain: c.Chain(), Handle: c.Rule.Handle, Priority: c.Priority, Packets: c.Packets(), Rule: c.RuleText(),
			Via: c.ViaText(), Why: c.Why(), kind: c.Kind,
		}
	}
	return reports
}

// String returns the report as text, starting with the problems.
func (r Status) String() string {
	var b strings.Builder
	lines(&b, "", texts(r.Problems.Of(config.Error, config.Mistake, config.Warning))...)
	if r.Config.Accepted && r.Kernel.InSync {
		lines(&b, "", r.inSync())
	}
	if r.Whose != "" {
		lines(&b, "  ", r.Whose)
	}
	for _, a := range r.Agents {
		if a.Policy != nil {
			lines(&b, "  ", fmt.Sprintf("pid %d %s", a.PID, a.Policy))
		}
	}
	r.writeConnections(&b)
	list(&b, "Source addresses:", texts(r.SNAT))
	list(&b, "Differences:", r.Kernel.Differences)
	list(&b, "Other rules that masquerade what the config exempts:", texts(r.Conflicts))
	list(&b, "Other rules that override the config for traffic that it masquerades:", texts(r.Overruled))
	list(&b, "Other rules that would masquerade pod traffic to exempt destinations without enforceNonMasquerade:",
		texts(r.Overridden))
	list(&b, "Rules of other programs that --accept-foreign accepts:", texts(r.Accepted))
	list(&b,
		"Other rules that masquerade what the config exempts, but from no pod by masqueradeSrcCIDRs or masqueradeSrcInterfaces:", texts(r.Podless))
	list(&b, "Notes:", texts(r.Problems.Of(config.Note)))
	return b.String()
}

// Conclude completes the problems by those that follow from the facts, and sorts them.
// lenient is what the older agents make of a rejected config, if anything.
func (r *Status) Conclude(o options.Options, lenient *nft.Ruleset) {
	installed := either(r.Kernel.Hash == "", "none of our rules are installed", fmt.Sprintf("installed: %s, mode %s",
		r.Kernel.Hash, r.Kernel.Mode))
	switch {
	case !r.Config.Accepted:
		r.Config.Enforced = r.enforced(o, lenient)
		r.Problems = slices.Insert(r.Problems, 0, problem(config.Error, "config-rejected", nowhere, "config rejected; %s; %s",
			r.Config.Enforced, r.running()))
	case !r.Kernel.InSync:
		r.Problems = slices.Insert(r.Problems, 0, problem(config.Error, "out-of-sync", nowhere,
			"out of sync: expected: %s (%s), mode %s; %s; %s",
			r.source(), r.Config.Hash, r.Config.Mode, installed, r.running()))
	}
	add := func(wrong bool, id, format string, args ...any) {
		if wrong {
			r.Add(config.Error, id, format, args...)
		}
	}
	add(len(r.Legacy) > 0, "older-agent",
		"rules of an iptables-based agent are also active (%s): run with --takeover, or cleanup --legacy-only", strings.Join(r.Legacy, "; "))
	add(len(r.Routing) > 0, "older-routing", "routing rules of an older agent are left; to remove them: %s",
		strings.Join(r.Routing, "; "))
	r.inTheWay("conflict", r.Conflicts, "traffic that the config exempts")
	r.inTheWay("overruled", r.Overruled, "traffic that the config masquerades")
	for _, s := range r.SNAT {
		add(len(s.Present) == 0 && !s.only, "snat-missing", "%s", s)
	}
	slices.SortStableFunc(r.Problems, func(a, b config.Problem) int { return cmp.Compare(a.Level, b.Level) })
}

// inTheWay adds a problem for each kind of other programs' rules that affect some traffic,
// with what to do about them.
func (r *Status) inTheWay(id string, rules []ruleReport, traffic string) {
	for kind := foreign.Masquerades; kind <= foreign.Drops; kind++ {
		of := slices.DeleteFunc(slices.Clone(rules), func(r ruleReport) bool { return r.kind != kind })
		if len(of) == 0 {
			continue
		}
		one, several := kind.Does()
		r.Add(config.Error, id, "%s of other programs %s %s, such as %s. %s.", Plural(len(of), "rule"),
			either(len(of) == 1, one, several), traffic, of[0].place(), kind.Remedy())
	}
}

func (r Status) source() string {
	if len(r.Config.Files) == 0 {
		return "built-in defaults (no file at " + r.Config.Path + ")"
	}
	return strings.Join(r.Config.Files, ", ")
}

func (r Status) running() string {
	if len(r.Agents) == 0 {
		return "no agent runs on this node"
	}
	return fmt.Sprintf("the agent runs, pid %d", r.Agents[0].PID)
}

func (r Status) inSync() string {
	return fmt.Sprintf("in sync: %s is installed, mode %s, from %s; %s", r.Kernel.Hash, r.Config.Mode, r.source(),
		r.running())
}

func (r Status) writeConnections(b *strings.Builder) {
	if len(r.Connections) == 0 {
		return
	}
	if !slices.ContainsFunc(r.Connections, func(c connectionReport) bool { return c.Count > 0 }) {
		b.WriteString("\nNo connection has passed the rules yet. If pods do connect, a data plane such as eBPF bypasses netfilter.\n")
	}
	b.WriteString("\nConnections since the rules were first installed:\n")
	for _, c := range r.Connections {
		fmt.Fprintf(b, "  %-5s %-12s %12d\n", c.Family, c.Verdict, c.Count)
	}
	for _, u := range r.Untranslated {
		fmt.Fprintf(b, "  %-5s %-12s %12d packets of pods without a connection, dropped (%s)\n", u.Family, nft.Invalid, u.Packets, config.KeyDropInvalid)
	}
}
