package agent

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"go.uber.org/zap/zapcore"
)

// documented returns the fields of each event in the table of the README.
var documented = sync.OnceValue(func() map[string][]string {
	text, err := os.ReadFile("../../README.md")
	if err != nil {
		panic(err)
	}
	_, table, _ := strings.Cut(string(text), "<!-- events -->")
	table, _, _ = strings.Cut(table, "<!-- /events -->")
	events := map[string][]string{}
	for _, row := range regexp.MustCompile("(?m)^\\| `([a-z_]+)` \\|([^|]*)\\|").FindAllStringSubmatch(table, -1) {
		events[row[1]] = []string{}
		for _, field := range regexp.MustCompile("`([a-z_]+)`").FindAllStringSubmatch(row[2], -1) {
			events[row[1]] = append(events[row[1]], field[1])
		}
	}
	return events
})

// A documentedCore fails a test for each line whose event or fields are not documented.
type documentedCore struct {
	zapcore.Core
	t *testing.T
}

func (c documentedCore) Check(e zapcore.Entry, checked *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if c.Enabled(e.Level) {
		return checked.AddCore(e, c)
	}
	return checked
}

func (c documentedCore) Write(e zapcore.Entry, fields []zapcore.Field) error {
	into := zapcore.NewMapObjectEncoder()
	for _, f := range fields {
		f.AddTo(into)
	}
	event, _ := into.Fields["event"].(string)
	known, ok := documented()[event]
	if !ok {
		c.t.Errorf("the README has no event %q: %s", event, e.Message)
	}
	for name := range into.Fields {
		if name != "event" && !slices.Contains(known, name) {
			c.t.Errorf("the README has no field %s of event %s", name, event)
		}
	}
	return c.Core.Write(e, fields)
}
