package main

import (
	"context"
	"errors"
	"strings"
	"testing"
)

// A twice ends when it is asked whether it has for the second time.
type twice struct {
	context.Context // that has ended
	asked           int
}

func (c *twice) Done() <-chan struct{} {
	if c.asked++; c.asked < 2 {
		return nil
	}
	return c.Context.Done()
}

// With JSON, which is one object, it goes to stderr.
func TestReasonToWaitForAnAgentIsPrintedOnce(t *testing.T) {
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	const reason = "waiting: no agent answers at [x y]:9717: lookup x y: no such host\n"
	for output, want := range map[string][2]string{outputText: {reason, ""}, outputJSON: {"", reason}} {
		var stdout, stderr strings.Builder
		e, ctx := testEnvironment(t, &stdout, &stderr), &twice{Context: ended}
		code, err := readyFlags{waitFor: "[x y]:9717", output: output}.wait(ctx, e)
		got := [2]string{stdout.String(), stderr.String()}
		if code != exitFailed || !errors.Is(err, ended.Err()) || got != want {
			t.Errorf("%s: exit code %d, %v, %q, want %q", output, code, err, got, want)
		}
	}
}
