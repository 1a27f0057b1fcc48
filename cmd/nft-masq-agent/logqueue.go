package main

import (
	"io"
	"sync"
	"sync/atomic"
	"time"
)

// maxQueued is the size of the queue, in bytes.
const maxQueued = 256 << 10

// A lineQueue writes log lines from a separate goroutine, so that a slow or
// missing reader blocks nothing. Lines that do not fit into the queue, or that
// cannot be written, are dropped and counted.
type lineQueue struct {
	w    io.Writer
	lost atomic.Uint64
	// report logs that lines were dropped, once the reader reads again.
	report func(lost uint64)

	mu       sync.Mutex
	lines    [][]byte
	size     int
	more     chan struct{} // receives a token when there are lines
	closed   chan struct{}
	finished chan struct{}
}

func newLineQueue(w io.Writer) *lineQueue {
	q := &lineQueue{
		w: w, report: func(uint64) {},
		more: make(chan struct{}, 1), closed: make(chan struct{}), finished: make(chan struct{}),
	}
	go q.run()
	return q
}

// Write implements [io.Writer]. It never blocks and never fails.
func (q *lineQueue) Write(line []byte) (int, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.size+len(line) > maxQueued {
		q.lost.Add(1)
		return len(line), nil
	}
	q.lines, q.size = append(q.lines, append([]byte(nil), line...)), q.size+len(line)
	select {
	case q.more <- struct{}{}:
	default:
	}
	return len(line), nil
}

func (q *lineQueue) Sync() error { return nil }

// Close writes the queued lines, as long as the reader accepts them within the
// timeout. Nothing may be written afterwards.
func (q *lineQueue) Close(timeout time.Duration) {
	close(q.closed)
	select {
	case <-q.finished:
	case <-time.After(timeout):
	}
}

func (q *lineQueue) run() {
	defer close(q.finished)
	for reported := uint64(0); ; {
		read := false // whether there is a reader
		for line := q.next(); line != nil; line = q.next() {
			_, err := q.w.Write(line)
			if read = err == nil; !read {
				q.lost.Add(1)
			}
		}
		// There is room for another line now.
		if lost := q.lost.Load(); lost > reported && read {
			q.report(lost - reported)
			reported = lost
		}
		select {
		case <-q.more:
		case <-q.closed:
			select {
			case <-q.more: // written before Close
			default:
				return
			}
		}
	}
}

// next takes the first line, nil if there is none.
func (q *lineQueue) next() []byte {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.lines) == 0 {
		return nil
	}
	line := q.lines[0]
	q.lines, q.size = q.lines[1:], q.size-len(line)
	return line
}
