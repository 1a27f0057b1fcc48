package main

import (
	"cmp"
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
	x := answer.Explanation{Destination: dst.String(), Answers: []answer.Answer{}, Notes: []string{}}
	candidates, fileErr := f.candidates(&x, e)
	k := e.kernel()
	defer func() { _ = k.Close() }()
	now, readErr := candidates.inForce(ctx, k)
	switch {
	case f.live && readErr != nil:
		return exitFailed, hinted(readErr)
	case f.live && !now.found:
		return exitFailed, errNoRules
	case fileErr != nil && !now.found:
		return refuse(e, fileErr)
	case readErr != nil:
		x.Notes = append(x.Notes, unreadable(hinted(readErr)))
	case !now.found:
		x.First = append(x.First, "None of this agent's rules are installed on this node.")
		x.Absent = true
	case fileErr != nil:
		x.First = append(x.First, fmt.Sprintf("The config is rejected; the kernel enforces %s, and that is the answer.", now.Hash))
	case !f.live && now.known == nil:
		x.First = append(x.First, now.unknown+": the answer is the kernel's.")
	}
	var known nft.Ruleset
	judged := now.known
	if judged != nil {
		known = *judged
	} else if !now.found {
		judged = &candidates.rulesets[0]
	}
	x.Live, x.Config, x.Why.Code = now.found && (fileErr != nil || judged == nil), now.Hash, "config"
	routes, err := e.routes(f.from, dst, f.out)
	switch {
	case err != nil && readErr == nil:
		return exitFailed, err
	case len(routes.Ways) == 0:
		x.Notes = append(x.Notes, fmt.Sprintf("The routes of this node are unknown: %v.", err))
		routes.Ways = []node.Route{{}}
	}
	if readErr == nil {
		paths, err := k.Trace(ctx, f.from, dst, routes, known)
		if err != nil {
			return exitFailed, hinted(err)
		}
		x.Follow(paths)
		if text := legacyNAT(e.proc, dst.Is6()); text != "" {
			x.First = append(x.First, "This answer ignores "+text)
		}
	}
	if judged != nil {
		x.Config = judged.Hash()
		x.Ask(judged.Policy, f.from, dst, routes)
	}
	if now.known != nil { // the verdict needs no privilege, but this does
		if n, err := staleTo(ctx, k, now.known.Policy, f.from, dst); err == nil {
			x.SetStale(n)
		}
	}
	if err := e.reply(f.output, x, x.String); err != nil || fileErr == nil {
		return exitDone, err
	}
	return refuse(e, fileErr)
}

// unreadable explains why the answer is from the config only.
func unreadable(err error) string {
	if errors.Is(err, unix.EPERM) {
		return "The answer is from the config only: the rules of this node cannot be read without the capability NET_ADMIN."
	}
	return fmt.Sprintf("The answer is from the config only: the rules of this node cannot be read: %v.", err)
}

// candidates returns the rulesets that the config may have led to.
func (f *explainFlags) candidates(x *answer.Explanation, e environment) (candidates, error) {
	x.Agent = running.Follow(f.Options, f.set, running.Agents(e.proc, program))
	if f.live {
		return candidates{}, nil
	}
	l, rejected := f.Load()
	warn(e, l)
	if rejected != nil && x.Agent != "" {
		_, _ = fmt.Fprintln(e.stderr, x.Agent)
	}
	all, err := e.candidates(f.Options, l, rejected)
	return all, cmp.Or(rejected, err)
}

// staleTo counts the stale connections to an address, from any source if src is the
// zero address.
func staleTo(ctx context.Context, k *kernel.Kernel, policy nft.Policy, src, dst netip.Addr) (int, error) {
	f := connectionsFlags{to: netip.PrefixFrom(dst, dst.BitLen()), stale: true}
	if src.IsValid() {
		f.pod = netip.PrefixFrom(src, src.BitLen())
	}
	j, err := judgeBy(ctx, k, policy)
	if err != nil {
		return 0, err
	}
	_, n, err := f.find(conntrack.Open(), j)
	return n, err
}

// legacyNAT describes the rules in legacy ip_tables, which netlink does not show; ""
// if there are none, or if they cannot be read.
func legacyNAT(proc string, ipv6 bool) string {
	t := foreign.XTable{Family: nfnetlink.IPv4}
	if ipv6 {
		t.Family = nfnetlink.IPv6
	}
	if n, err := foreign.LegacyRules(proc+"/thread-self/net", t.Family); err != nil || n == 0 {
		return ""
	}
	return "the NAT rules in legacy ip_tables: " + t.Command() + " lists them."
}
