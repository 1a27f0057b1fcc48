package agent

import (
	"context"
	"io"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.uber.org/zap"
)

// Limits of the HTTP server, so that a client can neither occupy its connections
// nor its memory. A connection serves one request: probes and scrapes are too
// rare to benefit from more, and none can be idle.
const (
	readTimeout     = 5 * time.Second
	writeTimeout    = 15 * time.Second
	scrapeTimeout   = 10 * time.Second
	maxHeaderBytes  = 8 << 10
	maxConnections  = 32
	maxScrapes      = 4
	shutdownTimeout = time.Second
)

// Handler serves GET and HEAD of /healthz, /startupz, /readyz and /metrics. Probes
// do not wait; a scrape waits for the kernel's counters.
func (a *Agent) Handler() http.Handler {
	_, _ = a.metrics.connectionCounts(a) // the zero of the sums
	mux := http.NewServeMux()
	mux.Handle("GET /healthz", probe(a.Alive))
	mux.Handle("GET /startupz", probe(a.Started))
	mux.Handle("GET /readyz", probe(a.Ready))
	mux.Handle("GET /metrics", promhttp.HandlerFor(a.metrics.registry, promhttp.HandlerOpts{
		ErrorHandling:       promhttp.ContinueOnError,
		MaxRequestsInFlight: maxScrapes,
		Timeout:             scrapeTimeout,
		DisableCompression:  true, // its buffers would take most of our memory
	}))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Cache-Control", "no-store")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		mux.ServeHTTP(w, r)
	})
}

// probe responds with 200, or 503 and the reason.
func probe(check func() error) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		text := "ok"
		if err := check(); err != nil {
			text = err.Error()
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		_, _ = io.WriteString(w, text+"\n")
	})
}

// Serve serves HTTP on an address until ctx is done, and then closes the returned channel
// when the pending requests have been answered. It never fails: an address that cannot be
// used is retried, because the agent works without it. The first attempt is made before
// Serve returns.
func Serve(ctx context.Context, listen func(address string) (net.Listener, error), address string, handler http.Handler, log *zap.Logger) <-chan struct{} {
	ended := make(chan struct{})
	listener, err := listen(address)
	go func() {
		defer close(ended)
		tries, reported := 0, ""
		for {
			if err == nil {
				log.Info("serving HTTP", zap.String("event", "listening"), zap.Stringer("address", listener.Addr()))
				tries, reported = 0, ""
				err = serve(ctx, listener, handler, log)
			}
			if ctx.Err() != nil {
				return
			}
			if err.Error() != reported {
				reported = err.Error()
				log.Error("cannot listen on "+address+", retrying", zap.String("event", "listen_failed"), zap.Error(err))
			}
			tries++
			wait(ctx, backoff(tries))
			listener, err = listen(address)
		}
	}()
	return ended
}

// OnTCP listens on HOST:PORT.
func OnTCP(address string) (net.Listener, error) { return net.Listen("tcp", address) }

// serve serves one listener until it fails or ctx is done.
func serve(ctx context.Context, l net.Listener, handler http.Handler, log *zap.Logger) error {
	debug, err := zap.NewStdLogAt(log, zap.DebugLevel)
	if err != nil {
		return err
	}
	server := &http.Server{
		Handler:           answering(handler),
		ConnContext:       func(ctx context.Context, c net.Conn) context.Context { return context.WithValue(ctx, connKey{}, c) },
		ReadHeaderTimeout: readTimeout,
		ReadTimeout:       readTimeout,
		WriteTimeout:      writeTimeout,
		MaxHeaderBytes:    maxHeaderBytes,
		ErrorLog:          debug,
	}
	server.SetKeepAlivesEnabled(false)
	shut := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(shut)
		grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
		defer cancel()
		if server.Shutdown(grace) != nil {
			_ = server.Close()
		}
	})
	err = server.Serve(&boundedListener{Listener: l})
	if !stop() {
		<-shut
	}
	return err
}

// A boundedListener has at most maxConnections open connections. A new one
// replaces the oldest that has not sent its request, so that idle clients lock no
// one out.
type boundedListener struct {
	net.Listener
	mu   sync.Mutex
	open []*boundedConn // oldest first
}

// A boundedConn removes itself from its listener's list when it is closed.
type boundedConn struct {
	net.Conn
	of        *boundedListener
	answering bool // guarded by of.mu
}

type connKey struct{}

// answering marks a connection whose request has arrived.
func answering(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if c, ok := r.Context().Value(connKey{}).(*boundedConn); ok {
			c.of.mu.Lock()
			c.answering = true
			c.of.mu.Unlock()
		}
		next.ServeHTTP(w, r)
	})
}

func (l *boundedListener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		b := &boundedConn{Conn: c, of: l}
		if l.enter(b) {
			return b, nil
		}
		_ = c.Close()
	}
}

// enter makes room for a connection, and reports whether it succeeded.
func (l *boundedListener) enter(b *boundedConn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.open) >= maxConnections {
		i := slices.IndexFunc(l.open, func(c *boundedConn) bool { return !c.answering })
		if i < 0 {
			return false
		}
		_ = l.open[i].Conn.Close()
		l.open = slices.Delete(l.open, i, i+1)
	}
	l.open = append(l.open, b)
	return true
}

func (c *boundedConn) Close() error {
	c.of.mu.Lock()
	defer c.of.mu.Unlock()
	if i := slices.Index(c.of.open, c); i >= 0 {
		c.of.open = slices.Delete(c.of.open, i, i+1)
	}
	return c.Conn.Close()
}
