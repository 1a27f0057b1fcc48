package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/netip"

	"nft-masq-agent/cmd/nft-masq-agent/answer"
	"nft-masq-agent/cmd/nft-masq-agent/options"
	"nft-masq-agent/cmd/nft-masq-agent/running"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/foreign"
	"nft-masq-agent/nft/kernel"

	"golang.org/x/sys/unix"
)

type explainFlags struct {
	*options.Options
	set    *flag.FlagSet
	from   netip.Addr // zero: any pod
	out    string     // interface; none: that of the route
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
			f := explainFlags{Options: options.AddPolicyFlags(fs), set: fs}
			options.AddFlag(fs, &f.from, "from", "", "`SOURCE` address of the connection (default: a pod's)", parseAddress)
			fs.StringVar(&f.out, "out", "", "`INTERFACE` that the connection leaves by (default: that of the node's route)")
			fs.BoolVar(&f.live, "live", false, "ask the rules and sets that the kernel holds now, not the config")
			options.AddFlag(fs, &f.output, "o", outputText, "text or json `FORMAT` of the answer", options.OneOf(outputText, outputJSON))
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
	x := answer.Explanation{Destination: dst.String(), Live: f.live}
	var policy nft.Policy
	if f.live {
		policy, err = livePolicy()
		if err == nil {
			x.Overruled, err = liveOverruled(f.Chain)
		}
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
	if f.out != "" {
		ends.Out = f.out
	}
	x.Ask(policy, f.from, dst, ends)
	// The verdict needs no privilege; these do.
	if n, err := e.staleTo(f.from, dst); err == nil {
		x.SetStale(n)
	}
	if f.output == outputJSON {
		return exitDone, writeJSON(e.stdout, x)
	}
	return exitDone, write(e.stdout, x.String())
}

// filePolicy gives the policy of the config.
func (f *explainFlags) filePolicy(x *answer.Explanation, e environment) (nft.Policy, error) {
	x.Agent = running.Follow(f.Options, f.set, running.Agents(e.proc, program))
	l, err := f.Load()
	warn(e, l)
	if err != nil && x.Agent != "" {
		_, _ = fmt.Fprintln(e.stderr, x.Agent)
	}
	return l.Ruleset.Policy, err
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
		return nft.Policy{}, errNoRules
	}
	return policy, nil
}

// liveOverruled finds the rules of other programs that decide before the kernel's
// own. The chain is where mode iptables-nft would be.
func liveOverruled(chain string) ([]foreign.Conflict, error) {
	k := kernel.Open()
	defer func() { _ = k.Close() }()
	held, _, err := k.Held(chain)
	if err != nil {
		return nil, hinted(err)
	}
	others, err := k.Others(held)
	if err != nil {
		return nil, hinted(err)
	}
	return others.Overruled, nil
}

func (e environment) ends(src, dst netip.Addr) (answer.Ends, error) {
	to, err := e.routeTo(dst)
	if err != nil || !src.IsValid() {
		return endsOf(kernel.Route{}, to, dst), err
	}
	from, err := e.routeTo(src)
	return endsOf(from, to, dst), err
}

// endsOf takes for the interface on which a source is received the one that leads
// back to it.
func endsOf(from, to kernel.Route, dst netip.Addr) answer.Ends {
	return answer.Ends{
		In: from.Interface, Out: to.Interface,
		FromHere: from.Type == unix.RTN_LOCAL,
		ToHere:   to.Type == unix.RTN_LOCAL || dst.IsLoopback(),
		ToMany:   to.Type == unix.RTN_BROADCAST || dst.IsMulticast() || dst == netip.AddrFrom4([4]byte{255, 255, 255, 255}),
	}
}
