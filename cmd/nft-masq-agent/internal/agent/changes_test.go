package agent

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"

	"nft-masq-agent/config"
)

// lists is a config with several lines.
func lists(lines ...string) Files {
	return Files{Sources: []config.Source{{Name: "config", Data: []byte(strings.Join(lines, "\n") + "\n")}}}
}

// fieldsOf returns the fields of the only line with an event.
func (w *world) fieldsOf(t *testing.T, event string) map[string]any {
	t.Helper()
	synctest.Wait()
	var found []map[string]any
	for _, e := range w.logs.TakeAll() {
		if m := e.ContextMap(); m["event"] == event {
			found = append(found, m)
		}
	}
	if len(found) != 1 {
		t.Fatalf("%d lines with event %s, want 1", len(found), event)
	}
	return found[0]
}

func TestConfigChangeLogsAddedAndRemovedEntriesOfAllLists(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.files <- lists("nonMasqueradeCIDRs: [10.1.0.0/16, 10.2.0.0/16]", "masqueradeSrcCIDRs: [10.244.0.0/16]")
		if m := w.fieldsOf(t, "config_applied"); m["added"] != nil || m["removed_count"] != nil {
			t.Errorf("the first line names changes: %v", m)
		}
		w.files <- lists("nonMasqueradeCIDRs: [10.2.0.0/16, 10.3.0.0/16, '2001:db8::/32']", "enableIPv6: true",
			"masqLinkLocalIPv6: true")
		m := w.fieldsOf(t, "config_applied")
		want := map[string]any{
			"added":   []any{"nonMasqueradeCIDRs: 10.3.0.0/16", "nonMasqueradeCIDRs: 2001:db8::/32"},
			"removed": []any{"masqueradeSrcCIDRs: 10.244.0.0/16", "nonMasqueradeCIDRs: 10.1.0.0/16"},
		}
		got := map[string]any{"added": m["added"], "removed": m["removed"]}
		if diff := cmp.Diff(want, got); diff != "" || m["added_count"] != int64(2) || m["removed_count"] != int64(2) {
			t.Errorf("-want +got:\n%s%v", diff, m)
		}
		var many []string
		for i := range 300 {
			many = append(many, fmt.Sprintf("10.%d.%d.0/24", 64+i/256, i%256))
		}
		w.files <- lists("nonMasqueradeCIDRs: ["+strings.Join(many, ", ")+"]", "enableIPv6: true", "masqLinkLocalIPv6: true")
		m = w.fieldsOf(t, "config_applied")
		if n := len(m["added"].([]any)); n != few || m["added_count"] != int64(300) || m["removed_count"] != int64(3) {
			t.Errorf("names %d, counts %v added and %v removed", n, m["added_count"], m["removed_count"])
		}
	})
}

func TestVanishingAndAppearingFileIsLoggedOnce(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.gets(Files{})
		wantLines(t, w.messages(), "starting without a config file: the built-in defaults apply", "applied")
		w.files <- file("10.1.0.0/16")
		if m := w.fieldsOf(t, "config_file_appeared"); m["path"] != "/etc/config/ip-masq-agent" {
			t.Errorf("appeared: %v", m)
		}
		w.files <- file("nonsense")
		w.gets(unusable["unreadable"])
		for _, m := range w.messages() {
			if strings.HasPrefix(m, "the config file") {
				t.Errorf("%q: the file still exists", m)
			}
		}
		w.files <- Files{}
		if m := w.fieldsOf(t, "config_file_vanished"); m["hash"] != hashOf(t, Files{}) {
			t.Errorf("vanished: %v", m)
		}
		w.gets(Files{})
		wantLines(t, w.messages())
	})
}
