package agent

import (
	"context"
	"io"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.uber.org/zap"
)

// Limits of the HTTP server, so that a client can neither hold its places nor
// take memory. A connection serves one request: probes and scrapes come too
// rarely to gain from more, and none can lie idle.
const (
	readTimeout     = 5 * time.Second
	writeTimeout    = 15 * time.Second
	scrapeTimeout   = 10 * time.Second
	maxHeaderBytes  = 8 << 10
	maxConnections  = 32
	maxScrapes      = 4
	shutdownTimeout = time.Second
)

// Handler answers GET and HEAD of /healthz, /readyz and /metrics. The probes
// wait for nothing; a scrape waits for the kernel's counters.
func (a *Agent) Handler() http.Handler {
	a.metrics.connections.begin()
	mux := http.NewServeMux()
	mux.Handle("GET /healthz", probe(a.Alive))
	mux.Handle("GET /readyz", probe(a.Ready))
	mux.Handle("GET /metrics", promhttp.HandlerFor(a.metrics.registry, promhttp.HandlerOpts{
		ErrorHandling:       promhttp.ContinueOnError,
		MaxRequestsInFlight: maxScrapes,
		Timeout:             scrapeTimeout,
		DisableCompression:  true, // its buffers would be most of our memory
	}))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Cache-Control", "no-store")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		mux.ServeHTTP(w, r)
	})
}

// probe answers 200, or 503 and in words why.
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

// Serve answers HTTP on an address until ctx ends; what it returns is closed
// once the requests under way then have been answered. It outlives every error:
// an address that cannot be used is tried again and again, because the agent
// does its work without it. The first try is made before Serve returns.
func Serve(ctx context.Context, address string, handler http.Handler, log *zap.Logger) <-chan struct{} {
	ended := make(chan struct{})
	listener, err := net.Listen("tcp", address)
	go func() {
		defer close(ended)
		tries, said := 0, ""
		for {
			if err == nil {
				log.Info("answering HTTP", zap.Stringer("address", listener.Addr()))
				tries, said = 0, ""
				err = serve(ctx, listener, handler, log)
			}
			if ctx.Err() != nil {
				return
			}
			if err.Error() != said {
				said = err.Error()
				log.Error("no HTTP, trying again", zap.Error(err))
			}
			tries++
			wait(ctx, backoff(tries))
			listener, err = net.Listen("tcp", address)
		}
	}()
	return ended
}

// serve answers on one listener until it fails or ctx ends.
func serve(ctx context.Context, l net.Listener, handler http.Handler, log *zap.Logger) error {
	debug, err := zap.NewStdLogAt(log, zap.DebugLevel)
	if err != nil {
		return err
	}
	server := &http.Server{
		Handler:           handler,
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
	err = server.Serve(&limitedListener{Listener: l, places: make(chan struct{}, maxConnections)})
	if !stop() {
		<-shut
	}
	return err
}

// A limitedListener has places for so many connections at a time; further ones
// wait in the kernel.
type limitedListener struct {
	net.Listener
	places chan struct{}
}

// Accept implements [net.Listener].
func (l *limitedListener) Accept() (net.Conn, error) {
	l.places <- struct{}{}
	c, err := l.Listener.Accept()
	if err != nil {
		<-l.places
		return nil, err
	}
	return &placedConn{Conn: c, leave: sync.OnceFunc(func() { <-l.places })}, nil
}

// A placedConn gives its place back when it is closed.
type placedConn struct {
	net.Conn
	leave func()
}

// Close implements [net.Conn].
func (c *placedConn) Close() error {
	defer c.leave()
	return c.Conn.Close()
}
