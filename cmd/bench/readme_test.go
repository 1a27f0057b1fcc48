package main

import (
	"crypto/sha256"
	"encoding/hex"
	"os"
	"slices"
	"strings"
	"testing"
)

func readFile(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// What is shown was drawn from the table that is there.
func TestPlotsAreThoseOfTheTable(t *testing.T) {
	files := 0
	for line := range strings.Lines(readFile(t, "plots.sha256")) {
		fields := strings.Fields(line)
		sum := sha256.Sum256([]byte(readFile(t, fields[1])))
		if files++; hex.EncodeToString(sum[:]) != fields[0] {
			t.Errorf("%s has changed: make plots", fields[1])
		}
	}
	if files != 4 {
		t.Errorf("plots.sha256 has %d files, want those of 4 plots", files)
	}
}

// What bench writes as flannel is what flannel wrote.
func TestFlannelsRulesAreThoseRecorded(t *testing.T) {
	recorded := 0
	for line := range strings.Lines(readFile(t, "../../testdata/foreign/flannel-nftables/rules.nft")) {
		if !strings.HasPrefix(line, "add rule ip flannel-ipv4 postrtg ") {
			continue
		}
		recorded++
		if !strings.Contains(flannelRules, line) {
			t.Errorf("bench does not write %s", line)
		}
	}
	if written := strings.Count(flannelRules, "add rule "); written != recorded {
		t.Errorf("bench writes %d rules, recorded are %d", written, recorded)
	}
}

// A value with a target is that of the results.
func TestReadmeShowsTheTargetsOfTheResults(t *testing.T) {
	rows, results := 0, strings.Split(readFile(t, "results.txt"), "\n")
	for row := range strings.Lines(readFile(t, "README.md")) {
		cells := strings.Split(strings.Trim(row, "| \n"), " | ")
		if len(cells) < 4 || !strings.HasSuffix(row, "met |\n") && !strings.HasSuffix(row, "missed |\n") {
			continue
		}
		rows++
		ratio, target := cells[len(cells)-2], cells[len(cells)-1]
		if !slices.ContainsFunc(results, func(line string) bool {
			return strings.Contains(line, "| "+cells[2]) && strings.Contains(line, ratio) && strings.Contains(line, target)
		}) {
			t.Errorf("results.txt has no such row: %s", row)
		}
	}
	if rows < 20 {
		t.Errorf("README.md has %d rows with a target that this test finds, want at least 20", rows)
	}
}
