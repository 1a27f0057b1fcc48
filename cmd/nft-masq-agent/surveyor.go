package main

import (
	"context"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/kernel"
)

// A surveyor reads other programs' rules for the agent, outside its loop. It does
// not use the loop's connection, so that repairs do not wait for it. It has one
// task at a time: the rules can take half of the agent's memory.
type surveyor struct {
	accepted []string // the chains of --accept-foreign
	busy     chan struct{}
}

func newSurveyor(accepted []string) *surveyor {
	return &surveyor{accepted: accepted, busy: make(chan struct{}, 1)}
}

// do calls a task with a connection, when no other one is running.
func (s *surveyor) do(ctx context.Context, task func(*kernel.Kernel) error) error {
	select {
	case s.busy <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-s.busy }()
	k := kernel.Open()
	defer func() {
		giveBack()
		_ = k.Close()
	}()
	return task(k)
}

func (s *surveyor) others(ctx context.Context, want nft.Ruleset) (others kernel.Others, err error) {
	err = s.do(ctx, func(k *kernel.Kernel) (err error) {
		others, err = k.Others(ctx, want)
		return err
	})
	others.Accept(s.accepted)
	return others, err
}

func (s *surveyor) stale(ctx context.Context, p nft.Policy) (stale conntrack.Stale, err error) {
	err = s.do(ctx, func(k *kernel.Kernel) (err error) {
		stale, err = countStale(ctx, k, p)
		return err
	})
	return stale, err
}

func (s *surveyor) flush(ctx context.Context, p nft.Policy, which config.Stale) (n int, err error) {
	err = s.do(ctx, func(k *kernel.Kernel) (err error) {
		n, err = flushStale(ctx, k, p, which)
		return err
	})
	return n, err
}
