package observe

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestStaleConnectionsAreCountedUntilNoneAreLeft(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.gets(file("10.0.0.0/8"))
		if n := w.recounts.Load(); n != 1 {
			t.Errorf("counted %d times at the start", n)
		}
		time.Sleep(time.Hour)
		if n := w.recounts.Load(); n != 1 {
			t.Errorf("counted %d times while none was stale", n)
		}
		w.stale.Store(3)
		w.gets(file("10.0.0.0/9"))
		if n := w.all[2].(*connections).stale.Load(); n == nil || *n != 3 || w.recounts.Load() != 2 {
			t.Errorf("after a change: %v stale, counted %d times", n, w.recounts.Load())
		}
		pass(recountEvery)
		w.stale.Store(0)
		time.Sleep(time.Hour)
		if n := w.all[2].(*connections).stale.Load(); n == nil || *n != 0 || w.recounts.Load() != 4 {
			t.Errorf("at the end: %v stale, counted %d times", n, w.recounts.Load())
		}
		if told := w.logs.FilterMessageSnippet("existing connections").Len(); told != 1 {
			t.Errorf("logged %d times", told)
		}
	})
}

func TestConnectionsAreReadLessOftenIfSlow(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		time.Sleep(10*time.Minute + time.Second)
		if n := w.readings.Load(); n != 11 {
			t.Errorf("read %d times in ten minutes", n)
		}
		w.reading.Store(int64(3 * time.Second)) // then 10 minutes pass
		time.Sleep(time.Minute)
		w.readings.Store(0)
		time.Sleep(100 * time.Minute)
		if n := w.readings.Load(); n < 9 || n > 10 {
			t.Errorf("read %d times in 100 minutes", n)
		}
		if every := w.all[3].(*ports).last.Load().interval; every != 10*time.Minute {
			t.Errorf("the metric is %s", every)
		}
	})
}

func TestPortPressureIsTheShareOfTheFullest(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		synctest.Wait()
		wantMetrics(t, w, `conntrack_drop_total 2
snat_ports_used_ratio_max{family="ipv4",protocol="sctp"} 0
snat_ports_used_ratio_max{family="ipv4",protocol="tcp"} 0
snat_ports_used_ratio_max{family="ipv4",protocol="udp"} 0.5
snat_ports_used_ratio_max{family="ipv6",protocol="sctp"} 0
snat_ports_used_ratio_max{family="ipv6",protocol="tcp"} 0
snat_ports_used_ratio_max{family="ipv6",protocol="udp"} 0
`, "snat_ports_used_ratio_max", "conntrack_drop_total")
	})
}
