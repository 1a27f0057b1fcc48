package main

import (
	"encoding/xml"
	"html"
	"os"
	"strings"
	"testing"
)

const file = "../../../manifests/grafana/dashboard.json"

// Whoever changes a panel draws the picture again: make dashboard.
func TestPictureShowsThePanelsOfTheDashboard(t *testing.T) {
	d, err := read(file)
	if err != nil {
		t.Fatal(err)
	}
	picture, err := os.ReadFile("../../../manifests/grafana/dashboard.svg")
	if err != nil {
		t.Fatal(err)
	}
	if err := xml.Unmarshal(picture, new(struct{})); err != nil {
		t.Error(err)
	}
	for _, p := range d.Panels {
		if !strings.Contains(string(picture), ">"+html.EscapeString(p.Title)+"<") {
			t.Errorf("the picture has no panel %q", p.Title)
		}
	}
	if strings.Contains(string(picture), ">No data<") || len(d.Panels) < 12 {
		t.Errorf("the picture has panels without data, or there are only %d", len(d.Panels))
	}
}

func TestPanelsShowTheLastValueAndGapsOfTheirSeries(t *testing.T) {
	d, err := read(file)
	if err != nil {
		t.Fatal(err)
	}
	for i := range d.Panels {
		d.Panels[i].found = []series{{
			Metric: map[string]string{"node": "node-1"}, name: "<one>",
			Values: [][2]any{{1.0, "4"}, {2.0, "NaN"}, {4.0, "7"}},
		}}
	}
	got := d.draw()
	if err := xml.Unmarshal([]byte(got), new(struct{})); err != nil {
		t.Error(err)
	}
	for _, want := range []string{`style="fill: #cf4a5f">7<`, ">&lt;one&gt;<", ">node-1<", "M330.0"} {
		if !strings.Contains(got, want) {
			t.Errorf("no %s in\n%s", want, got)
		}
	}
	d.Panels[0].found = nil
	if !strings.Contains(d.draw(), ">No data<") {
		t.Error("a panel without series shows something")
	}
}
