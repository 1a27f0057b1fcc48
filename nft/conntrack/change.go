package conntrack

import (
	"context"
	"errors"
	"fmt"
	"time"

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
// by interfaces, which an entry does not contain.
type Change struct{ Before, InForce *Comparison }

// Outdated reports whether the policy before decided about an open connection, and the one in force
// decides otherwise.
func (c Change) Outdated(e *Entry) bool {
	switch c.InForce.spared(e) {
	case Agrees, FamilyOff:
	default:
		return false
	}
	if !e.open() || e.translatedDestination() {
		return false
	}
	ruling, agrees := c.InForce.opinion(e)
	return !agrees && !ruling.Depends && c.Before.agrees(e)
}

// A Deletion deletes connections. It lists them first, so what opens meanwhile is not deleted, and reads
// and asks about each one again right before it deletes it. Their next packets start new connections, to
// which the current rules apply.
//
// It remembers at most 65,536 connections; if there are more, it lists again.
type Deletion struct {
	Tracker *Tracker
	// Doomed reports whether to delete an entry.
	Doomed func(*Entry) bool
	// Listed is called once, with the number of connections to delete.
	Listed func(n int)

	Deleted int // connections
	// Busy counts those that the kernel did not delete: before Linux 6.4, those in a flowtable.
	Busy int

	rounds int    // lists that follow
	begun  bool   // Listed was called
	listed *Noted // what is left to delete; nil: it is to be listed
}

// Run deletes at most 10,000 connections per second. It ends with the context. After an error it may be
// called again, and continues.
func (d *Deletion) Run(ctx context.Context) error {
	for {
		if d.listed == nil {
			if err := d.list(ctx); err != nil {
				return err
			}
		}
		if d.listed.Len() == 0 {
			return nil
		}
		if err := d.remove(ctx); err != nil {
			return err
		}
		if d.rounds == 0 {
			return nil
		}
		d.rounds--
		d.listed = nil
	}
}

// list remembers the connections to delete.
func (d *Deletion) list(ctx context.Context) error {
	var listed *Noted
	n := 0
	err := d.Tracker.Dump(ctx, Filter{}, func() {
		listed = newNoted(d.Tracker.noted)
		n = 0
	}, func(e *Entry) error {
		if d.Doomed(e) {
			listed.add(e, AgeStale)
			n++
		}
		return nil
	})
	if err != nil {
		return err
	}
	d.listed = listed
	if !d.begun {
		d.begun = true
		d.rounds = n / d.Tracker.noted
		d.Listed(n)
	}
	return nil
}

// At most 10,000 connections are deleted per second, in steps.
const (
	deletionRate = 10_000
	deletionStep = 100
)

// remove deletes the connections that were listed.
func (d *Deletion) remove(ctx context.Context) error {
	tick := time.NewTicker(deletionStep * time.Second / deletionRate)
	defer tick.Stop()
	c := d.Tracker.dial()
	defer func() { _ = c.Close() }()
	return d.Tracker.Dump(ctx, Filter{}, func() {}, func(e *Entry) error {
		if _, listed := d.listed.age(e); !listed {
			return nil
		}
		switch err := e.remove(c, d.Doomed); {
		case err == nil:
			d.Deleted++
		case errors.Is(err, unix.EBUSY):
			d.Busy++
		case !errors.Is(err, unix.ENOENT):
			return fmt.Errorf("delete connection: %w", err)
		}
		d.listed.drop(e)
		if d.listed.Len()%deletionStep == 0 {
			select {
			case <-tick.C:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		return nil
	})
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
