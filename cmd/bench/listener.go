package main

import (
	"context"
	"errors"
	"time"

	"nft-masq-agent/nft"
)

const groupListener = "what the agent's listening costs others"

// listener measures the transactions of another program with the agent and
// without. The kernel makes a notification of each element for who listens.
func (b *bench) listener(ctx context.Context) error {
	for _, n := range b.sizes {
		if err := b.listenerN(ctx, n); err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) listenerN(ctx context.Context, n int) (err error) {
	f, err := openFollower(defaultSize, b.agent)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.close()) }()
	msgs, err := record(ruleset(shuffled(n, false), nft.ModeNFTables))
	if err != nil {
		return err
	}
	w, err := newFloor(f.node.ns, msgs)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.close()) }()
	w.rename(otherTable)
	empty := func() error { return f.node.clear(otherTable, n) }
	// Stopped between its turns: the kernel makes notifications in all namespaces
	// where somebody listens in one.
	beside := contender{
		prepare: func() error { return errors.Join(empty(), f.start()) },
		run: func() (time.Duration, error) {
			took, err := w.send()
			return took, errors.Join(err, f.stop())
		},
	}
	s, err := takeTurns(ctx, b.rounds, beside, contender{empty, w.send})
	if err != nil {
		return err
	}
	b.add(newRow(groupListener, n, "another program's transaction", "ms", s[0]).against("without the agent", s[0], s[1]))
	return nil
}
