package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"go.uber.org/zap"
)

// A Report is what an agent answers on its probe socket: why it is not alive or
// not ready, "" for yes; and which policy it enforces, nil for none.
type Report struct {
	Alive  string    `json:"alive"`
	Ready  string    `json:"ready"`
	Policy *Enforced `json:"policy,omitempty"`
}

// Enforced is the policy that an agent enforces, and what it last changed in the
// kernel and why.
type Enforced struct {
	Hash    string    `json:"hash"`
	Since   time.Time `json:"since"`
	Changed time.Time `json:"changed"`
	What    string    `json:"what"`
	Why     string    `json:"why"`
}

// Limits of the probe socket. A report is written at once, and nothing is read.
const (
	probeTimeout   = time.Second
	maxReportBytes = 64 << 10
)

// Report says how the loop is.
func (a *Agent) Report() Report {
	text := func(err error) string {
		if err == nil {
			return ""
		}
		return err.Error()
	}
	return Report{text(a.Alive()), text(a.Ready()), a.health.now().enforces}
}

// ServeProbes answers whoever connects to a unix socket with a report, until ctx
// ends; then what it returns is closed. In a container whose socket is not shared
// only the probes of its own pod get there, and nobody else takes their place.
func ServeProbes(ctx context.Context, path string, report func() Report, log *zap.Logger) <-chan struct{} {
	return keepServing(ctx, endpoint{
		listen:  func() (net.Listener, error) { return listenUnix(path) },
		serve:   func(l net.Listener) error { return answerProbes(ctx, l, report) },
		serving: "answering probes", failing: "cannot listen on the probe socket, retrying",
	}, log)
}

// listenUnix takes the place of a socket that an agent which was killed left.
func listenUnix(path string) (net.Listener, error) {
	if c, err := net.DialTimeout("unix", path, probeTimeout); err == nil {
		_ = c.Close()
		return nil, fmt.Errorf("listen unix %s: another agent answers there", path)
	}
	if info, err := os.Lstat(path); err == nil && info.Mode().Type() == os.ModeSocket {
		_ = os.Remove(path)
	}
	return net.Listen("unix", path)
}

func answerProbes(ctx context.Context, l net.Listener, report func() Report) error {
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	defer stop()
	for {
		c, err := l.Accept()
		if err != nil {
			_ = l.Close()
			return err
		}
		// It fits into the socket's buffer; who does not read it is not waited for.
		_ = c.SetDeadline(time.Now().Add(probeTimeout))
		text, err := json.Marshal(report())
		if err == nil {
			_, _ = c.Write(text)
		}
		_ = c.Close()
	}
}

// Ask asks the agent that answers on a probe socket.
func Ask(path string) (Report, error) {
	c, err := net.DialTimeout("unix", path, probeTimeout)
	if err != nil {
		return Report{}, fmt.Errorf("no agent answers: %w", err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(probeTimeout))
	text, err := io.ReadAll(io.LimitReader(c, maxReportBytes))
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return Report{}, fmt.Errorf("the agent does not answer within %s", probeTimeout)
	}
	var r Report
	if err == nil {
		err = json.Unmarshal(text, &r)
	}
	if err != nil {
		return Report{}, fmt.Errorf("read the agent's report: %w", err)
	}
	return r, nil
}
