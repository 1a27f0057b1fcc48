package agent

import (
	"context"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
)

// pressureShare limits reading the connections to 0.5 % of one CPU: the pause is
// that many times as long as the last reading.
const pressureShare = 200

// pressure is the last reading of connection tracking, for the metrics.
type pressure struct {
	ports int // available for one destination

	mu       sync.Mutex
	read     bool
	last     conntrack.Pressure
	interval time.Duration // until the next reading

	ratio, insertFailed, drop, entries, limit, every *prometheus.Desc
}

func newPressure(o nft.Options) *pressure {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(metricPrefix+name, help, labels, nil)
	}
	return &pressure{
		ports: nft.Policy{Ports: o.Ports}.SourcePorts(),
		ratio: desc("snat_ports_used_ratio_max", "Share of source ports in use, for the source address and destination with the most. Connections fail from 0.9 on.",
			"family", "protocol"),
		insertFailed: desc("conntrack_insert_failed_total", "Connections that the kernel could not track, including those without a free source port."),
		drop:         desc("conntrack_drop_total", "Packets that the kernel dropped because their connection could not be tracked."),
		entries:      desc("conntrack_entries", "Tracked connections."),
		limit:        desc("conntrack_limit", "Maximum number of tracked connections."),
		every:        desc("conntrack_interval_seconds", "Time between two readings of the connections: --conntrack-interval, or more if a reading would take more than 0.5 % of one CPU."),
	}
}

// Describe implements [prometheus.Collector].
func (p *pressure) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{p.ratio, p.insertFailed, p.drop, p.entries, p.limit, p.every} {
		ch <- d
	}
}

// Collect implements [prometheus.Collector].
func (p *pressure) Collect(ch chan<- prometheus.Metric) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.read {
		return
	}
	tell := func(d *prometheus.Desc, kind prometheus.ValueType, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, kind, v, labels...)
	}
	for _, ipv6 := range []bool{false, true} {
		family := map[bool]string{false: "ipv4", true: "ipv6"}[ipv6]
		for _, protocol := range []uint8{unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP} {
			used := p.last.Fullest[conntrack.PortGroup{IPv6: ipv6, Protocol: protocol}]
			tell(p.ratio, prometheus.GaugeValue, float64(used)/float64(p.ports), family, conntrack.ProtocolName(protocol))
		}
	}
	tell(p.insertFailed, prometheus.CounterValue, float64(p.last.InsertFailed))
	tell(p.drop, prometheus.CounterValue, float64(p.last.Drop))
	tell(p.entries, prometheus.GaugeValue, float64(p.last.Entries))
	if p.last.Limit > 0 {
		tell(p.limit, prometheus.GaugeValue, float64(p.last.Limit))
	}
	tell(p.every, prometheus.GaugeValue, p.interval.Seconds())
}

// watchPressure reads the connections at intervals.
func (a *Agent) watchPressure(ctx context.Context) {
	p := a.metrics.pressure
	failed := ""
	for {
		start := time.Now()
		found, err := a.kernel.Pressure()
		wait := max(a.settings.ConntrackInterval, pressureShare*time.Since(start))
		p.mu.Lock()
		p.read, p.last, p.interval = err == nil, found, wait
		p.mu.Unlock()
		text := ""
		if err != nil {
			text = err.Error()
		}
		if text != "" && text != failed {
			a.log.Warn("cannot read connections", zap.String("event", "connections_unreadable"), zap.Error(err))
		}
		failed = text
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
	}
}
