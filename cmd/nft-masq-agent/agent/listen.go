package agent

import (
	"context"
	"time"

	"go.uber.org/zap"

	"nft-masq-agent/nft/nfnetlink"
)

// Listen delivers each change of the ruleset until ctx ends. It outlives every
// error: after one the listener is opened again, and that anything may have
// changed meanwhile is delivered too. The first listener is open when Listen
// returns, so that no change after that is missed.
func Listen(ctx context.Context, log *zap.Logger) <-chan nfnetlink.Change {
	changes := make(chan nfnetlink.Change)
	first, err := nfnetlink.Listen()
	go func() {
		l, tries := first, 0
		for ctx.Err() == nil {
			if err != nil {
				if tries++; tries == 1 {
					log.Error("not told of changes to the rules, looking now and then", zap.Error(err))
				}
				wait(ctx, backoff(tries))
				if l, err = nfnetlink.Listen(); err != nil {
					continue
				}
				tries = 0
				deliver(ctx, changes, nfnetlink.Change{Overrun: true})
			}
			err = hear(ctx, l, changes)
		}
	}()
	return changes
}

// hear delivers what one listener hears until it fails or ctx ends.
func hear(ctx context.Context, l *nfnetlink.Listener, changes chan<- nfnetlink.Change) error {
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	defer func() {
		if stop() {
			_ = l.Close()
		}
	}()
	for {
		c, err := l.Receive()
		if err != nil {
			return err
		}
		deliver(ctx, changes, c)
	}
}

func deliver(ctx context.Context, changes chan<- nfnetlink.Change, c nfnetlink.Change) {
	select {
	case changes <- c:
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
