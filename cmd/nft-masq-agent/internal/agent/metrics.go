package agent

import (
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"nft-masq-agent/nft"
)

// metrics are the counters of the loop and, at each scrape, its reported state
// and the kernel's counters. Names, labels and meaning are stable;
// manifests/README.md lists them.
type metrics struct {
	registry *prometheus.Registry
	applies  *prometheus.CounterVec
	duration prometheus.Histogram
	repairs  prometheus.Counter

	connections connectionCollector
}

const metricPrefix = "nft_masq_agent_"

// Results of an apply, as the metrics name them.
const (
	inSyncResult  = "in_step"
	writtenResult = "written"
	refusedResult = "refused"
)

func newMetrics(h *health, k Kernel, s Settings) *metrics {
	m := &metrics{
		registry: prometheus.NewRegistry(),
		applies: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: metricPrefix + "applies_total",
			Help: "Number of comparisons of kernel and config, by reason and by result: in_step, written or refused.",
		}, []string{"reason", "result"}),
		duration: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    metricPrefix + "apply_duration_seconds",
			Help:    "Time from the comparison to the end of the transaction, for those that wrote.",
			Buckets: []float64{.0005, .001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 30},
		}),
		repairs: prometheus.NewCounter(prometheus.CounterOpts{
			Name: metricPrefix + "drift_repairs_total",
			Help: "Number of times that rules changed by another program were restored.",
		}),
		connections: newConnectionCollector(k, s.Options.Layout),
	}
	info := prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name:        metricPrefix + "build_info",
		Help:        "Version, commit and Go version of the running program; always 1.",
		ConstLabels: prometheus.Labels{"version": s.Version, "commit": s.Commit, "goversion": runtime.Version()},
	}, func() float64 { return 1 })
	lost := prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: metricPrefix + "log_lines_lost_total",
		Help: "Log lines that were dropped because nothing read them in time, or that could not be written.",
	}, func() float64 {
		if s.LostLines == nil {
			return 0
		}
		return float64(s.LostLines())
	})
	for _, reason := range []string{onStart, onConfig, onDrift, onResync, onHangup, onRefusal, onAddresses} {
		for _, result := range []string{inSyncResult, writtenResult, refusedResult} {
			m.applies.WithLabelValues(reason, result)
		}
	}
	m.registry.MustRegister(
		info, lost, m.applies, m.duration, m.repairs,
		stateCollector{h, slices.Concat(ownGauges(), nodeGauges(), foreignGauges(), pressureMetrics(nft.Policy{Ports: s.Options.Ports}.SourcePorts()))}, m.connections,
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	)
	return m
}

func (m *metrics) applied(reason string, wrote bool, err error, took time.Duration) {
	result := inSyncResult
	switch {
	case err != nil:
		result = refusedResult
	case wrote:
		result = writtenResult
		m.duration.Observe(took.Seconds())
	}
	m.applies.WithLabelValues(reason, result).Inc()
}

func (m *metrics) repaired() { m.repairs.Inc() }

// A stateCollector exports the state of the loop, without what is still unknown.
type stateCollector struct {
	health  *health
	metrics []metric
}

// A metric is derived from a state, with one value for each set of labels.
type metric struct {
	desc    *prometheus.Desc
	kind    prometheus.ValueType
	collect func(s state, set setter)
}

func newGauge(name, help string, collect func(state, setter), labels ...string) metric {
	return metric{prometheus.NewDesc(metricPrefix+name, help, labels, nil), prometheus.GaugeValue, collect}
}

// A setter sets the value of a metric for label values.
type setter = func(v float64, labels ...string)

// ownGauges returns the gauges of what the agent reads and enforces.
func ownGauges() []metric {
	return []metric{
		newGauge("ready", "Whether the config was accepted and is in the kernel, as in /readyz: 1 or 0.",
			func(s state, set setter) { set(number(s.ready() == nil)) }),
		newGauge("config_accepted", "Whether the last config that was read was accepted: 1 or 0. If 0, config_source shows what is enforced.",
			func(s state, set setter) {
				if s.read {
					set(number(s.rejection == nil))
				}
			}),
		newGauge("config_source", "Source of the enforced policy, 1 for the one that applies: file; previous, the last good config or that of a previous run; "+
			"lenient, the older agents' reading of a rejected file; foreign, the rules of an iptables-based agent; defaults, built in.",
			func(s state, set setter) {
				for _, from := range Sources() {
					set(number(s.source == from), string(from))
				}
			}, "source"),
		newGauge("config_last_accepted_timestamp_seconds", "When a config was last accepted, in seconds since 1970.",
			func(s state, set setter) {
				if !s.accepted.IsZero() {
					set(float64(s.accepted.UnixMilli()) / 1000)
				}
			}),
		newGauge("config_warnings", "Warnings about the last config that was read.",
			func(s state, set setter) {
				if s.read {
					set(float64(s.warnings))
				}
			}),
		newGauge("config_info", "Hash of the policy that was last applied, and the mode; always 1.",
			func(s state, set setter) {
				if s.kernel != nil {
					set(1, s.kernel.hash, string(s.kernel.mode))
				}
			}, "hash", "mode"),
		newGauge("cidrs", "CIDRs of the policy in the kernel by address family, without those covered by another.",
			func(s state, set setter) {
				if s.kernel != nil {
					set(float64(s.kernel.ipv4), "ipv4")
					set(float64(s.kernel.ipv6), "ipv6")
				}
			}, "family"),
		newGauge("listening", "Whether the agent listens to ruleset changes: 1 or 0. If 0, it compares the generation every 250 ms, and restored rules are logged without the name of the program.",
			func(s state, set setter) { set(number(s.listening)) }),
	}
}

// nodeGauges are the gauges that compare the config with the node and its
// connections.
func nodeGauges() []metric {
	return []metric{
		newGauge("unmatched_interface_lists", "Lists of the config that name the only interfaces for masquerading and of which this node has none: nothing is masqueraded.",
			func(s state, set setter) {
				if s.unmatched != nil {
					set(float64(*s.unmatched))
				}
			}),
		newGauge("snat_addresses", "Addresses of snatAddresses: present, those that the node has; absent, entries of which it has no address. With none present, connections are masqueraded.",
			func(s state, set setter) {
				if s.kernel != nil {
					set(float64(s.kernel.present), "present")
					set(float64(s.kernel.absent), "absent")
				}
			}, "state"),
		newGauge("stale_connections", "Connections decided by an earlier policy, whose translation contradicts the rules. An estimate above 200,000 tracked connections.",
			func(s state, set setter) {
				if s.stale != nil {
					set(float64(*s.stale))
				}
			}),
	}
}

// foreignGauges returns the gauges of other programs' rules on the node.
func foreignGauges() []metric {
	of := func(name, help string, count func(others) int) metric {
		return newGauge(name, help, func(s state, set setter) {
			if s.others != nil {
				set(float64(count(*s.others)))
			}
		})
	}
	return []metric{
		of("foreign_masquerade_rules", "Other programs' rules that masquerade what the config exempts, without accepted ones and those that meet no pod.",
			func(o others) int { return o.foreign }),
		of("foreign_exempting_rules", "Other programs' rules that accept what the config masquerades: before the jump in mode iptables-nft, otherwise without effect on this agent.",
			func(o others) int { return o.exempting }),
		of("foreign_translating_rules", "Other programs' rules that translate what the config masquerades to another source address.",
			func(o others) int { return o.translating }),
		of("legacy_rules", "Chains of iptables-based agents, in nf_tables and in legacy ip_tables.",
			func(o others) int { return o.legacy }),
	}
}

func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

func (c stateCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, m := range c.metrics {
		ch <- m.desc
	}
}

func (c stateCollector) Collect(ch chan<- prometheus.Metric) {
	s := c.health.now()
	for _, m := range c.metrics {
		m.collect(s, func(v float64, labels ...string) {
			ch <- prometheus.MustNewConstMetric(m.desc, m.kind, v, labels...)
		})
	}
}

// A connectionCollector reads the kernel's counters at each scrape, without
// reading sets.
type connectionCollector struct {
	kernel      Kernel
	layout      nft.Layout
	connections *prometheus.Desc
	errors      prometheus.Counter
	sums        *sums // if the kernel's counters are not persistent
}

func newConnectionCollector(k Kernel, l nft.Layout) connectionCollector {
	c := connectionCollector{
		kernel: k, layout: l,
		connections: prometheus.NewDesc(metricPrefix+"connections_total",
			"New connections by address family and verdict: masqueraded, exempt, or local for those to the node itself.",
			[]string{"family", "verdict"}, nil),
		errors: prometheus.NewCounter(prometheus.CounterOpts{
			Name: metricPrefix + "connection_read_errors_total",
			Help: "Scrapes at which the connection counters could not be read.",
		}),
	}
	if !l.CountersLast() {
		c.sums = &sums{}
	}
	return c
}

// begin makes the kernel's current counters the zero of the sums.
func (c connectionCollector) begin() {
	if c.sums != nil && !c.sums.begun() {
		_, _ = c.counts()
	}
}

func (c connectionCollector) counts() ([]nft.Counts, error) {
	counts, err := c.kernel.Counters(c.layout)
	if err != nil || c.sums == nil {
		return counts, err
	}
	return c.sums.add(counts), nil
}

func (c connectionCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- c.connections
	c.errors.Describe(ch)
}

func (c connectionCollector) Collect(ch chan<- prometheus.Metric) {
	counts, err := c.counts()
	if err != nil {
		c.errors.Inc()
	}
	c.errors.Collect(ch)
	for _, n := range counts {
		ch <- prometheus.MustNewConstMetric(c.connections, prometheus.CounterValue, float64(n.Packets), familyName(n.IPv6), string(n.Verdict))
	}
}

// familyName is a family as labels and fields of the log have it.
func familyName(ipv6 bool) string {
	if ipv6 {
		return "ipv6"
	}
	return "ipv4"
}

// sums makes the counters of mode iptables-nft monotonic. They are sums over
// rules, and a deleted rule loses its count; Prometheus takes a decreasing
// counter for a reset and counts the rest again. The sums start at zero with the
// program and never decrease.
type sums struct {
	mu          sync.Mutex
	last, total map[nft.Counts]uint64 // by family and verdict
}

func (s *sums) begun() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.last != nil
}

func (s *sums) add(counts []nft.Counts) []nft.Counts {
	s.mu.Lock()
	defer s.mu.Unlock()
	first := s.last == nil
	if first {
		s.last, s.total = map[nft.Counts]uint64{}, map[nft.Counts]uint64{}
	}
	out := make([]nft.Counts, 0, len(counts))
	for _, n := range counts {
		key := nft.Counts{IPv6: n.IPv6, Verdict: n.Verdict}
		if last := s.last[key]; n.Packets > last && !first {
			s.total[key] += n.Packets - last
		}
		s.last[key] = n.Packets
		n.Packets = s.total[key]
		out = append(out, n)
	}
	return out
}
