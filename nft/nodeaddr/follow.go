package nodeaddr

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// A Change is the list of a node's addresses, or the reason why they are currently unknown.
type Change struct {
	Addresses []netip.Addr // sorted
	Err       error        // from the kernel; the request is retried
}

// Follow delivers the addresses of the node, and again whenever they change,
// until the context is done. A slow receiver gets only the last change.
func Follow(ctx context.Context) <-chan Change { return FollowBy(ctx, dial) }

// FollowBy is like Follow, with the given dialer.
func FollowBy(ctx context.Context, dial Dial) <-chan Change {
	f := follower{dial: dial, changes: make(chan Change, 1)}
	go f.run(ctx)
	return f.changes
}

type follower struct {
	dial    Dial
	changes chan Change
	known   bool
	last    []netip.Addr
}

const groups = unix.RTMGRP_LINK | unix.RTMGRP_IPV4_IFADDR | unix.RTMGRP_IPV6_IFADDR

// run listens again after each failure: an overrun or an inconsistent dump, which
// are normal, or a lasting error.
func (f *follower) run(ctx context.Context) {
	const shortest, longest = time.Second, time.Minute
	for pause := shortest; ctx.Err() == nil; {
		start := time.Now()
		err := f.listen(ctx)
		lasted, busy := time.Since(start) > shortest, errors.Is(err, unix.ENOBUFS) || errors.Is(err, errTorn)
		wait := pause / 10
		switch {
		case ctx.Err() != nil || lasted && busy:
			continue
		case lasted:
			pause = shortest
		case !busy:
			wait, pause = pause, min(2*pause, longest)
		}
		if !busy {
			f.known = false
			f.deliver(Change{Err: err})
		}
		select {
		case <-ctx.Done():
		case <-time.After(wait):
		}
	}
}

func (f *follower) listen(ctx context.Context) error {
	nl, err := f.dial(groups)
	if err != nil {
		return fmt.Errorf("netlink socket: %w", err)
	}
	defer func() { _ = nl.Close() }()
	defer context.AfterFunc(ctx, func() { _ = nl.SetReadDeadline(time.Unix(1, 0)) })()
	s, err := list(f.dial)
	if err != nil {
		return err
	}
	for {
		// Notifications from before the dump must not be reported as later changes.
		if err := s.takeAll(nl); err != nil {
			return err
		}
		if now := s.usable(); !f.known || !slices.Equal(f.last, now) {
			f.known, f.last = true, now
			f.deliver(Change{Addresses: now})
		}
		if err := nl.SetReadDeadline(time.Time{}); err != nil {
			return err
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err := s.receive(nl); err != nil {
			return err
		}
	}
}

// takeAll applies the queued notifications, and those that follow immediately,
// within bounds.
func (s state) takeAll(nl *netlink.Conn) error {
	const soon, longest = time.Millisecond, 20 * time.Millisecond
	for end := time.Now().Add(longest); time.Now().Before(end); {
		if err := nl.SetReadDeadline(time.Now().Add(soon)); err != nil {
			return err
		}
		err := s.receive(nl)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return nil
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// receive waits for notifications and applies them.
func (s state) receive(nl *netlink.Conn) error {
	msgs, err := nl.Receive()
	if err != nil {
		return fmt.Errorf("notifications of addresses: %w", err)
	}
	for _, m := range msgs {
		if err := s.take(m); err != nil {
			return err
		}
	}
	return nil
}

// deliver replaces a change that has not been received yet.
func (f *follower) deliver(c Change) {
	select {
	case <-f.changes:
	default:
	}
	f.changes <- c
}
