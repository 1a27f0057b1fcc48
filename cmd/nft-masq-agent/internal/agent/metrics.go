package agent

import (
	"runtime"
	"slices"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/kernel"
)

// metrics are the counters of the loop. At each scrape, the current view, the kernel's counters and those of the
// observers are added. Names, labels and meaning are stable; manifests/README.md lists them.
type metrics struct {
	registry *prometheus.Registry
	applies  *prometheus.CounterVec
	duration prometheus.Histogram
	errors   atomic.Int64 // scrapes at which the connections could not be read
}

const metricPrefix = "nft_masq_agent_"

// Results of an apply, as the metrics name them.
const (
	inSyncResult   = "in_sync"
	writtenResult  = "written"
	rejectedResult = "rejected"
	delayedResult  = "delayed" // by other programs' transactions
)

func newMetrics(a *Agent) *metrics {
	m := &metrics{
		registry: prometheus.NewRegistry(),
		applies: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: metricPrefix + "applies_total",
			Help: "Number of comparisons of kernel and config, by reason and by result: in_sync, written, rejected, or " +
				"delayed by other programs that write all the time.",
		}, []string{"reason", "result"}),
		duration: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    metricPrefix + "apply_duration_seconds",
			Help:    "Time from the comparison to the end of the transaction, for those that wrote.",
			Buckets: []float64{.0005, .001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 30},
		}),
	}
	for _, reason := range []string{onStart, onConfig, onDrift, onResync, onHangup, onRetry, onAddresses} {
		for _, result := range []string{inSyncResult, writtenResult, rejectedResult, delayedResult} {
			m.applies.WithLabelValues(reason, result)
		}
	}
	m.registry.MustRegister(
		m.applies, m.duration, stateCollector{a},
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	)
	return m
}

// count counts an attempt by its reason and result.
func (m *metrics) count(v view) {
	result := inSyncResult
	switch {
	case kernel.Delayed(v.attempt.err):
		result = delayedResult
	case v.attempt.err != nil:
		result = rejectedResult
	case v.attempt.applied == nil:
		return
	case len(v.attempt.applied.Differences) > 0:
		result = writtenResult
		m.duration.Observe(v.attempt.took.Seconds())
	}
	m.applies.WithLabelValues(v.attempt.reason, result).Inc()
}

// A stateCollector exports the view, the kernel's counters and what the observers found. It exports nothing that is
// still unknown.
type stateCollector struct{ *Agent }

// Describe describes nothing, because what is unknown is not exported.
func (c stateCollector) Describe(chan<- *prometheus.Desc) {}

// Collect implements [prometheus.Collector].
func (c stateCollector) Collect(ch chan<- prometheus.Metric) {
	e := Exporter(ch)
	e.Gauge("build_info", "Version, commit and Go version of the running program; always 1.",
		1, "version", c.settings.Version, "commit", c.settings.Commit, "goversion", runtime.Version())
	e.Counter("log_lines_lost_total",
		"Log lines that were dropped because nothing read them in time, or that could not be written.",
		float64(c.settings.LostLines()))
	counts, err := c.kernel.Counters(c.settings.NFT.Layout)
	if err != nil {
		c.metrics.errors.Add(1)
	}
	for _, n := range counts {
		if n.Verdict == nft.Invalid {
			e.Counter("untranslated_packets_total",
				"Packets of pods that were dropped because they belong to no connection, by address family: "+
					"without dropInvalid they would have left with the pod's IP.", float64(n.Packets), "family", nft.FamilyKey(n.IPv6))
			continue
		}
		e.Counter("connections_total",
			"New connections by address family and verdict: masqueraded, exempt, or local for those to the node itself.",
			float64(n.Packets), "family", nft.FamilyKey(n.IPv6), "verdict", string(n.Verdict))
	}
	e.Counter("connection_read_errors_total", "Scrapes at which the connection counters could not be read.",
		float64(c.metrics.errors.Load()))
	e.view(c.current())
	for _, o := range c.observers {
		o.Collect(e)
	}
}

// An Exporter exports the metrics of a scrape.
type Exporter chan<- prometheus.Metric

// Gauge exports a gauge. Labels are names and values in turn.
func (e Exporter) Gauge(name, help string, v float64, labels ...string) {
	e.export(prometheus.GaugeValue, name, help, v, labels...)
}

// Counter exports a counter.
func (e Exporter) Counter(name, help string, v float64, labels ...string) {
	e.export(prometheus.CounterValue, name, help, v, labels...)
}

func (e Exporter) export(kind prometheus.ValueType, name, help string, v float64, labels ...string) {
	var names, values []string
	for label := range slices.Chunk(labels, 2) {
		names = append(names, label[0])
		values = append(values, label[1])
	}
	e <- prometheus.MustNewConstMetric(prometheus.NewDesc(metricPrefix+name, help, names, nil), kind, v, values...)
}

// view exports what the loop reads and enforces.
func (e Exporter) view(v view) {
	e.Gauge("ready", "Whether the config was accepted and is in the kernel, as in /readyz: 1 or 0.",
		Number(v.ready() == nil))
	e.Counter("drift_repairs_total", "Number of times that rules changed by another program were restored.",
		float64(v.repairs))
	if v.read {
		e.Gauge("config_accepted", "Whether the last config that was read was accepted: 1 or 0. If 0, config_source shows "+
			"what is enforced.",
			Number(v.content.err == nil))
		e.Gauge("config_warnings", "Warnings about the last config that was read.",
			float64(len(v.content.remarks.WithLevel(config.Warning))))
		e.Gauge("config_vanished", "Whether there was a config in this run of the agent and there is none any more, so that "+
			"the built-in defaults apply: 1 or 0.",
			Number(v.vanished() != nil))
	}
	for _, source := range Sources() {
		e.Gauge("config_source", "Source of the enforced policy, 1 for the one that applies: file; previous, the last "+
			"good config or that of a previous run; "+
			"lenient, the older agents' reading of a rejected file; foreign, the rules of an iptables-based agent; defaults, "+
			"built in.",
			Number(v.policy.source == source), "source", string(source))
	}
	if v.policy.accepted {
		e.Gauge("config_last_accepted_timestamp_seconds", "When a config was last accepted, in seconds since 1970.",
			float64(v.policy.content.readAt.UnixMilli())/1000)
	}
	if v.installed == nil {
		return
	}
	e.Gauge("config_info", "Hash of the policy that was last applied, and the mode; always 1.", 1,
		"hash", v.hash(), "mode", string(v.installed.Mode()))
	v4, v6 := v.installed.CIDRs()
	present := 0
	absent := 0
	for _, f := range v.installed.Policy.Families {
		addresses := f.SNATAddresses()
		present += len(addresses.Present)
		absent += len(addresses.Absent())
	}
	for ipv6, n := range map[bool]int{false: v4, true: v6} {
		e.Gauge("cidrs", "CIDRs of the policy in the kernel by address family, without those covered by another.", float64(n),
			"family", nft.FamilyKey(ipv6))
	}
	for state, n := range map[string]int{"present": present, "absent": absent} {
		e.Gauge("snat_addresses", "Addresses of snatAddresses: present, those that the node has; absent, entries without "+
			"an address on the node. With none present, connections are masqueraded.",
			float64(n), "state", state)
	}
	present, absent = v.installed.Policy.CountSNATRules()
	for state, n := range map[string]int{"present": present, "absent": absent} {
		e.Gauge("snat_rules", "Entries of snatRules: present, with an address on the node; absent, without one. Those "+
			"are skipped.",
			float64(n), "state", state)
	}
}

// Number returns 1 for true and 0 for false, as metrics have it.
func Number(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
