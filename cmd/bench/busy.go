package main

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/google/nftables"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/nfnetlink"
)

const groupBusy = "long lists next to ten foreign commits a second"

// busy observes agents with long lists, in both modes, next to a program that
// commits to its own table: their CPU time, and for how long a deleted CIDR is
// missing.
func (b *bench) busy(ctx context.Context) (err error) {
	var all []*rester
	defer func() {
		for _, r := range all {
			err = errors.Join(err, r.close())
		}
	}()
	for _, n := range []int{10_000, 31_000, 68_000} {
		for _, mode := range []nft.Mode{nft.ModeNFTables, nft.ModeIPTables} {
			f, err := openFollowerIn(mode, n, b.agent)
			if err != nil {
				return err
			}
			all = append(all, &rester{follower: f, surroundings: surroundings{what: "mode " + string(mode), foreign: 10}})
			if err := f.start(); err != nil {
				return err
			}
		}
	}
	err = b.observe(ctx, all, func(r *rester, share, _ float64) {
		b.add(newRow(groupBusy, r.size, "CPU, "+r.what, "%", series{share}))
	})
	if err != nil {
		return err
	}
	for _, r := range all {
		took, err := r.restores(ctx, b.rounds)
		if err != nil {
			return err
		}
		b.add(newRow(groupBusy, r.size, "healing of a deleted CIDR, "+r.what, "ms", took))
	}
	return nil
}

// restores measures, next to the other program, from the deletion of a CIDR until
// the agent logs that it is restored.
func (r *rester) restores(ctx context.Context, rounds int) (took series, err error) {
	stop := r.writeForeign(ctx)
	defer func() { err = errors.Join(err, stop()) }()
	for range rounds {
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(time.Second + rand.N(2*time.Second)):
		}
		if err := r.deleteOne(); err != nil {
			return nil, err
		}
		start := time.Now()
		const minutes = 5 // each wait ends after one
		for range minutes {
			if _, err = r.agent.Await(ctx, "rules_restored"); err == nil || !errors.Is(err, context.DeadlineExceeded) {
				break
			}
		}
		if err != nil {
			return nil, err
		}
		took = append(took, time.Since(start).Seconds())
	}
	return took, nil
}

// deleteOne deletes the rule or the element of a CIDR.
func (r *rester) deleteOne() error {
	if r.mode == nft.ModeIPTables {
		const table, chain = "nat", "IP-MASQ-AGENT"
		c := dialIn(r.node.ns) // a new attacker each time, as in healingOf
		var attack nfnetlink.Batch
		_, _, err := c.FirstRules(nfnetlink.IPv4, table, chain, func(first nfnetlink.Rule) bool {
			attack.DelRule(nfnetlink.IPv4, table, chain, first.Handle)
			return true
		})
		if err != nil {
			return errors.Join(err, c.Close())
		}
		return errors.Join(c.Commit(&attack, 0), c.Close())
	}
	sets, err := r.node.conn.Sets(nfnetlink.Inet, nft.TableName)
	if err != nil {
		return err
	}
	// Not by nft, which reads the whole set again after every foreign commit.
	c, err := nftables.New(nftables.WithNetNSFd(r.node.ns.Fd()))
	if err != nil {
		return err
	}
	cidr := list(r.size)[1]
	set := &nftables.Set{
		Table: &nftables.Table{Family: nftables.TableFamilyINet, Name: nft.TableName},
		Name:  sets[0].Name, KeyType: nftables.TypeIPAddr, Interval: true,
	}
	err = c.SetDeleteElements(set, []nftables.SetElement{
		{Key: cidr.Addr().AsSlice()},
		{Key: iprange.Of(cidr).To.Next().AsSlice(), IntervalEnd: true},
	})
	return errors.Join(err, c.Flush())
}
