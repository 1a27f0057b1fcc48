package agent

import (
	"encoding/json"
	"errors"
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

// OnSocket listens on a unix socket that only this user can connect to. In a container
// whose socket is not shared, only the pod's own probes and commands can reach it, and no
// other agent can respond in its place. The leftover socket of a killed agent is replaced.
// Accept fails within lookEvery when the socket's file is gone, or another one.
func OnSocket(path string) (net.Listener, error) {
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
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, err
	}
	err = os.Chmod(path, 0o600)
	s := &socket{UnixListener: l, path: path}
	if err == nil {
		s.file, err = os.Lstat(path)
	}
	if err != nil {
		_ = l.Close()
		return nil, err
	}
	return s, nil
}

// lookEvery is how often the file of a socket is looked at.
const lookEvery = 2 * time.Second

// A socket is a listener whose file others can remove, or replace with its directory.
type socket struct {
	*net.UnixListener
	path string
	file os.FileInfo
}

// Accept implements [net.Listener].
func (s *socket) Accept() (net.Conn, error) {
	for {
		if err := s.SetDeadline(time.Now().Add(lookEvery)); err != nil {
			return nil, err
		}
		c, err := s.UnixListener.Accept()
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return c, err
		}
		if info, err := os.Lstat(s.path); err != nil || !os.SameFile(info, s.file) {
			s.SetUnlinkOnClose(false) // it is not ours
			return nil, fmt.Errorf("listen unix %s: the socket was removed", s.path)
		}
	}
}
