package agent

import (
	"context"
	"sync"
	"time"

	"go.uber.org/zap"

	"nft-masq-agent/nft/nfnetlink"
)

// A Listener hears of each change of the ruleset.
type Listener struct {
	changes chan nfnetlink.Change
	missed  chan struct{} // has a token when changes may have been missed

	mu      sync.Mutex
	current *nfnetlink.Listener // nil while it cannot be opened
	holdOff time.Time
	deaf    bool // until holdOff
}

// Listen delivers each change of the ruleset until ctx ends. It outlives every
// error: after one the listener is opened again, and that anything may have
// changed meanwhile is delivered too. The first listener is open when Listen
// returns, so that no change after that is missed.
func Listen(ctx context.Context, log *zap.Logger) *Listener {
	l := &Listener{changes: make(chan nfnetlink.Change), missed: make(chan struct{}, 1)}
	err := l.open()
	go func() {
		for tries := 0; ctx.Err() == nil; {
			if err != nil {
				if tries++; tries == 1 {
					log.Error("not told of changes to the rules, looking now and then", zap.Error(err))
				}
				wait(ctx, backoff(tries))
				if err = l.open(); err != nil {
					continue
				}
				tries = 0
				l.deliver(ctx, nfnetlink.Change{Overrun: true})
			}
			err = l.hear(ctx)
		}
	}()
	go func() {
		for {
			select {
			case <-l.missed:
				l.deliver(ctx, nfnetlink.Change{Overrun: true})
			case <-ctx.Done():
				return
			}
		}
	}()
	return l
}

// Changes delivers the changes. It is never closed.
func (l *Listener) Changes() <-chan nfnetlink.Change { return l.changes }

// Pause stops listening until resume is called, which delivers that anything
// may have changed meanwhile.
func (l *Listener) Pause() (resume func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	paused := l.current
	if paused == nil || paused.Pause() != nil {
		return func() {}
	}
	return func() {
		if paused.Resume() != nil {
			_ = paused.Close() // so that it is opened again
		}
		select {
		case l.missed <- struct{}{}:
		default:
		}
	}
}

// HoldOff lets changes wait in the socket for a time, and then delivers them
// together: each wakes the process, which costs more than to deliver it. Deaf,
// it does not listen for that time, and then delivers that anything may have
// changed: also a change that waits in the socket wakes the process.
func (l *Listener) HoldOff(d time.Duration, deaf bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.holdOff, l.deaf = time.Now().Add(d), deaf
}

// heldOff says how long no change is to be delivered.
func (l *Listener) heldOff() (d time.Duration, deaf bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return time.Until(l.holdOff), l.deaf
}

func (l *Listener) open() error {
	opened, err := nfnetlink.Listen()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.current = opened
	return err
}

// hear delivers what the open listener hears until it fails or ctx ends.
func (l *Listener) hear(ctx context.Context) error {
	current := l.current // only this goroutine changes it
	stop := context.AfterFunc(ctx, func() { _ = current.Close() })
	defer func() {
		if stop() {
			_ = current.Close()
		}
	}()
	for {
		switch d, deaf := l.heldOff(); {
		case d <= 0:
		case deaf:
			resume := l.Pause()
			wait(ctx, d)
			resume()
		case !current.Pending():
			wait(ctx, d)
		}
		c, err := current.Receive()
		if err != nil {
			return err
		}
		l.deliver(ctx, c)
	}
}

func (l *Listener) deliver(ctx context.Context, c nfnetlink.Change) {
	select {
	case l.changes <- c:
	case <-ctx.Done():
	}
}

func wait(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
