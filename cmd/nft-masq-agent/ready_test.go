package main

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/iotest"
)

// A server answers requests without a network.
type server func() (*http.Response, error)

func (s server) RoundTrip(*http.Request) (*http.Response, error) { return s() }

// A body knows whether it is closed.
type body struct {
	io.Reader
	closed bool
}

func (b *body) Close() error { b.closed = true; return nil }

func TestReasonToWaitForAnAgentIsWhatItAnswers(t *testing.T) {
	for _, tt := range []struct {
		url  string
		code int
		text io.Reader
		want string
	}{
		{"http://x/startupz", http.StatusOK, strings.NewReader("ok"), ""},
		{"http://x/startupz", http.StatusServiceUnavailable, strings.NewReader(" no rules yet\n"), "no rules yet"},
		{"http://x/startupz", http.StatusServiceUnavailable, strings.NewReader(""), "503 Service Unavailable"},
		{"http://x/startupz", http.StatusOK, iotest.ErrReader(io.ErrUnexpectedEOF), "200 OK"},
		{"http://x/startupz", 0, nil, `Get "http://x/startupz": refused`},
		{"http://[x/startupz", 0, nil, `parse "http://[x/startupz": missing ']' in host`},
	} {
		b := &body{Reader: tt.text}
		client := http.Client{Transport: server(func() (*http.Response, error) {
			if tt.code == 0 {
				return nil, errors.New("refused")
			}
			status := map[int]string{http.StatusOK: "200 OK", http.StatusServiceUnavailable: "503 Service Unavailable"}
			return &http.Response{StatusCode: tt.code, Status: status[tt.code], Body: b}, nil
		})}
		if got := started(t.Context(), client, tt.url); got != tt.want || b.closed != (tt.code != 0) {
			t.Errorf("%s, %d: %q, the body is closed: %t; want %q", tt.url, tt.code, got, b.closed, tt.want)
		}
	}
}

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
	const reason = "waiting: parse \"http://x y:9717/startupz\": invalid character \" \" in host name\n"
	for output, want := range map[string][2]string{outputText: {reason, ""}, outputJSON: {"", reason}} {
		var stdout, stderr strings.Builder
		e, ctx := testEnvironment(t, &stdout, &stderr), &twice{Context: ended}
		code, err := readyFlags{waitFor: "[x y]:9717", output: output}.wait(ctx, e)
		got := [2]string{stdout.String(), stderr.String()}
		if code != exitFailed || !errors.Is(err, ended.Err()) || got != want {
			t.Errorf("%s: exit code %d, %v, %q, want %q", output, code, err, got, want)
		}
	}
	code, err := readyFlags{waitFor: "192.0.2.1"}.wait(ended, testEnvironment(t, io.Discard, io.Discard))
	if code != exitFailed || err == nil || errors.Is(err, ended.Err()) {
		t.Errorf("without a port: exit code %d, %v", code, err)
	}
}
