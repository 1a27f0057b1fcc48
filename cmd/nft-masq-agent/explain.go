package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
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
	live bool
}

func explainCommand(l look) command {
	return command{
		name:     "explain",
		operands: "ADDRESS",
		about:    "show which source address a new connection to ADDRESS has, and why",
		details: "The answer comes from the kernel: it follows the connection through the NAT rules of this node, also " +
			"those of other programs, and names the rule, or the CIDR and its place in the file, that matches. It is about " +
			"one packet, which it names: without --from, from a pod of this node, or else from the node. If the kernel " +
			"cannot be read, the answer comes from the config alone. Flags that are not given are those of the running " +
			"agent. Nothing is written.",
		examples: []string{
			program + " explain 10.1.2.3",
			program + " explain 203.0.113.7 --from 10.244.1.5",
			program + " explain 203.0.113.7 --out eth1",
		},
		flags: func(fs *flag.FlagSet) action {
			f := explainFlags{lookFlags: lookFlags{addNodeFlags(fs), l}}
			options.AddFlag(fs, &f.from, "from", "", "`SOURCE` of the connection, an address (default: a pod of this node)", parseAddress)
			options.AddFlag(fs, &f.out, "out", "",
				"`INTERFACE` that the connection leaves by (default: that of the node's route)", parseInterface)
			fs.BoolVar(&f.live, "live", false, "do not read the config: answer from the kernel alone")
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
	dst, err := parseAddress(operands[0])
	if err != nil {
		return exitUsage, usagef("ADDRESS %q %w", operands[0], err)
	}
	if f.from.IsValid() && f.from.Is4() != dst.Is4() {
		return exitUsage, usagef("--from %s and ADDRESS %s are of different address families", f.from, dst)
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

func (f *explainFlags) answer(ctx context.Context, s *session, dst netip.Addr) (answer.Explanation, error) {
	now, readErr := s.inForce(ctx)
	x := answer.Explanation{Head: s.head(), Config: s.config(now), Destination: dst.String(), Answers: []answer.Answer{}}
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
	x.Live, x.Why.Code = now.found && (s.rejected != nil || judged == nil), "config"
	var tracer *neighbors.Tracer
	if readErr == nil {
		var err error
		if tracer, err = now.state.Tracer(ctx, known); err != nil {
			return x, hinted(err)
		}
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
		x.Follow(tracer.Trace(src, dst, ways))
	}
	switch {
	case !src.IsValid():
		x.Add(config.Note, "no-source", "This node has no pod, and no address from which it connects there: set --from.")
	case judged != nil:
		x.Ask(judged.Policy, src, dst, ways)
	}
	if readErr == nil {
		if err := legacyTables(ctx, &x, s.proc, f.from, dst); err != nil {
			return x, err
		}
	}
	if now.known != nil { // the verdict needs no privilege, but this does
		if n, err := staleTo(ctx, now.known, f.from, dst); err == nil {
			x.SetStale(n)
		}
	}
	return x, nil
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

// staleTo counts the stale connections to an address, from any source if src is the
// zero address.
func staleTo(ctx context.Context, held *neighbors.State, src, dst netip.Addr) (n int, err error) {
	j, err := held.Judge()
	if err != nil {
		return 0, err
	}
	of := between(src, dst)
	err = of.each(ctx, false, func() { n = 0 }, func(e *conntrack.Entry) {
		if j.Stale(e) {
			n++
		}
	})
	return n, err
}

// legacyTables completes an answer by the tables of legacy ip_tables of the family that decide,
// too, and by the open connections, which show what they do.
func legacyTables(ctx context.Context, x *answer.Explanation, proc string, src, dst netip.Addr) error {
	tables, err := older.LegacyTables(proc + "/thread-self/net")
	tables = slices.DeleteFunc(tables, func(t older.LegacyTable) bool { return (t.Family == nfnetlink.IPv6) != dst.Is6() })
	if err != nil || len(tables) == 0 {
		return err
	}
	open := map[netip.Addr]int{}
	of := between(src, dst)
	err = of.each(ctx, false, func() { clear(open) }, func(e *conntrack.Entry) { open[e.SeenAs().Addr()]++ })
	x.SetLegacy(tables, open)
	return err
}
