package loop

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"go.uber.org/zap/zapcore"
)

// Documented returns the fields of each event in the table of the README of cmd/nft-masq-agent,
// for tests of the packages in its internal directory.
var Documented = sync.OnceValue(func() map[string][]string {
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

// A DocumentedCore fails a test for each line whose event or fields are not documented.
type DocumentedCore struct {
	zapcore.Core
	T testing.TB
}

// Check implements [zapcore.Core].
func (c DocumentedCore) Check(e zapcore.Entry, checked *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if c.Enabled(e.Level) {
		return checked.AddCore(e, c)
	}
	return checked
}

// Write implements [zapcore.Core].
func (c DocumentedCore) Write(e zapcore.Entry, fields []zapcore.Field) error {
	into := zapcore.NewMapObjectEncoder()
	for _, f := range fields {
		f.AddTo(into)
	}
	event, _ := into.Fields["event"].(string)
	known, ok := Documented()[event]
	if !ok {
		c.T.Errorf("the README has no event %q: %s", event, e.Message)
	}
	for name := range into.Fields {
		if name != "event" && !slices.Contains(known, name) {
			c.T.Errorf("the README has no field %s of event %s", name, event)
		}
	}
	return c.Core.Write(e, fields)
}
