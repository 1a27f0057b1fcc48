package main

import (
	"bytes"
	"io"
	"sync/atomic"
	"time"
)

// maxQueued is how many lines the queue has room for.
const maxQueued = 256

// A lineQueue writes log lines from a separate goroutine, so that a slow or
// missing reader blocks nothing. Lines that do not fit into the queue, or that
// cannot be written, are dropped and counted.
type lineQueue struct {
	w        io.Writer
	lost     atomic.Uint64
	lines    chan []byte // ends with nil
	finished chan struct{}
}

func newLineQueue(w io.Writer) *lineQueue {
	q := &lineQueue{w: w, lines: make(chan []byte, maxQueued), finished: make(chan struct{})}
	go q.run()
	return q
}

// Write implements [io.Writer]. It never blocks and never fails.
func (q *lineQueue) Write(line []byte) (int, error) {
	select {
	case q.lines <- bytes.Clone(line):
	default:
		q.lost.Add(1)
	}
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
	for line := <-q.lines; line != nil; line = <-q.lines {
		_, err := q.w.Write(line)
		if err != nil {
			q.lost.Add(1)
		}
	}
}
