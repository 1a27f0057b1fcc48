package node

import (
	"context"
	"errors"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// A Change is the list of a node's addresses, as by [Addresses], or the reason why they
// are currently unknown.
type Change struct {
	Addresses []netip.Addr
	Err       error // from the kernel; the request is retried
}

// Follow delivers the addresses of the node, and again after each change of an address or
// an interface, until the context is done. A list may equal the one before. A slow
// receiver gets only the last one.
//
// Any number of events only means that something changed: then all addresses are listed.
// So no event is misread, and losing one has no effect.
func Follow(ctx context.Context) <-chan Change { return follow(ctx, dial) }

func follow(ctx context.Context, d dialer) <-chan Change {
	const pause = time.Second
	changes := make(chan Change, 1)
	go func() {
		for ctx.Err() == nil {
			if err := listen(ctx, d, changes); ctx.Err() == nil {
				deliver(changes, Change{Err: err})
			}
			time.Sleep(pause)
		}
	}()
	return changes
}

// listen delivers lists until there is an error.
func listen(ctx context.Context, d dialer, changes chan Change) error {
	// While there are events all the time, lists take one part in share of it.
	const share, longest = 200, 2 * time.Second
	nl, err := d(unix.RTMGRP_LINK | unix.RTMGRP_IPV4_IFADDR | unix.RTMGRP_IPV6_IFADDR)
	if err != nil {
		return err
	}
	defer func() { _ = nl.Close() }()
	defer context.AfterFunc(ctx, func() { _ = nl.SetReadDeadline(time.Unix(1, 0)) })()
	for {
		begun := time.Now()
		addresses, err := addressesOf(d)
		if err == nil {
			deliver(changes, Change{Addresses: addresses})
		}
		time.Sleep(min(share*time.Since(begun), longest))
		if err == nil {
			_, err = nl.Receive()
		}
		if err != nil && !errors.Is(err, unix.ENOBUFS) && !errors.Is(err, errTorn) { // those mean events
			return err
		}
	}
}

// deliver replaces a change that has not been received yet.
func deliver(changes chan Change, c Change) {
	select {
	case <-changes:
	default:
	}
	changes <- c
}
