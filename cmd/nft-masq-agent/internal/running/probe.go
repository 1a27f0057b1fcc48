package running

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"time"

	"nft-masq-agent/config"
)

// A Report is what an agent answers on its probe socket: why it is not alive or
// not ready, "" for yes; and which policy it enforces, nil for none.
type Report struct {
	Alive  string  `json:"alive"`
	Ready  string  `json:"ready"`
	Policy *Policy `json:"policy,omitempty"`
}

// A Policy is the policy that an agent enforces, and what it last changed in the
// kernel and why.
type Policy struct {
	Hash    string    `json:"hash"`
	Since   time.Time `json:"since"`
	Changed time.Time `json:"changed"`
	What    string    `json:"what"`
	Why     string    `json:"why"`
}

func (p Policy) String() string {
	return config.Printable(fmt.Sprintf("enforces %s since %s; last change %s: %s (%s)",
		p.Hash, p.Since.UTC().Format(time.RFC3339), p.Changed.UTC().Format(time.RFC3339), p.What, p.Why))
}

// ProbeTimeout bounds an exchange on the probe socket, of which a report is written
// at once, and nothing is read.
const ProbeTimeout = time.Second

const maxReportBytes = 64 << 10

// Reached returns the agents with what they report on their probe sockets.
func Reached(agents []Agent) []Agent {
	reached := make([]Agent, len(agents))
	for i, a := range agents {
		if reached[i] = a; !filepath.IsAbs(a.Options.ProbeSocket) {
			continue
		}
		if report, err := Ask(filepath.Join(a.Options.Root, a.Options.ProbeSocket)); err == nil {
			reached[i].Policy = report.Policy
		}
	}
	return reached
}

// Ask asks the agent that answers on a probe socket.
func Ask(path string) (Report, error) {
	c, err := net.DialTimeout("unix", path, ProbeTimeout)
	if err != nil {
		var op *net.OpError
		if errors.As(err, &op) {
			err = op.Err
		}
		return Report{}, fmt.Errorf("no agent answers at %s: %w", config.Printable(path), err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(ProbeTimeout))
	text, err := io.ReadAll(io.LimitReader(c, maxReportBytes))
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return Report{}, fmt.Errorf("the agent does not answer within %s", ProbeTimeout)
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
