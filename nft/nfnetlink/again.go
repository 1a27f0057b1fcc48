package nfnetlink

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// ErrBusy means that others changed the same again and again between reading and writing. What
// packets see is as before; nothing is wrong with the rules.
var ErrBusy = errors.New("other programs keep changing what is read")

// A task is repeated for patience, while other programs write, but at least for so many attempts.
const (
	patience = 3 * time.Second
	attempts = 5
)

// Again repeats a task while it fails because another program wrote at the same time, and returns its other errors.
// After a few seconds the error is [ErrBusy], and once ctx is done that of ctx. The pauses are random: otherwise two
// agents could disturb each other forever.
func Again(ctx context.Context, do func() error) error {
	start := time.Now()
	for n := 1; ; n++ {
		err := do()
		if !overtaken(err) {
			return err
		}
		if n >= attempts && time.Since(start) > patience {
			return fmt.Errorf("%w: %w", ErrBusy, err)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(rand.N(time.Duration(min(n, 20)) * time.Millisecond)):
		}
	}
}

// overtaken reports whether another program changed something between reading and writing, or the outcome is unknown.
// An object that was listed may be gone when it is read: that is another program's doing, but not if a transaction
// names something that does not exist.
func overtaken(err error) bool {
	return IsAny(err, ErrReadAgain, unix.ERESTART, unix.ENOBUFS, unix.EINTR) ||
		IsNotExist(err) && !errors.As(err, new(*RejectedError))
}

// IsAny reports whether an error is one of several.
func IsAny(err error, targets ...error) bool {
	return slices.ContainsFunc(targets, func(t error) bool { return errors.Is(err, t) })
}
