package running_test

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"nft-masq-agent/cmd/nft-masq-agent/internal/running"
	"nft-masq-agent/nft/nfttest"
)

// serve answers on a unix socket in place of an agent, until the test ends.
func serve(t *testing.T, answer http.HandlerFunc) (socket string) {
	t.Helper()
	socket = filepath.Join(t.TempDir(), "socket")
	l, err := net.Listen("unix", socket)
	nfttest.NoError(t, err)
	server := &http.Server{Handler: answer} //nolint:gosec // of one test
	ended := make(chan struct{})
	go func() { defer close(ended); _ = server.Serve(l) }()
	t.Cleanup(func() { _ = server.Close(); <-ended })
	return socket
}

func TestReportNamesTheProcessThatAnswers(t *testing.T) {
	socket := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/agent" {
			_ = json.NewEncoder(w).Encode(running.Report{PID: 1, Source: "file", HasLock: true, SecondAgent: 7})
		}
	})
	err := nfttest.NewNS(t, "agent").Do(func() error {
		r, err := running.Ask(socket)
		if err != nil || r.PID != os.Getpid() || r.Source != "file" || r.SecondAgent != 0 {
			t.Errorf("alone: %+v, %v, want pid %d, source file and no second agent", r, err, os.Getpid())
		}
		second, err := running.Announce()
		if err != nil {
			return err
		}
		if r, err = running.Ask(socket); err != nil || r.SecondAgent != os.Getpid() {
			t.Errorf("next to a second agent: %+v, %v", r, err)
		}
		for range 2 { // the queue of the socket stays empty
			c, err := net.Dial("unix", "@nft-masq-agent-later")
			if err != nil {
				return err
			}
			_ = c.SetDeadline(time.Now().Add(nfttest.Patient(10 * time.Second)))
			if _, err := c.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
				t.Errorf("a connection is not closed: %v", err)
			}
			_ = c.Close()
		}
		if _, err := running.Announce(); err == nil {
			t.Error("a third one says so, too")
		}
		return second.Close()
	})
	nfttest.NoError(t, err)
}

// An agent without the lock may be the first one: it takes the lock at its next check, or a process of
// another user has it.
func TestAgentIsNotItsOwnSecondAgent(t *testing.T) {
	socket := serve(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(`{"secondAgent": 7}`)) })
	err := nfttest.NewNS(t, "agent").Do(func() error {
		for name, take := range map[string]func() (io.Closer, error){
			"lock":                  running.Lock,
			"that of a later agent": running.Announce,
			"lock of another user":  func() (io.Closer, error) { return listenAsNobody("@nft-masq-agent") },
			"neither of the two":    func() (io.Closer, error) { return io.NopCloser(nil), nil },
		} {
			taken, err := take()
			if err != nil {
				return err
			}
			r, err := running.Ask(socket)
			if err != nil || r.SecondAgent != 0 {
				t.Errorf("with the %s: %+v, %v, want no second agent", name, r, err)
			}
			if err := taken.Close(); err != nil {
				return err
			}
		}
		return nil
	})
	nfttest.NoError(t, err)
}

// The test program, started again, is the other process.
func TestSecondAgentOfOneWithoutTheLockIsTheOneThatHasIt(t *testing.T) {
	if os.Getenv("HAS_LOCK") != "" {
		_ = nfttest.Must(running.Lock())
		fmt.Println("taken")
		_, _ = io.Copy(io.Discard, os.Stdin)
		return
	}
	socket := serve(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("{}")) })
	err := nfttest.NewNS(t, "agent").Do(func() error {
		other := exec.Command(os.Args[0], "-test.run", "^"+t.Name()+"$")
		other.Env = append(os.Environ(), "HAS_LOCK=1")
		stdin := nfttest.Must(other.StdinPipe())
		stdout := nfttest.Must(other.StdoutPipe())
		if err := other.Start(); err != nil {
			return err
		}
		_, err := bufio.NewReader(stdout).ReadString('\n')
		r, askErr := running.Ask(socket)
		if r.SecondAgent != other.Process.Pid {
			t.Errorf("second agent %d, want %d", r.SecondAgent, other.Process.Pid)
		}
		_ = stdin.Close()
		return errors.Join(err, askErr, other.Wait())
	})
	nfttest.NoError(t, err)
}

func TestTextOfAReport(t *testing.T) {
	for want, got := range map[string]string{
		"the running agent (pid 5, without flags)": running.Report{PID: 5}.String(),
		`the running agent (pid 5: --x=\u202e -v)`: running.Report{PID: 5, Args: []string{"--x=\u202e", "-v"}}.String(),
		"pid 5":       running.Process(5),
		"pid unknown": running.Process(running.Hidden),
	} {
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

func TestAnswersThatAreNoReportAreErrors(t *testing.T) {
	for answer, want := range map[string]string{
		"404 no":               "answers Not Found: ",
		"200 no":               "read the agent's answer: ",
		"200 {\"pid\": \"x\"}": "read the agent's answer: ",
	} {
		socket := serve(t, func(w http.ResponseWriter, _ *http.Request) {
			status, text, _ := strings.Cut(answer, " ")
			w.WriteHeader(nfttest.Must(strconv.Atoi(status)))
			_, _ = w.Write([]byte(text))
		})
		if _, err := running.Ask(socket); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", answer, err, want)
		}
	}
}

func TestProbeSaysWhyNot(t *testing.T) {
	answers := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/readyz":
			http.Error(w, "config rejected", http.StatusServiceUnavailable)
		case "/startupz":
			w.WriteHeader(http.StatusServiceUnavailable)
		default:
			_, _ = w.Write([]byte("ok"))
		}
	})
	byTCP := httptest.NewServer(answers)
	defer byTCP.Close()
	for network, address := range map[string]string{"unix": serve(t, answers), "tcp": byTCP.Listener.Addr().String()} {
		for path, want := range map[string]string{
			"/readyz": "config rejected", "/startupz": "Service Unavailable", "/healthz": "",
		} {
			if reason, err := running.Probe(network, address, path); err != nil || reason != want {
				t.Errorf("%s, %s: %q, %v", network, path, reason, err)
			}
		}
	}
}

func TestWithoutAnAgentTheErrorNamesTheSocket(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "socket")
	want := "no agent answers at " + socket + ": connect: no such file or directory"
	if _, err := running.Probe("unix", socket, "/readyz"); err == nil || err.Error() != want {
		t.Errorf("%v, want %s", err, want)
	}
	if _, err := running.Ask(socket); err == nil || err.Error() != want {
		t.Errorf("%v, want %s", err, want)
	}
}

func TestAgentThatDoesNotAnswerInTimeIsToldApart(t *testing.T) {
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "socket"))
	nfttest.NoError(t, err)
	defer l.Close()
	_, err = running.Probe("unix", l.Addr().String(), "/readyz")
	if !errors.Is(err, running.ErrNoAnswer) || err.Error() != "no answer from the agent within 1s" {
		t.Errorf("%v", err)
	}
}
