package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/netip"

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
	"nft-masq-agent/cmd/nft-masq-agent/internal/options"
	"nft-masq-agent/cmd/nft-masq-agent/internal/running"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/foreign"
	"nft-masq-agent/nft/kernel"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/node"

	"golang.org/x/sys/unix"
)

type explainFlags struct {
	*options.Options
	set    *flag.FlagSet
	from   netip.Addr // zero: any pod
	out    string     // interface; empty: that of the route
	live   bool
	output string
}

func explainCommand() command {
	return command{
		name:     "explain",
		operands: "ADDRESS",
		about:    "show which source address a new connection to ADDRESS has, and what decides that",
		details: "The answer is the kernel's: it follows the connection through the NAT rules of this node, those of other " +
			"programs included, and names the rule, or the CIDR and its place in the file, that decides. If the kernel cannot be " +
			"read, the config answers alone. Without policy flags it uses those of the running agent. Nothing is written.",
		examples: []string{
			program + " explain 10.1.2.3",
			program + " explain 203.0.113.7 --from 10.244.1.5",
			program + " explain 203.0.113.7 --out eth1",
		},
		flags: func(fs *flag.FlagSet) action {
			f := explainFlags{Options: options.AddPolicyFlags(fs), set: fs}
			options.AddFlag(fs, &f.from, "from", "", "`SOURCE` address of the connection (default: a pod's)", parseAddress)
			fs.StringVar(&f.out, "out", "", "`INTERFACE` that the connection leaves by (default: that of the node's route)")
			fs.BoolVar(&f.live, "live", false, "do not read the config: the kernel answers alone")
			addOutput(fs, &f.output)
			return func(ctx context.Context, operands []string, e environment) (int, error) {
				return f.explain(ctx, operands[0], e)
			}
		},
	}
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

func (f *explainFlags) explain(ctx context.Context, operand string, e environment) (int, error) {
	dst, err := parseAddress(operand)
	if err != nil {
		return exitUsage, usagef("ADDRESS %q %w", operand, err)
	}
	if f.from.IsValid() && f.from.Is4() != dst.Is4() {
		return exitUsage, usagef("--from %s and ADDRESS %s are of different address families", f.from, dst)
	}
	f.ForCommand(f.set, e.stdin)
	x := answer.Explanation{Destination: dst.String(), Live: f.live}
	policy, fileErr := f.filePolicy(&x, e)
	k := e.kernel()
	defer func() { _ = k.Close() }()
	held, exact, heldErr := readHeld(ctx, k, f.Chain)
	switch {
	case f.live && heldErr != nil:
		return exitFailed, heldErr
	case f.live && held == nil:
		return exitFailed, errNoRules
	case fileErr != nil && (heldErr != nil || held == nil):
		return refuse(e, fileErr)
	}
	f.compare(&x, policy, held, fileErr, heldErr)
	ours := nft.Ruleset{}
	if held != nil {
		ours = *held
		if f.live || fileErr != nil || held.Policy.Hash() != policy.Hash() {
			policy, x.Live = held.Policy, true
		}
	}
	x.Config, x.Why.Code = policy.Hash(), "config"
	routes, err := e.routes(f.from, dst, f.out)
	switch {
	case err != nil && heldErr == nil:
		return exitFailed, err
	case len(routes.Ways) == 0:
		x.Notes = append(x.Notes, fmt.Sprintf("The routes of this node are unknown: %v.", err))
		routes.Ways = []node.Route{{}}
	}
	if heldErr == nil {
		paths, err := k.Trace(ctx, f.from, dst, routes, ours)
		if err != nil {
			return exitFailed, hinted(err)
		}
		x.Follow(paths)
		if text := legacyNAT(e.proc, dst.Is6()); text != "" {
			x.First = append(x.First, "This answer ignores "+text)
		}
	}
	if held == nil || exact {
		x.Ask(policy, f.from, dst, routes)
	} else {
		x.First = append(x.First, "Another program changed this agent's rules: see status.")
	}
	// The verdict needs no privilege, but this does.
	if n, err := staleTo(ctx, k, f.from, dst); err == nil {
		x.SetStale(n)
	}
	if err := e.reply(f.output, x, x.String); err != nil || fileErr == nil {
		return exitDone, err
	}
	return refuse(e, fileErr)
}

// compare adds how the rules in the kernel, nil if there are none, differ from the config.
func (f *explainFlags) compare(x *answer.Explanation, policy nft.Policy, held *nft.Ruleset, fileErr, heldErr error) {
	switch {
	case heldErr != nil:
		x.Notes = append(x.Notes, unreadable(heldErr))
	case held == nil:
		x.First = append(x.First, "None of this agent's rules are installed on this node.")
		x.Absent = true
	case fileErr != nil:
		x.First = append(x.First, fmt.Sprintf("The config is rejected; the kernel enforces %s, and that is the answer.",
			held.Policy.Hash()))
	case !f.live && held.Policy.Hash() != policy.Hash():
		x.First = append(x.First, fmt.Sprintf(
			"The kernel enforces %s, not %s of the config (%s): the answer is the kernel's.",
			held.Policy.Hash(), policy.Hash(), f.ConfigPath))
	}
}

// unreadable explains why the answer is from the config only.
func unreadable(err error) string {
	if errors.Is(err, unix.EPERM) {
		return "The answer is from the config only: the rules of this node cannot be read without the capability NET_ADMIN."
	}
	return fmt.Sprintf("The answer is from the config only: the rules of this node cannot be read: %v.", err)
}

// filePolicy returns the policy of the config.
func (f *explainFlags) filePolicy(x *answer.Explanation, e environment) (nft.Policy, error) {
	x.Agent = running.Follow(f.Options, f.set, running.Agents(e.proc, program))
	if f.live {
		return nft.Policy{}, nil
	}
	l, err := f.Load()
	warn(e, l)
	if err != nil && x.Agent != "" {
		_, _ = fmt.Fprintln(e.stderr, x.Agent)
	}
	if err != nil {
		return nft.Policy{}, err
	}
	return l.Ruleset.Policy, nil
}

// readHeld returns our rules in the kernel, nil if there are none, and whether they
// are exact: some config of this version compiles to them. The chain is that of mode
// iptables-nft.
func readHeld(ctx context.Context, k *kernel.Kernel, chain string) (held *nft.Ruleset, exact bool, err error) {
	r, found, err := k.Held(ctx, chain, true)
	if err != nil || !found {
		return nil, false, hinted(err)
	}
	policy, exact, err := k.Live(ctx)
	if err != nil {
		return nil, false, hinted(err)
	}
	if exact {
		r.Policy = policy
	}
	return &r, exact, nil
}

// staleTo counts the stale connections to an address, from any source if src is the
// zero address.
func staleTo(ctx context.Context, k *kernel.Kernel, src, dst netip.Addr) (int, error) {
	f := connectionsFlags{to: netip.PrefixFrom(dst, dst.BitLen()), stale: true}
	if src.IsValid() {
		f.pod = netip.PrefixFrom(src, src.BitLen())
	}
	j, _, err := judge(ctx, k)
	if err != nil || j == nil {
		return 0, err
	}
	_, n, err := f.find(conntrack.Open(), j)
	return n, err
}

// legacyNAT describes the rules in legacy ip_tables, which netlink does not show; ""
// if there are none, or if they cannot be read.
func legacyNAT(proc string, ipv6 bool) string {
	family, program := nfnetlink.IPv4, "iptables-legacy"
	if ipv6 {
		family, program = nfnetlink.IPv6, "ip6tables-legacy"
	}
	switch n, err := foreign.LegacyRules(proc+"/thread-self/net", family); {
	case err != nil || n == 0:
		return ""
	case n == 1:
		return "a NAT rule in legacy ip_tables: " + program + " -t nat -S lists it."
	default:
		return fmt.Sprintf("%d NAT rules in legacy ip_tables: %s -t nat -S lists them.", n, program)
	}
}
