package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os/signal"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/nftrace"
)

// A traced is the answer of explain with --trace.
type traced struct {
	cli.Head
	// Trace is what the first packet of the next connection met, with --trace.
	Trace nftrace.Trace `json:"trace"`
}

// Print writes the trace as text, whose last line ends.
func (r *traced) Print(t cli.Text) { t.Line("%s", strings.TrimSuffix(r.Trace.String(), "\n")) }

// traceNext waits for a new connection to the destination, and prints what its first packet met. A signal or a
// broken pipe ends it, and the table goes in any case.
func (f *explainFlags) traceNext(ctx context.Context, dst netip.AddrPort, e environment) (int, error) {
	if f.link != "" {
		return exitUsage, usagef("--trace and --out exclude each other: the packet shows its interface")
	}
	ctx, stop := signal.NotifyContext(ctx, unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGPIPE)
	defer stop()
	waiting, cancel := context.WithTimeout(ctx, f.trace)
	defer cancel()
	if f.protocol == unix.IPPROTO_ICMP && dst.Addr().Is6() {
		f.protocol = unix.IPPROTO_ICMPV6
	}
	query := nftrace.Query{From: f.source, To: dst, Protocol: f.protocol}
	awaited := "a new connection"
	if f.source.IsValid() {
		awaited += " from " + f.source.String()
	}
	awaited += " to " + conntrack.HostPort(dst)
	t, err := nftrace.Run(waiting, query, func() {
		_, _ = fmt.Fprintf(e.stderr, "waiting up to %s for %s\n", f.trace, awaited)
	})
	switch {
	case errors.Is(err, nftrace.ErrNoPacket) && ctx.Err() != nil:
		return exitFailed, fmt.Errorf("interrupted before %s came", awaited)
	case errors.Is(err, nftrace.ErrNoPacket):
		return exitFailed, fmt.Errorf("%s did not come within %s: while the trace runs, open one, such as: %s\n"+
			"it begins at prerouting: chains of ingress, tc and XDP, which can drop packets before that, are not traced",
			awaited, f.trace, f.opens(dst))
	case err != nil:
		return exitFailed, hinted(err)
	}
	return e.reply(f.output, &traced{cli.NewHead(e.command), t})
}

// opens returns a command that opens a connection from a pod.
func (f *explainFlags) opens(dst netip.AddrPort) string {
	const pod = "kubectl exec POD -- "
	port := cmp.Or(dst.Port(), 80)
	switch f.protocol {
	case unix.IPPROTO_UDP:
		return fmt.Sprintf("%ssh -c 'echo | nc -u -w 1 %s %d'", pod, dst.Addr(), port)
	case unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6:
		return fmt.Sprintf("%sping -c 1 %s", pod, dst.Addr())
	}
	return fmt.Sprintf("%snc -z -w 3 %s %d", pod, dst.Addr(), port)
}

// The time that a trace waits for a packet, and the longest that it may.
const (
	traceTime    = "10s"
	maxTraceTime = 10 * time.Minute
)

func parseTraceTime(s string) (time.Duration, error) {
	d, err := time.ParseDuration(s)
	if err != nil || d <= 0 || d > maxTraceTime {
		return 0, fmt.Errorf("must be a duration up to %s, such as 30s", maxTraceTime)
	}
	return d, nil
}
