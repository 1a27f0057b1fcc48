package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
	"nft-masq-agent/cmd/nft-masq-agent/internal/observe"
	"nft-masq-agent/cmd/nft-masq-agent/internal/running"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
)

type connectionsFlags struct {
	lookFlags
	selection
	stale, flush, yes bool
	limit             int
}

// maxLimit bounds the memory of the list.
const maxLimit = 100_000

func connectionsCommand(l look) command {
	return command{
		name:     "connections",
		operands: "[ADDRESS]",
		about:    "list connections with their translation, and stale ones",
		details: "ADDRESS is a destination, or a CIDR of destinations. NOW is the verdict about a new connection from the " +
			"same source to the same destination. A connection is stale if its translation contradicts that verdict, " +
			"because existing connections keep their address when the policy changes. One that contradicts it although it " +
			"began under the policy is overruled by another program, and not deleted. The running agent knows which are: " +
			"without one, or if they began before it, they count as stale. " +
			"Connections from or to the node itself, closed ones, hairpins, bridged ones and those in a zone are never stale. " +
			"Nothing is written without --flush. A FIN or RST of a deleted TCP connection leaves with the pod's own address " +
			"unless dropInvalid is true, because the kernel translates tracked connections only. On a node without the rules " +
			"of --config, --seen-as ADDRESS:PORT names the pods of --pod-cidr whose block of portsPerPod the port is in.",
		examples: []string{
			program + " connections 203.0.113.0/24 --limit 20",
			program + " connections --seen-as 198.51.100.1:54716",
			program + " connections --stale --flush --yes",
		},
		flags: func(fs *flag.FlagSet) action {
			f := connectionsFlags{lookFlags: lookFlags{addNodeFlags(fs), l}}
			f.AddPodCIDRs(fs)
			cli.AddFlag(fs, &f.seenAs, "seen-as", "",
				"find the pod by the source that the destination sees, an `ADDRESS` or ADDRESS:PORT; with portsPerPod the "+
					"port names it also if no connection is open", parseSeenAs)
			cli.AddFlag(fs, &f.from, "from", "", "`SOURCE` of the connection, an address or a CIDR", parsePrefix)
			fs.BoolVar(&f.stale, "stale", false, "only connections whose translation contradicts the current rules")
			fs.BoolVar(&f.flush, "flush", false,
				"delete the stale connections that are listed; TCP connections among them are reset")
			fs.BoolVar(&f.yes, "yes", false, "confirm --flush, which asks on a terminal otherwise")
			cli.AddFlag(fs, &f.limit, "limit", "100", "list at most `N` connections", parseLimit)
			return f.connections
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
	if err != nil || a.Port() == 0 {
		return netip.AddrPort{}, errors.New("is not an IP address or ADDRESS:PORT, such as 198.51.100.1:54716 or " +
			"[2001:db8::1]:54716")
	}
	return netip.AddrPortFrom(a.Addr().WithZone("").Unmap(), a.Port()), nil
}

func parseLimit(s string) (int, error) {
	n, _ := strconv.Atoi(s) // 0 if it is no number, and too large if that is
	if n < 1 || n > maxLimit {
		return 0, fmt.Errorf("is not a number from 1 to %d", maxLimit)
	}
	return n, nil
}

func (f *connectionsFlags) contradiction() error {
	family := f.family()
	switch {
	case slices.ContainsFunc(f.addresses(), func(a netip.Addr) bool { return a.Is4() != (family == unix.AF_INET) }):
		return usagef("ADDRESS, --from and --seen-as are of different address families")
	case f.yes && !f.flush:
		return usagef("--yes is for --flush")
	}
	return nil
}

func (f *connectionsFlags) connections(ctx context.Context, operands []string, e environment) (_ int, err error) {
	if len(operands) > 0 {
		f.to, err = parsePrefix(operands[0])
		if err != nil {
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
	r := answer.Connections{Head: s.head(), Config: s.config(inForce{}), Connections: []answer.Connection{}}
	remarks, err := f.complete(ctx, &r, s, e)
	if err != nil {
		return exitFailed, err
	}
	return e.reply(f.output, &r, remarks...)
}

// complete lists the connections, or answers --seen-as without one.
func (f *connectionsFlags) complete(
	ctx context.Context, r *answer.Connections, s *session, e environment,
) (config.Problems, error) {
	policy, err := f.policy(ctx, s)
	if policy == nil && f.seenAs.Port() > 0 && s.rejected == nil {
		if remarks, ok := r.OfAnotherNode(s.Ruleset.Policy, f.seenAs, s.PodCIDRs); ok {
			if f.to.IsValid() || f.from.IsValid() {
				return nil, errors.New("this node does not have the rules of --config, so no connection can be looked for: " +
					"omit ADDRESS and --from")
			}
			return remarks, nil
		}
	}
	if err != nil {
		return nil, err
	}
	comparison, err := s.comparison(policy)
	if err != nil {
		return nil, err
	}
	found, err := f.list(ctx, r, comparison, s.history(policy))
	if err != nil {
		return nil, err
	}
	if r.Total == 0 && f.seenAs.Addr().IsValid() {
		addresses, err := s.addresses()
		if err != nil {
			return nil, err
		}
		if !slices.Contains(addresses, f.seenAs.Addr()) {
			return config.Problems{cli.Problem(config.Error, "no-address",
				"%s is not an address of this node: ask the node that has it", f.seenAs.Addr())}, nil
		}
	}
	var remarks config.Problems
	if r.Total == 0 && f.seenAs.Port() > 0 && policy != nil {
		pods, err := s.pods(f.seenAs.Addr().Is6())
		if err != nil {
			return nil, err
		}
		addresses := []netip.Addr{}
		for _, pod := range pods {
			addresses = append(addresses, pod.Address)
		}
		remarks, _ = r.SetBlock(*policy, f.seenAs, addresses, nil)
	}
	remarks = append(remarks, f.remarks(r, found)...)
	if f.flush && len(found.first) > 0 {
		deleted, err := f.delete(ctx, r, s, e, found.first)
		return append(remarks, deleted...), err
	}
	return remarks, nil
}

// errNoRules reports that no policy of ours is effective in the kernel.
var errNoRules = errors.New("the kernel has no rules of this agent: see status")

// policy returns the policy in the kernel; nil if the kernel has none of ours, or an unknown one. That is an error
// if it is needed.
func (f *connectionsFlags) policy(ctx context.Context, s *session) (policy *nft.Policy, err error) {
	err = s.consistently(func() error {
		current, err := s.inForce(ctx)
		switch {
		case err != nil:
			return err
		case current.known != nil:
			policy = &current.known.Want.Policy
		case f.stale && !current.found:
			return errNoRules
		case f.stale:
			return errors.New(current.unknown + ": which connections are stale is unknown")
		}
		return nil
	})
	return policy, err
}

// comparison compares connections with a policy; nil without one.
func (s *session) comparison(policy *nft.Policy) (*conntrack.Comparison, error) {
	if policy == nil {
		return nil, nil //nolint:nilnil // nothing is compared then
	}
	host, err := conntrack.ReadNode()
	if err != nil {
		return nil, err
	}
	return conntrack.NewComparison(*policy, host), nil
}

// history returns which connections contradicted the policy in force when it came into force, as the agent knows.
func (s *session) history(policy *nft.Policy) conntrack.History {
	if policy == nil || s.agent == nil {
		return conntrack.History{}
	}
	var h conntrack.History
	err := running.Read(s.path, observe.HistoryPath, &h)
	if err != nil || h.Hash != policy.Hash() {
		return conntrack.History{} // nothing is known
	}
	return h
}

// A listing is connections that match.
type listing struct {
	first []conntrack.Entry // up to the limit
	// overruled are not listed with --stale. Of undated ones it is not known when they began.
	overruled, undated int
}

// list adds the first connections that match, in order, and how many there are.
func (f *connectionsFlags) list(
	ctx context.Context, r *answer.Connections, comparison *conntrack.Comparison, history conntrack.History,
) (found listing, err error) {
	begin := func() {
		found = listing{}
		r.Total = 0
	}
	err = f.each(ctx, false, begin, func(e *conntrack.Entry) {
		if f.stale && !found.stale(e, comparison, history) {
			return
		}
		r.Total++
		if r.Total <= f.limit {
			found.first = append(found.first, *e)
		}
	})
	slices.SortStableFunc(found.first, func(a, b conntrack.Entry) int {
		return cmp.Or(
			a.Original.Src.Addr().Compare(b.Original.Src.Addr()), a.Destination().Compare(b.Destination()),
			cmp.Compare(a.Original.Protocol, b.Original.Protocol), a.Original.Src.Compare(b.Original.Src),
		)
	})
	for i := range found.first {
		r.Connections = append(r.Connections, answer.NewConnection(&found.first[i], comparison, history))
	}
	if f.seenAs.Addr().IsValid() {
		r.Behind(f.seenAs, found.first)
	}
	return found, err
}

// stale reports whether a connection contradicts the policy, and did not certainly begin under it. It counts those of
// which that is certain, or not known.
func (l *listing) stale(e *conntrack.Entry, comparison *conntrack.Comparison, history conntrack.History) bool {
	_, finding := comparison.Compare(e)
	if finding != conntrack.Contradicts {
		return false
	}
	switch history.Age(e) {
	case conntrack.AgeOverruled:
		l.overruled++
		return false
	case conntrack.AgeUndated:
		l.undated++
	case conntrack.AgeStale:
	}
	return true
}

func (f *connectionsFlags) remarks(r *answer.Connections, l listing) (found config.Problems) {
	add := func(level config.Level, id, format string, args ...any) {
		found = append(found, cli.Problem(level, id, format, args...))
	}
	switch {
	case r.Total == 0 && f.seenAs.Addr().IsValid():
		level := config.Error
		if r.Block != nil { // the pod is known without a connection
			level = config.Note
		}
		add(level, "no-match", "no connection is seen as %s: it has ended, or another node or program translates it",
			answer.End(f.seenAs))
	case r.Total == 0 && f.stale && l.overruled == 0:
		add(config.Note, "none-stale", "no connection contradicts the policy")
	}
	if l.undated > 0 {
		add(config.Note, "undated-connections", "%s began before this agent's start, or another program decided about "+
			"them: which is not known", answer.Plural(l.undated, "connection"))
	}
	if l.overruled > 0 {
		add(config.Note, "connections-overruled", "%s not listed, because they began under the policy and another program "+
			"decided: explain ADDRESS --from SOURCE --trace names its rule", answer.Plural(l.overruled, "connection"))
	}
	if n := len(r.Connections); r.Total > n {
		add(config.Note, "limited", "%d of %s; raise --limit for more", n, answer.Plural(r.Total, "connection"))
	}
	return found
}

// confirm asks a person whether the listed connections are to be deleted. Without a terminal, --yes is the answer.
func (f *connectionsFlags) confirm(r *answer.Connections, e environment, resets int) error {
	if f.yes {
		return nil
	}
	tcp := ""
	if resets > 0 {
		tcp = fmt.Sprintf(", and destinations reset the %d of TCP", resets)
	}
	what := fmt.Sprintf("delete %s: the next packet of each begins a new one with the right source%s",
		answer.Plural(len(r.Connections), "connection"), tcp)
	if !e.asks {
		return fmt.Errorf("give --yes to %s", what)
	}
	_, _ = fmt.Fprintf(e.stderr, "%s%s\nDelete them? [y/N] ", r, what)
	reply, err := bufio.NewReader(io.LimitReader(e.stdin, maxReply)).ReadString('\n')
	if err != nil {
		return errors.New("no answer: nothing was deleted")
	}
	switch strings.ToLower(strings.TrimSpace(reply)) {
	case "y", "yes":
		return nil
	}
	return errors.New("nothing was deleted")
}

// maxReply bounds what is read of a reply.
const maxReply = 100

// delete deletes the listed connections that are still stale, and says what became of them. The
// error is that this was not confirmed.
func (f *connectionsFlags) delete(
	ctx context.Context, r *answer.Connections, s *session, e environment, listed []conntrack.Entry,
) (config.Problems, error) {
	keys := map[conntrack.Key]bool{}
	resets := 0
	for _, c := range listed {
		keys[c.Key] = true
		if c.Original.Protocol == unix.IPPROTO_TCP {
			resets++
		}
	}
	err := f.confirm(r, e, resets)
	if err != nil {
		return nil, err
	}
	policy, err := f.policy(ctx, s)
	if err != nil {
		return nil, err
	}
	comparison, err := s.comparison(policy)
	if err != nil {
		return nil, err
	}
	d := conntrack.Deletion{
		Tracker: conntrack.Open(),
		Doomed: func(e *conntrack.Entry) bool {
			_, finding := comparison.Compare(e)
			return keys[e.Key] && finding == conntrack.Contradicts
		},
		Listed: func(int) {},
	}
	err = d.Run(ctx)
	r.Deleted = d.Deleted
	text := "deleted " + answer.Plural(d.Deleted, "connection")
	if resets > 0 {
		text += fmt.Sprintf("; TCP connections among them, at most %d, are reset by their destination", resets)
	}
	found := config.Problems{cli.Problem(config.Note, "deleted", "%s", text)}
	if err != nil {
		found = append(found, cli.Problem(config.Error, "failed", "%v", err))
	}
	return found, nil
}

// A selection is the connections that are meant: all by default.
type selection struct {
	to, from netip.Prefix
	seenAs   netip.AddrPort // port 0: any
	protocol uint8          // 0: any
	port     uint16         // of to; 0: any
}

func (s *selection) addresses() []netip.Addr {
	return slices.DeleteFunc([]netip.Addr{s.to.Addr(), s.from.Addr(), s.seenAs.Addr()},
		func(a netip.Addr) bool { return !a.IsValid() })
}

// family returns the one family that can match, 0 for both.
func (s *selection) family() uint8 {
	switch given := s.addresses(); {
	case len(given) == 0:
		return unix.AF_UNSPEC
	case given[0].Is4():
		return unix.AF_INET
	}
	return unix.AF_INET6
}

func (s *selection) matches(e *conntrack.Entry) bool {
	seen := e.SeenAs()
	return (s.protocol == 0 || s.protocol == e.Original.Protocol) &&
		(s.port == 0 || s.port == e.Original.Dst.Port() || s.port == e.Destination().Port()) &&
		(!s.to.IsValid() || s.to.Contains(e.Original.Dst.Addr()) || s.to.Contains(e.Destination().Addr())) &&
		(!s.from.IsValid() || s.from.Contains(e.Original.Src.Addr())) &&
		(!s.seenAs.Addr().IsValid() || s.seenAs.Addr() == seen.Addr()) &&
		(s.seenAs.Port() == 0 || s.seenAs.Port() == seen.Port())
}

// each visits the connections, or those whose source was translated. It calls begin first, and
// when it has to begin again.
func (s *selection) each(ctx context.Context, translated bool, begin func(), visit func(*conntrack.Entry)) error {
	filter := conntrack.Filter{Family: s.family(), Translated: translated}
	return conntrack.Open().Dump(ctx, filter, begin, func(e *conntrack.Entry) error {
		if s.matches(e) {
			visit(e)
		}
		return nil
	})
}
