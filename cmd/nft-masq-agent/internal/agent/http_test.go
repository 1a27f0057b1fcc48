package agent

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"nft-masq-agent/nft/nfttest"
)

func TestHandlerAcceptsOnlyGetAndHead(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		for _, path := range []string{"/healthz", "/readyz", "/metrics"} {
			for method, want := range map[string]int{
				http.MethodHead: http.StatusOK, http.MethodPost: http.StatusMethodNotAllowed,
				http.MethodDelete: http.StatusMethodNotAllowed,
			} {
				if path == "/readyz" && method == http.MethodHead {
					want = http.StatusServiceUnavailable
				}
				r := httptest.NewRecorder()
				w.agent.Handler().ServeHTTP(r, httptest.NewRequestWithContext(t.Context(), method, path, nil))
				if r.Code != want || r.Header().Get("Cache-Control") != "no-store" {
					t.Errorf("%s %s: %d %v, want %d", method, path, r.Code, r.Header(), want)
				}
			}
		}
	})
}

// A pipeListener is a listener without sockets, for synctest bubbles.
type pipeListener struct {
	conns  chan net.Conn
	closed chan struct{}
}

func newPipeListener() *pipeListener {
	return &pipeListener{make(chan net.Conn), make(chan struct{})}
}

func (l *pipeListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *pipeListener) Close() error   { close(l.closed); return nil }
func (l *pipeListener) Addr() net.Addr { return &net.UnixAddr{Name: "pipe"} }

// dial connects when there is room.
func (l *pipeListener) dial() net.Conn {
	client, server := net.Pipe()
	l.conns <- server
	return client
}

// ask sends a request and returns the status.
func ask(t *testing.T, c net.Conn, request string) int {
	t.Helper()
	go func() { _, _ = io.WriteString(c, request) }()
	response, err := http.ReadResponse(bufio.NewReader(c), nil)
	nfttest.NoError(t, err)
	defer response.Body.Close()
	_, _ = io.Copy(io.Discard, response.Body)
	return response.StatusCode
}

const plainRequest = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"

// serveInBubble runs the server on a listener without sockets.
func serveInBubble(t *testing.T, handler http.HandlerFunc, test func(t *testing.T, l *pipeListener, end func())) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		l, done := newPipeListener(), make(chan struct{})
		go func() {
			defer close(done)
			_ = serve(ctx, l, handler, zap.NewNop())
		}()
		test(t, l, cancel)
		cancel()
		<-done
	})
}

func TestIdleClientsDoNotBlockOthers(t *testing.T) {
	for name, request := range map[string]string{"idle": "", "slow": "GET / HTTP/1.1\r\nHost: lo"} {
		t.Run(name, func(t *testing.T) {
			serveInBubble(t, func(http.ResponseWriter, *http.Request) {}, func(t *testing.T, l *pipeListener, _ func()) {
				start := time.Now()
				for range 10 * maxConnections {
					c := l.dial()
					go func() { _, _ = io.WriteString(c, request) }()
				}
				if code := ask(t, l.dial(), plainRequest); code != http.StatusOK {
					t.Errorf("behind ten times as many connections as are served: status %d, want %d", code, http.StatusOK)
				}
				if took := time.Since(start); took > 0 {
					t.Errorf("answered after %s", took)
				}
			})
		})
	}
}

func TestClientsBeingServedKeepTheirConnections(t *testing.T) {
	release := make(chan struct{})
	arrived := make(chan struct{}, maxConnections)
	handler := func(http.ResponseWriter, *http.Request) { arrived <- struct{}{}; <-release }
	serveInBubble(t, handler, func(t *testing.T, l *pipeListener, _ func()) {
		codes := make(chan int, maxConnections)
		for range maxConnections {
			c := l.dial()
			go func() { codes <- ask(t, c, plainRequest) }()
		}
		for range maxConnections {
			<-arrived
		}
		idle := l.dial()
		for range maxConnections {
			l.dial()
		}
		if _, err := idle.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
			t.Errorf("an idle one: %v, want it closed", err)
		}
		close(release)
		for range maxConnections {
			if code := <-codes; code != http.StatusOK {
				t.Errorf("a request that was being served: status %d, want %d", code, http.StatusOK)
			}
		}
	})
}

func TestIdleClientsAreDisconnected(t *testing.T) {
	serveInBubble(t, func(http.ResponseWriter, *http.Request) {}, func(t *testing.T, l *pipeListener, _ func()) {
		start := time.Now()
		first := l.dial()
		for range maxConnections - 1 {
			l.dial()
		}
		if _, err := first.Read(make([]byte, 1)); !errors.Is(err, io.EOF) || time.Since(start) != readTimeout {
			t.Errorf("%v after %s, want the close after %s", err, time.Since(start), readTimeout)
		}
	})
}

func TestConnectionServesOneRequest(t *testing.T) {
	serveInBubble(t, func(http.ResponseWriter, *http.Request) {}, func(t *testing.T, l *pipeListener, _ func()) {
		c := l.dial()
		start := time.Now()
		ask(t, c, plainRequest)
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, io.EOF) || time.Since(start) > 0 {
			t.Errorf("the connection stays open: %v", err)
		}
	})
}

func TestLongHeaderIsRejected(t *testing.T) {
	serveInBubble(t, func(http.ResponseWriter, *http.Request) {}, func(t *testing.T, l *pipeListener, _ func()) {
		request := "GET / HTTP/1.1\r\nHost: localhost\r\nX: " + strings.Repeat("x", 2*maxHeaderBytes) + "\r\n\r\n"
		if code := ask(t, l.dial(), request); code != http.StatusRequestHeaderFieldsTooLarge {
			t.Errorf("status %d, want %d", code, http.StatusRequestHeaderFieldsTooLarge)
		}
	})
}

func TestPendingRequestIsAnsweredBeforeShutdown(t *testing.T) {
	arrived := make(chan struct{}, 1)
	handler := func(http.ResponseWriter, *http.Request) {
		arrived <- struct{}{}
		time.Sleep(shutdownTimeout / 2)
	}
	serveInBubble(t, handler, func(t *testing.T, l *pipeListener, end func()) {
		c := l.dial()
		go func() {
			<-arrived
			end()
		}()
		if code := ask(t, c, plainRequest); code != http.StatusOK {
			t.Errorf("a request that had arrived before the end: status %d, want %d", code, http.StatusOK)
		}
	})
}

func TestSlowRequestDoesNotBlockShutdown(t *testing.T) {
	arrived := make(chan struct{}, 1)
	handler := func(_ http.ResponseWriter, r *http.Request) {
		arrived <- struct{}{}
		<-r.Context().Done()
	}
	serveInBubble(t, handler, func(t *testing.T, l *pipeListener, end func()) {
		c := l.dial()
		go func() { _, _ = io.WriteString(c, plainRequest) }()
		<-arrived
		start := time.Now()
		end()
		if _, err := io.ReadAll(c); err != nil {
			t.Error(err)
		}
		if took := time.Since(start); took != shutdownTimeout {
			t.Errorf("ended after %s, want %s", took, shutdownTimeout)
		}
	})
}

// loggedMessages returns a logger that sends each message to a channel.
func loggedMessages() (*zap.Logger, <-chan string) {
	lines := make(chan string, 100)
	return zap.NewNop().WithOptions(zap.WrapCore(func(zapcore.Core) zapcore.Core {
		return zapcore.NewCore(zapcore.NewJSONEncoder(zapcore.EncoderConfig{MessageKey: "msg"}), lineWriter(lines),
			zap.InfoLevel)
	})), lines
}

type lineWriter chan<- string

func (w lineWriter) Write(b []byte) (int, error) {
	w <- string(b)
	return len(b), nil
}

func (lineWriter) Sync() error { return nil }

func TestPortInUseIsLoggedAndRetried(t *testing.T) {
	first, err := net.Listen("tcp", "127.0.0.1:0")
	nfttest.NoError(t, err)
	defer first.Close()
	address := first.Addr().String()
	synctest.Test(t, func(t *testing.T) {
		log, lines := loggedMessages()
		free := newPipeListener()
		tries := 0
		listen := func(address string) (net.Listener, error) {
			switch tries++; {
			case tries <= 3:
				return ListenTCP(address)
			case tries <= 5:
				_ = first.Close()
				return first, nil
			}
			return free, nil
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := Serve(ctx, listen, address, http.NotFoundHandler(), log)
		if line := <-lines; !strings.Contains(line, "cannot listen on "+address+", retrying") ||
			!strings.Contains(line, "address already in use") {
			t.Errorf("logged is %s, want that the address is in use, and that it is tried again", line)
		}
		for _, want := range []string{"serving", "cannot listen", "serving", "cannot listen", "serving"} {
			if line := <-lines; !strings.Contains(line, want) {
				t.Errorf("logged is %s, want %s HTTP once the address is free, and each end of that", line, want)
			}
		}
		if code := ask(t, free.dial(), plainRequest); code != http.StatusNotFound {
			t.Errorf("status %d, want %d of the handler", code, http.StatusNotFound)
		}
		cancel()
		<-ended
		if _, err := free.Accept(); !errors.Is(err, net.ErrClosed) {
			t.Errorf("after shutdown: %v", err)
		}
	})
}
