package conntrack

import (
	"context"
	"time"
)

// Flush deletes at most flushRate entries per second, and holds at most
// flushBatch in memory.
const (
	flushRate  = 10_000
	flushBatch = 10_000
)

// Flush deletes the stale connections that match, at most 10,000 per second, and
// returns how many. Their next packets start new connections, for which the
// current rules decide.
func (t *Table) Flush(ctx context.Context, j *Judge, matches func(*Entry) bool) (deleted int, err error) {
	for ctx.Err() == nil {
		var batch []Entry
		err := t.Dump(Filter{}, func() func(*Entry) error {
			batch = batch[:0]
			return func(e *Entry) error {
				if matches(e) && j.Stale(e) {
					batch = append(batch, e.Clone())
				}
				if len(batch) == flushBatch {
					return ErrStop
				}
				return nil
			}
		})
		if err != nil {
			return deleted, err
		}
		n, err := t.Delete(batch, pace(ctx))
		deleted += n
		if err != nil || n == 0 || len(batch) < flushBatch {
			return deleted, err
		}
	}
	return deleted, ctx.Err()
}

// pace returns a function that waits as long as flushRate requires.
func pace(ctx context.Context) func() error {
	start, n := time.Now(), 0
	return func() error {
		const step = 100
		if n++; n%step != 0 {
			return nil
		}
		due := start.Add(time.Duration(n) * time.Second / flushRate)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Until(due)):
			return nil
		}
	}
}
