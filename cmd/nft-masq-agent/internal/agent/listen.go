package agent

import (
	"context"

	"nft-masq-agent/nft/nfnetlink"
)

// A Listener is notified of each change of the ruleset between Join and Leave.
type Listener struct {
	changes chan Heard
	leave   func()
}

// Heard is a change, or the error that ended the notifications.
type Heard struct {
	nfnetlink.Change
	Err error
}

// NewListener returns a listener that has not joined.
func NewListener() *Listener {
	return &Listener{changes: make(chan Heard), leave: func() {}}
}

// Changes delivers the changes. It is never closed.
func (l *Listener) Changes() <-chan Heard { return l.changes }

// Join starts to listen: no change after it returns is missed.
func (l *Listener) Join() error {
	joined, err := nfnetlink.Listen()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	l.leave = func() {
		cancel()
		_ = joined.Close()
	}
	go func() {
		for ctx.Err() == nil {
			c, err := joined.Receive()
			if ctx.Err() != nil {
				return // we closed the socket ourselves
			}
			select {
			case l.changes <- Heard{c, err}:
			case <-ctx.Done():
			}
			if err != nil {
				return
			}
		}
	}()
	return nil
}

// Leave stops listening. Undelivered changes are dropped.
func (l *Listener) Leave() { l.leave() }
