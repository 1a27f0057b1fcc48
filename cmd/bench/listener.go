package main

import (
	"context"
	"errors"

	"nft-masq-agent/nft"
)

const groupListener = "what the agent's listening costs others"

// listener measures the transactions of another program on a node with the
// agent and on one without. The kernel makes notifications for whoever listens.
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
	empty, err := openNode("empty")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, empty.close()) }()
	want, err := ruleset(text(n, false), nft.ModeNFTables)
	if err != nil {
		return err
	}
	msgs, err := record(want)
	if err != nil {
		return err
	}
	var contenders []contender
	for _, at := range []*node{f.node, empty} {
		w, err := newFloor(at.ns, msgs)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, w.close()) }()
		w.rename(otherTable)
		contenders = append(contenders, contender{func() error { return at.clear(otherTable, n) }, w.send})
	}
	s, err := takeTurns(ctx, b.rounds, contenders...)
	if err != nil {
		return err
	}
	b.add(newRow(groupListener, n, "another program's transaction", "ms", s[0]).against("without the agent", s[0], s[1]))
	return nil
}
