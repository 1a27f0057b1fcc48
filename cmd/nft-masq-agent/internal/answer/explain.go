package answer

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/nft-masq-agent/internal/reply"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/judge"
	"nft-masq-agent/nft/routes"
	"nft-masq-agent/nft/trace"
)

// An Explanation is the output of explain.
type Explanation struct {
	reply.Head
	// Config that the answer is about.
	Config Config `json:"config"`
	// Destination is the address that was asked for.
	Destination string `json:"destination"`
	// Protocol of the packet, if one was asked for.
	Protocol string `json:"protocol,omitempty"`
	// Port of the destination, if one was asked for.
	Port uint16 `json:"port,omitempty"`
	// Source of the packet that the answer is about; absent if this node has none to the destination.
	Source string `json:"source,omitempty"`
	// Absent means that none of this agent's rules are installed, so the answers are the config's.
	Absent bool `json:"notInstalled,omitempty"`
	// Headline is the answer as a sentence.
	Headline string `json:"headline,omitempty"`
	// Details are what the headline goes on to say, such as a command, one per line.
	Details string `json:"details,omitempty"`
	// Sees is the address that the destination sees; absent if unknown.
	Sees string `json:"sees,omitempty"`
	// Possible is what the destination may see, if that is unknown.
	Possible []string `json:"possible,omitempty"`
	// Why is the reason for the answer.
	Why Why `json:"why"`
	// Live means that the answer is from the kernel's rules, not the config.
	Live bool `json:"live"`
	// Answers of the policy: one, or none if the kernel's rules are those of no policy that is known.
	Answers []Answer `json:"answers"`
	// Stale counts existing connections to the destination that were opened under an earlier policy.
	Stale *Stale `json:"staleConnections,omitempty"`
	// Against are open connections from the source to the destination that are seen as another
	// address than this answer says, at most 8.
	Against []Connection `json:"contradicting,omitempty"`

	to string // the destination, in sentences
}

// SetDestination sets the destination, of a protocol and a port if these are not 0.
func (x *Explanation) SetDestination(dst netip.AddrPort, protocol uint8) {
	x.Destination, x.Port, x.to = dst.Addr().String(), dst.Port(), End(dst)
	if protocol != 0 {
		x.Protocol = conntrack.ProtocolName(protocol)
	}
}

// SetSource sets the source of the packet. If it was not given, a pod is chosen, or the node.
func (x *Explanation) SetSource(src netip.Addr, given, ofNode bool) {
	if src.IsValid() {
		x.Source = src.String()
	}
	if !given && src.IsValid() {
		x.Add(config.Note, "packet", "The packet is from %s, %s: --from asks about another.", src,
			either(ofNode, "this node itself", "a pod of this node"))
	}
}

// SetStale adds the number of existing connections that were opened under an
// earlier policy.
func (x *Explanation) SetStale(n int) {
	if x.Stale = (&Stale{Count: n}); n > 0 {
		x.Add(config.Note, "stale-connections", "%s to it %s opened under an earlier policy.", Plural(n, "connection"),
			either(n == 1, "was", "were"))
	}
}

// SetAgainst adds the open connections that contradict the answer.
func (x *Explanation) SetAgainst(all []Connection) {
	if x.Against = all; len(all) == 0 {
		return
	}
	details := "Open connections contradict this, if they did not begin under other rules:"
	for _, c := range all {
		to := cmp.Or(c.Requested, c.Destination)
		details += fmt.Sprintf("\n%s %s to %s is seen as %s", c.Protocol, c.Source, to, c.SeenAs)
	}
	x.Details = strings.TrimPrefix(x.Details+"\n"+details, "\n")
}

// An Answer is the verdict for a source: local, exempt or masqueraded.
type Answer struct {
	// Source address.
	Source string `json:"source"`
	// Verdict of the policy.
	Verdict nft.Verdict `json:"verdict"`
	// Ports are the source ports of the block, FIRST-LAST, with portsPerPod.
	Ports string `json:"sourcePorts,omitempty"`
	// Steps are the questions of the policy. The last one applies.
	Steps []Step `json:"steps"`

	sees string // if it is masqueraded, in words
}

// A Step is a question of the policy. The last one of an answer applies.
type Step struct {
	// Question of the policy.
	Question string `json:"question"`
	// Yes is the reply.
	Yes bool `json:"yes"`
	// CIDR that contains the address.
	CIDR string `json:"cidr,omitempty"`
	// Interface is the entry that matches the interface.
	Interface string `json:"interface,omitempty"`
	// Listed is the list that does not have it, which begins at the place.
	Listed string `json:"listed,omitempty"`
	origin
}

// Ask adds the answer of the policy for a connection, and notes about surprising ones. It is about
// packets on the first of the routes.
func (x *Explanation) Ask(p nft.Policy, src, dst netip.Addr, ways routes.Routes) {
	to := ways.Ways[0]
	c := nft.Connection{
		Src: src, Dst: dst, In: ways.Back.Interface.Name, Out: to.Interface.Name,
		FromNode: ways.Back.Type == unix.RTN_LOCAL, ToNode: to.Type == unix.RTN_LOCAL || dst.IsLoopback(),
	}
	x.add(p, c)
	if len(ways.Ways) > 1 && c.Out != "" {
		x.Add(config.Note, "interface", "The steps above are for packets that leave by %s.", config.Printable(c.Out))
	}
	if p.DropInvalid {
		x.Add(config.Note, "drop-invalid", "Packets of pods that belong to no connection are dropped where connections are "+
			"masqueraded (dropInvalid).")
	}
	toMany := to.Type == unix.RTN_BROADCAST || dst.IsMulticast() || dst == netip.AddrFrom4([4]byte{255, 255, 255, 255})
	x.note(c, toMany, judge.Enforced(p, c))
}

func (x *Explanation) add(p nft.Policy, c nft.Connection) {
	steps := judge.Explain(p, c)
	a := Answer{Source: c.Src.String(), Verdict: steps[len(steps)-1].Verdict, sees: "this node's address"}
	if a.Verdict == nft.Masqueraded && !c.FromNode {
		snat, rules := judge.SourceOf(p, c)
		one, present := snat.Of(c.Src)
		switch {
		case present:
			a.sees = one.String() + ", one of " + config.KeySNATAddresses
		case len(snat.CIDRs) > 0:
			a.sees = "an address of " + config.KeySNATAddresses + ", if this node has one, or else this node's"
		}
		for _, r := range rules {
			if len(r.Present) == 0 {
				x.Add(config.Note, "snat-rule-absent", "Entry %d of %s (%s) matches, but this node has no address of it.", r.Place,
					config.KeySNATRules, r.At)
				continue
			}
			a.sees = fmt.Sprintf("%s, by entry %d of %s", one, r.Place, config.KeySNATRules)
			x.Add(config.Note, "snat-rule", "The source address is that of entry %d of %s (%s).", r.Place, config.KeySNATRules,
				r.At)
		}
	}
	if b := p.PortBlocks(c.Dst.Is6()); b.Count() > 0 && a.Verdict == nft.Masqueraded {
		a.Ports = blockPorts(b, c)
		x.Add(config.Note, "source-port", "The source port, or the identifier of an ICMP echo, is one of %s (%s).", a.Ports,
			config.KeyPortsPerPod)
	}
	for _, s := range steps {
		a.Steps = append(a.Steps, explainStep(s))
	}
	x.Answers = append(x.Answers, a)
}

func explainStep(s judge.Step) Step {
	out := Step{Question: s.Question, Yes: s.Yes, Interface: s.Name}
	if s.Yes && s.CIDR != (config.CIDR{}) {
		out.origin = originOf(s.CIDR.Pos)
	}
	switch {
	case s.Yes:
	case len(s.Of.CIDRs) > 0:
		list := slices.DeleteFunc(slices.Clone(s.Of.CIDRs), func(c config.CIDR) bool { return c.Pos == nowhere })
		if len(list) == 0 { // nothing of it is from the file
			list = s.Of.CIDRs
		}
		out.origin, out.Listed = originOf(list[0].Pos), addressList(list)
	case len(s.Of.Interfaces) > 0:
		out.origin, out.Listed = originOf(s.Of.Interfaces[0].Pos), strings.Join(config.Names(s.Of.Interfaces), ", ")
	}
	if s.CIDR.IsValid() {
		out.CIDR = s.CIDR.String()
	}
	return out
}

// note adds notes about surprising answers.
func (x *Explanation) note(c nft.Connection, toMany, enforced bool) {
	verdict := x.Answers[0].Verdict
	if verdict == nft.Masqueraded && toMany && x.Why.Code != string(trace.Drops) {
		x.Add(config.Note, "multicast", "Multicast and broadcast are masqueraded too, as with the older agents.")
	}
	if verdict == nft.Masqueraded && c.FromNode {
		x.Add(config.Note, "own-traffic", "The source is this node; its own traffic is masqueraded too.")
	}
	switch {
	case x.Headline != "":
	case enforced:
		x.Add(config.Note, "enforced",
			"It keeps its address even if another program would translate it later (enforceNonMasquerade).")
	case verdict == nft.Exempt:
		x.Add(config.Note, "others", "Another rule on the node may still masquerade it.")
	}
	x.Add(config.Note, "existing", "This applies to new connections; existing connections keep their address.")
}

// String returns the output as text.
func (x *Explanation) String() string {
	var b strings.Builder
	write(&b, slices.Concat(x.Errors, x.Warnings))
	if x.Headline != "" {
		first(&b, x.Headline)
	}
	if x.Details != "" {
		lines(&b, "  ", strings.Split(x.Details, "\n")...)
	}
	lines(&b, "  ", x.Possible...)
	if b.Len() > 0 {
		b.WriteString("\n")
	}
	for _, a := range x.Answers {
		a.write(&b, x)
	}
	lines(&b, "", texts(x.Notes)...)
	if len(x.Answers) > 0 {
		fmt.Fprintf(&b, "%s %s\n", either(x.Live, "kernel", "config"), cmp.Or(x.Config.Enforced, x.Config.Hash))
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
		"By this agent's policy, a connection from %s is %s%s")
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
		if s.Place != nowhere || s.Default {
			at := s.place(s.CIDR)
			if s.Listed != "" {
				at = fmt.Sprintf("(%s: %s)", at, s.Listed)
			}
			fmt.Fprintf(b, "     %s\n", at)
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
