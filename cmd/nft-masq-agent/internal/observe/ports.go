package observe

import (
	"context"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"nft-masq-agent/cmd/nft-masq-agent/internal/agent"
	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/judge"
)

// ports measures how many source ports are in use.
type ports struct {
	*agent.Agent
	read func(context.Context, conntrack.Ports) (conntrack.Pressure, error)
	o    cli.Options
	last atomic.Pointer[pressure] // nil: unknown
}

// A pressure is a reading of connection tracking.
type pressure struct {
	conntrack.Pressure
	interval time.Duration // until the next reading
}

// Run reads the connections at intervals. A reading ends when another policy is decided, and is done again for that.
func (p *ports) Run(ctx context.Context) {
	failed := ""
	for ctx.Err() == nil && p.o.ConntrackInterval > 0 {
		start := time.Now()
		policy := nft.Policy{Ports: p.o.Ports}
		v := p.Current()
		if v.Installed != nil {
			policy = v.Installed.Policy
		}
		this, end := p.WithPolicy(ctx, v)
		found, err := p.read(this, judge.SourcePorts(policy))
		share := agent.CheckShare * time.Since(start)
		pause := max(p.o.ConntrackInterval, share)
		switch {
		case this.Err() != nil:
			pause = min(p.o.ConntrackInterval, share)
		case err == nil:
			failed = ""
			p.last.Store(&pressure{found, pause})
		default:
			p.last.Store(nil)
			unreadable(p.Agent, err, &failed)
		}
		end()
		agent.Wait(ctx, pause)
	}
}

// unreadable logs that connections cannot be read, once until the error changes.
func unreadable(a *agent.Agent, err error, failed *string) {
	if text := err.Error(); text != *failed {
		*failed = text
		a.Log(zap.WarnLevel, "connections_unreadable", "cannot read connections", "error", err)
	}
}

func (p *ports) Collect(e agent.Exporter) {
	last := p.last.Load()
	if last == nil {
		return
	}
	e.Gauge("snat_ports_used_ratio_max",
		"Share of source ports in use, for the source address, protocol and destination with the most; with portsPerPod, of "+
			"the ports of a block. Connections fail from 0.9 on.", last.Fullest)
	e.Counter("conntrack_insert_failed_total",
		"Connections that the kernel could not track, including those without a free source port.",
		float64(last.InsertFailed))
	e.Counter("conntrack_drop_total", "Packets that the kernel dropped because their connection could not be tracked.",
		float64(last.Drop))
	e.Gauge("conntrack_entries", "Tracked connections.", float64(last.Entries))
	if last.Limit > 0 {
		e.Gauge("conntrack_limit", "Maximum number of tracked connections.", float64(last.Limit))
	}
	e.Gauge("conntrack_interval_seconds",
		"Time between two readings of the connections: --conntrack-interval, or more if a reading would take more than "+
			"0.5 % of one CPU.",
		last.interval.Seconds())
}
