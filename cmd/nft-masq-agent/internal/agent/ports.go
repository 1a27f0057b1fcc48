package agent

import (
	"context"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/conntrack"
)

// A pressure is a reading of connection tracking.
type pressure struct {
	conntrack.Pressure
	interval time.Duration // until the next reading
}

// pressure exports a reading; ports is how many are available for one destination.
func (e exporter) pressure(p pressure, ports int) {
	for _, ipv6 := range []bool{false, true} {
		for _, protocol := range []uint8{unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP} {
			used := p.Fullest[conntrack.PortGroup{IPv6: ipv6, Protocol: protocol}]
			e.gauge("snat_ports_used_ratio_max", "Share of source ports in use, for the source address and destination with the most. Connections fail from 0.9 on.",
				float64(used)/float64(ports), "family", familyName(ipv6), "protocol", conntrack.ProtocolName(protocol))
		}
	}
	e.counter("conntrack_insert_failed_total", "Connections that the kernel could not track, including those without a free source port.", float64(p.InsertFailed))
	e.counter("conntrack_drop_total", "Packets that the kernel dropped because their connection could not be tracked.", float64(p.Drop))
	e.gauge("conntrack_entries", "Tracked connections.", float64(p.Entries))
	if p.Limit > 0 {
		e.gauge("conntrack_limit", "Maximum number of tracked connections.", float64(p.Limit))
	}
	e.gauge("conntrack_interval_seconds", "Time between two readings of the connections: --conntrack-interval, or more if a reading would take more than 0.5 % of one CPU.",
		p.interval.Seconds())
}

// watchPressure reads the connections at intervals.
func (a *Agent) watchPressure(ctx context.Context) {
	for failed := ""; ctx.Err() == nil; {
		start := time.Now()
		found, err := a.in.Pressure()
		pause := max(a.settings.ConntrackInterval, checkShare*time.Since(start))
		var p *pressure
		switch {
		case err == nil:
			p, failed = &pressure{found, pause}, ""
		case err.Error() != failed:
			failed = err.Error()
			a.log.Warn("cannot read connections", zap.String("event", "connections_unreadable"), zap.Error(err))
		}
		a.health.set(func(s *state) { s.pressure = p })
		wait(ctx, pause)
	}
}
