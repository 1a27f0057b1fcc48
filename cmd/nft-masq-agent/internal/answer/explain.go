package answer

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/node"
)

// An Explanation is the output of explain. As JSON, fields are only ever added.
type Explanation struct {
	Destination string   `json:"destination"`
	First       []string `json:"first,omitempty"`  // what is wrong on this node
	Absent      bool     `json:"absent,omitempty"` // none of our rules are installed, so the answers are the config's
	Headline    string   `json:"headline,omitempty"`
	Sees        string   `json:"sees,omitempty"`     // the address that the destination sees; none: unknown, or the pod's own
	Possible    []string `json:"possible,omitempty"` // what it may see, if unknown
	Why         Why      `json:"why"`
	Config      string   `json:"config"`          // hash
	Live        bool     `json:"live"`            // from the kernel's rules, not the config
	Whose       string   `json:"agent,omitempty"` // whose flags are used, as text
	Answers     []Answer `json:"answers"`         // several if it depends on the source and none was given
	Stale       int      `json:"stale,omitempty"` // existing connections opened under an earlier policy
	Notes       []string `json:"notes"`

	rule string // the entry of snatRules that decides
}

// SetStale adds the number of existing connections that were opened under an
// earlier policy.
func (x *Explanation) SetStale(n int) {
	if x.Stale = n; n > 0 {
		x.Notes = append(x.Notes, Plural(n, "connection")+" to it "+either(n == 1, "was",
			"were")+" opened under an earlier policy.")
	}
}

// An Answer is the verdict for a source: local, exempt or masqueraded.
type Answer struct {
	Source  string      `json:"source"` // an address, or a description
	Verdict nft.Verdict `json:"verdict"`
	Steps   []Step      `json:"steps"`

	sees string // if it is masqueraded, in words
}

// snatText names the address of snatAddresses for a source, as far as it is known.
func snatText(s nft.SNAT, src netip.Addr) string {
	switch only := len(s.Present) == 1; {
	case len(s.Present) == 0:
		return "an address of " + config.KeySNATAddresses + ", if this node has one, or else this node's"
	case only || src.IsValid():
		a, _ := s.Of(cmp.Or(src, s.Present[0]))
		return a.String() + ", one of " + config.KeySNATAddresses
	}
	return "one of " + addressList(s.Present) + ", by its source"
}

// A Step is a question of the policy. The last one of an answer decides.
type Step struct {
	Question string `json:"question"`
	Yes      bool   `json:"yes"`
	CIDR     string `json:"cidr,omitempty"` // that contains the address
	// Interface is the entry that matches the interface.
	Interface string `json:"interface,omitempty"`
	Place     string `json:"place,omitempty"` // FILE:LINE:COL, or a description if it is not from a file
}

// Ask adds the answers for a connection, from any pod if src is the zero address,
// and notes about surprising ones. It is about packets on the first of the routes.
func (x *Explanation) Ask(p nft.Policy, src, dst netip.Addr, routes node.Routes) {
	to := routes.Ways[0]
	c := nft.Connection{
		Src: src, Dst: dst, In: routes.Back.Interface.Name, Out: to.Interface.Name,
		FromNode: routes.Back.Type == unix.RTN_LOCAL, ToNode: to.Type == unix.RTN_LOCAL || dst.IsLoopback(),
	}
	asks := sourceQuestions(p, dst.Is6())
	switch {
	case src.IsValid():
		x.add(p, src.String(), c, nil)
	case c.ToNode || len(asks) == 0:
		x.add(p, "any pod", c, nil)
	default:
		x.answerForSources(p, nft.Connection{Dst: dst, Out: c.Out}, asks)
	}
	if p.Enforce != nil && !src.IsValid() {
		x.Notes = append(x.Notes,
			"Pod traffic to an exempt destination keeps its address even if another program would translate it later (enforceNonMasquerade).")
	}
	if len(routes.Ways) > 1 && c.Out != "" {
		x.Notes = append(x.Notes, fmt.Sprintf("The steps above are for packets that leave by %s.", config.Printable(c.Out)))
	}
	toMany := to.Type == unix.RTN_BROADCAST || dst.IsMulticast() || dst == netip.AddrFrom4([4]byte{255, 255, 255, 255})
	nodeExempt, snat := exemptsNode(p, nft.Connection{Dst: dst, FromNode: true, Out: c.Out}), p.SNATOf(dst.Is6())
	if p.DropInvalid {
		x.Notes = append(x.Notes, "Packets of pods that belong to no connection are dropped where connections are masqueraded (dropInvalid).")
	}
	if x.rule != "" {
		x.Notes = append(x.Notes, "The source address is that of "+x.rule+".")
	}
	x.note(c, toMany, nodeExempt, p.Enforced(c), len(snat.CIDRs) > 0)
}

func (x *Explanation) add(p nft.Policy, source string, c nft.Connection, answers func(nft.Question) bool) {
	steps := p.ExplainSources(c, answers)
	a := Answer{Source: source, Verdict: steps[len(steps)-1].Verdict, sees: "this node's address"}
	entries, _ := p.SNATRules()
	switch snat, rule := p.SourceOf(c); {
	case c.FromNode:
	case entries > 0 && !c.Src.IsValid():
		a.sees = "the address that " + config.KeySNATRules + " choose for its source (--from)"
	case rule != nil:
		one, _ := snat.Of(c.Src)
		a.sees = fmt.Sprintf("%s, by entry %d of %s", one, rule.Place, config.KeySNATRules)
		x.rule = fmt.Sprintf("entry %d of %s (%s)", rule.Place, config.KeySNATRules, rule.At)
	case len(snat.CIDRs) > 0:
		a.sees = snatText(snat, c.Src)
	}
	for _, s := range steps {
		a.Steps = append(a.Steps, explainStep(s))
	}
	x.Answers = append(x.Answers, a)
}

// sourceQuestions returns the questions about the source.
func sourceQuestions(p nft.Policy, ipv6 bool) (asks []nft.Question) {
	for _, f := range p.Families {
		for _, q := range f.Questions {
			if f.IPv6 == ipv6 && q.AsksSource() {
				asks = append(asks, q)
			}
		}
	}
	return asks
}

// answerForSources adds answers for the sources that pass the lists of sources,
// and for those that each list stops.
func (x *Explanation) answerForSources(p nft.Policy, c nft.Connection, asks []nft.Question) {
	words := func(q nft.Question, yes bool) string {
		if q.Asks == config.ReceivedOn {
			return either(yes, "received on one of ", "received on none of ") + q.Key
		}
		return either(yes, "in ", "not in ") + q.Key
	}
	var pass []string
	for _, q := range asks {
		pass = append(pass, words(q, q.Outside))
	}
	x.add(p, "a source "+strings.Join(pass, " and "), c, func(q nft.Question) bool { return q.Outside })
	for _, stop := range asks {
		x.add(p, "a source "+words(stop, !stop.Outside), c,
			func(q nft.Question) bool { return q.Outside != (q.Key == stop.Key) })
	}
}

// explainStep converts a step for output.
func explainStep(s nft.Step) Step {
	out := Step{Question: s.Question, Yes: s.Yes, Interface: s.Name}
	if s.Yes && s.CIDR != (config.CIDR{}) {
		out.Place = place(s.CIDR)
	}
	if s.CIDR.IsValid() {
		out.CIDR = s.CIDR.String()
	}
	return out
}

// exemptsNode reports whether a condition that no pod matches decides for this
// node's own traffic.
func exemptsNode(p nft.Policy, c nft.Connection) bool {
	steps := p.Explain(c)
	last := steps[len(steps)-1]
	return slices.ContainsFunc(config.Conditions(), func(row config.Row) bool {
		return row.Key == last.Key && (row.Asks == config.SentByNode || row.Asks == config.ReceivedOn)
	})
}

// note adds notes about surprising answers.
func (x *Explanation) note(c nft.Connection, toMany, nodeExempt, enforced, snat bool) {
	var exempt, masqueraded bool
	for _, a := range x.Answers {
		exempt = exempt || a.Verdict == nft.Exempt
		masqueraded = masqueraded || a.Verdict == nft.Masqueraded
	}
	notes := []struct {
		holds bool
		text  string
	}{
		{masqueraded && toMany, "Multicast and broadcast are masqueraded too, as with the older agents."},
		{
			masqueraded && !c.Src.IsValid() && !nodeExempt && snat,
			"The node's own traffic is masqueraded with the address of its interface.",
		},
		{
			masqueraded && !c.Src.IsValid() && len(x.Answers) == 1 && !nodeExempt && !snat,
			"The node's own traffic is masqueraded like a pod's.",
		},
		{masqueraded && !c.Src.IsValid() && nodeExempt, "The node's own traffic keeps its address."},
		{masqueraded && c.FromNode, "The source is this node; its own traffic is masqueraded too."},
		{
			enforced && x.Headline == "",
			"It keeps its address also if another program would translate it later (enforceNonMasquerade).",
		},
		{
			exempt && !enforced && x.Headline == "",
			"Not by this agent, that is: another rule on the node may still masquerade it.",
		},
		{true, "This applies to new connections; existing connections keep their address."},
	}
	for _, n := range notes {
		if n.holds {
			x.Notes = append(x.Notes, n.text)
		}
	}
}

// String returns the output as text.
func (x *Explanation) String() string {
	var b strings.Builder
	lines(&b, "", x.First...)
	if x.Headline != "" {
		lines(&b, "", x.Headline)
	}
	lines(&b, "  ", x.Possible...)
	if b.Len() > 0 {
		b.WriteString("\n")
	}
	for _, a := range x.Answers {
		a.write(&b, x)
	}
	lines(&b, "", x.Notes...)
	if len(x.Answers) == 0 {
		return b.String()
	}
	fmt.Fprintf(&b, "%s %s\n", either(x.Live, "kernel", "config"), x.Config)
	if x.Whose != "" {
		lines(&b, "", x.Whose)
	}
	return b.String()
}

func (a Answer) write(b *strings.Builder, x *Explanation) {
	means := map[nft.Verdict]string{
		nft.Local:       x.Destination + " is an address of this node",
		nft.Exempt:      x.Destination + " sees the source's own address",
		nft.Masqueraded: x.Destination + " sees " + a.sees,
	}[a.Verdict]
	by := either(x.Absent, "If the config were applied, a connection from %s would be %s%s",
		"By this agent's policy a connection from %s is %s%s")
	if x.Headline != "" { // which contains what it sees
		means = ":"
	} else {
		means = ": " + means + "."
	}
	lines(b, "", fmt.Sprintf(by, a.Source, either(a.Verdict == nft.Masqueraded, "masqueraded", "not masqueraded"), means))
	b.WriteString("\n")
	width := 0
	for _, s := range a.Steps {
		width = max(width, len(s.Question))
	}
	for i, s := range a.Steps {
		fmt.Fprintf(b, "  %d  %-*s  %s\n", i+1, width, s.Question, s.reply(a.Verdict, i == len(a.Steps)-1))
		if s.Place != "" {
			fmt.Fprintf(b, "     %s\n", s.Place)
		}
	}
	b.WriteString("\n")
}

func (s Step) reply(v nft.Verdict, decides bool) string {
	reply := either(s.Yes, "yes", "no")
	if hit := cmp.Or(s.CIDR, s.Interface); hit != "" {
		reply += ", " + hit
	}
	if decides {
		reply += either(v == nft.Masqueraded, ": masqueraded", ": not masqueraded")
	}
	return reply
}
