package agent

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/conntrack"
)

// pressureShare limits reading the connections to 0.5 % of one CPU: the pause is
// that many times as long as the last reading.
const pressureShare = 200

// A pressure is a reading of connection tracking.
type pressure struct {
	conntrack.Pressure
	interval time.Duration // until the next reading
}

// pressureMetrics returns the metrics of a reading; ports is how many are available
// for one destination.
func pressureMetrics(ports int) []metric {
	of := func(kind prometheus.ValueType, name, help string, value func(pressure) float64) metric {
		m := newGauge(name, help, func(s state, set setter) {
			if s.pressure != nil {
				set(value(*s.pressure))
			}
		})
		m.kind = kind
		return m
	}
	return []metric{
		newGauge("snat_ports_used_ratio_max", "Share of source ports in use, for the source address and destination with the most. Connections fail from 0.9 on.",
			func(s state, set setter) {
				for _, ipv6 := range []bool{false, true} {
					for _, protocol := range []uint8{unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP} {
						if s.pressure != nil {
							used := s.pressure.Fullest[conntrack.PortGroup{IPv6: ipv6, Protocol: protocol}]
							set(float64(used)/float64(ports), familyName(ipv6), conntrack.ProtocolName(protocol))
						}
					}
				}
			}, "family", "protocol"),
		of(prometheus.CounterValue, "conntrack_insert_failed_total", "Connections that the kernel could not track, including those without a free source port.",
			func(p pressure) float64 { return float64(p.InsertFailed) }),
		of(prometheus.CounterValue, "conntrack_drop_total", "Packets that the kernel dropped because their connection could not be tracked.",
			func(p pressure) float64 { return float64(p.Drop) }),
		of(prometheus.GaugeValue, "conntrack_entries", "Tracked connections.", func(p pressure) float64 { return float64(p.Entries) }),
		newGauge("conntrack_limit", "Maximum number of tracked connections.", func(s state, set setter) {
			if s.pressure != nil && s.pressure.Limit > 0 {
				set(float64(s.pressure.Limit))
			}
		}),
		of(prometheus.GaugeValue, "conntrack_interval_seconds", "Time between two readings of the connections: --conntrack-interval, or more if a reading would take more than 0.5 % of one CPU.",
			func(p pressure) float64 { return p.interval.Seconds() }),
	}
}

// watchPressure reads the connections at intervals.
func (a *Agent) watchPressure(ctx context.Context) {
	failed := ""
	for {
		start := time.Now()
		found, err := a.in.Pressure()
		wait := max(a.settings.ConntrackInterval, pressureShare*time.Since(start))
		if err == nil {
			a.health.foundPressure(&pressure{found, wait})
			failed = ""
		} else {
			a.health.foundPressure(nil)
			if failed != err.Error() {
				a.log.Warn("cannot read connections", zap.String("event", "connections_unreadable"), zap.Error(err))
			}
			failed = err.Error()
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
	}
}
