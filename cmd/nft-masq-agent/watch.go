package main

import (
	"context"
	"flag"
	"os/signal"
	"time"

	"golang.org/x/sys/unix"
)

// watchInterval is the pause between two answers of --watch.
const watchInterval = 2 * time.Second

func addWatch(fs *flag.FlagSet, to *bool) {
	fs.BoolVar(to, "watch", false, "answer every 2 s until interrupted; as JSON, one object a line")
}

// watch answers once, or if on is set again and again until it is interrupted.
func (e environment) watch(ctx context.Context, on bool, format string,
	once func(environment) (int, error),
) (int, error) {
	if !on {
		return once(e)
	}
	ctx, stop := signal.NotifyContext(ctx, unix.SIGTERM, unix.SIGINT)
	defer stop()
	for e.stream = true; ; {
		if e.fit {
			if err := write(e.stdout, "\x1b[H\x1b[2J"); err != nil { // clears the screen
				return exitFailed, err
			}
		}
		code, err := once(e)
		if err != nil {
			e.fail(format, err)
		}
		select {
		case <-ctx.Done():
			return code, nil
		case <-time.After(watchInterval):
		}
	}
}
