package main

import (
	"bytes"
	"io"
	"sync/atomic"
	"time"
)

// maxQueued is how many lines the queue has room for, and maxSize how many bytes.
const (
	maxQueued = 1024
	maxSize   = 256 << 10
)

// A lineQueue writes log lines from a separate goroutine, so that a slow or
// missing reader blocks nothing. Lines that do not fit into the queue, or that
// cannot be written, are dropped and counted.
type lineQueue struct {
	w    io.Writer
	lost atomic.Uint64
	// report logs that lines were dropped, once the reader reads again.
	report func(lost uint64)

	lines    chan []byte  // ends with nil
	size     atomic.Int64 // of the lines in it
	finished chan struct{}
}

func newLineQueue(w io.Writer) *lineQueue {
	q := &lineQueue{w: w, report: func(uint64) {}, lines: make(chan []byte, maxQueued), finished: make(chan struct{})}
	go q.run()
	return q
}

// Write implements [io.Writer]. It never blocks and never fails.
func (q *lineQueue) Write(line []byte) (int, error) {
	if q.size.Add(int64(len(line))) <= maxSize {
		select {
		case q.lines <- bytes.Clone(line):
			return len(line), nil
		default:
		}
	}
	q.size.Add(-int64(len(line)))
	q.lost.Add(1)
	return len(line), nil
}

func (q *lineQueue) Sync() error { return nil }

// Close writes the queued lines, as long as the reader accepts them within the
// timeout. What is written afterwards is lost.
func (q *lineQueue) Close(timeout time.Duration) {
	late := time.After(timeout)
	select {
	case q.lines <- nil:
	case <-late:
		return
	}
	select {
	case <-q.finished:
	case <-late:
	}
}

func (q *lineQueue) run() {
	defer close(q.finished)
	reported := uint64(0)
	for line := <-q.lines; line != nil; line = <-q.lines {
		q.size.Add(-int64(len(line)))
		if _, err := q.w.Write(line); err != nil {
			q.lost.Add(1)
			continue
		}
		if lost := q.lost.Load(); lost > reported && len(q.lines) == 0 {
			q.report(lost - reported)
			reported = lost
		}
	}
}
