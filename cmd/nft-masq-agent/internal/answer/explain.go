package answer

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/judge"
	"nft-masq-agent/nft/others"
	"nft-masq-agent/nft/routes"
	"nft-masq-agent/nft/xtables"
)

// A Code is what the headline of explain says.
type Code string

// The codes, by rank: the first one that applies is the headline.
const (
	// ConfigRejected means that the config is rejected, and the kernel keeps an earlier policy.
	ConfigRejected Code = "config-rejected"
	// NotInstalled means that the kernel has no rules of this agent.
	NotInstalled Code = "not-installed"
	// OutOfSync means that the kernel holds another policy than the file.
	OutOfSync Code = "out-of-sync"
	// Contradicted means that connections to the address contradict the policy, and did not certainly begin
	// before it.
	Contradicted Code = "contradicted"
	// NotForwarded means that the node does not forward such packets.
	NotForwarded Code = "not-forwarded"
	// NoRoute means that the node has no route to the address.
	NoRoute Code = "no-route"
	// LocalAddress means that the address is one of this node.
	LocalAddress Code = "local"
	// Shown means that open connections to the address agree with the policy and were answered.
	Shown Code = "shown"
	// ShownByEntry means that other open connections agree, which the same entry decides.
	ShownByEntry Code = "shown-by-entry"
	// Should means that no open connection shows the answer.
	Should Code = "should"
)

// A KernelState is how our rules in the kernel compare with the config.
type KernelState int

// The states.
const (
	// InSync means that the kernel has the policy of the config.
	InSync KernelState = iota
	// Unread means that the kernel cannot be read: the answer is that of the config alone.
	Unread
	// Absent means that the kernel has no rules of ours.
	Absent
	// Differs means that the kernel has other rules than those of the config.
	Differs
)

// placeOf returns the place of the first fault in a rejected config, or its path.
func placeOf(files config.Problems, path string) string {
	for _, p := range files.Faults() {
		if p.Pos != nowhere {
			return p.Pos.String()
		}
	}
	return path
}

// A Packet is the first packet of the connection that explain is about.
type Packet struct {
	Src      netip.Addr // the zero address if the node has none to the destination
	Dst      netip.AddrPort
	Protocol uint8
	// Chosen means that the source was not given: it is a pod of this node, or the node.
	Chosen bool
}

// ExplainFacts are what explain has gathered.
type ExplainFacts struct {
	Head   cli.Head
	Config Config
	Packet Packet
	// Files is what is to be said about the files.
	Files  config.Problems
	Kernel KernelState
	// Why says what the kernel has instead, or why it cannot be read.
	Why string
	// Policy that answers, nil if none is known: that in the kernel, or else that of the config.
	Policy *nft.Policy
	Route  routes.Route
	// Kept is what the node does not forward of such packets, "" if it forwards them, and Remedy what changes that.
	Kept, Remedy string
	// ToAddress is the evidence of connections to the address, from the source unless that was not given. ToEntry is
	// that of all connections that the same entry decides, also to the address from other sources.
	ToAddress, ToEntry conntrack.Count
	Others             []others.Rule
	Legacy             []xtables.LegacyTable
}

// SetEvidence sets what open connections show: first those from the source, then those from anywhere. The latter count
// if the source was not given, is a pod, and has none.
func (f *ExplainFacts) SetEvidence(found conntrack.Evidence) {
	f.ToAddress = found.Answers[0]
	if f.Packet.Chosen && !f.Route.FromNode() && f.ToAddress.Open() == 0 {
		f.ToAddress = found.Answers[1]
	}
	family, enabled := f.Policy.Family(f.Packet.Dst.Addr().Is6())
	if enabled {
		f.ToEntry = found.Entry(judge.Rule(&family, f.connection()).Entry)
	}
}

// contradicting is how many connections contradict the policy, and did not certainly begin before it.
func contradicting(c conntrack.Count) int { return c.Overruled + c.Undated }

// contradictions returns examples of these.
func contradictions(c conntrack.Count) []conntrack.Example {
	stale := func(x conntrack.Example) bool { return x.Age == conntrack.AgeStale }
	return slices.DeleteFunc(slices.Clone(c.Examples), stale)
}

// An Explanation is the output of explain.
type Explanation struct {
	cli.Head
	// Config that the answer is about.
	Config Config `json:"config"`
	// Destination is the address that was asked for, with the port if one was.
	Destination string `json:"destination"`
	// Protocol of the packet, if one was asked for.
	Protocol string `json:"protocol,omitempty"`
	// Source of the packet that the answer is about; absent if this node has none to the destination.
	Source netip.Addr `json:"source,omitzero"`
	// Headline is the answer as a sentence.
	Headline string `json:"headline"`
	// Details are what the headline goes on to say, such as a command.
	Details []string `json:"detailLines,omitempty"`
	// Sees is the address that the destination sees, as open connections show it; absent if none do.
	Sees netip.Addr `json:"sees,omitzero"`
	// ShouldSee is the address that the destination should see by the policy; absent if unknown.
	ShouldSee netip.Addr `json:"shouldSee,omitzero"`
	// Why is the reason for the answer.
	Why Why `json:"why"`
	// Answers of the policy: one, or none if the kernel's rules are those of no policy that is known.
	Answers []Answer `json:"answers"`
	// Open connections to the destination, and closed ones that another program decided.
	Open OpenConnections `json:"openConnections"`
	// Contradicting are connections to the destination that contradict the policy, and did not certainly begin
	// before it, at most 3.
	Contradicting []Connection `json:"contradicting,omitempty"`
	// Others are rules of other programs that name the address, and chains that translate sources.
	Others []others.Rule `json:"otherRules,omitempty"`
}

// A Why is the reason for an answer.
type Why struct {
	// Code is config-rejected, not-installed, out-of-sync, contradicted, not-forwarded, no-route, local, shown,
	// shown-by-entry or should.
	Code Code `json:"code"`
}

// OpenConnections counts open connections by what they show.
type OpenConnections struct {
	// Agreeing with the policy.
	Agreeing int `json:"agreeing"`
	// Answered are those of them that had a reply.
	Answered int `json:"answered"`
	// Contradicting the policy, and not certainly older than it.
	Contradicting int `json:"contradictingCount"`
	// Stale contradict the policy and began before it.
	Stale int `json:"staleCount"`
}

// An Answer is the verdict for a source: local, exempt or masqueraded.
type Answer struct {
	// Source address.
	Source netip.Addr `json:"source"`
	// Verdict of the policy.
	Verdict nft.Verdict `json:"verdict"`
	// Ports are the source ports of the block, FIRST-LAST, with portsPerPod.
	Ports string `json:"sourcePorts,omitempty"`
	// Steps are the questions of the policy. The last one applies.
	Steps []Step `json:"steps"`
}

// A Step is a question of the policy. The last one of an answer applies.
type Step struct {
	// Question of the policy.
	Question string `json:"question"`
	// Yes is the reply.
	Yes bool `json:"yes"`
	// Match is the CIDR that contains the address, or the entry that matches the interface.
	Match string `json:"match,omitempty"`
	// Place of that in a file, or of the list that decides because it does not have it.
	Place config.Position `json:"place,omitzero"`
}

// connection is what the policy is asked about.
func (f *ExplainFacts) connection() nft.Connection {
	dst := f.Packet.Dst.Addr()
	return nft.Connection{
		Src: f.Packet.Src, Dst: dst, InInterface: f.Route.Ingress.Name, OutInterface: f.Route.Egress.Name,
		FromNode: f.Route.FromNode(), ToNode: f.Route.Type == unix.RTN_LOCAL || dst.IsLoopback(),
	}
}

// Explain chooses one headline, and then writes the answer.
func Explain(f ExplainFacts) Explanation {
	x := Explanation{
		Head: f.Head, Config: f.Config, Destination: conntrack.HostPort(f.Packet.Dst), Source: f.Packet.Src,
		Answers: []Answer{}, Others: f.Others,
		Open: OpenConnections{
			f.ToAddress.Agrees, f.ToAddress.Answered, contradicting(f.ToAddress), f.ToAddress.Stale,
		},
	}
	for _, example := range contradictions(f.ToAddress) {
		x.Contradicting = append(x.Contradicting, exampleConnection(example))
	}
	if f.Packet.Protocol != 0 {
		x.Protocol = conntrack.ProtocolName(f.Packet.Protocol)
	}
	var e expectation
	if f.Policy != nil && f.Packet.Src.IsValid() {
		e = expect(*f.Policy, f.connection(), f.Route)
		x.Answers = append(x.Answers, e.Answer)
	}
	x.ShouldSee = e.address
	found := f.conclude(e)
	x.Why.Code = found.code
	x.Headline = found.headline
	x.Details = found.details
	x.Sees = found.sees
	if slices.Contains([]Code{ConfigRejected, NotInstalled, OutOfSync}, found.code) {
		problem := cli.Problem(config.Error, string(found.code), "%s", found.headline)
		problem.Details = strings.Join(found.details, "\n")
		x.Take(config.Problems{problem})
	}
	x.Take(f.notes())
	return x
}

// A conclusion is the headline, and what it goes on to say.
type conclusion struct {
	code     Code
	headline string
	details  []string
	// sees is the address that the destination sees of the next packet, as answered connections show it: all the same,
	// and none leads to another address. It is the zero address if they do not show it.
	sees netip.Addr
}

// conclude chooses the first headline that applies.
func (f *ExplainFacts) conclude(e expectation) conclusion {
	destination := conntrack.HostPort(f.Packet.Dst)
	if !f.Config.Accepted {
		headline := "the config is rejected; " + cmp.Or(f.Why, "none of our rules are installed")
		fix := "fix " + placeOf(f.Files, f.Config.Path)
		return conclusion{code: ConfigRejected, headline: headline, details: append(f.inForce(e), fix)}
	}
	if f.Kernel == Absent {
		c := conclusion{code: NotInstalled, headline: "None of this agent's rules are installed on this node."}
		if e.words != "" {
			c.details = []string{fmt.Sprintf("with the config, %s would see %s: %s", destination, e.words, e.policy)}
		}
		c.details = append(c.details, "nft-masq-agent status says what is wrong")
		return c
	}
	if f.Kernel == Differs {
		return conclusion{code: OutOfSync, headline: f.Why + ".", details: f.inForce(e)}
	}
	if contradicting(f.ToAddress) > 0 {
		return f.contradicted(e)
	}
	if f.Kept != "" && !f.Route.FromNode() {
		headline := fmt.Sprintf("%s sees nothing: this node forwards no %s.", destination, f.Kept)
		return conclusion{code: NotForwarded, headline: headline, details: []string{f.Remedy}}
	}
	if !f.Packet.Src.IsValid() || f.Route.Type == unix.RTN_UNSPEC {
		headline := "This node has no route to " + destination
		if f.Packet.Src.IsValid() {
			headline += " for a packet from " + f.Packet.Src.String()
		}
		return conclusion{code: NoRoute, headline: headline + "."}
	}
	if f.connection().ToNode {
		headline := fmt.Sprintf("%s is an address of this node: this agent does not masquerade a connection from %s.",
			destination, f.Packet.Src)
		return conclusion{code: LocalAddress, headline: headline}
	}
	if f.ToAddress.Answered > 0 {
		return f.shown(e)
	}
	return f.should(e)
}

// inForce is the answer of the policy in force, if that is known.
func (f *ExplainFacts) inForce(e expectation) []string {
	if e.words == "" {
		return nil
	}
	return []string{
		fmt.Sprintf("by the policy in force, %s should see %s: %s", conntrack.HostPort(f.Packet.Dst), e.words, e.policy),
	}
}

// contradicted is about connections that contradict the policy.
func (f *ExplainFacts) contradicted(e expectation) conclusion {
	c := conclusion{code: Contradicted}
	evidence := f.ToAddress
	examples := contradictions(evidence)
	var seen []netip.Addr
	answered := false
	for _, x := range examples {
		answered = answered || x.Status&conntrack.SeenReply != 0
		if !slices.Contains(seen, x.SeenAs().Addr()) {
			seen = append(seen, x.SeenAs().Addr())
		}
		c.details = append(c.details, fmt.Sprintf("%s %s to %s is seen as %s", conntrack.ProtocolName(x.Original.Protocol),
			conntrack.HostPort(x.Original.Src), conntrack.HostPort(x.Destination()), conntrack.HostPort(x.SeenAs())))
	}
	expected := e.words
	if len(evidence.Endpoints) > 0 {
		expected = "what the policy says of " + listed(cli.Texts(evidence.Endpoints))
	} else if len(seen) == 1 && answered && evidence.Agrees == 0 {
		c.sees = seen[0]
	}
	n := contradicting(evidence)
	c.headline = fmt.Sprintf("%s to %s %s %s, not %s: %s.", Plural(n, "connection"), conntrack.HostPort(f.Packet.Dst),
		verb(n, "show"), listed(cli.Texts(seen)), expected, choose(evidence.Overruled == 0,
			"they began before the policy, or another program decides", "another program decides"))
	if right := evidence.Agrees + evidence.Closed; right > 0 {
		c.details = append(c.details, Plural(right, "connection")+" to it "+verb(right, "agree")+" with the policy")
	}
	c.details = append(c.details, f.others()...)
	return c
}

// shown is about answered connections, which agree with the policy. They need not show the address that it should be:
// another program may have chosen that, or they lead to another address.
func (f *ExplainFacts) shown(e expectation) conclusion {
	c := conclusion{code: Shown}
	evidence := f.ToAddress
	destination := conntrack.HostPort(f.Packet.Dst)
	n := evidence.Agrees
	counted := Plural(n, "open connection") + " to it"
	if len(evidence.Endpoints) == 0 && len(evidence.Seen) == 1 {
		c.sees = evidence.Seen[0]
	}
	switch {
	case len(evidence.Endpoints) > 0:
		c.headline = fmt.Sprintf("%s to %s %s to %s, %s %s, and %s with the policy: another endpoint may see another "+
			"address.", Plural(n, "open connection"), destination, verb(n, "lead"), listed(cli.Texts(evidence.Endpoints)),
			verb(n, "show"), listed(cli.Texts(evidence.Seen)), verb(n, "agree"))
	case c.sees.IsValid() && c.sees == e.address:
		c.headline = fmt.Sprintf("%s sees %s: %s; %s %s.", destination, e.words, e.policy, counted, verb(n, "agree"))
		return c
	default:
		c.headline = fmt.Sprintf("%s sees %s, as %s %s; it should see %s.", destination, listed(cli.Texts(evidence.Seen)),
			counted, verb(n, "show"), e.words)
	}
	c.details = f.others()
	return c
}

// should is the answer of the policy, which no connection to the address shows.
func (f *ExplainFacts) should(e expectation) conclusion {
	c := conclusion{code: Should, details: f.others()}
	destination := conntrack.HostPort(f.Packet.Dst)
	if e.words == "" {
		c.headline = fmt.Sprintf("What %s should see is unknown: the policy in the kernel is not that of a config that is "+
			"known.", destination)
		return c
	}
	shows := "no open connection shows it"
	switch {
	case f.ToAddress.Agrees > 0:
		n := f.ToAddress.Agrees
		shows = fmt.Sprintf("%s to it %s, but none was answered", Plural(n, "open connection"), verb(n, "agree"))
	case f.ToEntry.Answered > 0:
		n := f.ToEntry.Agrees
		shows += fmt.Sprintf(", but %s that the same entry decides %s", Plural(n, "open connection"), verb(n, "agree"))
		c.code = ShownByEntry
	}
	c.headline = fmt.Sprintf("%s should see %s: %s; %s.", destination, e.words, e.policy, shows)
	return c
}

// An expectation is what the destination should see by the policy.
type expectation struct {
	Answer
	// address that it should see, the zero address if it is unknown.
	address netip.Addr
	words   string // the address, and what it is
	policy  string // what the policy does
}

// expect asks the policy.
func expect(p nft.Policy, c nft.Connection, route routes.Route) expectation {
	steps, verdict := judge.Explain(p, c)
	e := expectation{Answer: Answer{Source: c.Src, Verdict: verdict}}
	for i, s := range steps {
		e.Steps = append(e.Steps, explainStep(s, i == len(steps)-1))
	}
	if e.Verdict != nft.Masqueraded {
		e.address = c.Src
		e.words = c.Src.String() + ", the source's own address"
		e.policy = "this agent does not masquerade it"
		if judge.Enforced(p, c) {
			e.policy = "this agent enforces that (" + config.KeyEnforceNonMasquerade + ")"
		}
		return e
	}
	e.policy = "masqueraded by this agent"
	e.masquerade(p, c, route)
	if blocks := p.PortBlocks(c.Dst.Is6()); blocks.Count() > 0 {
		e.Ports = blockPorts(blocks, c)
		whose := "this node's own block"
		if !c.FromNode {
			whose = "the block of " + c.Src.String()
		}
		e.policy += fmt.Sprintf("; the source port, or the identifier of an ICMP echo, is one of %s, %s (%s)", e.Ports, whose,
			config.KeyPortsPerPod)
	}
	return e
}

// masquerade finds the address of a masqueraded connection.
func (e *expectation) masquerade(p nft.Policy, c nft.Connection, route routes.Route) {
	e.address = route.Address
	e.words = "this node's address"
	if route.Address.IsValid() {
		e.words = fmt.Sprintf("%s, the address of %s", route.Address, config.Printable(route.Egress.Name))
	}
	if c.FromNode {
		return
	}
	address, rule := judge.SourceAddress(p, c)
	if address.IsValid() {
		e.address = address
		e.words = address.String() + ", " + choose(rule.Number == 0, "one of ", "by ") + entryName(rule)
	}
}

func explainStep(s judge.Step, decides bool) Step {
	step := Step{Question: s.Question, Yes: s.Yes, Match: s.Name}
	if s.CIDR.IsValid() {
		step.Match = s.CIDR.String()
	}
	if s.Yes || decides {
		step.Place = s.Place()
	}
	return step
}

// others names what may interfere, and the command that asks the kernel.
func (f *ExplainFacts) others() (lines []string) {
	const limit = 8
	for i, o := range f.Others {
		if i == limit {
			lines = append(lines, "and more: nft -a list ruleset")
			break
		}
		if o.Handle == 0 {
			lines = append(lines, fmt.Sprintf("chain %s %s of another program may translate sources: %s", o.Table, o.Chain,
				o.Command))
			continue
		}
		lines = append(lines, fmt.Sprintf("rule %s %s handle %d of another program names one of the addresses: %s", o.Table,
			o.Chain, o.Handle, o.Command))
	}
	for _, table := range f.Legacy {
		lines = append(lines, fmt.Sprintf("legacy ip_tables (%s) may decide, too: %s shows it", table, table.Command()))
	}
	trace := "nft-masq-agent explain " + conntrack.HostPort(f.Packet.Dst)
	if f.Packet.Src.IsValid() {
		trace += " --from " + f.Packet.Src.String()
	}
	if f.Packet.Protocol != 0 {
		trace += " --protocol " + conntrack.ProtocolName(f.Packet.Protocol)
	}
	return append(lines, trace+" --trace names each rule that the next connection meets")
}

// notes are about the packet, and surprising answers.
func (f *ExplainFacts) notes() (notes config.Problems) {
	add := func(level config.Level, id, format string, args ...any) {
		notes = append(notes, cli.Problem(level, id, format, args...))
	}
	c := f.connection()
	if f.Kernel == Unread {
		add(config.Warning, "kernel-unread", "%s; the answer is from the config only", f.Why)
	}
	if f.Packet.Chosen && c.FromNode && c.Src.IsValid() {
		add(config.Note, "packet", "The packet is from %s, this node itself: --from asks about another.", c.Src)
	}
	if n := f.ToAddress.Stale; n > 0 {
		add(config.Note, "stale-connections", "%s to it %s from an earlier policy.", Plural(n, "connection"),
			verb(n, "date"))
	}
	return notes
}

// Print writes the answer as text.
func (x *Explanation) Print(t cli.Text) {
	t.Line("%s", x.Headline)
	for _, line := range x.Details {
		t.Line("  %s", line)
	}
	t.Problems(x.Warnings)
	t.Line("")
	for _, a := range x.Answers {
		a.print(t)
	}
	cli.Lines(t, "", x.Notes)
}

func (a Answer) print(t cli.Text) {
	t.Line("The policy, for a connection from %s:\n", a.Source)
	width := 0
	for _, s := range a.Steps {
		width = max(width, len(s.Question))
	}
	for i, s := range a.Steps {
		t.Line("  %d  %-*s  %s", i+1, width, s.Question, s.reply(a.Verdict, i == len(a.Steps)-1))
		if s.Match != "" || s.Place != nowhere {
			t.Line("     %s", placeText(s.Place, s.Match))
		}
	}
	t.Line("")
}

func (s Step) reply(v nft.Verdict, decides bool) string {
	reply := choose(s.Yes, "yes", "no")
	if s.Match != "" {
		reply += ", " + s.Match
	}
	if decides {
		reply += choose(v == nft.Masqueraded, ": masqueraded", ": not masqueraded")
	}
	return reply
}
