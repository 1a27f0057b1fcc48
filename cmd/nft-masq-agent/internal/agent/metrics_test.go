package agent

import (
	"errors"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
)

// everything makes an agent export all its metrics.
func everything(t *testing.T, test func(t *testing.T, w *world)) {
	inBubble(t, func(t *testing.T, w *world) {
		w.counts = []nft.Counts{
			{Verdict: nft.Masqueraded, Packets: 3},
			{IPv6: true, Verdict: nft.Exempt, Packets: 2},
			{Verdict: nft.Invalid, Packets: 7},
		}
		w.gets(file("10.0.0.0/8"))
		test(t, w)
	})
}

// wantMetrics scrapes and compares the metrics with these names.
func wantMetrics(t *testing.T, a *Agent, want string, names ...string) {
	t.Helper()
	code, text := get(t, a, "/metrics")
	if code != http.StatusOK {
		t.Fatalf("status %d: %s", code, text)
	}
	var kept strings.Builder
	for line := range strings.Lines(text) {
		line, ours := strings.CutPrefix(line, metricPrefix)
		if ours && slices.Contains(names, line[:strings.IndexAny(line, "{ ")]) {
			kept.WriteString(line)
		}
	}
	if diff := cmp.Diff(want, kept.String()); diff != "" {
		t.Errorf("metrics (-want +got):\n%s", diff)
	}
}

func TestMetricsShowTheResultOfTheConfig(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		names := []string{
			"ready", "config_accepted", "config_last_accepted_timestamp_seconds", "config_warnings",
			"config_info", "cidrs",
		}
		wantMetrics(t, w.agent, "ready 0\n", names...)
		good := file("10.0.0.0/8")
		good.Sources[0].Data = append(good.Sources[0].Data, "somethingElse: 1\n"...)
		w.gets(good)
		// A bubble's clock starts at 2000-01-01.
		const accepted = "config_last_accepted_timestamp_seconds 9.466848e+08\n"
		held := `cidrs{family="ipv4"} 2` + "\n" + `cidrs{family="ipv6"} 0` + "\n"
		info := `config_info{hash="` + hashOf(t, good) + `",mode="nftables"} 1` + "\n"
		wantMetrics(t, w.agent, held+"config_accepted 1\n"+info+accepted+"config_warnings 1\nready 1\n", names...)
		w.gets(file("10.0.0.1/8"))
		wantMetrics(t, w.agent, held+"config_accepted 0\n"+info+accepted+"config_warnings 0\nready 0\n", names...)
	})
}

func TestMetricsCountApplies(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.gets(file("10.0.0.0/8"))
		w.tamper()
		time.Sleep(restoredWithin)
		w.hangup <- unix.SIGHUP
		synctest.Wait()
		w.refuse(unix.EPERM)
		w.gets(file("11.0.0.0/8"))
		families, err := w.agent.metrics.registry.Gather()
		if err != nil {
			t.Fatal(err)
		}
		counts := map[[2]string]float64{} // all that are not 0: each comparison counts once
		for _, family := range families {
			for _, m := range family.GetMetric() {
				if n := m.GetCounter().GetValue(); family.GetName() == metricPrefix+"applies_total" && n > 0 {
					counts[[2]string{m.GetLabel()[0].GetValue(), m.GetLabel()[1].GetValue()}] = n
				}
			}
		}
		want := map[[2]string]float64{
			{onStart, writtenResult}: 1, {onDrift, writtenResult}: 1, {onHangup, inSyncResult}: 1, {onConfig, refusedResult}: 1,
		}
		if diff := cmp.Diff(want, counts); diff != "" {
			t.Errorf("applies (-want +got):\n%s", diff)
		}
		wantMetrics(t, w.agent, "drift_repairs_total 1\n", "drift_repairs_total")
	})
}

func TestConnectionsAreReadAtEachScrape(t *testing.T) {
	everything(t, func(t *testing.T, w *world) {
		names := []string{"connections_total", "connection_read_errors_total"}
		wantMetrics(t, w.agent, `connection_read_errors_total 0
connections_total{family="ipv4",verdict="masqueraded"} 3
connections_total{family="ipv6",verdict="exempt"} 2
`, names...)
		w.countsErr = errors.New("refused")
		wantMetrics(t, w.agent, "connection_read_errors_total 1\n", names...)
		w.countsErr = nil
		w.counts[0].Packets = 1
		wantMetrics(t, w.agent, `connection_read_errors_total 1
connections_total{family="ipv4",verdict="masqueraded"} 1
connections_total{family="ipv6",verdict="exempt"} 2
`, names...)
	})
}
