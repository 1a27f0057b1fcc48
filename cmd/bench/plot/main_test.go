package main

import (
	"encoding/xml"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// What is shown is what the table has: make plots draws it again.
func TestPlotsAreThoseOfTheTable(t *testing.T) {
	dir := t.TempDir()
	if err := run("../results.txt", dir); err != nil {
		t.Fatal(err)
	}
	for _, p := range plots {
		want, err := os.ReadFile(filepath.Join(dir, p.name))
		if err != nil {
			t.Fatal(err)
		}
		if err := xml.Unmarshal(want, new(struct{})); err != nil {
			t.Errorf("%s: %v", p.name, err)
		}
		shown, err := os.ReadFile(filepath.Join("..", p.name))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(want), string(shown)); diff != "" {
			t.Errorf("%s (-table +file), make plots draws it:\n%s", p.name, diff)
		}
	}
}

// A value with a target is that of the results.
func TestReadmeShowsTheTargetsOfTheResults(t *testing.T) {
	results, err := os.ReadFile("../results.txt")
	if err != nil {
		t.Fatal(err)
	}
	readme, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	rows := 0
	for row := range strings.Lines(string(readme)) {
		cells := strings.Split(strings.Trim(row, "| \n"), " | ")
		if len(cells) < 4 || !strings.HasSuffix(row, "met |\n") && !strings.HasSuffix(row, "missed |\n") {
			continue
		}
		rows++
		ratio, target := cells[len(cells)-2], cells[len(cells)-1]
		if !slices.ContainsFunc(strings.Split(string(results), "\n"), func(line string) bool {
			return strings.Contains(line, "| "+cells[2]) && strings.Contains(line, ratio) && strings.Contains(line, target)
		}) {
			t.Errorf("results.txt has no such row: %s", row)
		}
	}
	if rows < 20 {
		t.Errorf("%d rows", rows)
	}
}

const sample = `|  | **full apply** |  |  |
| 10 | from a ruleset | 2.00 ms [1 3] | nft -f | 20.0 ms [16.5 20.7] | 0.13 |
| 10 | from a ruleset | 2.00 ms [1 3] | iptables-nft-restore | 4.00 ms [3.21 3.38] | 0.77 |
| 1,000 | from a ruleset | 4.00 ms [1 3] | nft -f | 21.6 ms [20.8 23.9] | 0.19 |
| 10,000 | from a ruleset | 34.1 ms [1 3] | nft -f | 89.8 ms [86.3 97.3] | 0.37 |
|  | **another** |  |  |
| 100,000 | from a ruleset | 1 ms [1 1] | nft -f | 1 ms [1 1] | 1 |
`

func TestPointsAreMediansOfOneSection(t *testing.T) {
	p := plots[1]
	for against, want := range map[string][]point{
		"":       {{10, 2}, {1000, 4}, {10000, 34.1}},
		"nft -f": {{10, 20}, {1000, 21.6}, {10000, 89.8}},
	} {
		got, err := p.points(sample, series{what: "from a ruleset", against: against})
		if diff := cmp.Diff(want, got, cmp.AllowUnexported(point{})); diff != "" || err != nil {
			t.Errorf("%q: %v (-want +got):\n%s", against, err, diff)
		}
	}
	if _, err := p.points(strings.ReplaceAll(sample, " ms ", " µs "), p.series[2]); err == nil {
		t.Error("another unit is no error")
	}
	if _, err := p.points(sample, p.series[0]); err == nil {
		t.Error("a single row is no error")
	}
}
