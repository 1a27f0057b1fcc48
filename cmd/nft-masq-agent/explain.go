package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/kernel"

	"golang.org/x/sys/unix"
)

type explainFlags struct {
	*options
	set    *flag.FlagSet
	from   netip.Addr // zero: any pod
	live   bool
	output string
}

func explainCommand() command {
	return command{
		name:     "explain",
		operands: "ADDRESS",
		about:    "says whether a new connection to ADDRESS is masqueraded, and why",
		details: "It goes through the questions that are asked of a connection's first packet, and names the CIDR and the place " +
			"in the file that decide. Without flags about the policy it takes those of an agent that runs here. " +
			"Nothing is written, and the kernel is read with --live alone.",
		examples: []string{
			program + " explain 10.1.2.3",
			program + " explain 203.0.113.7 --from 10.244.1.5 --config ./ip-masq-agent",
			program + " explain 10.1.2.3 --live",
		},
		flags: func(fs *flag.FlagSet) action {
			f := explainFlags{options: addPolicyFlags(fs), set: fs}
			addFlag(fs, &f.from, "from", "", "`SOURCE` address of the connection (default: a pod's)", parseAddress)
			fs.BoolVar(&f.live, "live", false, "ask the rules and sets that the kernel holds now, not the config")
			addFlag(fs, &f.output, "o", outputText, "text or json `FORMAT` of the answer", oneOf(outputText, outputJSON))
			return func(_ context.Context, operands []string, e environment) (int, error) {
				return f.explain(operands[0], e)
			}
		},
	}
}

// parseAddress reads an address and leaves out its zone and the mapping of IPv4
// to IPv6, which no packet carries.
func parseAddress(s string) (netip.Addr, error) {
	a, err := netip.ParseAddr(s)
	if err != nil {
		if p, notCIDR := netip.ParsePrefix(s); notCIDR == nil {
			return netip.Addr{}, fmt.Errorf("is a CIDR; give one address, such as %s", p.Addr())
		}
		return netip.Addr{}, errors.New("is no IP address")
	}
	return a.WithZone("").Unmap(), nil
}

func (f *explainFlags) explain(operand string, e environment) (int, error) {
	dst, err := parseAddress(operand)
	if err != nil {
		return exitUsage, usagef("ADDRESS %q %w", operand, err)
	}
	if f.from.IsValid() && f.from.Is4() != dst.Is4() {
		return exitUsage, usagef("--from %s and ADDRESS %s are of two families", f.from, dst)
	}
	x := explanation{Destination: dst.String(), Live: f.live}
	var policy nft.Policy
	if f.live {
		policy, err = livePolicy()
	} else {
		policy, err = f.filePolicy(&x, e)
	}
	if err != nil {
		return refuse(e, err)
	}
	x.Config = policy.Hash()
	ends, err := e.ends(f.from, dst)
	if err != nil {
		x.Notes = append(x.Notes, fmt.Sprintf("The addresses of this node are not known: %v.", err))
	}
	x.answer(policy, f.from, dst, ends)
	if f.output == outputJSON {
		return exitDone, writeJSON(e.stdout, x)
	}
	return exitDone, write(e.stdout, x.String())
}

// filePolicy gives the policy of the config.
func (f *explainFlags) filePolicy(x *explanation, e environment) (nft.Policy, error) {
	x.Agent = f.followAgent(f.set, runningAgents(e.proc))
	l, err := f.load()
	l.warn(e)
	if err != nil && x.Agent != "" {
		_, _ = fmt.Fprintln(e.stderr, x.Agent)
	}
	return l.ruleset.Policy, err
}

// livePolicy gives the policy by which the kernel decides.
func livePolicy() (nft.Policy, error) {
	k := kernel.Open()
	defer func() { _ = k.Close() }()
	policy, found, err := k.Live()
	if err != nil {
		return nft.Policy{}, hinted(err)
	}
	if !found {
		return nft.Policy{}, errors.New("the kernel holds no rules that this version wrote: see status")
	}
	return policy, nil
}

// ends is what the node's routes say of the two ends of a connection.
type ends struct {
	fromHere, toHere, toMany bool
}

func (e environment) ends(src, dst netip.Addr) (ends, error) {
	to, err := e.routeType(dst)
	if err != nil || !src.IsValid() {
		return endsOf(unix.RTN_UNSPEC, to, dst), err
	}
	from, err := e.routeType(src)
	return endsOf(from, to, dst), err
}

func endsOf(from, to int, dst netip.Addr) ends {
	return ends{
		fromHere: from == unix.RTN_LOCAL,
		toHere:   to == unix.RTN_LOCAL || dst.IsLoopback(),
		toMany:   to == unix.RTN_BROADCAST || dst.IsMulticast() || dst == netip.AddrFrom4([4]byte{255, 255, 255, 255}),
	}
}

// An explanation is the answer of explain. As JSON, fields are only ever added.
type explanation struct {
	Destination string   `json:"destination"`
	Config      string   `json:"config"`          // hash
	Live        bool     `json:"live"`            // of the kernel's rules, not of the config
	Agent       string   `json:"agent,omitempty"` // whose flags were taken, in words
	Answers     []answer `json:"answers"`         // several where it may depend on the source and none was given
	Notes       []string `json:"notes"`
}

// An answer is the verdict for a source: local, exempt or masqueraded.
type answer struct {
	Source  string        `json:"source"` // an address, or words
	Verdict nft.Verdict   `json:"verdict"`
	Steps   []explainStep `json:"steps"`
}

// An explainStep is a question that was asked. The last one of an answer
// decides.
type explainStep struct {
	Question string `json:"question"`
	Yes      bool   `json:"yes"`
	CIDR     string `json:"cidr,omitempty"`  // that holds the address
	Place    string `json:"place,omitempty"` // FILE:LINE:COL, or words for what no file says
}

func (x *explanation) answer(p nft.Policy, src, dst netip.Addr, on ends) {
	if src.IsValid() || on.toHere || !asksForSource(p, dst.Is6()) {
		source := "any pod"
		if src.IsValid() {
			source = src.String()
		}
		x.add(p, source, src, dst, on.toHere)
	} else {
		x.answerForSources(p, dst)
	}
	x.note(src, on)
}

func (x *explanation) add(p nft.Policy, source string, src, dst netip.Addr, local bool) {
	steps := p.Explain(src, dst, local)
	a := answer{Source: source, Verdict: steps[len(steps)-1].Verdict}
	for _, s := range steps {
		step := explainWords(s)
		if x.Live && step.CIDR != "" {
			step.Place = "in the kernel"
		}
		a.Steps = append(a.Steps, step)
	}
	x.Answers = append(x.Answers, a)
}

func asksForSource(p nft.Policy, ipv6 bool) bool {
	return slices.ContainsFunc(p.Families, func(f nft.FamilyPolicy) bool {
		return f.IPv6 == ipv6 && len(f.MasqSrc.CIDRs)+len(f.NonMasqSrc.CIDRs) > 0
	})
}

// answerForSources answers for the sources that the lists of sources let pass,
// and for those that each list stops.
func (x *explanation) answerForSources(p nft.Policy, dst netip.Addr) {
	passing := nft.Policy{Families: slices.Clone(p.Families)}
	var passed []explainStep // by the sources that pass
	var pass []string
	var stopped []answer
	stop := func(key string, in bool) {
		question := "source in " + key
		words := map[bool]string{true: "in " + key, false: "not in " + key}
		steps := append(slices.Clone(passed), explainStep{Question: question, Yes: in})
		stopped = append(stopped, answer{Source: "a source " + words[in], Verdict: nft.Exempt, Steps: steps})
		passed = append(passed, explainStep{Question: question, Yes: !in})
		pass = append(pass, words[!in])
	}
	for i := range passing.Families {
		f := &passing.Families[i]
		if f.IPv6 != dst.Is6() {
			continue
		}
		for _, l := range keyedLists(*f) {
			if l.asks == "source" && len(l.CIDRs) > 0 {
				stop(l.key, l.set == "non-masq-src")
			}
		}
		f.MasqSrc, f.NonMasqSrc = nft.List{}, nft.List{}
	}
	x.add(passing, "a source "+strings.Join(pass, " and "), netip.Addr{}, dst, false)
	first := &x.Answers[len(x.Answers)-1]
	toNode := first.Steps[0]
	first.Steps = slices.Insert(first.Steps, 1, passed...)
	for _, a := range stopped {
		a.Steps = slices.Insert(a.Steps, 0, toNode)
		x.Answers = append(x.Answers, a)
	}
}

// explainWords puts a step in the words of the config.
func explainWords(s nft.Step) explainStep {
	switch s.Question {
	case "local":
		return explainStep{Question: "to an address of this node", Yes: s.Decides}
	case "family":
		return explainStep{Question: "IPv6, which is off", Yes: true}
	case "default":
		return explainStep{Question: "anything else", Yes: true}
	}
	out := explainStep{Question: s.Question, Yes: s.CIDR.IsValid()}
	for _, l := range keyedLists(nft.FamilyPolicy{}) {
		if s.Question == l.set+"-v4" || s.Question == l.set+"-v6" {
			out.Question = l.asks + " in " + l.key
		}
	}
	if out.Yes {
		out.CIDR, out.Place = s.CIDR.String(), place(s.CIDR)
	}
	return out
}

// note adds what people do not expect.
func (x *explanation) note(src netip.Addr, on ends) {
	var exempt, masqueraded bool
	for _, a := range x.Answers {
		exempt = exempt || a.Verdict == nft.Exempt
		masqueraded = masqueraded || a.Verdict == nft.Masqueraded
	}
	notes := []struct {
		holds bool
		text  string
	}{
		{masqueraded && on.toMany, "Multicast and broadcast are masqueraded too, as with the older agents."},
		{masqueraded && !src.IsValid() && len(x.Answers) == 1, "The node's own traffic is masqueraded like a pod's."},
		{masqueraded && on.fromHere, "The source is this node; its own traffic is masqueraded too."},
		{exempt, "Not by this agent, that is: another rule on the node may still masquerade it."},
		{true, "This holds for new connections; an established one keeps the address it has."},
	}
	for _, n := range notes {
		if n.holds {
			x.Notes = append(x.Notes, n.text)
		}
	}
}

// String is the answer for people.
func (x *explanation) String() string {
	var b strings.Builder
	for _, a := range x.Answers {
		a.write(&b, x.Destination)
	}
	for _, n := range x.Notes {
		b.WriteString(wrap(n, ""))
	}
	of := "config"
	if x.Live {
		of = "kernel"
	}
	fmt.Fprintf(&b, "%s %s\n", of, x.Config)
	if x.Agent != "" {
		b.WriteString(wrap(x.Agent, ""))
	}
	return b.String()
}

func (a answer) write(b *strings.Builder, dst string) {
	means := map[nft.Verdict]string{
		nft.Local:       "not masqueraded: %[1]s is an address of this node",
		nft.Exempt:      "not masqueraded: %[1]s sees the source's own address",
		nft.Masqueraded: "masqueraded: %[1]s sees this node's address",
	}[a.Verdict]
	b.WriteString(wrap(fmt.Sprintf("A new connection to %[1]s from %[2]s is "+means+".", dst, a.Source), "") + "\n")
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

func (s explainStep) reply(v nft.Verdict, decides bool) string {
	reply := "no"
	if s.Yes {
		reply = "yes"
	}
	if s.CIDR != "" {
		reply += ", " + s.CIDR
	}
	if !decides {
		return reply
	}
	if v == nft.Masqueraded {
		return reply + ": masqueraded"
	}
	return reply + ": not masqueraded"
}
