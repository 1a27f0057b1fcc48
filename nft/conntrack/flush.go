package conntrack

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfnetlink"
)

// A Pass deletes connections that are stale, and only those of which that is certain:
// each was stale when the pass began, and is read and judged again right before it is
// deleted. Their next packets start new connections, to which the current rules apply.
// What opens meanwhile is not deleted, so a pass ends however many connections there are.
//
// It keeps about twenty bytes for each connection that it is to delete.
type Pass struct {
	Tracker *Tracker
	Matches func(*Entry) bool
	// Read returns a judge for the policy in force. It is called before the stale
	// connections are listed, and again after that: the second judge knows each rule that
	// was there when one of them was opened.
	Read func(context.Context) (*Judge, error)
	// Listed is called once: with the number of connections to delete, and the judge.
	Listed func(n int, j *Judge)

	// Deleted counts the connections that were deleted.
	Deleted int

	listed map[uint64]bool // hashes of keys; nil: not listed yet
	seed   maphash.Seed
}

// flushRate is the most connections that are deleted per second, in steps.
const (
	flushRate = 10_000
	flushStep = 100
)

// Run deletes at most 10,000 connections per second. It ends with the context. After an
// error it may be called again, and continues with the connections that it has listed.
func (p *Pass) Run(ctx context.Context) error {
	if err := p.list(ctx); err != nil || len(p.listed) == 0 {
		return err
	}
	j, err := p.Read(ctx)
	if err != nil {
		return err
	}
	tick := time.NewTicker(flushStep * time.Second / flushRate)
	defer tick.Stop()
	c := p.Tracker.dial()
	defer func() { _ = c.Close() }()
	return p.Tracker.Dump(ctx, Filter{}, func() {}, func(e *Entry) error {
		if !p.listed[p.hash(e)] {
			return nil
		}
		switch err := e.remove(c, j.Stale); {
		case err == nil:
			p.Deleted++
		case !errors.Is(err, unix.ENOENT):
			return fmt.Errorf("delete connection: %w", err)
		}
		delete(p.listed, p.hash(e))
		if len(p.listed)%flushStep == 0 {
			select {
			case <-tick.C:
			case <-ctx.Done():
			}
		}
		return nil
	})
}

// list lists the stale connections, once.
func (p *Pass) list(ctx context.Context) error {
	if p.listed != nil {
		return nil
	}
	j, err := p.Read(ctx)
	if err != nil {
		return err
	}
	p.seed = maphash.MakeSeed()
	listed := map[uint64]bool{}
	err = p.Tracker.Dump(ctx, Filter{}, func() {}, func(e *Entry) error {
		if p.Matches(e) && j.Stale(e) {
			listed[p.hash(e)] = true
		}
		return nil
	})
	if err == nil {
		p.listed = listed
		p.Listed(len(listed), j)
	}
	return err
}

func (p *Pass) hash(e *Entry) uint64 { return maphash.Comparable(p.seed, e.Key) }

// request returns a request about the entry with its addresses and ports, in zone 0.
func (e *Entry) request(kind uint16, flags netlink.HeaderFlags) netlink.Message {
	family := uint8(unix.AF_INET)
	if e.Original.Src.Addr().Is6() {
		family = unix.AF_INET6
	}
	var a nfnetlink.Attrs
	a.AddBytes(ctaTupleOrig|unix.NLA_F_NESTED, e.tuple)
	a.AddUint32(ctaID, e.ID)
	return request(kind, flags, family, a)
}
