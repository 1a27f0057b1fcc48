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
		connections: newConnectionCollector(k, s.NFT().Layout),
	}
	for _, reason := range []string{onStart, onConfig, onDrift, onResync, onHangup, onRefusal, onAddresses} {
		for _, result := range []string{inSyncResult, writtenResult, refusedResult} {
			m.applies.WithLabelValues(reason, result)
		}
	}
	m.registry.MustRegister(
		m.applies, m.duration, m.repairs, m.connections, stateCollector{h, s},
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

// A stateCollector exports the state of the loop, without what is still unknown.
type stateCollector struct {
	health   *health
	settings Settings
}

// Describe describes nothing, because what is unknown is not exported.
func (c stateCollector) Describe(chan<- *prometheus.Desc) {}

// Collect implements [prometheus.Collector].
func (c stateCollector) Collect(ch chan<- prometheus.Metric) {
	e, s := exporter(ch), c.health.now()
	e.gauge("build_info", "Version, commit and Go version of the running program; always 1.",
		1, "version", c.settings.Version, "commit", c.settings.Commit, "goversion", runtime.Version())
	lost := uint64(0)
	if c.settings.LostLines != nil {
		lost = c.settings.LostLines()
	}
	e.counter("log_lines_lost_total", "Log lines that were dropped because nothing read them in time, or that could not be written.", float64(lost))
	e.own(s)
	e.node(s)
	if s.others != nil {
		e.foreign(*s.others)
	}
	if s.pressure != nil {
		e.pressure(*s.pressure, nft.Policy{Ports: c.settings.Ports}.SourcePorts())
	}
}

// An exporter exports the metrics of a scrape.
type exporter chan<- prometheus.Metric

// gauge exports a gauge. Labels are names and values in turn.
func (e exporter) gauge(name, help string, v float64, labels ...string) {
	e.export(prometheus.GaugeValue, name, help, v, labels...)
}

func (e exporter) counter(name, help string, v float64, labels ...string) {
	e.export(prometheus.CounterValue, name, help, v, labels...)
}

func (e exporter) export(kind prometheus.ValueType, name, help string, v float64, labels ...string) {
	var names, values []string
	for label := range slices.Chunk(labels, 2) {
		names, values = append(names, label[0]), append(values, label[1])
	}
	e <- prometheus.MustNewConstMetric(prometheus.NewDesc(metricPrefix+name, help, names, nil), kind, v, values...)
}

// own exports what the agent reads and enforces.
func (e exporter) own(s state) {
	e.gauge("ready", "Whether the config was accepted and is in the kernel, as in /readyz: 1 or 0.", number(s.ready() == nil))
	if s.read {
		e.gauge("config_accepted", "Whether the last config that was read was accepted: 1 or 0. If 0, config_source shows what is enforced.",
			number(s.rejection == nil))
		e.gauge("config_warnings", "Warnings about the last config that was read.", float64(len(s.warnings)))
	}
	for _, from := range Sources() {
		e.gauge("config_source", "Source of the enforced policy, 1 for the one that applies: file; previous, the last good config or that of a previous run; "+
			"lenient, the older agents' reading of a rejected file; foreign, the rules of an iptables-based agent; defaults, built in.",
			number(s.policy.from == from), "source", string(from))
	}
	if !s.accepted.IsZero() {
		e.gauge("config_last_accepted_timestamp_seconds", "When a config was last accepted, in seconds since 1970.", float64(s.accepted.UnixMilli())/1000)
	}
	if s.kernel != nil {
		e.gauge("config_info", "Hash of the policy that was last applied, and the mode; always 1.", 1, "hash", s.kernel.hash, "mode", string(s.kernel.mode))
		for ipv6, n := range map[bool]int{false: s.kernel.ipv4, true: s.kernel.ipv6} {
			e.gauge("cidrs", "CIDRs of the policy in the kernel by address family, without those covered by another.", float64(n), "family", familyName(ipv6))
		}
	}
	e.gauge("listening", "Whether the agent listens to ruleset changes: 1 or 0. If 0, it compares the generation every 250 ms, and restored rules are logged without the name of the program.",
		number(s.listening))
}

// node exports the comparison of the config with the node and its connections.
func (e exporter) node(s state) {
	if s.unmatched != nil {
		e.gauge("unmatched_interface_lists", "Lists of the config that name the only interfaces for masquerading and of which this node has none: nothing is masqueraded.",
			float64(*s.unmatched))
	}
	if s.kernel != nil {
		for state, n := range map[string]int{"present": s.kernel.present, "absent": s.kernel.absent} {
			e.gauge("snat_addresses", "Addresses of snatAddresses: present, those that the node has; absent, entries of which it has no address. With none present, connections are masqueraded.",
				float64(n), "state", state)
		}
	}
	if s.stale != nil {
		e.gauge("stale_connections", "Connections decided by an earlier policy, whose translation contradicts the rules. An estimate above 200,000 tracked connections.",
			float64(*s.stale))
	}
}

// foreign exports the numbers of other programs' rules on the node.
func (e exporter) foreign(o others) {
	e.gauge("foreign_masquerade_rules", "Other programs' rules that masquerade what the config exempts, without accepted ones and those that meet no pod.", float64(o.foreign))
	e.gauge("foreign_exempting_rules", "Other programs' rules that accept what the config masquerades: before the jump in mode iptables-nft, otherwise without effect on this agent.", float64(o.exempting))
	e.gauge("foreign_translating_rules", "Other programs' rules that translate what the config masquerades to another source address.", float64(o.translating))
	e.gauge("legacy_rules", "Chains of iptables-based agents, in nf_tables and in legacy ip_tables.", float64(o.legacy))
}

func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
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
	if l.Mode() == nft.ModeIPTables { // a rule that is written again counts from 0
		c.sums = &sums{}
	}
	return c
}

// counts reads the counters. What they are at the first time is the zero of the sums.
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
