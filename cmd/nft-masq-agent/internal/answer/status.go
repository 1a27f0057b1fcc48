package answer

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"nft-masq-agent/cmd/nft-masq-agent/internal/health"
	"nft-masq-agent/cmd/nft-masq-agent/internal/options"
	"nft-masq-agent/cmd/nft-masq-agent/internal/reply"
	"nft-masq-agent/cmd/nft-masq-agent/internal/report"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/neighbors"
	"nft-masq-agent/nft/trace"
)

// A Status is the output of status.
type Status struct {
	reply.Head
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
	// Others are rules of other programs that concern this agent's connections.
	Others []Rule `json:"otherRules"`
	// SNAT lists which of snatAddresses this node has.
	SNAT []SNATReport `json:"snatAddresses,omitempty"`
	// Areas are the health of this node on one screen.
	Areas []Area `json:"areas"`

	forwards string
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

// A Stale counts connections whose translation contradicts the kernel's rules.
type Stale struct {
	// Count of connections, estimated if sampled is present.
	Count int `json:"count"`
	// Oldest is when the oldest one began, if that is known.
	Oldest time.Time `json:"oldest,omitzero"`
	// Sampled is the number of connections that the estimate is based on.
	Sampled int `json:"sampled,omitempty"`
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

// The effects of other programs' rules.
const (
	Conflicting = "masquerades-exempt"
	Overriding  = "overrides"
	Prevented   = "prevented"
	Accepted    = "accepted"
	NotOfPods   = "not-of-pods"
)

// effects are what status says about rules of each effect.
var effects = []struct{ effect, title string }{
	{Conflicting, "Other rules that masquerade what the config exempts:"},
	{Overriding, "Other rules that override the config for traffic that it masquerades:"},
	{Prevented, "Other rules that would masquerade pod traffic to exempt destinations without enforceNonMasquerade:"},
	{Accepted, "Rules of other programs that --accept-foreign accepts:"},
	{
		NotOfPods, "Other rules that masquerade what the config exempts, " +
			"but from no pod by masqueradeSrcCIDRs or masqueradeSrcInterfaces:",
	},
}

// With returns the rules of other programs with an effect.
func (r *Status) With(effect string) []Rule {
	return slices.DeleteFunc(slices.Clone(r.Others), func(o Rule) bool { return o.Effect != effect })
}

// NewStatus returns the report on the files, which are rejected if there is an error.
func NewStatus(h reply.Head, o options.Options, l Loaded, err error) Status {
	h.Take(config.ProblemsOf(err))
	h.Take(l.Problems.Remarks())
	return Status{
		Head: h, Config: NewConfig(o, l, err), Kernel: Kernel{Differences: []string{}}, Counters: []Counter{},
		Legacy: []Legacy{}, Others: []Rule{}, Areas: []Area{},
	}
}

// SetAgent sets the report on the running agent.
func (r *Status) SetAgent(a report.Report) {
	r.Agent = &Agent{a.PID, append([]string{}, a.Args...), a.Policy}
	if a.Alive != "" {
		r.Explain(config.Error, "agent-stuck", "changes of the config do not arrive, and nothing restores the rules\n"+
			"the kubelet restarts it when its liveness probe fails; see its log", "the agent is stuck (%s): %s",
			report.Process(a.PID), a.Alive)
	}
	switch {
	case a.Delayed:
		r.Add(config.Error, "rules-delayed", "%s", a.Refusal)
	case a.Refusal != "":
		r.Explain(config.Error, "kernel-refusal", a.Refusal, "the agent cannot write its rules")
	}
	if a.Vanished != "" {
		r.Explain(config.Error, "config-vanished", "write it again at "+r.Config.Path+"\n"+
			"if it was removed on purpose, restart the agent", "%s", a.Vanished)
	}
	r.Take(a.Problems)
	if a.SecondAgent != 0 {
		r.Add(config.Error, "second-agent", "2 agents run here (%s, %s) and overwrite each other: stop all but one",
			report.Process(a.PID), report.Process(a.SecondAgent))
	}
}

// enforced names what is enforced instead of a rejected config, judging by the
// installed rules. lenient is the older agents' reading of it, if anything.
func (r *Status) enforced(o options.Options, lenient *nft.Ruleset) string {
	hash := r.Kernel.Hash
	what := "an earlier config"
	switch {
	case hash == "":
		return either(len(r.Legacy) > 0, "the rules of an iptables-based agent are active, ",
			"") + "none of our rules are installed"
	case lenient != nil && hash == lenient.Hash():
		what = "the older agents' reading of it"
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
			r.Untranslated = append(r.Untranslated, Untranslated{familyKey(c.IPv6), c.Packets})
			continue
		}
		r.Counters = append(r.Counters, Counter{familyKey(c.IPv6), c.Verdict, c.Packets})
	}
}

// SetForwards sets whether the node forwards packets, in words.
func (r *Status) SetForwards(words string) { r.forwards = words }

// SetStale sets the report on stale connections.
func (r *Status) SetStale(s conntrack.Stale) {
	r.Stale = &Stale{Count: s.Count, Oldest: s.Oldest.UTC()}
	text := Plural(s.Count, "connection") + either(s.Count == 1, " still uses", " still use") + " an earlier policy"
	details := "nft-masq-agent connections --stale lists them"
	if !s.Oldest.IsZero() {
		details = "the oldest since " + r.Stale.Oldest.Format(time.RFC3339) + "\n" + details
	}
	if s.Partial {
		r.Stale.Sampled = s.Examined
		text += fmt.Sprintf(" (estimated from %d)", s.Examined)
	}
	if s.Count > 0 {
		r.Explain(config.Error, "stale-connections", details, "%s", text)
	}
}

// SetPorts reports the destination with the largest share of source ports in use, if new
// connections to it fail or soon will. A sample of the connections shows less than there is.
// pods returns those that use the ports.
func (r *Status) SetPorts(used conntrack.Tally, pods func(conntrack.PortKey) []netip.Addr) {
	const most = 0.9
	full := slices.DeleteFunc(used.Fullest(len(used)), func(u conntrack.PortUse) bool { return u.Share() < most })
	if len(full) == 0 {
		return
	}
	u := full[0]
	whose, remedy := "", fmt.Sprintf("nft-masq-agent connections %s names the pods\n"+
		"have them reuse connections, exempt the destination, add addresses to %s, or widen %s", u.To.Addr(),
		config.KeySNATAddresses, config.KeyToPorts)
	if u.Among.Block >= 0 { // others are not affected
		whose = " of " + addressList(pods(u.PortKey))
		remedy = "have it reuse connections, exempt the destination, or raise " + config.KeyPortsPerPod
	}
	r.Explain(config.Error, "source-ports", fmt.Sprintf("%d of %d source ports of %s are in use there%s\n%s", u.Used,
		u.Among.Ports, u.From, either(len(full) > 1, fmt.Sprintf(" (likewise for %d more destinations)", len(full)-1), ""),
		remedy),
		"new %s connections%s to %s fail, or will", conntrack.ProtocolName(u.Protocol), whose, u.To)
}

// SetOthers sets the report on other programs' rules, next to an agent that takes over those of older
// agents or not.
func (r *Status) SetOthers(others neighbors.Others, takeOver bool) {
	for _, l := range others.Legacy {
		r.Legacy = append(r.Legacy, Legacy{
			l.Family.String() + " " + config.Printable(l.Table), config.Printable(l.Name), l.Rules, len(l.Jumps),
		})
	}
	if len(others.Legacy) > 0 {
		r.Explain(config.Error, "older-agent", strings.Join(texts(others.Legacy), "\n")+"\nstop that agent"+
			either(takeOver, ": this one then removes its rules (--takeover), once the config is accepted",
				", and run this one with --takeover, or nft-masq-agent cleanup --legacy-only"),
			"rules of an iptables-based agent are also active")
	}
	r.inTheWay("conflict", others.Conflicts, "traffic that the config exempts")
	r.inTheWay("overruled", others.Overruled, "traffic that the config masquerades")
	for effect, rules := range map[string][]neighbors.Conflict{
		Conflicting: others.Conflicts, Overriding: others.Overruled, Prevented: others.Overridden,
		Accepted: others.Accepted, NotOfPods: others.Podless,
	} {
		for _, c := range rules {
			found := newRule(c.Finding, c.Kind.String())
			found.Packets, found.Via, found.Why = c.Packets(), c.ViaText(), &RuleWhy{found.Kind, c.Why()}
			found.Effect = effect
			r.Others = append(r.Others, found)
		}
	}
	slices.SortStableFunc(r.Others, func(a, b Rule) int { return cmp.Compare(a.Effect, b.Effect) })
	if others.Unread > 0 {
		r.Add(config.Warning, "rules-unread", "%d rules of other programs were too many to examine; their effect is unknown",
			others.Unread)
	}
	if len(others.Devices) > 0 {
		r.Add(config.Warning, "rules-unread", "not read: rules at network devices (%s); their effect is unknown",
			strings.Join(others.Devices, ", "))
	}
	if others.Unasked > 0 {
		r.Add(config.Warning, "rules-unasked", "rules of other programs name too many addresses to ask about each: "+
			"%d packets were not asked about", others.Unasked)
	}
}

func newRule(p trace.Finding, kind string) Rule {
	return Rule{
		Table: p.Table(), Chain: p.Chain(), Handle: p.Rule.Handle, Priority: p.Base.Hook.Priority, Rule: p.RuleText(),
		Kind: kind,
	}
}

// inTheWay adds a problem for each kind of other programs' rules that affect some traffic,
// with what to do about them.
func (r *Status) inTheWay(id string, rules []neighbors.Conflict, traffic string) {
	for kind := neighbors.Masquerades; kind <= neighbors.Drops; kind++ {
		of := slices.DeleteFunc(slices.Clone(rules), func(c neighbors.Conflict) bool { return c.Kind != kind })
		if len(of) == 0 {
			continue
		}
		one, several := kind.Does()
		r.Explain(config.Error, id, fmt.Sprintf("such as %s\n%s", newRule(of[0].Finding, "").place(), kind.Remedy()),
			"%s of other programs %s %s", Plural(len(of), "rule"), either(len(of) == 1, one, several), traffic)
	}
}

// String returns the report as text, starting with the problems.
func (r *Status) String() string {
	var b strings.Builder
	write(&b, slices.Concat(r.Errors, r.Warnings))
	if r.Config.Accepted && r.Kernel.InSync {
		lines(&b, "", fmt.Sprintf("in sync: %s is installed, mode %s", r.Kernel.Hash, r.Config.Mode))
	}
	r.writeAreas(&b)
	if r.Agent != nil && r.Agent.Policy != nil {
		lines(&b, "  ", fmt.Sprintf("pid %d %s", r.Agent.PID, r.Agent.Policy))
	}
	r.writeCounters(&b)
	list(&b, "Source addresses:", texts(r.SNAT))
	list(&b, "Differences:", r.Kernel.Differences)
	for _, e := range effects {
		list(&b, e.title, texts(r.With(e.effect)))
	}
	list(&b, "Notes:", texts(r.Notes))
	return b.String()
}

// weights are the errors by weight; the empty one stands for all others, which are those of
// the files.
var weights = slices.Concat([]string{
	health.NotANode, "agent-stuck", "kernel-refusal", "rules-delayed", "config-rejected", "config-vanished", "",
	"second-agent", "out-of-sync", "no-agent", "older-agent",
	"interface-list-unmatched",
}, health.IDs, []string{
	"conflict", "overruled", "rules-restored", "source-ports", "snat-missing", "pod-cidr-not-exempt", "pod-cidr-forced",
	"stale-connections",
})

// Conclude completes the problems by those that follow from the facts, and sorts them.
// lenient is what the older agents make of a rejected config, if anything. others are flags that
// the agent does not have.
func (r *Status) Conclude(o options.Options, lenient *nft.Ruleset, others string) {
	switch {
	case !r.Config.Accepted:
		r.Config.Enforced = r.Kernel.Hash
		fix := r.Config.Path
		if i := slices.IndexFunc(r.Errors, func(p config.Problem) bool { return p.Pos != nowhere }); i >= 0 {
			fix = r.Errors[i].Pos.String()
		}
		r.Explain(config.Error, "config-rejected", "fix "+fix, "config rejected; %s", r.enforced(o, lenient))
	case !r.Kernel.InSync:
		remedy := "see its log, and nft monitor for who changes them"
		switch {
		case r.Agent == nil:
			remedy = "start it, or check that it runs with these flags"
		case others != "":
			remedy = "this command has another " + others + " than the agent"
		case r.Agent.Policy == nil && !o.Given("config"):
			remedy = fmt.Sprintf("cannot read the flags of the agent (%s): give --config", report.Process(r.Agent.PID)) +
				either(o.Given("probe-socket"), "", " or --probe-socket")
		}
		r.Explain(config.Error, "out-of-sync", fmt.Sprintf("expected: %s, mode %s, from %s\n%s", r.Config.Hash,
			r.Config.Mode, r.source(), remedy), "out of sync: %s", r.installed())
	}
	if r.Agent == nil {
		r.Explain(config.Error, "no-agent", "changes of the config do not arrive, and nothing restores the rules\n"+
			"kubectl -n kube-system get pods -o wide -l app.kubernetes.io/name=nft-masq-agent", "no agent runs on this node")
	}
	for _, s := range r.SNAT {
		if len(s.Present) == 0 && len(s.Absent) > 0 {
			r.Explain(config.Error, "snat-missing", s.String(), "this node has none of %s", config.KeySNATAddresses)
		}
	}
	weight := func(p config.Problem) int {
		if i := slices.Index(weights, p.ID); i >= 0 {
			return i
		}
		return slices.Index(weights, "")
	}
	slices.SortStableFunc(r.Errors, func(a, b config.Problem) int { return cmp.Compare(weight(a), weight(b)) })
	r.setAreas()
}

// installed says which rules of ours the kernel has.
func (r *Status) installed() string {
	if r.Kernel.Hash == "" {
		return "none of our rules are installed"
	}
	return fmt.Sprintf("installed: %s, mode %s", r.Kernel.Hash, r.Kernel.Mode)
}

func (r *Status) source() string {
	if len(r.Config.Files) == 0 {
		return "built-in defaults (no config at " + r.Config.Path + ")"
	}
	return strings.Join(r.Config.Files, ", ")
}

func (r *Status) running() string {
	if r.Agent == nil {
		return "no agent runs on this node"
	}
	return "the agent runs, " + report.Process(r.Agent.PID)
}

func (r *Status) writeCounters(b *strings.Builder) {
	if len(r.Counters) == 0 || r.Kernel.Hash == "" {
		return
	}
	if !slices.ContainsFunc(r.Counters, func(c Counter) bool { return c.Count > 0 }) {
		b.WriteString("\nNo connection has been counted yet. If pods do connect, a data plane such as eBPF bypasses " +
			"netfilter.\n")
	}
	b.WriteString("\nConnections since the counters were created:\n")
	for _, c := range r.Counters {
		fmt.Fprintf(b, "  %-5s %-12s %12d\n", c.Family, c.Verdict, c.Count)
	}
	for _, u := range r.Untranslated {
		fmt.Fprintf(b, "  %-5s %-12s %12d packets of pods without a connection, dropped (%s)\n", u.Family, nft.Invalid,
			u.Packets,
			config.KeyDropInvalid)
	}
}
