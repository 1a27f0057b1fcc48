package agent

import (
	"context"
	"io"
	"sync/atomic"

	"go.uber.org/zap"
)

// second takes the lock of the network namespace, and reports another agent that has it.
type second struct {
	*Agent
	lock  io.Closer
	later io.Closer    // while another one has the lock
	other atomic.Int64 // its process, 0 for none
}

func (s *second) Run(ctx context.Context) {
	s.Follow(ctx, func(_ View, checked bool) {
		if s.lock == nil && checked {
			s.try()
		}
	})
	for _, c := range []io.Closer{s.lock, s.later} {
		if c != nil {
			_ = c.Close()
		}
	}
}

func (s *second) try() {
	var err error
	if s.lock, err = s.in.Lock(); err != nil {
		s.lock = nil
	}
	other := 0
	switch {
	case s.lock == nil:
		other, _ = s.in.Holder()
		if s.later == nil {
			if s.later, err = s.in.Later(); err != nil {
				s.later = nil
			}
		}
	case s.later != nil:
		_ = s.later.Close()
		s.later = nil
	}
	switch was := s.other.Swap(int64(other)); {
	case other != 0 && was == 0:
		s.Log(zap.WarnLevel, "second_agent",
			"another agent runs in this network namespace, and both write the same rules: stop one of them", "pid", other)
	case other == 0 && was != 0:
		s.Log(zap.InfoLevel, "second_agent_gone", "the other agent in this network namespace is gone")
	}
}

func (s *second) Collect(e Exporter) {
	e.Gauge("second_agent", "Whether another agent was in this network namespace before this one: 1 or 0. Both write "+
		"the same rules.",
		Number(s.other.Load() != 0))
}
