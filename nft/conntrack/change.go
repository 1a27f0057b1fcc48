package conntrack

import (
	"context"
	"errors"
	"fmt"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfnetlink"
)

// A Change is that of the policy in force. A connection is outdated if its translation agrees with the
// policy before and contradicts the one in force: then this agent decided about it, and would now
// decide otherwise. No rule of another program is asked.
//
// Never outdated are connections that are closed, that a helper expected, in a zone other than 0, from
// or to the node itself, to multicast or broadcast, from an address to itself, that a bridge may have
// forwarded, or of which the destination was translated, and those of which the policy in force decides
// by an interface that is not known.
type Change struct{ Before, InForce *Comparison }

// Outdated reports whether the policy before decided about an open connection, and the one in force
// decides otherwise.
func (c Change) Outdated(e *Entry) bool {
	if c.InForce.exclusion(e) != Agrees || !e.Open() || e.translatedDestination() {
		return false
	}
	ruling, right := c.InForce.ruling(e)
	if right || ruling.Depends {
		return false
	}
	_, agreed := c.Before.ruling(e)
	return agreed
}

// Delete deletes the doomed connections in one pass, and asks about each one again right before that. Their next
// packets start new connections, to which the current rules apply. It ends with the context, and returns how many it
// deleted.
func (t *Tracker) Delete(ctx context.Context, doomed func(*Entry) bool) (deleted int, err error) {
	c := t.dial()
	defer func() { _ = c.Close() }()
	err = t.Dump(ctx, func() {}, func(e *Entry) error {
		if !doomed(e) {
			return nil
		}
		err := e.remove(c, doomed)
		switch {
		case err == nil:
			deleted++
		case errors.Is(err, unix.ENOENT), errors.Is(err, unix.EBUSY): // EBUSY: before Linux 6.4, it is in a flowtable
		default:
			return fmt.Errorf("delete connection: %w", err)
		}
		return nil
	})
	return deleted, err
}

// remove deletes the entry if it is still there and doomed. Otherwise it returns ENOENT, also if there
// is a newer entry with the same addresses and ports.
func (e *Entry) remove(c *nfnetlink.Conn, doomed func(*Entry) bool) error {
	var current Entry
	if err := exchange(c, e.request(msgGet, 0), current.decode); err != nil {
		return err
	}
	if current.Key != e.Key || !doomed(&current) {
		return unix.ENOENT
	}
	return c.Exchange(e.request(msgDelete, netlink.Acknowledge), func(netlink.Message) error { return nil })
}
