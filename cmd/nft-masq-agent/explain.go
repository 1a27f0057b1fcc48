package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
	"nft-masq-agent/cmd/nft-masq-agent/internal/health"
	"nft-masq-agent/cmd/nft-masq-agent/internal/options"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/judge"
	"nft-masq-agent/nft/neighbors"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/older"
	"nft-masq-agent/nft/routes"
)

type explainFlags struct {
	lookFlags
	from netip.Addr // zero: a pod's, or else the node's own
	out  string     // interface; empty: that of the route
	// protocol of the packet, 0 if unknown; its destination's port is that of the operand, 0 if unknown.
	protocol uint8
	live     bool
	trace    time.Duration // how long to wait for a packet; 0: the answer is about no packet that was sent
}

func explainCommand(l look) command {
	return command{
		name:     "explain",
		operands: "ADDRESS[:PORT]",
		about:    "show which source address a new connection to ADDRESS has, and why",
		details: "The answer comes from the kernel: it follows the connection through the NAT rules of this node, also " +
			"those of other programs, and names the rule, or the CIDR and its place in the file, that matches. It is about " +
			"one packet, which it names: without --from, from a pod of this node, or else from the node. If rules translate " +
			"the destination, as those of a Service, it goes on to the endpoints. If the kernel " +
			"cannot be read, the answer comes from the config alone. Flags that are not given are those of the running " +
			"agent. Nothing is written. With --trace, the answer is what the kernel does with the next packet that opens a " +
			"connection from SOURCE, or any source, to ADDRESS: each chain and rule that it meets, the one that decides, and " +
			"whose that is. For this time there is a table inet nft-masq-agent-trace.",
		examples: []string{
			program + " explain 10.1.2.3",
			program + " explain 203.0.113.7 --from 10.244.1.5",
			program + " explain 10.96.0.10:53 --protocol udp",
			program + " explain 203.0.113.7 --out eth1",
			program + " explain 203.0.113.7:443 --from 10.244.1.5 --trace",
		},
		flags: func(fs *flag.FlagSet) action {
			f := explainFlags{lookFlags: lookFlags{addNodeFlags(fs), l}}
			options.AddFlag(fs, &f.from, "from", "",
				"`SOURCE` of the connection, an address (default: a pod of this node)", parseSource)
			options.AddFlag(fs, &f.out, "out", "",
				"`INTERFACE` that the connection leaves by (default: that of the node's route)", parseInterface)
			options.AddFlag(fs, &f.protocol, "protocol", "",
				"`PROTOCOL` of the packet, such as udp (default: tcp, if a port is given)", parseProtocol)
			fs.BoolVar(&f.live, "live", false, "do not read the config: answer from the kernel alone")
			options.AddOptional(fs, &f.trace, "trace", traceTime, "wait `[DURATION]`, or "+traceTime+", for a new "+
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
	p := conntrack.ProtocolOf(strings.ToLower(s))
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
		if p, notCIDR := netip.ParsePrefix(s); notCIDR == nil {
			return netip.Addr{}, fmt.Errorf("is a CIDR; use one address, such as %s", p.Addr())
		}
		return netip.Addr{}, errors.New("is not an IP address")
	}
	return a.WithZone("").Unmap(), nil
}

func (f *explainFlags) explain(ctx context.Context, operands []string, e environment) (int, error) {
	dst, err := parseTarget(operands[0])
	if err != nil {
		return exitUsage, usagef("ADDRESS %q %w", operands[0], err)
	}
	if f.from.IsValid() && f.from.Is4() != dst.Addr().Is4() {
		return exitUsage, usagef("--from %s and ADDRESS %s are of different address families", f.from, dst.Addr())
	}
	if dst.Port() != 0 {
		f.protocol = cmp.Or(f.protocol, unix.IPPROTO_TCP)
	}
	if f.trace != 0 {
		return f.traceNext(ctx, dst, e)
	}
	s, err := f.open(e)
	defer func() { _ = s.kernel.Close() }()
	if f.live {
		s.Loaded, s.rejected = answer.Loaded{}, nil
	}
	if err != nil && s.rejected == nil {
		return exitFailed, err
	}
	var x answer.Explanation
	if err := s.consistently(func() (err error) { x, err = f.answer(ctx, s, dst); return err }); err != nil {
		return exitFailed, s.why(err)
	}
	return e.reply(f.output, &x, s.files()...)
}

func (f *explainFlags) answer(ctx context.Context, s *session, to netip.AddrPort) (answer.Explanation, error) {
	now, readErr := s.inForce(ctx)
	dst, x := to.Addr(), answer.Explanation{Head: s.head(), Config: s.config(now), Answers: []answer.Answer{}}
	x.SetDestination(to, f.protocol)
	if err := f.admit(&x, s, &now, readErr); err != nil {
		return x, err
	}
	var known nft.Ruleset
	var judged *nft.Ruleset
	if now.known != nil {
		known, judged = now.known.Want, &known
	} else if !now.found {
		judged = s.Ruleset
	}
	x.Live, x.Why.Code = s.rejected != nil || judged == nil, "config"
	var tracer *neighbors.Tracer
	if readErr == nil {
		var err error
		if tracer, err = now.state.Tracer(ctx, known); err != nil {
			return x, hinted(err)
		}
		tracer.Protocol, tracer.Port = f.protocol, to.Port()
	}
	src, ways, err := f.packet(s, judged, dst)
	if tracer != nil && len(ways.Ways) > 0 {
		if mark, open := tracer.Mark(src, dst, ways); mark != 0 || open != 0 {
			ways, err = s.routes(routes.Query{Src: src, Dst: dst, Out: f.out, Mark: mark, Open: open})
		}
	}
	switch {
	case err != nil && readErr == nil:
		return x, err
	case len(ways.Ways) == 0:
		x.Add(config.Note, "routes-unknown", "The routes of this node are unknown: %v.", err)
		ways.Ways = []routes.Route{{}}
	}
	x.SetSource(src, f.from.IsValid(), ways.Back.Type == unix.RTN_LOCAL)
	if tracer != nil {
		if dst, ways, err = f.follow(&x, s, tracer, src, dst, ways); err != nil {
			return x, err
		}
		what, remedy := health.NotForwarded(s.proc, ways.Back.Interface.Name, dst, ways.Ways[0].Type)
		if what != "" && ways.Back.Type != unix.RTN_LOCAL {
			x.SetNotForwarded(what, remedy)
		}
	}
	switch {
	case !src.IsValid():
		x.Add(config.Note, "no-source", "This node has no pod, and no address from which it connects there: set --from.")
	case judged != nil:
		x.Ask(judged.Policy, src, dst, ways)
	}
	var besides unread
	if tracer != nil {
		besides.devices = tracer.Devices()
		if besides.tables, err = older.LegacyTables(s.proc + "/thread-self/net"); err != nil {
			return x, err
		}
	}
	f.addOpen(ctx, &x, s, now.known, besides, src, to, ways)
	return x, nil
}

// What decides too, and is not read: tables of legacy ip_tables, and chains of network devices.
type unread struct {
	tables  []older.LegacyTable
	devices []string
}

// follow sets the headline. It returns the destination about which the policy is asked, and its
// routes: an endpoint, if rules translate the destination.
func (f *explainFlags) follow(
	x *answer.Explanation, s *session, tracer *neighbors.Tracer, src, dst netip.Addr, ways routes.Routes,
) (netip.Addr, routes.Routes, error) {
	paths := tracer.Trace(src, dst, ways)
	var endpoints [][]neighbors.Path
	for _, by := range paths[0].Endpoints() {
		q := routes.Query{Src: src, Dst: by.To[0].From, Out: f.out, Mark: by.Mark.Value, Open: by.Mark.Open()}
		to, err := s.routes(q)
		if err != nil {
			return dst, ways, err
		}
		if endpoints = append(endpoints, tracer.Onward(paths[0], by, to)); len(endpoints) == 1 {
			dst, ways = q.Dst, to
		}
	}
	if len(endpoints) == 0 {
		x.Follow(paths)
		return dst, ways, nil
	}
	x.FollowEach(endpoints)
	if len(endpoints) > 1 {
		x.Add(config.Note, "endpoint", "The steps are for the endpoint %s.", dst)
	}
	return dst, ways, nil
}

// admit says what the answer is from, or returns why there is none.
func (f *explainFlags) admit(x *answer.Explanation, s *session, now *inForce, readErr error) error {
	switch {
	case f.live && readErr != nil:
		return readErr
	case f.live && !now.found:
		return errNoRules
	case f.live:
		now.known = nil
	case s.rejected != nil && !now.found:
		return s.rejected
	case readErr != nil:
		x.Add(config.Warning, "kernel-unread", "%v; the answer is from the config only", readErr)
	case !now.found:
		x.Add(config.Warning, "not-installed", "None of this agent's rules are installed on this node.")
		x.Absent = true
	case s.rejected != nil:
		x.Add(config.Error, "config-rejected", "The config is rejected; the kernel enforces %s, and that is the answer.",
			now.Hash)
	case now.known == nil:
		x.Add(config.Warning, "out-of-sync", "%s: the answer is the kernel's.", now.unknown)
	}
	return nil
}

// packet returns the source of the packet to explain, and its routes: without --from a pod of this
// node, of the policy's if that is known, or else the node itself.
func (f *explainFlags) packet(s *session, judged *nft.Ruleset, dst netip.Addr) (netip.Addr, routes.Routes, error) {
	ask := func(src netip.Addr) (routes.Routes, error) {
		return s.routes(routes.Query{Src: src, Dst: dst, Out: f.out})
	}
	if f.from.IsValid() {
		ways, err := ask(f.from)
		return f.from, ways, err
	}
	pods, err := s.pods(dst.Is6())
	if err != nil {
		pods = nil // then neither are the routes known
	}
	for _, pod := range pods {
		ways, err := ask(pod)
		if len(ways.Ways) == 0 {
			return pod, ways, err
		}
		ours := true
		if judged != nil {
			family, on := judged.Policy.Family(dst.Is6())
			ours = on && judge.Pods(family).Includes(nft.Connection{Src: pod, Dst: dst, In: ways.Back.Interface.Name})
		}
		if ours && pod != dst {
			return pod, ways, err
		}
	}
	ways, err := ask(netip.Addr{})
	if !ways.Own.IsValid() {
		return ways.Own, ways, err
	}
	src := ways.Own
	ways, err = ask(src)
	return src, ways, err
}

// addOpen completes an answer by what the open connections to the destination show: which are stale,
// which contradict it, what the tables of legacy ip_tables do, and whether replies arrive. Those that
// are stale may be from any source, unless one was given. The verdict needs no privilege, but this does.
func (f *explainFlags) addOpen(
	ctx context.Context, x *answer.Explanation, s *session, known *neighbors.State, besides unread, src netip.Addr,
	to netip.AddrPort, ways routes.Routes,
) {
	const most = 8
	var j *conntrack.Judge // nil: nothing is certain to be stale
	if known != nil {
		j, _ = known.Judge()
	}
	stale, silent, seen, against := 0, 0, map[netip.Addr]int{}, []answer.Connection(nil)
	of := between(f.from, to.Addr())
	of.protocol, of.port = f.protocol, to.Port()
	err := of.each(ctx, false, func() { stale, silent, against = 0, 0, nil; clear(seen) }, func(e *conntrack.Entry) {
		as := e.SeenAs().Addr()
		if seen[as]++; j != nil && j.Stale(e) {
			stale++
		}
		if e.Status&conntrack.SeenReply == 0 {
			silent++
		}
		if x.Sees != "" && as.String() != x.Sees && e.Original.Src.Addr() == src && len(against) < most {
			against = append(against, answer.NewConnection(e, j))
		}
	})
	tables := slices.DeleteFunc(besides.tables, func(t older.LegacyTable) bool {
		return (t.Family == nfnetlink.IPv6) != to.Addr().Is6()
	})
	unread := x.SetLegacy(tables, seen)
	unread = x.SetDevices(besides.devices, seen) || unread
	switch {
	case err != nil: // as without the privilege
		return
	case !unread:
		x.SetAgainst(against)
	}
	if j != nil {
		x.SetStale(stale)
	}
	if to.Addr().Is4() {
		x.Take(health.StrictReplies(s.proc, silent, ways.Out()))
	}
}
