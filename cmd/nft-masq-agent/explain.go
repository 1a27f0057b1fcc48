package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
	"nft-masq-agent/cmd/nft-masq-agent/internal/health"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/judge"
	"nft-masq-agent/nft/others"
	"nft-masq-agent/nft/routes"
	"nft-masq-agent/nft/xtables"
)

type explainFlags struct {
	*nodeFlags
	source netip.Addr // zero: a pod's, or else the node's own
	link   string     // interface; empty: that of the route
	// protocol of the packet, 0 if unknown; its destination's port is that of the operand, 0 if unknown.
	protocol uint8
	trace    time.Duration // how long to wait for a packet; 0: the answer is about no packet that was sent
}

func explainCommand() command {
	return command{
		name:     "explain",
		operands: "ADDRESS[:PORT]",
		about:    "show which source address a new connection to ADDRESS has, and why",
		details: "The answer is about one packet, which it names: without --from, from a pod of this node, or else from " +
			"the node. It is that of the policy, with the CIDR and its place in the file that decides, beside what open " +
			"connections show. If none shows it, the answer is what the destination should see, with the rules of other " +
			"programs that name the address. If the kernel cannot be read, the answer comes from the config alone. Flags " +
			"that are not given are those of the running agent. Nothing is written. With --trace, the answer is what the " +
			"kernel does with the next packet that opens a connection from SOURCE, or any source, to ADDRESS: each chain and " +
			"rule that it meets, the one that decides, and whose that is. For this time there is a table inet " +
			"nft-masq-agent-trace.",
		examples: []string{
			program + " explain 10.1.2.3",
			program + " explain 203.0.113.7 --from 10.244.1.5",
			program + " explain 10.96.0.10:53 --protocol udp",
			program + " explain 203.0.113.7 --out eth1",
			program + " explain 203.0.113.7:443 --from 10.244.1.5 --trace",
		},
		flags: func(fs *flag.FlagSet) action {
			f := explainFlags{nodeFlags: addNodeFlags(fs)}
			cli.AddFlag(fs, &f.source, "from", "",
				"`SOURCE` of the connection, an address (default: a pod of this node)", parseSource)
			cli.AddFlag(fs, &f.link, "out", "",
				"`INTERFACE` that the connection leaves by (default: that of the node's route)", parseInterface)
			cli.AddFlag(fs, &f.protocol, "protocol", "",
				"`PROTOCOL` of the packet, such as udp (default: any)", parseProtocol)
			cli.AddOptional(fs, &f.trace, "trace", traceTime, "wait `[DURATION]`, or "+traceTime+", for a new "+
				"connection, and show which rules its first packet meets", parseTraceTime)
			return f.explain
		},
	}
}

func parseInterface(s string) (string, error) {
	if s == "" || len(s) >= unix.IFNAMSIZ || strings.ContainsAny(s, "/ :!?*") {
		return "", errors.New("is not the name of an interface")
	}
	return s, nil
}

func parseProtocol(s string) (uint8, error) {
	p := conntrack.ParseProtocol(strings.ToLower(s))
	if p == 0 {
		return 0, errors.New("is not a protocol such as tcp, udp, sctp or icmp")
	}
	return p, nil
}

// parseTarget parses an address with or without a port.
func parseTarget(s string) (netip.AddrPort, error) {
	if p, _ := netip.ParseAddrPort(s); p.Port() != 0 { // and so it is no address
		return netip.AddrPortFrom(p.Addr().WithZone("").Unmap(), p.Port()), nil
	}
	a, err := parseAddress(s)
	return netip.AddrPortFrom(a, 0), err
}

// parseSource parses the address of a pod or a node.
func parseSource(s string) (netip.Addr, error) {
	a, err := parseAddress(s)
	if a.IsLoopback() {
		err = errors.New("is not the source of a packet to another host or pod: name a pod's address, or the node's")
	}
	return a, err
}

// parseAddress parses an address, without its zone and the mapping of IPv4 to
// IPv6, which packets do not have.
func parseAddress(s string) (netip.Addr, error) {
	a, err := netip.ParseAddr(s)
	if err != nil {
		return netip.Addr{}, errors.New("is not an IP address")
	}
	return a.WithZone("").Unmap(), nil
}

func (f *explainFlags) explain(ctx context.Context, operands []string, e environment) (int, error) {
	dst, err := parseTarget(operands[0])
	if err != nil {
		return exitUsage, usagef("ADDRESS %q %w", operands[0], err)
	}
	if f.source.IsValid() && f.source.Is4() != dst.Addr().Is4() {
		return exitUsage, usagef("--from %s and ADDRESS %s are of different address families", f.source, dst.Addr())
	}
	if dst.Port() != 0 && f.protocol != 0 && !conntrack.HasPorts(f.protocol) {
		return exitUsage, usagef("--protocol %s has no ports: omit that of ADDRESS", conntrack.ProtocolName(f.protocol))
	}
	if f.trace != 0 {
		return f.traceNext(ctx, dst, e)
	}
	s, err := f.open(e)
	if err != nil {
		return exitFailed, err
	}
	facts, err := f.gather(ctx, s, dst)
	if err != nil {
		return exitFailed, err
	}
	x := answer.Explain(facts)
	return e.reply(f.output, &x, s.files()...)
}

// gather reads everything that the answer is made of.
func (f *explainFlags) gather(ctx context.Context, s *session, dst netip.AddrPort) (answer.ExplainFacts, error) {
	current, readErr := s.inForce(ctx)
	facts := answer.ExplainFacts{
		Head: s.head(), Config: s.config(current), Files: s.files(),
		Packet: answer.Packet{Src: f.source, Dst: dst, Protocol: f.protocol, Chosen: !f.source.IsValid()},
	}
	switch {
	case s.rejected != nil && !current.found:
		return facts, s.rejected
	case readErr != nil:
		facts.Kernel = answer.Unread
		facts.Why = readErr.Error()
	case !current.found:
		facts.Kernel = answer.Absent
	case s.rejected != nil:
		facts.Why = "the kernel enforces " + cmp.Or(current.Hash, "an unknown policy")
	case current.known == nil || !current.known.Want.Same(*s.Ruleset):
		facts.Kernel = answer.Differs
		facts.Why = cmp.Or(current.unknown, fmt.Sprintf("The kernel enforces %s, not %s of the config (%s)", current.Hash,
			s.Ruleset.Hash(), s.ConfigPath))
	}
	if current.known != nil {
		facts.Policy = &current.known.Want.Policy
	} else if !current.found {
		facts.Policy = &s.Ruleset.Policy
	}
	var err error
	facts.Packet.Src, err = f.choose(facts.Policy, dst.Addr())
	if err != nil {
		return facts, err
	}
	facts.Route, err = f.route(facts.Packet.Src, dst)
	if err != nil {
		return facts, err
	}
	if !facts.Packet.Src.IsValid() && facts.Route.Own.IsValid() {
		facts.Packet.Src = facts.Route.Own
		facts.Route, err = f.route(facts.Packet.Src, dst)
	}
	if err != nil || facts.Kernel == answer.Unread {
		return facts, err
	}
	node := health.Node{Proc: s.proc}
	facts.Kept, facts.Remedy = node.Forwards(facts.Route.Ingress.Name, dst.Addr(), facts.Route.Type)
	return facts, f.gatherOthers(ctx, s, &facts)
}

// choose returns the source of the packet to explain: without --from a pod of this node, according to the policy. It is
// the zero address if there is none: then the packet is the node's own.
func (f *explainFlags) choose(policy *nft.Policy, dst netip.Addr) (netip.Addr, error) {
	if f.source.IsValid() || policy == nil {
		return f.source, nil
	}
	pods, err := routes.Pods(dst.Is6())
	if err != nil {
		return netip.Addr{}, err
	}
	family, enabled := policy.Family(dst.Is6())
	for _, pod := range pods {
		packet := nft.Connection{Src: pod.Address, Dst: dst, InInterface: pod.Interface}
		if pod.Address != dst && enabled && judge.IsPod(family, packet) {
			return pod.Address, nil
		}
	}
	return netip.Addr{}, nil
}

// route looks up the route of the packet.
func (f *explainFlags) route(src netip.Addr, dst netip.AddrPort) (routes.Route, error) {
	query := routes.Query{Src: src, Dst: dst.Addr(), Protocol: f.protocol, Port: dst.Port(), Interface: f.link}
	if query.Port != 0 && query.Protocol == 0 {
		query.Protocol = unix.IPPROTO_TCP // the kernel looks up a port of one protocol only
	}
	return routes.Lookup(query)
}

// gatherOthers reads what open connections to the destination show, and what else may decide. Connections need a
// privilege of their own: without it, nothing is known of them.
func (f *explainFlags) gatherOthers(ctx context.Context, s *session, facts *answer.ExplainFacts) (err error) {
	facts.Legacy, err = xtables.LegacyTables(s.proc + "/thread-self/net")
	if err != nil {
		return err
	}
	facts.Others, err = others.Find(ctx, s.kernel.In(ctx), others.Query{
		Source: facts.Packet.Src, Destination: facts.Packet.Dst.Addr(),
	})
	if err != nil {
		return hinted(err)
	}
	if facts.Policy == nil || !facts.Packet.Src.IsValid() {
		return nil
	}
	question := conntrack.Query{From: facts.Packet.Src, To: facts.Packet.Dst, Protocol: f.protocol}
	anywhere := question
	anywhere.From = netip.Addr{}
	evidence, err := conntrack.ReadEvidence(ctx, *facts.Policy, s.history(*facts.Policy), question, anywhere)
	if err != nil {
		return nil //nolint:nilerr // as without connections
	}
	facts.SetEvidence(evidence)
	return nil
}
