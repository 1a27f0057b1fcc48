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

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
	"nft-masq-agent/cmd/nft-masq-agent/internal/observe"
	"nft-masq-agent/cmd/nft-masq-agent/internal/running"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/routes"
)

type connectionsFlags struct {
	*nodeFlags
	destination, source netip.Prefix   // zero: any
	seenAs              netip.AddrPort // port 0: any
	stale, flush, yes   bool
}

func connectionsCommand() command {
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
			"of --config, --seen-as ADDRESS:PORT names the last byte of the IPs of pods whose block of portsPerPod the " +
			"port is in.",
		examples: []string{
			program + " connections 203.0.113.0/24 --from 10.244.1.5",
			program + " connections --seen-as 198.51.100.1:54716",
			program + " connections --stale --flush --yes",
		},
		flags: func(fs *flag.FlagSet) action {
			f := connectionsFlags{nodeFlags: addNodeFlags(fs)}
			cli.AddFlag(fs, &f.seenAs, "seen-as", "",
				"find the pod by the source that the destination sees, an `ADDRESS` or ADDRESS:PORT; with portsPerPod the "+
					"port names it also if no connection is open", parseTarget)
			cli.AddFlag(fs, &f.source, "from", "", "`SOURCE` of the connection, an address or a CIDR", parsePrefix)
			fs.BoolVar(&f.stale, "stale", false, "only connections whose translation contradicts the current rules")
			fs.BoolVar(&f.flush, "flush", false,
				"delete the stale connections that are listed; TCP connections among them are reset")
			fs.BoolVar(&f.yes, "yes", false, "confirm --flush, which asks on a terminal otherwise")
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

func (f *connectionsFlags) connections(ctx context.Context, operands []string, e environment) (int, error) {
	if len(operands) > 0 {
		destination, err := parsePrefix(operands[0])
		if err != nil {
			return exitUsage, usagef("ADDRESS %q %w", operands[0], err)
		}
		f.destination = destination
	}
	if f.yes && !f.flush {
		return exitUsage, usagef("--yes is for --flush")
	}
	f.stale = f.stale || f.flush
	s, err := f.open(e)
	if err != nil {
		return exitFailed, err
	}
	r := answer.Connections{Head: s.head(), Config: s.config(inForce{}), Connections: []answer.Connection{}}
	policy, err := f.policy(ctx, s)
	if err != nil {
		return exitFailed, err
	}
	if f.isOffline(s, policy) {
		r.SetBlock(s.Ruleset.Policy, f.seenAs, nil)
		r.Add(config.Note, "another-node", "this is by the config alone, because this node does not have its rules: no "+
			"connection was looked for")
		return e.reply(f.output, &r)
	}
	listed, err := f.list(ctx, s, policy)
	if err != nil {
		return exitFailed, err
	}
	listed.show(&r)
	if f.seenAs.Addr().IsValid() {
		err = f.behind(&r, s, policy, listed.entries)
	}
	if err == nil && f.flush {
		err = f.delete(ctx, &r, s, listed.entries)
	}
	if err != nil {
		return exitFailed, err
	}
	return e.reply(f.output, &r)
}

// isOffline reports whether only the block of --seen-as can be named: this node does not have the rules.
func (f *connectionsFlags) isOffline(s *session, policy *nft.Policy) bool {
	filtered := f.destination.IsValid() || f.source.IsValid()
	return policy == nil && s.rejected == nil && !filtered && s.Ruleset.Policy.PortsPerPod > 0 && f.seenAs.Port() > 0
}

// behind answers --seen-as: by the open connections that are seen as that, or else by whose block the port is in.
func (f *connectionsFlags) behind(
	r *answer.Connections, s *session, policy *nft.Policy, listed []conntrack.Entry,
) error {
	if len(listed) > 0 {
		r.Behind(f.seenAs, listed)
		return nil
	}
	addresses, err := s.addresses()
	if err != nil {
		return err
	}
	if !slices.Contains(addresses, f.seenAs.Addr()) {
		r.Add(config.Error, "no-address", "%s is not an address of this node: ask the node that has it", f.seenAs.Addr())
		return nil
	}
	level := config.Error
	if policy != nil && policy.PortsPerPod > 0 && f.seenAs.Port() > 0 {
		pods, err := routes.Pods(f.seenAs.Addr().Is6())
		if err != nil {
			return err
		}
		if r.SetBlock(*policy, f.seenAs, pods) { // the pod is known without a connection
			level = config.Note
		}
	}
	r.Add(level, "no-match", "no connection is seen as %s: it has ended, or another node or program translates it",
		conntrack.HostPort(f.seenAs))
	return nil
}

// policy returns the policy in the kernel; nil if the kernel has none of ours, or an unknown one. That is an error
// if it is needed.
func (f *connectionsFlags) policy(ctx context.Context, s *session) (*nft.Policy, error) {
	current, err := s.inForce(ctx)
	if err != nil {
		return nil, err
	}
	if current.known != nil {
		return &current.known.Want.Policy, nil
	}
	if f.stale && !current.found {
		return nil, errors.New("the kernel has no rules of this agent: see status")
	}
	if f.stale {
		return nil, errors.New(current.unknown + ": which connections are stale is unknown")
	}
	return nil, nil //nolint:nilnil // it is not needed
}

// history returns which connections contradicted the policy in force when it came into force, as the agent knows.
func (s *session) history(policy nft.Policy) (h conntrack.History) {
	if s.agent == nil {
		return conntrack.History{}
	}
	err := running.Read(s.socket, observe.HistoryPath, &h)
	if err != nil || h.Hash != policy.Hash() {
		return conntrack.History{} // nothing is known
	}
	return h
}

// A listing is the connections that were asked for.
type listing struct {
	*connectionsFlags
	comparison *conntrack.Comparison // with the policy in the kernel; nil: that is not known
	history    conntrack.History     // of that policy
	entries    []conntrack.Entry     // at most maxListed
	total      int
	overruled  int // left out, because only stale ones were asked for
}

// maxListed bounds the memory of a listing.
const maxListed = 10_000

// list reads the connections that match.
func (f *connectionsFlags) list(ctx context.Context, s *session, policy *nft.Policy) (l *listing, err error) {
	l = &listing{connectionsFlags: f}
	if policy != nil {
		l.history = s.history(*policy)
		l.comparison, err = conntrack.ReadComparison(*policy)
	}
	if err != nil {
		return nil, err
	}
	err = conntrack.New().Dump(ctx, l.begin, l.add)
	slices.SortStableFunc(l.entries, func(a, b conntrack.Entry) int {
		return cmp.Or(a.Original.Src.Addr().Compare(b.Original.Src.Addr()), a.Destination().Compare(b.Destination()),
			cmp.Compare(a.Original.Protocol, b.Original.Protocol), a.Original.Src.Compare(b.Original.Src))
	})
	return l, err
}

func (l *listing) begin() {
	l.entries = nil
	l.total = 0
	l.overruled = 0
}

// add adds a connection if it was asked for.
func (l *listing) add(e *conntrack.Entry) error {
	if !l.matches(e) || l.stale && !contradicting(l.comparison, e) {
		return nil
	}
	if l.stale && l.history.Age(e) == conntrack.AgeOverruled {
		l.overruled++
		return nil
	}
	l.total++
	if len(l.entries) < maxListed {
		l.entries = append(l.entries, *e)
	}
	return nil
}

// show adds the connections to the answer, and what is left out.
func (l *listing) show(r *answer.Connections) {
	r.Total = l.total
	for i := range l.entries {
		connection := answer.NewConnection(&l.entries[i])
		if l.comparison != nil {
			connection = answer.JudgedConnection(&l.entries[i], l.comparison, l.history)
		}
		r.Connections = append(r.Connections, connection)
	}
	if l.overruled > 0 {
		r.Add(config.Note, "connections-overruled", "%s not listed: another program decided under this policy; explain "+
			"ADDRESS --from SOURCE --trace names its rule", answer.Plural(l.overruled, "connection"))
	}
	if l.stale && l.total == 0 {
		r.Add(config.Note, "none-stale", "no connection is stale")
	}
	if l.total > len(l.entries) {
		r.Add(config.Note, "limited", "%d of %s: name an ADDRESS, or --from SOURCE, for others", len(l.entries),
			answer.Plural(l.total, "connection"))
	}
}

// matches reports whether a connection was asked for, whatever its translation.
func (f *connectionsFlags) matches(e *conntrack.Entry) bool {
	if f.destination.IsValid() && !f.destination.Contains(e.Original.Dst.Addr()) &&
		!f.destination.Contains(e.Destination().Addr()) {
		return false
	}
	if f.source.IsValid() && !f.source.Contains(e.Original.Src.Addr()) {
		return false
	}
	seen := e.SeenAs()
	if f.seenAs.Addr().IsValid() && f.seenAs.Addr() != seen.Addr() {
		return false
	}
	return f.seenAs.Port() == 0 || f.seenAs.Port() == seen.Port()
}

// contradicting reports whether an open connection contradicts the policy.
func contradicting(comparison *conntrack.Comparison, e *conntrack.Entry) bool {
	_, finding := comparison.Compare(e)
	return finding == conntrack.Contradicts && e.Open()
}

// confirm asks a person whether the listed connections are to be deleted. Without a terminal, --yes is the answer.
func (f *connectionsFlags) confirm(r *answer.Connections, e environment) error {
	if f.yes {
		return nil
	}
	deletion := fmt.Sprintf("delete %s: the next packet of each begins a new one with the right source, and destinations "+
		"reset those of TCP", answer.Plural(len(r.Connections), "connection"))
	if !e.asks {
		return fmt.Errorf("give --yes to %s", deletion)
	}
	_ = cli.Print(e.stderr, false, r.Print)
	_, _ = fmt.Fprintf(e.stderr, "%s\nDelete them? [y/N] ", deletion)
	reply := ""
	_, _ = fmt.Fscanln(e.stdin, &reply)
	switch strings.ToLower(reply) {
	case "y", "yes":
		return nil
	}
	return errors.New("nothing was deleted")
}

// delete deletes the listed connections that are still stale, and says what became of them. The
// error is that this was not confirmed.
func (f *connectionsFlags) delete(
	ctx context.Context, r *answer.Connections, s *session, listed []conntrack.Entry,
) error {
	if len(listed) == 0 {
		return nil
	}
	keys := map[conntrack.Key]bool{}
	for _, c := range listed {
		keys[c.Key] = true
	}
	err := f.confirm(r, s.environment)
	if err != nil {
		return err
	}
	policy, err := f.policy(ctx, s)
	if err != nil {
		return err
	}
	comparison, err := conntrack.ReadComparison(*policy)
	if err != nil {
		return err
	}
	deleted, err := conntrack.New().Delete(ctx, func(e *conntrack.Entry) bool {
		return keys[e.Key] && contradicting(comparison, e)
	})
	r.Deleted = deleted
	r.Add(config.Note, "deleted", "deleted %s; destinations reset those of TCP", answer.Plural(deleted, "connection"))
	if err != nil {
		r.Add(config.Error, "failed", "%v", err)
	}
	return nil
}
