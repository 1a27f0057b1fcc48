package agent

import (
	"fmt"
	"testing"
)

func TestLinesOfBothFormatsAreTakenByEvent(t *testing.T) {
	g := NewLog()
	if line := g.Take(); line != nil {
		t.Fatalf("%v in an empty log", line)
	}
	for _, part := range []string{
		`{"level":"info","msg":"starting","event":"start`, "ing\"}\n" +
			`{"msg":"applied","event":"config_applied","hash":"1"}` + "\n",
		`2026-11-22T06:32:06.383Z  WARN  rules {restored}  {"event": "rules_restored", "what": ["a", "b"]}` + "\n",
		"panic: no line\n", `{"msg":"applied","event":"config_applied","hash":"2"}` + "\n",
	} {
		_, _ = fmt.Fprint(g, part)
	}
	if l := g.Take("nothing", "rules_restored"); l.Message() != "rules {restored}" || l.Text("level") != "warn" ||
		l.Texts("what") != "ab" {
		t.Errorf("%v", l)
	}
	if l := g.Take("config_applied"); l.Text("hash") != "1" {
		t.Errorf("%v", l)
	}
	if l := g.Take(); l.Event() != "starting" {
		t.Errorf("%v", l)
	}
	if l := g.Latest("starting", "config_applied"); l.Text("hash") != "2" {
		t.Errorf("%v", l)
	}
	if g.Latest("config_rejected") != nil || g.Lines() != 5 || g.Count("config_applied") != 2 || g.Count("") != 1 ||
		len(g.Untaken()) != 2 {
		t.Errorf("%d lines, %d without an event, %v", g.Lines(), g.Count(""), g.Untaken())
	}
}
