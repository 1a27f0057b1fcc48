package agent

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"time"
)

// SocketHandler serves GET /agent, the report, what observers serve, and what Handler serves.
func (a *Agent) SocketHandler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/", a.Handler())
	for pattern, h := range a.served {
		mux.Handle(pattern, h)
	}
	mux.HandleFunc("GET /agent", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(a.Report())
	})
	return mux
}

// ListenSocket listens on a unix socket that only this user can connect to. In a container whose socket is not shared,
// only the pod's own probes and commands can reach it, and no other agent can respond in its place. The leftover socket
// of a killed agent is replaced. ListenSocket fails if an agent answers on the path, or something else is there.
func ListenSocket(path string) (net.Listener, error) {
	if c, err := net.DialTimeout("unix", path, time.Second); err == nil {
		_ = c.Close()
		return nil, fmt.Errorf("listen unix %s: another agent uses it", path)
	}
	if info, err := os.Lstat(path); err == nil {
		if info.Mode().Type() != os.ModeSocket {
			return nil, fmt.Errorf("listen unix %s: is not a socket: remove it, or name another path", path)
		}
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
