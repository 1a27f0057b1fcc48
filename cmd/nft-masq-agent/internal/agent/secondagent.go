package agent

import (
	"context"
	"io"
	"os"
	"sync/atomic"

	"go.uber.org/zap"
)

// second takes the lock of the network namespace, and reports another agent there: the one
// that has the lock or, if this agent has it, one that came later.
type second struct {
	*Agent
	lock      io.Closer
	announced io.Closer    // the place of the second agent, while another one has the lock
	hasLock   atomic.Bool  // lock is not nil
	other     atomic.Int64 // process of the other agent, 0 for none
}

func (s *second) Run(ctx context.Context) {
	s.EachView(ctx, func(_ View, resynced bool) {
		if resynced {
			s.try()
		}
	})
	for _, c := range []io.Closer{s.lock, s.announced} {
		if c != nil {
			_ = c.Close()
		}
	}
}

// try takes the lock if it is free, and looks for another agent.
func (s *second) try() {
	if s.lock == nil {
		s.takeLock()
	}
	find := s.in.Holder
	if s.lock != nil {
		find = s.in.Announced
	}
	other, found := find()
	if !found {
		other = 0
	}
	previous := s.other.Swap(int64(other))
	switch {
	case other != 0 && previous == 0:
		s.Log(zap.WarnLevel, "second_agent",
			"another agent runs in this network namespace, and both write the same rules: stop one of them",
			"pid", other, "own_pid", os.Getpid())
	case other == 0 && previous != 0:
		s.Log(zap.InfoLevel, "second_agent_gone", "the other agent in this network namespace is gone")
	}
}

// takeLock takes the lock or, while another process has it, the place of the second agent.
func (s *second) takeLock() {
	lock, err := s.in.Lock()
	if err == nil {
		s.lock = lock
		if s.announced != nil {
			_ = s.announced.Close()
			s.announced = nil
		}
		s.hasLock.Store(true)
		return
	}
	if s.announced == nil {
		later, err := s.in.Announce()
		if err == nil {
			s.announced = later
		}
	}
}

func (s *second) Collect(e Exporter) {
	e.Gauge("second_agent", "Whether another agent runs in this network namespace: 1 or 0. Both write the same rules.",
		Number(s.other.Load() != 0))
}
