package agent

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"time"

	"go.uber.org/zap"

	"nft-masq-agent/cmd/nft-masq-agent/internal/running"
)

// Report returns the state of the loop.
func (a *Agent) Report() running.Report {
	text := func(err error) string {
		if err == nil {
			return ""
		}
		return err.Error()
	}
	return running.Report{Alive: text(a.Alive()), Ready: text(a.Ready()), Policy: a.health.now().enforces}
}

// ServeProbes sends a report to every client of a unix socket until ctx is done;
// then the returned channel is closed. In a container whose socket is not shared,
// only the pod's own probes can reach it, and no other agent can respond in its
// place.
func ServeProbes(ctx context.Context, path string, report func() running.Report, log *zap.Logger) <-chan struct{} {
	return keepServing(ctx, endpoint{
		listen:  func() (net.Listener, error) { return listenUnix(path) },
		serve:   func(l net.Listener) error { return answerProbes(ctx, l, report) },
		serving: "serving probes", failing: "cannot listen on the probe socket, retrying",
	}, log)
}

// listenUnix replaces the leftover socket of a killed agent.
func listenUnix(path string) (net.Listener, error) {
	if c, err := net.DialTimeout("unix", path, running.ProbeTimeout); err == nil {
		_ = c.Close()
		return nil, fmt.Errorf("listen unix %s: another agent uses it", path)
	}
	if info, err := os.Lstat(path); err == nil && info.Mode().Type() == os.ModeSocket {
		_ = os.Remove(path)
	}
	return net.Listen("unix", path)
}

func answerProbes(ctx context.Context, l net.Listener, report func() running.Report) error {
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	defer stop()
	for {
		c, err := l.Accept()
		if err != nil {
			_ = l.Close()
			return err
		}
		// It fits into the socket's buffer, so that a client that does not read is not waited for.
		_ = c.SetDeadline(time.Now().Add(running.ProbeTimeout))
		text, err := json.Marshal(report())
		if err == nil {
			_, _ = c.Write(text)
		}
		_ = c.Close()
	}
}
