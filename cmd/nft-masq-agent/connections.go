package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
	"nft-masq-agent/cmd/nft-masq-agent/internal/options"
	"nft-masq-agent/cmd/nft-masq-agent/internal/reply"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/judge"
)

type connectionsFlags struct {
	lookFlags
	to     netip.Prefix // zero: any
	from   netip.Prefix
	seenAs netip.AddrPort // port 0: any

	stale, flush, yes, ports bool
	limit                    int
}

// maxLimit bounds the memory of the list.
const maxLimit = 100_000

func connectionsCommand(l look) command {
	return command{
		name:     "connections",
		operands: "[ADDRESS]",
		about:    "list connections with their translation, stale ones, and source ports in use",
		details: "ADDRESS is a destination, or a CIDR of destinations. NOW is the verdict about a new connection from the " +
			"same source to the same destination. A connection is stale if its translation contradicts that verdict, " +
			"because existing connections keep their address when the policy changes. Connections from or to the node " +
			"itself, closed ones, and those that another program may have translated or exempted are never stale. Nothing is " +
			"written without --flush. A FIN or RST of a deleted TCP connection leaves with the pod's own address unless " +
			"dropInvalid is true, because the kernel translates tracked connections only. On a node without the rules of " +
			"--config, --seen-as ADDRESS:PORT names the pods of --pod-cidr whose block of portsPerPod the port is in.",
		examples: []string{
			program + " connections 203.0.113.0/24 --limit 20",
			program + " connections --seen-as 198.51.100.1:54716",
			program + " connections --stale --flush --yes",
			program + " connections --ports",
		},
		flags: func(fs *flag.FlagSet) action {
			f := connectionsFlags{lookFlags: lookFlags{addNodeFlags(fs), l}}
			f.AddPodCIDRs(fs)
			options.AddFlag(fs, &f.seenAs, "seen-as", "",
				"find the pod by the source that the destination sees, an `ADDRESS` or ADDRESS:PORT; with portsPerPod the "+
					"port names it also if no connection is open", parseSeenAs)
			options.AddFlag(fs, &f.from, "from", "", "`SOURCE` of the connection, an address or a CIDR", parsePrefix)
			options.AddFlag(fs, &f.from, "pod", "", "older name of --from=`SOURCE`", parsePrefix)
			fs.BoolVar(&f.stale, "stale", false, "only connections whose translation contradicts the current rules")
			fs.BoolVar(&f.flush, "flush", false,
				"delete the stale connections that are listed; TCP connections among them are reset")
			fs.BoolVar(&f.yes, "yes", false, "confirm --flush")
			fs.BoolVar(&f.ports, "ports", false,
				"list the destinations with the most source ports in use, and the pods that use them")
			options.AddFlag(fs, &f.limit, "limit", "100", "list at most `N` connections", parseLimit)
			again := false
			addWatch(fs, &again)
			return func(ctx context.Context, operands []string, e environment) (int, error) {
				given := *f.Options
				if again && f.flush {
					return exitUsage, usagef("--flush deletes once: omit --watch")
				}
				return e.watch(ctx, again, f.output, func(e environment) (int, error) {
					o, once := given, f
					once.nodeFlags = &nodeFlags{&o, f.output}
					return once.connections(ctx, operands, e)
				})
			}
		},
	}
}

// parsePrefix parses an address or a CIDR.
func parsePrefix(s string) (netip.Prefix, error) {
	if a, err := parseAddress(s); err == nil {
		return netip.PrefixFrom(a, a.BitLen()), nil
	}
	p, err := netip.ParsePrefix(s)
	if err != nil {
		return netip.Prefix{}, errors.New("is not an IP address or a CIDR")
	}
	return p.Masked(), nil
}

// parseSeenAs parses an address with or without a port.
func parseSeenAs(s string) (netip.AddrPort, error) {
	if a, err := parseAddress(s); err == nil {
		return netip.AddrPortFrom(a, 0), nil
	}
	a, err := netip.ParseAddrPort(s)
	if err != nil {
		return netip.AddrPort{}, errors.New("is not an IP address or ADDRESS:PORT, such as 198.51.100.1:54716 or " +
			"[2001:db8::1]:54716")
	}
	return netip.AddrPortFrom(a.Addr().WithZone("").Unmap(), a.Port()), nil
}

func parseLimit(s string) (int, error) {
	n, err := strconv.Atoi(s)
	if err != nil || n < 1 || n > maxLimit {
		return 0, fmt.Errorf("is not a number from 1 to %d", maxLimit)
	}
	return n, nil
}

// contradiction returns an error if flags contradict each other.
func (f *connectionsFlags) contradiction() error {
	family := f.filter().Family
	switch {
	case family != 0 && slices.ContainsFunc([]netip.Addr{f.to.Addr(), f.from.Addr(), f.seenAs.Addr()},
		func(a netip.Addr) bool { return a.IsValid() && a.Is4() != (family == unix.AF_INET) }):
		return usagef("ADDRESS, --from and --seen-as are of different address families")
	case f.yes && !f.flush:
		return usagef("--yes is for --flush")
	case f.ports && (f.flush || f.stale):
		return usagef("--ports does not list connections: omit --stale and --flush")
	}
	return nil
}

func (f *connectionsFlags) connections(ctx context.Context, operands []string, e environment) (_ int, err error) {
	if len(operands) > 0 {
		if f.to, err = parsePrefix(operands[0]); err != nil {
			return exitUsage, usagef("ADDRESS %q %w", operands[0], err)
		}
	}
	if err := f.contradiction(); err != nil {
		return exitUsage, err
	}
	f.stale = f.stale || f.flush
	s, err := f.open(e)
	defer func() { _ = s.kernel.Close() }()
	if err != nil {
		return exitFailed, err
	}
	j, policy, err := f.judge(ctx, s)
	r := answer.Connections{Head: s.head(), Config: s.config(inForce{})}
	if j == nil {
		if notes, ok := f.ofAnotherNode(&r, s); ok {
			return e.reply(f.output, &r, notes...)
		}
	}
	if err != nil {
		return exitFailed, err
	}
	table := conntrack.Open()
	if f.ports {
		if r.Ports, err = f.listPorts(ctx, table, policy); err != nil {
			return exitFailed, err
		}
		r.Total = len(r.Ports)
		return e.reply(f.output, &r)
	}
	listed, total, err := f.find(ctx, table, j)
	if err != nil {
		return exitFailed, err
	}
	r.Connections, r.Total = make([]answer.Connection, len(listed)), total
	for i := range listed {
		r.Connections[i] = answer.NewConnection(&listed[i], j)
	}
	found, err := f.behind(&r, s, policy, listed)
	if err != nil {
		return exitFailed, err
	}
	found = append(found, f.remarks(j, len(listed), total, r.Block != nil)...)
	if f.flush {
		notes, err := f.deleteListed(ctx, s, listed, &r)
		if err != nil {
			return exitFailed, err
		}
		found = append(found, notes...)
	}
	return e.reply(f.output, &r, found...)
}

// behind adds who is behind --seen-as: by open connections, and by the blocks of portsPerPod.
func (f *connectionsFlags) behind(r *answer.Connections, s *session, policy nft.Policy, listed []conntrack.Entry,
) (found config.Problems, err error) {
	if f.seenAs.Addr().IsValid() {
		r.Behind(f.seenAs, listed)
	}
	if f.seenAs.Port() > 0 {
		pods, err := s.pods(f.seenAs.Addr().Is6())
		if err != nil {
			return nil, err
		}
		found, _ = r.SetBlock(policy, f.seenAs, append([]netip.Addr{}, pods...), nil)
	}
	return found, nil
}

// deleteListed deletes the connections that are still stale, and says what became of them. The
// error is that --yes is missing.
func (f *connectionsFlags) deleteListed(ctx context.Context, s *session, listed []conntrack.Entry,
	r *answer.Connections,
) (found config.Problems, err error) {
	deleted, resets, err := f.delete(ctx, listed, func(ctx context.Context) (*conntrack.Judge, error) {
		j, _, err := f.judge(ctx, s)
		return j, err
	})
	if !f.yes && err != nil {
		return nil, err
	}
	r.Deleted = deleted
	text := "deleted " + answer.Plural(deleted, "connection")
	if resets > 0 {
		text += fmt.Sprintf("; TCP connections among them, at most %d, are reset by their destination", resets)
	}
	found = config.Problems{reply.Problem(config.Note, "deleted", "%s", text)}
	if err != nil {
		found = append(found, reply.Problem(config.Error, "failed", "%v", err))
	}
	return found, nil
}

// ofAnotherNode answers --seen-as by the blocks of the config's portsPerPod alone, if this node
// does not have its rules.
func (f *connectionsFlags) ofAnotherNode(r *answer.Connections, s *session) (notes config.Problems, ok bool) {
	if f.seenAs.Port() == 0 || s.Ruleset == nil || s.rejected != nil {
		return nil, false //nolint:nilerr // the caller has the error
	}
	if notes, ok = r.SetBlock(s.Ruleset.Policy, f.seenAs, nil, s.PodCIDRs); ok {
		r.Connections = []answer.Connection{}
		r.Behind(f.seenAs, nil)
		notes = append(notes, reply.Problem(config.Note, "another-node",
			"this is by the config alone, because this node does not have its rules: no connection was looked for"))
	}
	return notes, ok
}

// remarks are the problems of a list of so many connections, of all that match. decoded means
// that the pod is known without one.
func (f *connectionsFlags) remarks(j *conntrack.Judge, listed, total int, decoded bool) (found config.Problems) {
	add := func(level config.Level, id, format string, args ...any) {
		found = append(found, reply.Problem(level, id, format, args...))
	}
	if total == 0 && f.seenAs.IsValid() {
		level := config.Error
		if decoded {
			level = config.Note
		}
		add(level, "no-match", "no connection is seen as %s: it has ended, or another node or program translates it",
			answer.End(f.seenAs))
	}
	if total > listed {
		add(config.Note, "limited", "%d of %s; raise --limit for more", listed, answer.Plural(total, "connection"))
	}
	if f.stale {
		for _, reason := range j.Spared {
			add(config.Note, "stale-unknown", "not certain, and not listed as stale: %s", reason)
		}
	}
	return found
}

// errNoRules reports that no policy of ours is effective in the kernel.
var errNoRules = errors.New("the kernel has no rules of this agent: see status")

// judge returns a judge for the policy in the kernel, and that policy; no judge if
// the kernel has none of ours, or an unknown one. That is an error if it is needed.
func (f *connectionsFlags) judge(ctx context.Context, s *session) (j *conntrack.Judge, p nft.Policy, err error) {
	err = s.consistently(func() error {
		now, err := s.inForce(ctx)
		switch {
		case err != nil:
			return err
		case now.known != nil:
			p = now.known.Want.Policy
			j, err = now.known.Judge()
			return err
		case f.stale && !now.found:
			return errNoRules
		case f.stale:
			return errors.New(now.unknown + ": which connections are stale is unknown")
		}
		return nil
	})
	return j, p, err
}

// filter restricts the dump to one family if only that can match.
func (f *connectionsFlags) filter() conntrack.Filter {
	for _, a := range []netip.Addr{f.to.Addr(), f.from.Addr(), f.seenAs.Addr()} {
		switch {
		case a.Is4():
			return conntrack.Filter{Family: unix.AF_INET}
		case a.Is6():
			return conntrack.Filter{Family: unix.AF_INET6}
		}
	}
	return conntrack.Filter{}
}

func (f *connectionsFlags) matches(e *conntrack.Entry, j *conntrack.Judge) bool {
	seen := e.SeenAs()
	switch {
	case f.to.IsValid() && !f.to.Contains(e.Original.Dst.Addr()) && !f.to.Contains(e.Destination().Addr()),
		f.from.IsValid() && !f.from.Contains(e.Original.Src.Addr()),
		f.seenAs.Addr().IsValid() && (f.seenAs.Addr() != seen.Addr() ||
			f.seenAs.Port() != 0 && f.seenAs.Port() != seen.Port()):
		return false
	}
	return !f.stale || j.Stale(e)
}

// find returns the first connections that match, and how many there are.
func (f *connectionsFlags) find(ctx context.Context, table *conntrack.Table, j *conntrack.Judge) (
	listed []conntrack.Entry, total int, err error,
) {
	err = table.Dump(ctx, f.filter(), func() { listed, total = nil, 0 }, func(e *conntrack.Entry) error {
		if !f.matches(e, j) {
			return nil
		}
		if total++; total <= f.limit {
			listed = append(listed, *e)
		}
		return nil
	})
	slices.SortStableFunc(listed, func(a, b conntrack.Entry) int {
		return cmp.Or(
			a.Original.Src.Addr().Compare(b.Original.Src.Addr()), a.Destination().Compare(b.Destination()),
			cmp.Compare(a.Original.Protocol, b.Original.Protocol), a.Original.Src.Compare(b.Original.Src),
		)
	})
	return listed, total, err
}

// delete deletes the stale connections that were listed, judged again.
func (f *connectionsFlags) delete(
	ctx context.Context, listed []conntrack.Entry, read func(context.Context) (*conntrack.Judge, error),
) (deleted, resets int, err error) {
	keys := map[conntrack.Key]bool{}
	for _, c := range listed {
		keys[c.Key] = true
		if c.Original.Protocol == unix.IPPROTO_TCP {
			resets++
		}
	}
	if !f.yes && len(listed) > 0 {
		tcp := ""
		if resets > 0 {
			tcp = fmt.Sprintf(", and destinations reset the %d of TCP", resets)
		}
		return 0, 0, fmt.Errorf("give --yes to delete %s: the next packet of each begins a new one with the right source%s",
			answer.Plural(len(listed), "connection"), tcp)
	}
	p := conntrack.Pass{
		Table: conntrack.Open(), Read: read,
		Matches: func(e *conntrack.Entry) bool { return keys[e.Key] },
		Listed:  func(int, *conntrack.Judge) {},
	}
	err = p.Run(ctx)
	return p.Deleted, resets, err
}

// Sizes of the list of --ports.
const (
	mostTuples = 30
	mostPods   = 5
)

// listPorts lists the destinations with the most ports in use, and the pods that
// use them.
func (f *connectionsFlags) listPorts(ctx context.Context, table *conntrack.Table, p nft.Policy) (
	[]answer.PortsOf, error,
) {
	ports := conntrack.Ports(judge.SourcePorts(p))
	filter := f.filter()
	filter.Translated = true
	var tally conntrack.Tally
	err := table.Dump(ctx, filter, func() { tally = conntrack.Tally{} }, func(e *conntrack.Entry) error {
		if f.matches(e, nil) {
			tally.Add(e, ports)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	fullest := tally.Fullest(min(f.limit, mostTuples))
	byPod := make([]map[netip.Addr]int, len(fullest))
	err = table.Dump(ctx, filter, func() {
		for i := range byPod {
			byPod[i] = map[netip.Addr]int{}
		}
	}, func(e *conntrack.Entry) error {
		if k, ok := ports.Key(e); ok {
			for i, u := range fullest {
				if u.PortKey == k {
					byPod[i][e.Original.Src.Addr()]++
				}
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	all := make([]answer.PortsOf, len(fullest))
	for i, u := range fullest {
		all[i] = answer.PortsOf{
			Protocol: conntrack.ProtocolName(u.Protocol), SeenAs: u.From.String(), Destination: u.To.String(),
			Used: u.Used, Ports: u.Among.Ports, Pods: answer.TopPods(byPod[i], mostPods),
		}
	}
	return all, nil
}
