package answer

import (
	"errors"
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
	Agent  string          `json:"agent,omitempty"` // whose flags are used, as text
	Agents []running.Agent `json:"agents"`          // agents in this network namespace
	Config configReport    `json:"config"`
	Kernel kernelReport    `json:"kernel"`
	// Connections since the counters were created.
	Connections []connectionReport `json:"connections"`
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
	// Uncovered lists the networks of --pod-cidr that the policy does not cover.
	Uncovered []string `json:"uncovered"`
	// Unmatched describes lists of interfaces because of which nothing is masqueraded.
	Unmatched []string `json:"unmatched"`
	// SNAT lists which of snatAddresses this node has; none if the policy has none.
	SNAT  []snatReport `json:"snatAddresses,omitempty"`
	Notes []string     `json:"notes"`
}

// A configReport is the result of reading the files.
type configReport struct {
	Path     string   `json:"path"`
	Files    []string `json:"files"` // none: the built-in defaults apply
	Accepted bool     `json:"accepted"`
	Errors   []string `json:"errors"`
	Warnings []string `json:"warnings"`
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

// SetConfig sets the report on the files.
func (r *Status) SetConfig(o options.Options, l options.Loaded, err error) {
	r.Config = configReport{
		Path: o.ConfigPath, Files: append([]string{}, l.Files...), Accepted: err == nil,
		Errors: []string{}, Warnings: []string{}, Mode: string(o.Mode), Chain: o.NFT().Layout.Chain(),
	}
	for _, w := range l.Problems.Remarks() {
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
		r.Config.Hash = l.Ruleset.Hash()
	}
}

// SetEnforced sets what is enforced instead of a rejected config, judging by the
// installed rules. lenient is what the older agents make of it, if anything.
func (r *Status) SetEnforced(o options.Options, lenient *nft.Ruleset) {
	hash := r.Kernel.Hash
	of := func(c config.Config) string { return nft.Compile(c, o.NFT()).Hash() }
	switch {
	case hash == "" && len(r.Legacy) > 0:
		r.Config.Enforced = "the rules of an iptables-based agent are active, none of ours are installed"
	case hash == "":
		r.Config.Enforced = "none of our rules are installed"
	case lenient != nil && hash == lenient.Hash():
		r.Config.Enforced = fmt.Sprintf("what the older agents make of it (%s) is installed, mode %s", hash, r.Kernel.Mode)
	case hash == of(config.Default(o.Defaults)):
		r.Config.Enforced = fmt.Sprintf("the built-in defaults (%s) are installed, mode %s", hash, r.Kernel.Mode)
	default:
		r.Config.Enforced = fmt.Sprintf("an earlier config (%s) is installed, mode %s", hash, r.Kernel.Mode)
	}
}

// SetConnections sets the report on the counters.
func (r *Status) SetConnections(counts []nft.Counts) {
	r.Connections = []connectionReport{}
	for _, c := range counts {
		r.Connections = append(r.Connections, connectionReport{strings.ToLower(familyName(c.IPv6)), string(c.Verdict), c.Packets})
	}
}

// SetStale sets the report on stale connections.
func (r *Status) SetStale(s conntrack.Stale) {
	r.Stale = &staleReport{Count: s.Count}
	if !s.Oldest.IsZero() {
		r.Stale.Oldest = &s.Oldest
	}
	if s.Partial {
		r.Stale.Sampled = s.Examined
	}
}

// staleText describes stale connections; "" if there are none.
func (r Status) staleText() string {
	if r.Stale == nil || r.Stale.Count == 0 {
		return ""
	}
	text := Plural(r.Stale.Count, "connection") + either(r.Stale.Count == 1, " still uses", " still use") + " an earlier policy"
	if r.Stale.Oldest != nil {
		text += fmt.Sprintf(", the oldest since %s", r.Stale.Oldest.UTC().Format(time.RFC3339))
	}
	if r.Stale.Sampled > 0 {
		text += fmt.Sprintf(" (estimated from %d)", r.Stale.Sampled)
	}
	return text + "; connections --stale lists them"
}

// SetOthers sets the report on other programs' rules.
func (r *Status) SetOthers(others kernel.Others) {
	r.Legacy, r.Routing = texts(others.Legacy), append([]string{}, others.Routing...)
	r.Overridden = ruleReports(others.Overridden)
	r.Accepted, r.Podless = ruleReports(others.Accepted), ruleReports(others.Podless)
	r.Conflicts, r.Overruled = ruleReports(others.Conflicts), ruleReports(others.Overruled)
	if others.Unread > 0 {
		r.Notes = append(r.Notes, fmt.Sprintf("%d rules of other programs were too many to examine; their effect is unknown", others.Unread))
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
	for _, text := range r.problems() {
		b.WriteString(Line(text, ""))
	}
	if r.Config.Accepted && r.Kernel.InSync {
		b.WriteString(Line(r.inSync(), ""))
	}
	if r.Agent != "" {
		b.WriteString(Line(r.Agent, "  "))
	}
	for _, a := range r.Agents {
		if a.Policy != nil {
			b.WriteString(Line(fmt.Sprintf("pid %d %s", a.PID, a.Policy), "  "))
		}
	}
	r.writeConnections(&b)
	writeList(&b, "Source addresses:", texts(r.SNAT))
	writeList(&b, "Errors of the config:", r.Config.Errors)
	writeList(&b, "Differences:", r.Kernel.Differences)
	writeList(&b, "Warnings of the config:", r.Config.Warnings)
	writeList(&b, "Rules of iptables-based agents (run with --takeover, or cleanup --legacy-only):", r.Legacy)
	writeList(&b, "Other rules that masquerade what the config exempts:", texts(r.Conflicts))
	writeList(&b, "Other rules that override the config for traffic that it masquerades:", texts(r.Overruled))
	writeList(&b, "Other rules that would masquerade pod traffic to exempt destinations without enforceNonMasquerade:", texts(r.Overridden))
	writeList(&b, "Rules of other programs that --accept-foreign accepts:", texts(r.Accepted))
	writeList(&b, "Other rules that masquerade what the config exempts, but from no pod by masqueradeSrcCIDRs or masqueradeSrcInterfaces:", texts(r.Podless))
	writeList(&b, "Notes:", r.Notes)
	return b.String()
}

// problems returns the first lines: the problems on this node.
func (r Status) problems() []string {
	var lines []string
	add := func(wrong bool, format string, args ...any) {
		if wrong {
			lines = append(lines, fmt.Sprintf(format, args...))
		}
	}
	installed := fmt.Sprintf("installed: %s, mode %s", r.Kernel.Hash, r.Kernel.Mode)
	if r.Kernel.Hash == "" {
		installed = "none of our rules are installed"
	}
	add(!r.Config.Accepted, "config rejected; %s; %s", r.Config.Enforced, r.running())
	add(r.Config.Accepted && !r.Kernel.InSync, "out of sync: expected: %s (%s), mode %s; %s; %s",
		r.source(), r.Config.Hash, r.Config.Mode, installed, r.running())
	for _, text := range r.Unmatched {
		add(true, "%s", text)
	}
	add(len(r.Agents) > 1, "%d agents run here and overwrite each other: stop all but one", len(r.Agents))
	add(len(r.Legacy) > 0, "rules of an iptables-based agent are also active (%s)", strings.Join(r.Legacy, "; "))
	add(len(r.Routing) > 0, "routing rules of an older agent are left; to remove them: %s", strings.Join(r.Routing, "; "))
	lines = append(lines, inTheWay(r.Conflicts, "traffic that the config exempts")...)
	lines = append(lines, inTheWay(r.Overruled, "traffic that the config masquerades")...)
	for _, s := range r.SNAT {
		add(len(s.Present) == 0, "%s", missingSNAT(s.Family == "ipv6"))
	}
	for _, text := range r.Uncovered {
		add(true, "%s", text)
	}
	add(r.staleText() != "", "%s", r.staleText())
	return lines
}

// inTheWay describes other programs' rules that affect some traffic, and what to do about
// them: a line for each kind.
func inTheWay(rules []ruleReport, traffic string) (lines []string) {
	for kind := foreign.Masquerades; kind <= foreign.Drops; kind++ {
		of := slices.DeleteFunc(slices.Clone(rules), func(r ruleReport) bool { return r.kind != kind })
		if len(of) == 0 {
			continue
		}
		one, several := kind.Does()
		lines = append(lines, fmt.Sprintf("%s %s %s, such as %s. %s.", Plural(len(of), "rule")+" of other programs",
			either(len(of) == 1, one, several), traffic, of[0].place(), kind.Remedy()))
	}
	return lines
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
	return fmt.Sprintf("in sync: %s is installed, mode %s, from %s; %s", r.Kernel.Hash, r.Config.Mode, r.source(), r.running())
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
}

func writeList(b *strings.Builder, title string, lines []string) {
	if len(lines) == 0 {
		return
	}
	fmt.Fprintf(b, "\n%s\n", title)
	for _, l := range lines {
		b.WriteString(Line(l, "  "))
	}
}
