package node

import (
	"context"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfnetlink"
)

// A Change is the list of a node's addresses, as [Addresses] returns it, or the reason why they are currently unknown.
type Change struct {
	Addresses []netip.Addr
	At        time.Time // when the kernel was asked for the list
	Err       error     // from the kernel; the request is retried
}

// Follow delivers the addresses of the node, and again after each change of an address or
// an interface, until the context is done. A list may equal the one before. A slow
// receiver gets only the last one.
//
// Any number of events only means that something changed: then all addresses are listed.
// So no event is misread, and losing one has no effect.
func Follow(ctx context.Context) <-chan Change { return follow(ctx, Dial, shortest) }

// shortest is the least time from one list to the next.
const shortest = 250 * time.Millisecond

func follow(ctx context.Context, d Dialer, shortest time.Duration) <-chan Change {
	changes := make(chan Change, 1)
	go func() {
		for ctx.Err() == nil {
			begun := time.Now()
			pause, err := listen(ctx, d, changes, begun, shortest)
			if err != nil && ctx.Err() == nil {
				deliver(changes, Change{Err: err})
			}
			select {
			case <-time.After(time.Until(begun.Add(pause))):
			case <-ctx.Done():
			}
		}
	}()
	return changes
}

// listen delivers a list, and returns after the first event since then, with the least time from this list to the next.
// Until that has passed there is no socket: each event would wake the program.
func listen(ctx context.Context, d Dialer, changes chan Change, begun time.Time, shortest time.Duration) (
	pause time.Duration, err error,
) {
	const share = 200 // next to events without end, the pause is that many times as long as a list takes
	afterError := 4 * shortest
	longest := 8 * shortest
	nl, err := d(unix.RTMGRP_LINK | unix.RTMGRP_IPV4_IFADDR | unix.RTMGRP_IPV6_IFADDR)
	if err != nil {
		return afterError, err
	}
	defer func() { _ = nl.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = nl.SetReadDeadline(time.Unix(1, 0)) }) // ends Receive
	defer stop()
	listed := time.Now()
	addresses, err := addressesOf(d)
	pause = min(max(shortest, share*time.Since(begun)), longest)
	if err == nil {
		deliver(changes, Change{Addresses: addresses, At: listed})
		_, err = nl.Receive()
	}
	if err == nil || nfnetlink.IsAny(err, unix.ENOBUFS, nfnetlink.ErrBusy) { // these errors mean many events
		return pause, nil
	}
	return afterError, err
}

// deliver replaces a change that has not been received yet.
func deliver(changes chan Change, c Change) {
	select {
	case <-changes:
	default:
	}
	changes <- c
}
