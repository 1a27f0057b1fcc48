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

// Limits of the HTTP server, so that a client can occupy neither its connections nor its memory. A connection serves
// one request: probes and scrapes are too rare to benefit from more, and so no connection is idle after its request.
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
func Serve(ctx context.Context, listen func(address string) (net.Listener, error), address string, handler http.Handler,
	log *zap.Logger,
) <-chan struct{} {
	ended := make(chan struct{})
	listener, err := listen(address)
	go func() {
		defer close(ended)
		tries := 0
		reported := ""
		for {
			if err == nil {
				log.Info("serving HTTP", zap.String("event", "listening"), zap.Stringer("address", listener.Addr()))
				tries = 0
				reported = ""
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
			if !Wait(ctx, Backoff(tries)) {
				return
			}
			listener, err = listen(address)
		}
	}()
	return ended
}

// ListenTCP listens on HOST:PORT. It fails if the address is invalid or in use.
func ListenTCP(address string) (net.Listener, error) { return net.Listen("tcp", address) }

// serve serves one listener until it fails or ctx is done.
func serve(ctx context.Context, l net.Listener, handler http.Handler, log *zap.Logger) error {
	debug, err := zap.NewStdLogAt(log, zap.DebugLevel)
	if err != nil {
		return err
	}
	room := &waitingRoom{}
	server := &http.Server{
		Handler:           room.leaving(handler),
		ConnContext:       room.enter,
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
	err = server.Serve(l)
	if !stop() {
		<-shut
	}
	return err
}

// A waitingRoom has at most maxConnections connections that wait for their client's request. A new one replaces the
// oldest, so that idle clients lock no one out.
type waitingRoom struct {
	mu      sync.Mutex
	waiting []net.Conn // oldest first
}

type connKey struct{}

// enter adds a new connection, and closes the oldest one if there are too many.
func (w *waitingRoom) enter(ctx context.Context, c net.Conn) context.Context {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.waiting = append(w.waiting, c)
	if len(w.waiting) > maxConnections {
		_ = w.waiting[0].Close()
		w.waiting = w.waiting[1:]
	}
	return context.WithValue(ctx, connKey{}, c)
}

// leaving removes a connection from the room when its request has arrived, so that it is not closed.
func (w *waitingRoom) leaving(next http.Handler) http.Handler {
	return http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		w.mu.Lock()
		w.waiting = slices.DeleteFunc(w.waiting, func(c net.Conn) bool { return c == r.Context().Value(connKey{}) })
		w.mu.Unlock()
		next.ServeHTTP(rw, r)
	})
}
