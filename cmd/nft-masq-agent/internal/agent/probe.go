package agent

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"go.uber.org/zap"

	"nft-masq-agent/cmd/nft-masq-agent/internal/running"
	"nft-masq-agent/config"
)

// Report returns the state of the loop, and what commands need to answer like it.
func (a *Agent) Report() running.Report {
	text := func(err error) string {
		if err == nil {
			return ""
		}
		return err.Error()
	}
	s := a.health.now()
	r := running.Report{
		PID: os.Getpid(), Args: a.settings.Args, ConfigPath: a.settings.ConfigPath,
		Alive: text(a.Alive()), Ready: text(s.ready()), Refusal: text(s.refusal),
		Source: string(s.policy.from), Compiled: s.policy.want != nil, Addresses: s.addresses,
		Policy: s.enforces, SecondAgent: s.second,
	}
	if path, err := filepath.Abs(r.ConfigPath); err == nil {
		r.ConfigPath = path
	}
	r.Files, r.Rejected, r.Warnings = s.policy.files, config.ProblemsOf(s.rejection), s.warnings
	return r
}

// SocketHandler serves GET /agent, the report, and what Handler serves.
func (a *Agent) SocketHandler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/", a.Handler())
	mux.HandleFunc("GET /agent", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(a.Report())
	})
	return mux
}

// ServeSocket is like Serve, on a unix socket that only this user can connect to. In a
// container whose socket is not shared, only the pod's own probes and commands can
// reach it, and no other agent can respond in its place.
func ServeSocket(ctx context.Context, path string, handler http.Handler, log *zap.Logger) <-chan struct{} {
	return keepServing(ctx, endpoint{
		listen:  func() (net.Listener, error) { return listenUnix(path) },
		serve:   func(l net.Listener) error { return serve(ctx, l, handler, log) },
		serving: "serving probes and commands", failing: "cannot listen on the probe socket, retrying",
	}, log)
}

// listenUnix replaces the leftover socket of a killed agent.
func listenUnix(path string) (net.Listener, error) {
	if c, err := net.DialTimeout("unix", path, time.Second); err == nil {
		_ = c.Close()
		return nil, fmt.Errorf("listen unix %s: another agent uses it", path)
	}
	if info, err := os.Lstat(path); err == nil && info.Mode().Type() == os.ModeSocket {
		_ = os.Remove(path)
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(path, 0o600); err != nil {
		_ = l.Close()
		return nil, err
	}
	return l, nil
}
